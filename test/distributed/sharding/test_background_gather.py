"""Parameters gathered in the background: the same bits, each module waiting for its own."""

from __future__ import annotations

import copy
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_opt
from test.support.harness import assert_bitwise, run_processes, run_threads
from zero_opt.sharding.gather import ParamGather
from zero_opt.system.future import Future


class Model(nn.Module):
    """Modules that are called, one whose weight its parent reads, and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.unused_name = nn.Linear(16, 16)
        self.body = nn.Sequential(nn.Linear(16, 40), nn.GELU(), nn.Linear(40, 16))
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = x + nn.functional.linear(x, self.unused_name.weight, self.unused_name.bias)
        return self.head(x + self.body(x))  # type: ignore[no-any-return]


def _swap_head(rank: int, world_size: int, background: bool) -> list[Tensor]:
    """The old head stays in its group, as torch allows."""
    torch.manual_seed(0)
    model, heads = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)), [nn.Linear(8, 5), nn.Linear(8, 2)]
    policy = zero_opt.Overlapped(overlap_param_gather=model if background else None)
    opt = zero_opt.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1, reduction=policy)
    params = list(model.parameters())
    for number, head in enumerate((model[1], *heads)):
        if number:
            model[1] = head
            opt.add_param_group({"params": head.parameters()})
            params += head.parameters()
        for _ in range(2):
            model(torch.ones(2, 4) * (1 + rank)).square().sum().backward()
            opt.step()
            opt.zero_grad()
    if background:
        with pytest.raises(zero_opt.ConfigError, match=r"parameter 8 .* is not in the given model"):
            opt.add_param_group({"params": nn.Linear(2, 2).parameters()})
    opt.flush()
    opt.close()
    return [param.detach() for param in params]


def test_a_module_may_be_replaced_and_the_new_ones_parameters_added() -> None:
    assert_bitwise(run_processes(2, _swap_head, True), run_processes(2, _swap_head, False))


def train(rank: int, policy_of: Any, background: bool) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    model = Model()
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) * 0.1)
    policy = policy_of(overlap_param_gather=model if background else None)
    opt = zero_opt.ShardedOptimizer(model.parameters(), torch.optim.AdamW, reduction=policy, lr=0.01, max_grad_norm=1.0)
    outputs = []
    for step in range(5):
        tokens = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(step * 7 + rank))
        out = model(tokens)
        outputs.append(out.detach().clone())
        out.square().mean().backward()
        opt.step()
        opt.zero_grad()
    saved = {key: value.clone() for key, value in model.state_dict().items()}
    model(tokens).square().mean().backward()
    opt.step()
    opt.close()  # no flush(): what is under way must still arrive
    return [*outputs, *saved.values(), *(p.detach().clone() for p in model.parameters())]


def orders(rank: int, world_size: int) -> tuple[list[int], list[int], list[int]]:
    """The order of gathers, within the step and in the background; the place in the model of each bucket's first
    parameter.
    """
    found = []
    for late in (False, True):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        for param in model.parameters():
            nn.init.zeros_(param)
        policy = zero_opt.Overlapped(1e-4, overlap_param_gather=model if late else None)
        groups: Any = [{"params": [layer.bias for layer in model]}, {"params": [layer.weight for layer in model]}]
        opt: Any = zero_opt.ShardedOptimizer(groups, torch.optim.SGD, lr=0.1, reduction=policy)
        found.append(list(opt._engine.gather.order()))
        buckets = opt._engine.partition.buckets
        opt.close()
    places = {param: place for place, param in enumerate(model.parameters())}
    return found[0], found[1], [min(places[flat.param] for flat in bucket.params) for bucket in buckets]


def test_gathers_in_the_background_follow_the_model() -> None:
    for within, late, places in run_threads(2, orders):
        assert within == sorted(late)
        assert len(late) == len(places) > 2
        assert [places[index] for index in late] == sorted(places)
        assert late != within


def tiny_overlapped(**options: Any) -> zero_opt.Overlapped:
    return zero_opt.Overlapped(bucket_mb=0.001, **options)


def tiny_at_step(**options: Any) -> zero_opt.AtStep:
    return zero_opt.AtStep(bucket_mb=0.001, **options)


def backend_overlapped(**options: Any) -> zero_opt.Overlapped:
    return zero_opt.Overlapped(bucket_mb=0.001, exchange="backend", **options)


def worker(rank: int, world_size: int, policy_of: Any, background: bool) -> list[Tensor]:
    return train(rank, policy_of, background)


def slow_worker(rank: int, world_size: int, policy_of: Any, background: bool) -> list[Tensor]:
    """Every gather is late, so that a module that does not wait reads an old parameter."""
    gather = ParamGather._gather

    def late(self: ParamGather, *arguments: Any, **options: Any) -> Any:
        time.sleep(0.005)
        return gather(self, *arguments, **options)

    patch = pytest.MonkeyPatch()
    patch.setattr(ParamGather, "_gather", late)
    return train(rank, policy_of, background)


@pytest.mark.parametrize("policy_of", [tiny_overlapped, tiny_at_step, backend_overlapped])
def test_same_bits_as_gathering_in_step(policy_of: Any) -> None:
    plain = run_processes(2, worker, policy_of, False)
    background = run_processes(2, slow_worker, policy_of, True)
    for ours, theirs in zip(background, plain, strict=True):
        assert_bitwise(ours, theirs)


def test_threaded_ranks() -> None:
    for ours, theirs in zip(
        run_threads(3, worker, tiny_overlapped, True), run_threads(3, worker, tiny_overlapped, False), strict=True
    ):
        assert_bitwise(ours, theirs)


def part_of_the_model(rank: int, world_size: int) -> str:
    model = Model()
    zero_opt.broadcast_params(model)
    policy = zero_opt.Overlapped(overlap_param_gather=model.body)
    with pytest.raises(zero_opt.ConfigError) as caught:
        zero_opt.ShardedOptimizer(model.parameters(), torch.optim.SGD, reduction=policy, lr=0.1)
    return str(caught.value)


def test_a_model_without_some_of_the_parameters_is_refused() -> None:
    for message in run_processes(2, part_of_the_model):
        assert "pass the whole model" in message


def add_a_stranger(rank: int, world_size: int, who: tuple[int, ...]) -> list[Tensor]:
    """A group that the model does not hold, on some ranks, leaves everything as it was."""
    model = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    zero_opt.broadcast_params(model)
    policy = zero_opt.Overlapped(bucket_mb=0.0001, overlap_param_gather=model)
    opt = zero_opt.ShardedOptimizer(model[0].parameters(), torch.optim.SGD, reduction=policy, lr=0.1)
    stranger = [nn.Parameter(torch.ones(8, 8)), nn.Parameter(torch.ones(8))]
    with torch.no_grad():
        for param, value in zip(model[1].parameters(), stranger, strict=True):
            param.copy_(value)
    with pytest.raises(zero_opt.ConfigError, match=r"parameter 2 .* pass the whole model"):
        opt.add_param_group({"params": stranger if rank in who else model[1].parameters(), "lr": 9.0})
    opt.add_param_group({"params": model[1].parameters()})
    assert [len(group["params"]) for group in opt.param_groups] == [2, 2]
    model[1](model[0](torch.ones(8))).sum().backward()
    opt.step()
    opt.close()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("who", [(0, 1), (1,)])
def test_an_added_group_that_the_model_does_not_hold_is_not_taken_in(who: tuple[int, ...]) -> None:
    runs = run_processes(2, add_a_stranger, who)
    assert_bitwise(runs[0], runs[1])


def _versions(rank: int, world_size: int, offload: Any) -> None:
    """Layers that are cut from one tensor have a version counter in common."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(6)))
    for layer, weight in zip(model, (torch.randn(384, 64) * 0.1).chunk(6), strict=True):
        layer.weight = nn.Parameter(weight)
    apart = nn.Linear(64, 64)
    whole = nn.Sequential(model, apart)
    policy = tiny_overlapped(overlap_param_gather=whole)
    opt = zero_opt.ShardedOptimizer(whole.parameters(), zero_opt.CPUAdamW, reduction=policy, offload=offload)
    data = torch.randn(4, 64)
    for _ in range(5):
        whole(data).square().sum().backward()  # while parameters arrive: nothing that is saved is counted then
        kept = apart(data.requires_grad_()).sum()
        before = [apart.weight._version, apart.bias._version, model[0].weight._version]
        opt.step()
        versions = [param._version for param in (apart.weight, apart.bias, model[0].weight)]
        assert all(old < now for old, now in zip(before, versions, strict=True))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            kept.backward()
        opt.zero_grad()
        opt.flush()
        assert versions == [param._version for param in (apart.weight, apart.bias, model[0].weight)]
    opt.close()


