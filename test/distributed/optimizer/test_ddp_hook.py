"""Our reduce-scatter as DDP's communication hook: the same bits as without DDP, in every mode that DDP has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_wrapper
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import zero_opt
from test.support.compact_training import FORMS
from test.support.harness import assert_bitwise, run_processes
from test.support.scenario import BUCKET_MB, OVERLAPPED
from test.support.tripwire import Failed, Tripwire

HOOK = zero_opt.DDPHook(BUCKET_MB)
STEPS = 5


class Branches(nn.Module):
    """Two branches, of which a rank may use either; ``never`` is used by none."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right = nn.Linear(30, 40), nn.Linear(40, 40), nn.Linear(40, 40)
        self.last, self.never = nn.Linear(40, 3), nn.Linear(7, 7)

    def forward(self, data: Tensor, branch: int) -> Tensor:
        hidden = torch.tanh(self.first(data))
        if branch != 1:
            hidden = hidden + self.left(hidden)
        if branch != 0:
            hidden = hidden + self.right(hidden)
        return self.last(hidden)


def _model(unused: bool) -> Branches:
    generator = torch.Generator().manual_seed(0)
    model = Branches()
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) / 8)
    model.never.requires_grad_(unused)
    return model


def _optimizer(model: nn.Module, reduction: Any, cls: Any = torch.optim.AdamW, **options: Any) -> Any:
    params = list(model.parameters())
    groups = [{"params": params[:3], "lr": 0.02}, {"params": params[3:]}]
    return zero_opt.ShardedOptimizer(groups, cls, reduction=reduction, **options)


def _train(
    rank: int,
    world_size: int,
    reduction: Any,
    script: str,
    ddp: dict[str, Any] | None,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Any:
    """Parameters and state after a few steps, with DDP (and its options) or without."""
    unused = script in ("unused", "unused twice")
    model = _model(unused).to(dtype)
    options |= {"max_grad_norm": 0.5} if script == "clip" else {}
    optimizer = _optimizer(model, reduction, **options)
    wrapped: Any = model
    if ddp is not None:
        wrapped = DistributedDataParallel(model, bucket_cap_mb=0.004, **ddp)
        if reduction is HOOK:
            wrapped.register_comm_hook(optimizer, zero_opt.ddp_hook)
    generator = torch.Generator().manual_seed(rank)
    for step in range(STEPS):
        backwards = 1 + (step % 3 if script in ("twice", "unused twice", "zero twice", "no_sync") else 0)
        backwards += script in ("from the first", "zero twice")
        for turn in range(backwards):
            data = torch.randn(4, 30, generator=generator).to(dtype)
            branch = (step + turn + rank) % 3 if unused else 2
            if script == "no_sync" and turn + 1 < backwards:
                with (optimizer if ddp is None else wrapped).no_sync():
                    wrapped(data, branch).square().sum().backward()
            else:
                wrapped(data, branch).square().sum().backward()
        optimizer.step()
        if script == "model.zero_grad":
            model.zero_grad()
        elif script == "zero twice":
            model.zero_grad(set_to_none=False)
        else:
            optimizer.zero_grad()
    optimizer.consolidate_state_dict(to=0)
    state = optimizer.state_dict() if rank == 0 else None
    optimizer.close()
    return [param.detach().clone() for param in model.parameters()], state


MODES = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "find_unused": {"find_unused_parameters": True},
    "find_unused, views": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "static, views": {"static_graph": True, "gradient_as_bucket_view": True},
}


@pytest.mark.sampled(12)
@pytest.mark.parametrize(
    ("mode", "script"),
    [
        *((mode, "once") for mode in MODES),
        *((mode, script) for mode in ("plain", "views") for script in ("twice", "no_sync")),
        *((mode, "zero twice") for mode in ("plain", "views")),
        *((mode, "from the first") for mode in ("plain", "views", "find_unused, views", "static, views")),
        *((mode, script) for mode in ("find_unused", "find_unused, views") for script in ("unused", "unused twice")),
        ("plain", "clip"),
        ("views", "model.zero_grad"),
    ],
)
def test_it_gives_the_bits_of_overlapped(mode: str, script: str) -> None:
    without = run_processes(2, _train, OVERLAPPED, script, None)
    within = run_processes(2, _train, HOOK, script, MODES[mode])
    assert_bitwise(within[1][0], within[0][0])
    assert_bitwise(within[0], without[0])


def _train_compact(
    rank: int, world_size: int, reduction: Any, ddp: dict[str, Any] | None, offload: Any
) -> dict[str, Any]:
    return {
        name: _train(
            *(rank, world_size, reduction, "unused twice", ddp, form.dtype),
            cls=zero_opt.CPUAdamW,
            state=form.state,
            offload=offload,
            max_grad_norm=0.5,
        )
        for name, form in FORMS.items()
    }


