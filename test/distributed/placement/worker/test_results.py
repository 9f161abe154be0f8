"""Results of a worker that reach the parameters after step(): who waits for them, and what becomes of them."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero_opt
from test.support.failures import PATIENCE_S
from test.support.harness import assert_bitwise, run_processes
from test.support.late_results import OFFLOADS, SPECULATING, Layers, optimizer_of, slowly
from test.support.worker_training import LATER, NOW, stillborn_workers
from zero_opt.comm.exchange import Ident
from zero_opt.placement.worker import results
from zero_opt.placement.worker.results import ParamWriter, ResultDelivery, Used
from zero_opt.sharding.background_gather import BackgroundGather
from zero_opt.sharding.flat_param import FlatParam
from zero_opt.sharding.late_params import Unwatched
from zero_opt.system.background_thread import SerialThread
from zero_opt.system.future import Future
from zero_opt.system.stages import Lane


class Net(nn.Module):
    """Modules that are called, one that is checkpointed, a weight read by the parent, one tied, one with gaps."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.unused_name = nn.Linear(16, 16)
        self.body = nn.Sequential(nn.Linear(16, 40), nn.GELU(), nn.Linear(40, 16))
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight
        self.gaps = nn.Parameter(torch.zeros(16, 2)[:, 0])
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=generator) * 0.1)
        self.to(dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.gaps
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = x + nn.functional.linear(x, self.unused_name.weight, self.unused_name.bias)
        return self.head(x + checkpoint(self.body, x, use_reentrant=False))  # type: ignore[no-any-return]


def _train(rank: int, world_size: int, late: bool, offload: Any, dtype: torch.dtype, reduction: Any) -> list[Tensor]:
    slowly(pytest.MonkeyPatch())
    model = Net(dtype)
    optimizer = optimizer_of(model, late, offload, max_grad_norm=1.0, reduction=reduction)
    found = []
    for step in range(6):
        tokens = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(step * 7 + rank))
        if step % 2:
            with torch.no_grad(), Unwatched():  # an evaluation that delay=1 refuses
                found.append(model.eval()(tokens).clone())
            model.train()
        out = model(tokens)
        found.append(out.detach().clone())
        out.square().mean().backward()
        if world_size > 1 and reduction is zero_opt.AlreadyReduced:
            for param in model.parameters():
                torch.distributed.all_reduce(param.grad)
        optimizer.step()
        optimizer.zero_grad()
    if offload != LATER:  # which refuses it
        found += [value.clone() for value in model.state_dict().values()]
    model(tokens).square().mean().backward()
    if world_size > 1 and reduction is zero_opt.AlreadyReduced:
        for param in model.parameters():
            torch.distributed.all_reduce(param.grad)
    optimizer.step()
    if offload == LATER:
        optimizer.flush()
    optimizer.close()  # what is under way must still arrive
    return [*found, *(param.detach().clone() for param in model.parameters())]


@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    ("world_size", "offload", "dtype", "reduction"),
    [
        *((world_size, offload, torch.float32, zero_opt.Overlapped) for world_size in (1, 2) for offload in OFFLOADS),
        *((1, offload, torch.bfloat16, zero_opt.Overlapped) for offload in OFFLOADS),
        (2, SPECULATING, torch.bfloat16, zero_opt.Overlapped),
        (2, NOW, torch.bfloat16, zero_opt.AtStep),
        (2, NOW, torch.float32, zero_opt.AlreadyReduced),
        (1, zero_opt.WorkerOffload(selective=zero_opt.Selective()), torch.float32, zero_opt.Overlapped),
        (2, zero_opt.CPUOffload(), torch.bfloat16, zero_opt.Overlapped),
    ],
)
def test_the_bits_of_copies_within_step(world_size: int, offload: Any, dtype: torch.dtype, reduction: Any) -> None:
    """Evaluation, a recomputed forward, tied and mirrored parameters, and those that a parent reads."""
    within, late = (run_processes(world_size, _train, way, offload, dtype, reduction) for way in (False, True))
    assert_bitwise(late, within)