@pytest.mark.parametrize(("world_size", "offload"), [(1, True), (2, False), (2, True)])
def test_what_arrives_later_is_counted_as_written_in_step(world_size: int, offload: bool) -> None:
    """So a graph from before the step notices, and none that is made while parameters arrive is disturbed."""
    run_processes(world_size, _versions, zero_opt.WorkerOffload(threads=1) if offload else None)


def _close_in_a_fork(rank: int, world_size: int) -> None:
    """Fork while a gather is under way."""
    model = Model()
    optimizer = zero_opt.ShardedOptimizer(
        model.parameters(), torch.optim.SGD, lr=0.1, reduction=zero_opt.Overlapped(overlap_param_gather=model)
    )
    optimizer._engine.gather._arriving[0] = Future()  # that of a thread which is in no fork
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(60)  # for a child that waits for ever
            optimizer.close()
            status = 0
        finally:
            os._exit(status)
    del optimizer._engine.gather._arriving[0]
    assert os.waitpid(child, 0)[1] == 0
    optimizer.close()


def test_a_close_in_a_fork_waits_for_no_gather() -> None:
    run_processes(2, _close_in_a_fork)


def _forward(model: nn.Module) -> object:
    return model(torch.ones(2, 8))


READS: dict[str, Callable[[nn.Module], object]] = {
    "forward": lambda model: _forward(model.train()),
    "evaluation": lambda model: _forward(model.eval()),
    "state_dict": lambda model: model.state_dict(),
    "copy": lambda model: copy.deepcopy(model),
    "sum": lambda model: [param.sum() for param in model.parameters()],
}