@pytest.mark.parametrize(
    "offload",
    [None, zero_opt.CPUOffload(), zero_opt.WorkerOffload(threads=1), zero_opt.WorkerOffload(threads=1, speculate=True)],
    ids=["device", "cpu", "worker", "worker, speculating"],
)
def test_compact_state_has_the_bits_of_overlapped(offload: Any) -> None:
    """Whose bits are those of the class with the same form."""
    without = run_processes(2, _train_compact, OVERLAPPED, None, offload)
    within = run_processes(2, _train_compact, HOOK, MODES["find_unused, views"], offload)
    assert_bitwise(within[0], without[0])
    for name, (params, _) in within[1].items():
        assert_bitwise(params, without[0][name][0], name)


def test_at_two_ranks_it_gives_the_bits_of_ddp() -> None:
    reduced = run_processes(2, _train, zero_opt.AlreadyReduced(), "once", {})
    assert_bitwise(run_processes(2, _train, HOOK, "once", {}), reduced)


def test_three_ranks() -> None:
    without = run_processes(3, _train, OVERLAPPED, "twice", None)
    assert_bitwise(run_processes(3, _train, HOOK, "twice", {}), without)


def _train_frozen(rank: int, world_size: int, reduction: Any, ddp: dict[str, Any] | None, clips: bool) -> Any:
    """One branch, buckets of its own, is frozen for a step, and thawed before the next backward."""
    model = _model(unused=False)
    optimizer = _optimizer(model, reduction)
    wrapped: Any = model
    if ddp is not None:
        wrapped = DistributedDataParallel(model, bucket_cap_mb=0.004, **ddp)
        wrapped.register_comm_hook(optimizer, zero_opt.ddp_hook)
    generator = torch.Generator().manual_seed(rank)
    for step in range(STEPS):
        model.left.requires_grad_(step != 2)
        wrapped(torch.randn(4, 30, generator=generator), 2).square().sum().backward()
        if clips:
            optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    return [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("mode", ["find_unused", "find_unused, views"])
def test_buckets_that_were_frozen_for_a_step_take_part_again(mode: str, clips: bool) -> None:
    without = run_processes(2, _train_frozen, OVERLAPPED, None, clips)
    assert_bitwise(run_processes(2, _train_frozen, HOOK, MODES[mode], clips), without)


# -- what p.grad is ---------------------------------------------------------------------------------------------------


def _read_grads(rank: int, world_size: int, views: bool) -> list[str]:
    model = _model(False)
    optimizer = _optimizer(model, HOOK)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=views)
    wrapped.register_comm_hook(optimizer, zero_opt.ddp_hook)
    wrapped(torch.ones(4, 30), 2).sum().backward()
    with pytest.raises(zero_opt.GradientConsumed) as caught:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    norm = float(optimizer.clip_grad_norm_(1e9))
    optimizer.close()
    return [str(caught.value), str(norm)]


@pytest.mark.parametrize("views", [False, True])
def test_nobody_clips_nothing(views: bool) -> None:
    model = _model(False)
    model(torch.ones(4, 30), 2).sum().backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    for message, found in run_processes(2, _read_grads, views):
        assert "opt.clip_grad_norm_" in message
        assert float(found) == pytest.approx(float(norm), rel=1e-5)


# -- uneven inputs ----------------------------------------------------------------------------------------------------


def _uneven(rank: int, world_size: int, reduction: Any) -> Any:
    model = _model(False)
    optimizer = _optimizer(model, reduction)
    wrapped: Any = model
    joined: list[Any] = [optimizer]
    if reduction is HOOK:
        wrapped = DistributedDataParallel(model)
        wrapped.register_comm_hook(optimizer, zero_opt.ddp_hook)
        joined = [wrapped, optimizer]
    generator = torch.Generator().manual_seed(rank)
    with Join(joined):
        for _ in range(3 * rank):
            optimizer.zero_grad()
            wrapped(torch.randn(4, 30, generator=generator), 2).square().sum().backward()
            optimizer.step()
    optimizer.close()
    return [param.detach().clone() for param in model.parameters()]


def test_ranks_without_inputs_count_as_zero() -> None:
    within = run_processes(3, _uneven, HOOK)
    assert_bitwise(within, run_processes(3, _uneven, OVERLAPPED))


# -- what is refused --------------------------------------------------------------------------------------------------