# -- who waits for what -----------------------------------------------------------------------------------------------


@contextmanager
def held_back(patch: pytest.MonkeyPatch, params: list[Tensor]) -> Any:
    """Results of some parameters do not arrive before the end, or before what is yielded is set; at least begun."""
    write, go, begun = ParamWriter.write_beside, threading.Event(), threading.Event()

    def gated(self: ParamWriter, made: list[Used]) -> None:
        if any(flat.param is param for shard, _ in made for flat in shard.flats for param in params):
            begun.set()
            assert go.wait(PATIENCE_S)
        write(self, made)

    with patch.context() as inside:
        inside.setattr(ParamWriter, "write_beside", gated)
        try:
            yield SimpleNamespace(go=go, begun=begun)
        finally:
            go.set()


def plain(steps: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Parameters after so many steps."""
    model = Layers(dtype)
    optimizer = optimizer_of(model, False, NOW)
    for step in range(steps):
        model.backward(step)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    return model.copies()


def begun(offload: Any = SPECULATING, dtype: torch.dtype = torch.float32) -> tuple[Layers, zero_opt.ShardedOptimizer]:
    """A model whose results are copied late, before its first step()."""
    model = Layers(dtype)
    optimizer = optimizer_of(model, True, offload)
    model.backward(0)
    return model, optimizer


def parts_of(optimizer: zero_opt.ShardedOptimizer) -> Any:
    return optimizer._engine


@pytest.mark.parametrize("offload", [NOW, SPECULATING])
def test_a_module_waits_for_its_own_and_the_first_for_the_least(monkeypatch: pytest.MonkeyPatch, offload: Any) -> None:
    model, optimizer = begun(offload)
    before, first = model.copies(), plain(1)
    with held_back(monkeypatch, [model.layers[2].weight]) as gate:
        optimizer.step()
        for layer in model.layers[:2]:
            layer(torch.ones(20))
        assert gate.begun.wait(PATIENCE_S)
        assert_bitwise(model.copies(), [*first[:2], before[2]])
        gate.go.set()
        model.layers[2](torch.ones(20))
        assert_bitwise(model.copies(), first)
    optimizer.close()


@pytest.mark.parametrize("way", ["state_dict", "load_state_dict", "flush", "close", "step", "load", "offload_state"])
def test_what_waits_for_all(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    slowly(monkeypatch)
    model, optimizer = begun()
    saved = optimizer.state_dict()
    optimizer.step()
    steps = 1
    if way == "state_dict":
        model.state_dict()
    elif way == "load_state_dict":
        model.load_state_dict({"layers.0.weight": model.layers[0].weight}, strict=False)
    elif way == "step":
        steps = 2
        optimizer.zero_grad()
        model.backward(1)
        optimizer.step()
        optimizer.flush()
    elif way == "load":
        optimizer.load_state_dict(saved)
    else:
        getattr(optimizer, way)()
    assert_bitwise(model.copies(), plain(steps))
    optimizer.close()


def test_nothing_is_begun_where_results_still_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward without a forward: of bf16 parameters there is one place for results."""
    model, optimizer = begun(dtype=torch.bfloat16)
    with held_back(monkeypatch, [model.layers[0].weight]) as gate:
        optimizer.step()
        assert gate.begun.wait(PATIENCE_S)
        optimizer.zero_grad()
        model.backward(1)
        placement = parts_of(optimizer).placement
        kept = placement.kept
        assert not placement._drafts
        gate.go.set()
        optimizer.step()
        assert placement.kept == kept + 3
    optimizer.close()
    assert_bitwise(model.copies(), plain(2, torch.bfloat16))


def test_masters_that_are_taken_from_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """State without a master is put in the place of another, which state_dict() takes over."""
    slowly(monkeypatch)
    model, optimizer = begun()
    optimizer.step()
    state = optimizer.state[model.layers[2].weight]
    optimizer.state[model.layers[2].weight] = {key: value.clone() for key, value in state.items()}
    optimizer.state_dict()
    assert torch.equal(parts_of(optimizer).placement.param_of(2), model.layers[2].weight)
    optimizer.close()
    assert_bitwise(model.copies(), plain(1))


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core is not divided")
def test_copies_are_made_on_the_worker_s_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the exchange thread, which is confined as all others are, before and after."""
    seen: list[tuple[set[int], int | None, bool]] = []
    monkeypatch.setattr(
        results,
        "write_counted",
        lambda _, threads: seen.append((os.sched_getaffinity(0), threads, threading.current_thread().daemon)),
    )
    before = os.sched_getaffinity(0)
    _, optimizer = begun()
    trainer = os.sched_getaffinity(0)
    optimizer.step()
    optimizer.flush()
    assert seen == [(before - trainer, len(before - trainer), True)] * 3
    assert parts_of(optimizer).parts.thread.submit(os.sched_getaffinity, 0).result(PATIENCE_S) == trainer
    optimizer.close()


# -- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_parameter_that_is_changed_before_its_update_has_arrived(world_size: int) -> None:
    """step() says so on every rank; flush() does what it says, and after it training goes on from the change."""

    def run(_rank: int, _world_size: int) -> list[Tensor]:
        model, optimizer = begun()
        with held_back(pytest.MonkeyPatch(), [model.layers[0].weight]) as gate:
            optimizer.step()
            assert gate.begun.wait(PATIENCE_S)
            with torch.no_grad(), Unwatched():  # as in C++: other writes wait for the parameters
                model.layers[1].weight.fill_(3.0)
            gate.go.set()
            model.backward(1)
            before = None
            for _ in range(2):
                with pytest.raises(zero_opt.StepPending, match=r"call opt\.flush\(\) before changing parameters"):
                    optimizer.step()
                before = before or model.copies()
                assert_bitwise(model.copies(), before)
            optimizer.flush()
            assert_bitwise(model.copies(), before)
            assert torch.equal(before[1], torch.full((10, 20), 3.0))
        optimizer.zero_grad()
        model.backward(2)
        optimizer.step()
        optimizer.flush()
        optimizer.close()
        return model.copies()

    found = run_processes(world_size, run)
    for copies in found:
        assert_bitwise(copies, found[0])
        assert not torch.equal(copies[1], torch.full((10, 20), 3.0))


def test_ctrl_c_before_results_are_on_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = begun(dtype=torch.bfloat16)
    submit, calls = SerialThread.submit_stages, []

    def interrupted(self: SerialThread, lane: Lane, call: Any, *arguments: Any) -> Any:
        if getattr(call, "__name__", "") == "_gather_one":
            calls.append(call)
            if len(calls) == 2:
                raise KeyboardInterrupt
        return submit(self, lane, call, *arguments)

    with monkeypatch.context() as inside:
        inside.setattr(SerialThread, "submit_stages", interrupted)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    for layer in model.layers[:2]:
        layer(torch.ones(20, dtype=torch.bfloat16))
    first = plain(1, torch.bfloat16)
    assert_bitwise(model.copies()[:2], first[:2])
    optimizer.close()
    assert_bitwise(model.copies(), first)


def test_ctrl_c_while_a_forward_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = begun()
    with held_back(monkeypatch, [model.layers[0].weight]) as gate:
        optimizer.step()
        for wait in (lambda: model.layers[0](torch.ones(20)), optimizer.flush):
            with monkeypatch.context() as inside:
                inside.setattr(Future, "wait", _interrupted)
                with pytest.raises(KeyboardInterrupt):
                    wait()
        gate.go.set()
        model.layers[0](torch.ones(20))
        assert torch.equal(model.layers[0].weight, plain(1)[0])
        model.layers[2](torch.ones(20))
    assert_bitwise(model.copies(), plain(1))
    optimizer.close()


def _interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


def test_a_worker_that_cannot_be_had(tmp_path: Path) -> None:
    """The step stays pending, no forward waits for it, and flush() brings it in whole."""
    model, optimizer = begun(zero_opt.WorkerOffload(speculate=True, max_deaths=2))
    before, worker = model.copies(), parts_of(optimizer).placement._worker
    optimizer.param_groups[0]["lr"] = 0.5  # what was begun is void
    os.kill(worker._handles.child.pid, signal.SIGKILL)
    with stillborn_workers(tmp_path), pytest.raises(zero_opt.WorkerDied):
        optimizer.step()
    model.layers[0](torch.ones(20))
    assert_bitwise(model.copies(), before)
    optimizer.flush()
    assert not any(torch.equal(now, was) for now, was in zip(model.copies(), before, strict=True))
    optimizer.close()


def _without_a_rank(rank: int, _: int) -> tuple[list[Tensor], list[tuple[int, int]]]:
    """What is this rank's arrives, and whoever waits for the others' hears of it."""
    slowly(pytest.MonkeyPatch())
    model, optimizer = begun()
    if rank:
        gather = BackgroundGather._gather_one

        def dies(self: BackgroundGather, bucket: Any, ident: Ident, *rest: Any) -> None:
            if ident.sequence == 1:
                os._exit(7)
            gather(self, bucket, ident, *rest)

        pytest.MonkeyPatch().setattr(BackgroundGather, "_gather_one", dies)
        optimizer.step()
        optimizer.flush()
    optimizer.step()
    with pytest.raises(zero_opt.PeerLost):
        optimizer.flush()
    placement = parts_of(optimizer).placement
    spans = [tuple(placement._places[index][0].pieces[0].in_param) for index in range(3)]
    optimizer.close()
    return model.copies(), spans


def test_a_rank_that_is_lost_meanwhile() -> None:
    (copies, spans), died = run_processes(2, _without_a_rank, expect_errors=True)
    assert died.type_name == "Died"
    for copied, expected, span in zip(copies, plain(1), spans, strict=True):
        assert torch.equal(copied.view(-1)[slice(*span)], expected.view(-1)[slice(*span)])


def _other_names(rank: int, _: int) -> str:
    layers = [nn.Linear(4, 4, bias=False) for _ in range(2)]
    model = nn.ModuleDict(zip(("a", "b") if rank else ("b", "a"), layers, strict=True))
    with torch.no_grad():
        for layer in layers:
            layer.weight.fill_(1.0)
    with pytest.raises(zero_opt.RankMismatch) as caught:
        optimizer_of(model, True, NOW)
    return str(caught.value)


def test_models_with_another_order() -> None:
    for message in run_processes(2, _other_names):
        assert "parameter 0 of overlap_param_gather: 'b.weight' on rank 0, 'a.weight' on rank 1" in message


# -- devices ----------------------------------------------------------------------------------------------------------


def test_what_lies_on_an_accelerator_does_not_wait() -> None:
    written: list[int] = []
    writer: Any = SimpleNamespace(write=lambda made: written.extend(shard.bucket.layout.index for shard, _ in made))

    def shard(index: int, device: str) -> Any:
        bucket = SimpleNamespace(device=torch.device(device), layout=SimpleNamespace(index=index))
        flats = [FlatParam(nn.Parameter(torch.zeros(1)), "param")]
        return SimpleNamespace(bucket=bucket, flats=flats, edited=lambda _: False)

    late = ResultDelivery(writer, nn.Linear(1, 1))
    late.deliver([Used(shard(0, "cuda"), [0]), Used(shard(1, "cpu"), [0])])
    assert written == [0]
    late.await_results()
    assert written == [0, 1]
    late.await_results()
    assert written == [0, 1]