def _is_refused(read: Callable[[nn.Module], object], model: nn.Module) -> bool:
    try:
        read(model)
    except zero_opt.ProcessGroupError as refused:
        return "call opt.flush() before the fork" in str(refused)
    return False


def _read_in_a_fork(rank: int, world_size: int, first: str) -> None:
    """Fork while the gathers of a step are under way, and read there again and again."""
    begin, gather = threading.Event(), ParamGather._gather

    def late(self: ParamGather, *arguments: Any, **options: Any) -> Any:
        assert begin.wait(60)
        return gather(self, *arguments, **options)

    patch = pytest.MonkeyPatch()
    patch.setattr(ParamGather, "_gather", late)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    zero_opt.broadcast_params(model)
    reduction = zero_opt.Overlapped(bucket_mb=0.0001, overlap_param_gather=model)
    optimizer = zero_opt.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, reduction=reduction)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    child = os.fork()
    if child == 0:
        taken = 1
        try:
            signal.alarm(60)  # for a child that waits for ever
            taken = sum(not _is_refused(READS[name], model) for name in (first, *READS, *READS))
        finally:
            os._exit(taken)
    begin.set()
    assert os.waitpid(child, 0)[1] == 0
    optimizer.flush()
    for read in READS.values():
        read(model)
    optimizer.close()


@pytest.mark.parametrize("first", READS)
def test_every_read_in_a_fork_is_refused_of_what_cannot_come(first: str) -> None:
    run_processes(2, _read_in_a_fork, first)


def _scripted(rank: int, world_size: int) -> list[str]:
    """torch.jit.script of a model whose forwards wait, and an optimizer of a model that is scripted."""
    warnings.filterwarnings("ignore", category=DeprecationWarning)  # of torch.jit
    model, x, said = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3)), torch.ones(2, 8), []
    policy = zero_opt.Overlapped(overlap_param_gather=model)
    opt = zero_opt.ShardedOptimizer(model.parameters(), torch.optim.AdamW, reduction=policy)
    model(x).square().mean().backward()
    opt.step()
    opt.zero_grad()
    with pytest.raises(zero_opt.ConfigConflict) as caught:
        torch.jit.script(model)
    said.append(str(caught.value))
    hook = next(iter(model._forward_pre_hooks.values()))
    assert not hasattr(hook, "__name__")
    opt.close()
    scripted = torch.jit.script(model)
    assert torch.equal(scripted(x), model(x))
    policy = zero_opt.Overlapped(overlap_param_gather=scripted)
    with pytest.raises(zero_opt.ConfigConflict) as caught:
        zero_opt.ShardedOptimizer(scripted.parameters(), torch.optim.AdamW, reduction=policy)
    return [*said, str(caught.value)]


def test_scripted_models_are_refused_with_the_way_out() -> None:
    for compiled, given in run_processes(2, _scripted):
        assert compiled.startswith("torch.jit.script cannot compile the hooks") and "opt.close()" in compiled
        assert "is of torch.jit.script, which takes none of the hooks" in given