def _refused(rank: int, world_size: int, what: str) -> str:
    model = _model(False)
    trained = model.first if what == "partial" else model
    group = torch.distributed.new_group([0]), torch.distributed.new_group([1])
    optimizer = _optimizer(
        trained,
        zero_opt.AtStep() if what == "policy" else HOOK,
        process_group=group[rank] if what == "alone" else None,
    )
    wrapped = DistributedDataParallel(model)
    if what != "unregistered":
        hook = fp16_compress_wrapper(zero_opt.ddp_hook) if what == "rounded" else zero_opt.ddp_hook
        wrapped.register_comm_hook(model if what == "state" else optimizer, hook)  # type: ignore[arg-type]
    before = [param.detach().clone() for param in model.parameters()]

    def train() -> None:
        wrapped(torch.ones(4, 30), 2).sum().backward()
        optimizer.step()

    with pytest.raises((zero_opt.ZeroOptError, RuntimeError)) as caught:
        train()
    assert_bitwise([param.detach() for param in model.parameters()], before)
    optimizer.close()
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("unregistered", "call ddp.register_comm_hook"),
        ("policy", "reduction=zero_opt.DDPHook"),
        ("partial", "that is not in the ShardedOptimizer"),
        ("alone", "is over one rank"),
        ("state", "needs a ShardedOptimizer, got Branches"),
        ("rounded", "set MixedPrecision(reduce_dtype=...)"),
    ],
)
def test_misuse_is_told(what: str, message: str) -> None:
    for found in run_processes(2, _refused, what):
        assert message in found


def _local_so_far(rank: int, world_size: int) -> Any:
    """Before DDP has called the hook, a step finds gradients that are this rank's alone."""
    torch.manual_seed(0)
    models = [nn.Linear(4, 3) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizer = _optimizer(models[0], zero_opt.DDPHook(), torch.optim.SGD)
    wrapped = DistributedDataParallel(models[0])
    wrapped.register_comm_hook(optimizer, zero_opt.ddp_hook)
    plain, reference = (
        DistributedDataParallel(models[1]),
        _optimizer(models[1], zero_opt.AlreadyReduced(), torch.optim.SGD),
    )
    first, second = torch.full((2, 4), 1.0 + rank), torch.full((2, 4), 3.0 - rank)
    for model, stepper in ((wrapped, optimizer), (plain, reference)):
        with model.no_sync():
            model(first).square().sum().backward()
        if stepper is optimizer:
            with pytest.raises(zero_opt.GradientConflict, match=r"every backward was inside ddp\.no_sync\(\)"):
                stepper.step()
            assert models[0].weight.grad is not None and models[0].weight.grad.isfinite().all()
        model(second).square().sum().backward()
        stepper.step()
    assert_bitwise([*models[0].parameters()], [*models[1].parameters()])
    optimizer.close()
    reference.close()


def test_a_first_step_of_local_gradients_leaves_them_to_the_next_backward() -> None:
    run_processes(2, _local_so_far)


def _failing(rank: int, world_size: int) -> Any:
    """A backward that fails half-way on every rank."""
    model = _model(False)
    optimizer = _optimizer(model, HOOK)
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.004)
    wrapped.register_comm_hook(optimizer, zero_opt.ddp_hook)
    wrapped(torch.ones(4, 30) * rank, 2).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    wrapped(torch.ones(4, 30) * rank, 2).sum().backward()  # in buckets of the size asked for
    optimizer.step()
    optimizer.zero_grad()
    handle = model.first.weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        wrapped(torch.ones(4, 30) * rank, 2).sum().backward()
    with pytest.raises(zero_opt.StepDesync):
        optimizer.step()
    handle.remove()
    optimizer.zero_grad()
    optimizer.close()
    return [param.grad for param in model.parameters()]


def test_a_backward_that_fails_is_no_gradient() -> None:
    assert run_processes(2, _failing) == [[None] * 10] * 2


def _views(rank: int, world_size: int) -> Any:
    """In its second forward DDP makes its buckets anew, and looks into every gradient that there is."""
    model = _model(False)
    optimizer = _optimizer(model, HOOK)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    wrapped.register_comm_hook(optimizer, zero_opt.ddp_hook)
    seen: list[Any] = []
    for _ in range(3):
        output = wrapped(torch.ones(4, 30), 2)
        for call in (Tensor.clone, torch.empty(40, 30).copy_):
            try:
                seen.append(call(model.first.weight.grad))  # type: ignore[arg-type]
            except (TypeError, zero_opt.GradientConsumed) as refused:
                seen.append(type(refused).__name__)
        output.sum().backward()
    before = [param.detach().clone() for param in model.parameters()]
    wrapped(torch.ones(4, 30), 2)  # a forward for which there is no backward
    norm = optimizer.clip_grad_norm_(1e9)
    optimizer.close()
    hooks = len(model._forward_pre_hooks)
    return seen, norm, hooks, all(map(torch.equal, before, model.parameters()))


