"""Gradients that are reduced at step(): also those that a CUDA graph's replay has written, which raises no version.

Those that were edited after they were clipped, or added to, are refused, whatever torch has edited them by.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zero_opt
from test.support.harness import assert_bitwise, run_processes, run_threads
from zero_opt.reduction.grad_norm import clip_factor
from zero_opt.system.threads import BackgroundThreads

NUMELS = (300, 64, 1)
BUCKET_MB = 1024 / 2**20
STEPS = 3
MASTERS = {"precision": zero_opt.MixedPrecision(torch.float32)}
# Below the norm of any gradient here.
MAX_NORM = 0.5

Optimizer = zero_opt.ShardedOptimizer


def _gradients(step: int, rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(97 * step + rank)
    return [torch.randn(numel, generator=generator) for numel in NUMELS]


def _made(dtype: torch.dtype = torch.float32, **options: Any) -> tuple[list[Tensor], Optimizer]:
    params: list[Tensor] = [torch.nn.Parameter(torch.ones(numel, dtype=dtype)) for numel in NUMELS]
    for param in params:
        param.grad = torch.zeros_like(param)
    reduction = zero_opt.AtStep(BUCKET_MB)
    return params, Optimizer(params, torch.optim.SGD, lr=0.25, momentum=0.9, reduction=reduction, **options)


def _in_place(param: Tensor, grad: Tensor) -> None:
    assert param.grad is not None
    param.grad.copy_(grad)


def _as_a_replay(param: Tensor, grad: Tensor) -> None:
    assert param.grad is not None
    before = param.grad._version
    param.grad.data.copy_(grad)
    assert param.grad._version == before


def _train(rank: int, world_size: int, write: Callable[[Tensor, Tensor], None], clips: bool, options: Any) -> Any:
    """Take steps without zero_grad(): gradients stay where a graph writes them."""
    params, optimizer = _made(**options)
    for step in range(STEPS):
        for param, grad in zip(params, _gradients(step, rank), strict=True):
            write(param, grad)
        if clips:
            optimizer.clip_grad_norm_(MAX_NORM)
        optimizer.step()
    optimizer.close()
    return [param.detach() for param in params]


@pytest.mark.parametrize("options", [{}, {"offload": zero_opt.CPUOffload()}, {"max_grad_norm": MAX_NORM}], ids=str)
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("world_size", [1, 2])
def test_every_step_reduces_what_is_there(world_size: int, clips: bool, options: dict[str, Any]) -> None:
    found = run_threads(world_size, _train, _as_a_replay, clips, options)
    assert_bitwise(found, run_threads(world_size, _train, _in_place, clips, options))


def _add_after_clip(rank: int, world_size: int, added: bool) -> list[Tensor]:
    params, optimizer = _made()
    late = torch.nn.Parameter(torch.ones(3))
    if not added:
        optimizer.add_param_group({"params": [late]})
    for param, grad in zip(params, _gradients(0, rank), strict=True):
        _in_place(param, grad)
    optimizer.clip_grad_norm_(MAX_NORM)
    if added:
        optimizer.add_param_group({"params": [late]})
    optimizer.step()
    late.grad = torch.full_like(late, 1.0 + rank)
    optimizer.step()
    optimizer.close()
    return [param.detach() for param in (*params, late)]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_group_may_be_added_between_clipping_and_the_step(world_size: int) -> None:
    assert_bitwise(run_threads(world_size, _add_after_clip, True), run_threads(world_size, _add_after_clip, False))


def _add_with_gradient_after_clip(rank: int, world_size: int, edits: bool) -> list[Tensor]:
    """On rank 0 alone; then clip again, with the group."""
    params, optimizer = _made()
    late = torch.nn.Parameter(torch.ones(3))
    for param, grad in zip(params, _gradients(0, rank), strict=True):
        _in_place(param, grad)
    optimizer.clip_grad_norm_(MAX_NORM)
    late.grad = torch.ones(3) if rank == 0 else None
    optimizer.add_param_group({"params": [late]})
    if edits:
        _in_place(params[0], torch.ones(NUMELS[0]))
    cause = (
        r"edited after opt\.clip_grad_norm_\(\)" if edits else rf"parameter {len(params)} has .* add the group first"
    )
    with pytest.raises(zero_opt.GradientConflict, match=cause):
        optimizer.step()
    optimizer.zero_grad()
    late.grad = torch.ones(3)
    optimizer.clip_grad_norm_(MAX_NORM)
    optimizer.step()
    optimizer.close()
    return [late.detach()]


@pytest.mark.parametrize("edits", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_group_that_is_added_with_gradients_after_clipping_is_named(world_size: int, edits: bool) -> None:
    (late,) = run_threads(world_size, _add_with_gradient_after_clip, edits)[0]
    assert torch.allclose(late, torch.full((3,), 1 - 0.25 * MAX_NORM / 3**0.5))


def _accumulate(rank: int, world_size: int, dtype: torch.dtype, options: Any, by_hand: bool) -> list[list[Tensor]]:
    """Clip, step, and take another step with the clipped gradients and new ones, as without zero_grad().

    Args:
        by_hand: drop the gradients, and make the sum of both.
    """
    params, optimizer = _made(dtype, **options)
    first, second = ([grad.to(dtype) for grad in _gradients(step, rank)] for step in range(2))
    for param, grad in zip(params, first, strict=True):
        param.grad = grad.clone()
    norm = optimizer.clip_grad_norm_(MAX_NORM)
    shown = [param.grad.clone() for param in params if param.grad is not None]
    optimizer.step()
    if by_hand:
        shown = [grad.mul_(clip_factor(norm, MAX_NORM)) for grad in first]
        optimizer.zero_grad()
        for param, clipped, grad in zip(params, shown, second, strict=True):
            param.grad = clipped + grad
    else:
        for param, grad in zip(params, second, strict=True):
            assert param.grad is not None
            param.grad += grad
    optimizer.step()
    optimizer.close()
    return [shown, [param.detach() for param in params]]


@pytest.mark.parametrize("masters", [False, True], ids=["", "masters"])
def test_a_gradient_that_was_clipped_is_added_to(masters: bool) -> None:
    given = (torch.bfloat16, MASTERS) if masters else (torch.float32, {})
    assert_bitwise(run_threads(2, _accumulate, *given, False), run_threads(2, _accumulate, *given, True))


def _by_scaler(params: list[Tensor], optimizer: Optimizer) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))  # makes its scale
    scaler.unscale_(optimizer)


def _by_fused_step(params: list[Tensor], _: Optimizer) -> None:
    """GradScaler has a fused class unscale gradients, which writes them back."""
    copies = [torch.nn.Parameter(param.detach().clone()) for param in params]
    for copy, param in zip(copies, params, strict=True):
        copy.grad = param.grad
    fused: Any = torch.optim.SGD(copies, lr=0.1, fused=True)
    fused.grad_scale, fused.found_inf = torch.full((), 2.0), torch.zeros(())
    fused.step()


def _by_all_reduce(params: list[Tensor], _: Optimizer) -> None:
    for param in params:
        assert param.grad is not None
        dist.all_reduce(param.grad)


EDITS: dict[str, Callable[[list[Tensor], Optimizer], object]] = {
    "scaler.unscale_": _by_scaler,
    "all_reduce": _by_all_reduce,
    "fused step": _by_fused_step,
    "clip_grad_value_": lambda params, _: torch.nn.utils.clip_grad_value_(params, 1e-4),
    "clip_grad_norm_": lambda params, _: torch.nn.utils.clip_grad_norm_(params, 1e-4),
    "_foreach_mul_": lambda params, _: torch._foreach_mul_([param.grad for param in params], 0.5),
    "backward": lambda params, _: sum(param.sum() for param in params).backward(),  # type: ignore[union-attr]
    "div_": lambda params, _: [param.grad.div_(2.0) for param in params if param.grad is not None],
}


def _edit_after_clip(rank: int, world_size: int, edit: str, dtype: torch.dtype, options: Any) -> None:
    params, optimizer = _made(dtype, **options)
    for param, grad in zip(params, _gradients(0, rank), strict=True):
        _in_place(param, grad)
    optimizer.clip_grad_norm_(MAX_NORM)
    EDITS[edit](params, optimizer)
    words = r"edited after opt\.clip_grad_norm_\(\), or another backward has added to it"
    with pytest.raises(zero_opt.GradientConflict, match=words):
        optimizer.step()
    assert all(torch.equal(param, torch.ones_like(param)) for param in params)
    optimizer.zero_grad()
    optimizer.close()


@pytest.mark.parametrize("masters", [False, True], ids=["", "masters"])
@pytest.mark.parametrize("edit", EDITS)
def test_gradients_that_were_edited_after_they_were_clipped_are_refused(edit: str, masters: bool) -> None:
    dtype, options = (torch.bfloat16, MASTERS) if masters else (torch.float32, {})
    run_processes(2, _edit_after_clip, edit, dtype, options)


def _train_with_nan(rank: int, world_size: int) -> None:
    """Under Checks(nonfinite="ignore"), the default, clipped gradients may be NaN, which is not equal to itself."""
    params, optimizer = _made()
    for param in params:
        _in_place(param, torch.full_like(param, torch.nan))
    optimizer.clip_grad_norm_(MAX_NORM)
    optimizer.step()
    assert all(param.isnan().all() for param in params)
    optimizer.close()


@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_that_are_nan_are_clipped_and_stepped(world_size: int) -> None:
    run_threads(world_size, _train_with_nan)


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "one": lambda: torch.ones(()),
    "transposed": lambda: torch.ones(12, 10).t(),
    "channels last": lambda: torch.ones(4, 3, 5, 5).to(memory_format=torch.channels_last),
    "complex": lambda: torch.ones(40, dtype=torch.complex64),
    "fp64": lambda: torch.ones(40, dtype=torch.float64),
}


def _edit_one(rank: int, world_size: int, layout: str) -> None:
    """Write to one gradient of several layouts, on one rank, without a trace but in its values."""
    params = [torch.nn.Parameter(torch.ones(3, 0)), *(torch.nn.Parameter(make()) for make in LAYOUTS.values())]
    optimizer = Optimizer(params, torch.optim.SGD, lr=0.25, reduction=zero_opt.AtStep(BUCKET_MB))
    for param in params:
        param.grad = torch.full_like(param, 2.0)
    optimizer.clip_grad_norm_(MAX_NORM)
    edited = params[1 + [*LAYOUTS].index(layout)].grad
    assert edited is not None
    if rank == 1:
        edited.data.mul_(2.0)
    with pytest.raises(zero_opt.GradientConflict, match=r"edited after opt\.clip_grad_norm_\(\)"):
        optimizer.step()
    if rank == 1:
        edited.data.mul_(0.5)
    optimizer.step()
    optimizer.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_edit_of_one_gradient_is_noticed_whatever_its_layout(layout: str) -> None:
    run_threads(2, _edit_one, layout)


def _gets_no_thread(rank: int, world_size: int, gathers_late: bool) -> tuple[str, Tensor]:
    """Rank 1 gets no thread for its first exchange, or for its first late gather, and then gets one."""
    start = BackgroundThreads.start

    def refused(threads: BackgroundThreads, thread: threading.Thread) -> None:
        if rank == 1 and thread.name == "zero_opt exchange":
            raise zero_opt.OutOfResources("can't start new thread")
        start(threads, thread)

    model = nn.ParameterList([nn.Parameter(torch.ones(8))])
    late = zero_opt.AtStep(overlap_param_gather=model)
    reduction = late if gathers_late else zero_opt.AtStep(exchange="backend")
    optimizer = zero_opt.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=1.0, reduction=reduction)
    model[0].grad = torch.full((8,), float(rank))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BackgroundThreads, "start", refused)
        with pytest.raises(zero_opt.OutOfResources) as caught:
            optimizer.step()
    optimizer.flush()
    assert torch.equal(model[0], torch.ones(8))
    optimizer.step()
    optimizer.flush()
    optimizer.close()
    return str(caught.value), model[0].detach()


@pytest.mark.parametrize("gathers_late", [False, True])
def test_a_rank_that_gets_no_thread_for_its_exchange_is_an_error_on_all(gathers_late: bool) -> None:
    found = run_processes(2, _gets_no_thread, gathers_late)
    assert [text for text, _ in found] == ["rank 1: can't start new thread", "can't start new thread"]
    for _, param in found:
        assert_bitwise([param], [torch.full((8,), 0.5)])