def test_a_forward_of_ddp_leaves_gradients_consumed() -> None:
    model = _model(False)
    model(torch.ones(4, 30), 2).sum().backward()
    norm = 3 * torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    for seen, found, hooks, same in run_processes(2, _views):
        assert seen == ["TypeError"] * 2 + ["GradientConsumed"] * 4
        assert float(found) == pytest.approx(float(norm), rel=1e-5)
        assert hooks == 0 and same


def _joined_after_one(rank: int, world_size: int, reduction: Any) -> Any:
    """Rank 0 runs out of inputs after its first backward."""
    model = _model(False)
    optimizer = _optimizer(model, reduction)
    wrapped: Any = model
    joined: list[Any] = [optimizer]
    if reduction is HOOK:
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
        wrapped.register_comm_hook(optimizer, zero_opt.ddp_hook)
        joined = [wrapped, optimizer]
    generator = torch.Generator().manual_seed(rank)
    with Join(joined):
        for _ in range(1 + 2 * rank):
            optimizer.zero_grad()
            wrapped(torch.randn(4, 30, generator=generator), 2).square().sum().backward()
            optimizer.step()
    optimizer.close()
    return [param.detach().clone() for param in model.parameters()]


def test_a_rank_that_runs_out_of_inputs_has_buckets_made_anew() -> None:
    within = run_processes(2, _joined_after_one, HOOK)
    assert_bitwise(within, run_processes(2, _joined_after_one, OVERLAPPED))


def _goes_on(rank: int, world_size: int) -> list[list[torch.Tensor]]:
    """Once the optimizer is closed another one trains the same DDP; and, beside it, one that never had ours."""
    found = []
    for hooked in (True, False):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 3)
        wrapped = DistributedDataParallel(model)
        if hooked:
            optimizer = zero_opt.ShardedOptimizer(
                wrapped.parameters(), torch.optim.SGD, lr=0.0, reduction=zero_opt.DDPHook()
            )
            wrapped.register_comm_hook(optimizer, zero_opt.ddp_hook)
            wrapped(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.close()
        plain = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(2):
            wrapped(torch.full((2, 4), rank + 1.0)).square().sum().backward()
            plain.step()
            plain.zero_grad()
        found.append([param.detach() for param in model.parameters()])
    return found


def test_ddp_goes_on_by_itself_once_the_optimizer_is_closed() -> None:
    for hooked, usual in run_processes(2, _goes_on):
        assert_bitwise(hooked, usual)


def _under_ddp_by_default(rank: int, world_size: int) -> str:
    model = DistributedDataParallel(torch.nn.Linear(3, 3))
    optimizer = zero_opt.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(zero_opt.GradientConsumed) as caught:
        model(torch.ones(1, 3)).sum().backward()
    optimizer.close()
    return str(caught.value)


def test_ddp_with_the_default_reduction_is_told_what_to_use_under_ddp() -> None:
    for message in run_processes(2, _under_ddp_by_default):
        assert message.startswith("Under DistributedDataParallel, use reduction=zero_opt.AlreadyReduced()")


def _hooked_one_by_one(rank: int, world_size: int) -> None:
    ddp = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = zero_opt.ShardedOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, reduction=HOOK)
    # As torch's "python_reducer" calls it, with a gradient and its parameter.
    with pytest.raises(zero_opt.ConfigConflict, match=r'optimize_ddp="python_reducer".*AlreadyReduced\(\)'):
        zero_opt.ddp_hook(optimizer, (torch.ones(2), ddp.module.bias))  # type: ignore[arg-type]
    optimizer.close()


def test_a_reducer_without_buckets_is_refused_by_name() -> None:
    run_processes(2, _hooked_one_by_one)


def _broken_in_the_middle(rank: int, world_size: int) -> None:
    first, last = nn.Linear(4, 4), nn.Linear(4, 1 << 17)  # DDP hands the last one over by itself

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = first, last

        def forward(self, data: Tensor, *, breaks: bool) -> Tensor:
            hidden = self.first(data)
            return self.last(Tripwire.apply(hidden) if breaks else hidden)  # type: ignore[no-untyped-call]

    ddp = DistributedDataParallel(Both())
    optimizer = zero_opt.ShardedOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, reduction=HOOK)
    ddp.register_comm_hook(optimizer, zero_opt.ddp_hook)
    ddp(torch.ones(3, 4), breaks=False).sum().backward()
    optimizer.step()
    with pytest.raises(Failed):
        ddp(torch.ones(3, 4), breaks=True).sum().backward()
    said = "call opt.zero_grad.. on every rank and repeat it; if Dist.* make it and the optimizer anew on every rank"
    with pytest.raises(zero_opt.StepDesync, match=said):
        optimizer.step()
    optimizer.close()


def test_after_an_exception_in_backward_the_way_out_is_one_that_ddp_has() -> None:
    run_processes(2, _broken_in_the_middle)
