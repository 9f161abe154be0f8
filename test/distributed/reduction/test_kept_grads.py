"""``p.grad`` that is kept, and set again after another backward, never stands for the gradient of that one."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import zero_opt
from test.support.harness import assert_bitwise, run_processes


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))


def _backward(model: nn.Module, rank: int, scale: float) -> None:
    (model(torch.ones(2, 5) * (1 + rank)) * scale).sum().backward()


def _grads(model: nn.Module) -> list[Tensor | None]:
    return [param.grad for param in model.parameters()]


def _set(model: nn.Module, grads: list[Tensor | None]) -> None:
    for param, grad in zip(model.parameters(), grads, strict=True):
        param.grad = grad


def _refusal(optimizer: Any) -> str:
    """What step() says, which must refuse the gradients."""
    with pytest.raises(zero_opt.GradientConflict) as caught:
        optimizer.step()
    return str(caught.value)


def _by_hand(model: nn.Module, optimizer: Any) -> None:
    _set(model, [None] * 4)


DROPS: dict[str, Callable[[nn.Module, Any], None]] = {
    "by hand": _by_hand,
    "model.zero_grad": lambda model, optimizer: model.zero_grad(),
    "opt.zero_grad": lambda model, optimizer: optimizer.zero_grad(),
}
POLICIES = (None, zero_opt.CPUOffload(), zero_opt.WorkerOffload(), zero_opt.WorkerOffload(delay=1))


def _put_back(rank: int, world_size: int, drop: str, again: bool, offload: Any) -> tuple[str, list[Tensor]]:
    """Keep gradients, drop them, make others if ``again``, and step by those that were kept."""
    model = _model()
    optimizer = zero_opt.ShardedOptimizer(model.parameters(), torch.optim.AdamW, fused=True, offload=offload)
    _backward(model, rank, 1.0)
    kept = _grads(model)
    DROPS[drop](model, optimizer)
    if again:
        _backward(model, rank, -3.0)
    _set(model, kept)
    said = _refusal(optimizer)
    optimizer.zero_grad()
    _backward(model, rank, 1.0)
    optimizer.step()
    optimizer.flush()
    optimizer.close()
    return said, [param.detach() for param in model.parameters()]


def _expected() -> list[Tensor]:
    """After one step by the mean gradient of two ranks."""
    model = _model()
    by_rank = []
    for rank in range(2):
        model.zero_grad()
        _backward(model, rank, 1.0)
        by_rank.append([param.grad for param in model.parameters() if param.grad is not None])
    _set(model, [(first + second) / 2 for first, second in zip(*by_rank, strict=True)])
    torch.optim.AdamW(model.parameters(), fused=True).step()
    return [param.detach() for param in model.parameters()]


@pytest.mark.parametrize("offload", POLICIES, ids=str)
@pytest.mark.parametrize("drop", DROPS)
def test_a_kept_gradient_is_refused_after_another_backward(drop: str, offload: Any) -> None:
    for message, params in run_processes(2, _put_back, drop, True, offload):
        assert "the gradient of parameter 0 " in message and "repeat the backward" in message
        assert_bitwise(params, _expected())


def test_a_kept_gradient_is_refused_after_zero_grad() -> None:
    for message, _ in run_processes(2, _put_back, "opt.zero_grad", False, None):
        assert "the gradient of parameter 0 " in message and "are gone" in message


def _keep_weakly(rank: int, world_size: int) -> list[Tensor | None]:
    """What weak references to gradients give after another backward."""
    model = _model()
    optimizer = zero_opt.ShardedOptimizer(model.parameters(), torch.optim.AdamW)
    _backward(model, rank, 1.0)
    kept = [weakref.ref(param.grad) for param in model.parameters()]
    assert [found() for found in kept] == _grads(model)
    optimizer.zero_grad()
    _backward(model, rank, 1.0)
    found = [reference() for reference in kept]
    optimizer.close()
    return found


def test_a_weak_reference_to_a_gradient_ends_with_it() -> None:
    assert run_processes(2, _keep_weakly) == [[None] * 4] * 2


def _put_back_at_once(rank: int, world_size: int, puts_back: bool) -> list[Tensor]:
    model = _model()
    optimizer = zero_opt.ShardedOptimizer(model.parameters(), torch.optim.AdamW)
    for _ in range(3):
        _backward(model, rank, 1.0)
        kept = _grads(model)
        if puts_back:
            _set(model, [None] * 4)
            _set(model, kept)
        optimizer.step()
        optimizer.zero_grad()
        _backward(model, rank, 2.0)  # what is kept from the step before is in nobody's way
        optimizer.step()
        model.zero_grad()
    optimizer.close()
    return [param.detach() for param in model.parameters()]


def test_a_kept_gradient_that_nothing_has_followed_is_what_it_was() -> None:
    for params, expected in zip(
        run_processes(2, _put_back_at_once, True), run_processes(2, _put_back_at_once, False), strict=True
    ):
        assert_bitwise(params, expected)


def _close_before_the_step(rank: int, world_size: int, reduction: Any) -> tuple[str, list[Tensor]]:
    model = _model()
    first = zero_opt.ShardedOptimizer(model.parameters(), torch.optim.AdamW)
    _backward(model, rank, 1.0)
    first.close()
    optimizer = zero_opt.ShardedOptimizer(model.parameters(), torch.optim.AdamW, fused=True, reduction=reduction)
    before = [param.detach().clone() for param in model.parameters()]
    said = _refusal(optimizer)
    assert_bitwise([param.detach() for param in model.parameters()], before)
    optimizer.zero_grad()
    _backward(model, rank, 1.0)
    optimizer.step()
    optimizer.flush()
    optimizer.close()
    return said, [param.detach() for param in model.parameters()]


@pytest.mark.parametrize("reduction", [zero_opt.Overlapped(), zero_opt.AtStep()], ids=str)
def test_gradients_that_close_has_dropped_are_not_taken_for_none(reduction: Any) -> None:
    for message, params in run_processes(2, _close_before_the_step, reduction):
        assert "are gone" in message and "repeat the backward" in message
        assert_bitwise(params, _expected())


def _over_fsdp(rank: int, world_size: int, closes: bool) -> str:
    """Gradients that leave early over DTensors are kept beside another backward, or their optimizer ``closes``."""
    model = _model()
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))

    def made() -> Any:
        return zero_opt.ShardedOptimizer(
            model.parameters(), torch.optim.AdamW, offload=zero_opt.WorkerOffload(speculate=True)
        )

    optimizer = made()
    _backward(model, rank, 1.0)
    if closes:
        optimizer.close()
        optimizer = made()
    else:
        kept = _grads(model)
        _set(model, [None] * 4)
        _backward(model, rank, -3.0)
        _set(model, kept)
    said = _refusal(optimizer)
    optimizer.close()
    return said


@pytest.mark.parametrize("closes", [False, True])
def test_gradients_of_dtensors_are_refused_likewise(closes: bool) -> None:
    for message in run_processes(2, _over_fsdp, closes):
        assert "are gone" in message and "repeat the backward" in message


def _frozen_after_close(rank: int, world_size: int) -> str:
    """The gradients of a frozen part are gone on rank 0 alone."""
    model = _model()
    first = zero_opt.ShardedOptimizer(model.parameters(), torch.optim.AdamW)
    _backward(model, rank, 1.0)
    first.close()
    model[0].requires_grad_(False)
    if rank == 1:
        model.zero_grad()
    optimizer = zero_opt.ShardedOptimizer(model.parameters(), torch.optim.AdamW, reduction=zero_opt.Overlapped(0.0001))
    model[1].zero_grad()
    _backward(model, rank, 1.0)
    said = _refusal(optimizer)
    optimizer.close()
    return said


def test_all_ranks_are_told_of_what_is_gone_on_one() -> None:
    for message in run_processes(2, _frozen_after_close):
        assert "are gone" in message


def _swapped(rank: int, world_size: int) -> str:
    params = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = zero_opt.ShardedOptimizer(params, torch.optim.AdamW)
    sum((param * (1 + rank)).sum() for param in params).backward()  # type: ignore[union-attr]
    params[0].grad, params[1].grad = params[1].grad, params[0].grad
    said = _refusal(optimizer)
    optimizer.close()
    return said


def test_swapped_gradients_are_refused_by_their_names() -> None:
    for message in run_processes(2, _swapped):
        assert "was set to the gradient of parameter 1" in message


class _OneBuffer(torch.autograd.Function):
    """Writes every gradient to the same memory, as a captured graph does."""

    buffer = torch.zeros(4)

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:  # type: ignore[override]
        return value * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return _OneBuffer.buffer.copy_(grad)


def _with_reused_memory(rank: int, world_size: int, reduction: Any) -> list[Tensor]:
    params = [nn.Parameter(torch.ones(4)) for _ in range(3)]
    optimizer = zero_opt.ShardedOptimizer(params, torch.optim.SGD, lr=1.0, reduction=reduction)
    for backward in range(3):
        terms = [(_OneBuffer.apply(param) * (2.0**backward * (at + 1 + rank))).sum() for at, param in enumerate(params)]
        sum(terms).backward()  # type: ignore[union-attr]
    optimizer.step()
    optimizer.close()
    return [param.detach() for param in params]


@pytest.mark.parametrize("reduction", [zero_opt.Overlapped(), zero_opt.Overlapped(0.0001), zero_opt.AtStep()], ids=str)
def test_gradients_whose_memory_is_used_again_are_added_up(reduction: Any) -> None:
    expected = [torch.full((4,), 1.0 - 7 * (at + 1.5)) for at in range(3)]
    for params in run_processes(2, _with_reused_memory, reduction):
        assert_bitwise(params, expected)


def _flatten(model: nn.Module, spare: int = 0) -> Tensor:
    """Let gradients be views of one tensor, which has spare elements."""
    flat = torch.zeros(sum(param.numel() for param in model.parameters()) + spare)
    _set_views(model, flat)
    return flat


def _set_views(model: nn.Module, flat: Tensor) -> None:
    start, views = 0, list[Tensor | None]()
    for param in model.parameters():
        start, begin = start + param.numel(), start
        views.append(flat[begin:start].view_as(param))
    _set(model, views)


def _optimizer_over(model: nn.Module, reduction: Any = None) -> zero_opt.ShardedOptimizer:
    options = {} if reduction is None else {"reduction": reduction}
    return zero_opt.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, **options)


WRITES: dict[str, Callable[[Tensor], Any]] = {"zeroed": Tensor.zero_, "clipped": lambda flat: flat.mul_(0.5)}


def _written_after_it_was_moved(rank: int, world_size: int, write: str, spare: int) -> str:
    """Write to a tensor that gradients were views of, where step() is to notice it."""
    model = _model()
    optimizer, flat = _optimizer_over(model), _flatten(model, spare)
    _backward(model, rank, 1.0)
    if write == "zeroed":  # for the next step, in the place of zero_grad()
        optimizer.step()
    WRITES[write](flat)
    if write == "zeroed":
        _backward(model, rank, 2.0)
    try:
        optimizer.step()
    except zero_opt.GradientConsumed as error:
        return str(error)
    return ""


@pytest.mark.parametrize("write", WRITES)
def test_a_write_to_a_tensor_that_gradients_were_moved_from_is_refused(write: str) -> None:
    found = run_processes(2, _written_after_it_was_moved, write, 0)
    assert all("p.grad was a view of a tensor of 66 elements, from which" in said for said in found), found
    assert run_processes(2, _written_after_it_was_moved, write, 1) == ["", ""]  # others may write to the rest


def _flat_and_dropped(model: nn.Module, optimizer: Any, rank: int, flat: Tensor) -> None:
    optimizer.zero_grad()
    flat.zero_()
    _backward(model, rank, 2.0)


def _flat_and_set_again(model: nn.Module, optimizer: Any, rank: int, flat: Tensor) -> None:
    del flat
    _flatten(model)
    _backward(model, rank, 2.0)


def _flat_and_zeroed_in_place(model: nn.Module, optimizer: Any, rank: int, flat: Tensor) -> None:
    model.zero_grad(set_to_none=False)
    flat.zero_()
    _backward(model, rank, 2.0)


def _flat_and_set_by_hand(model: nn.Module, optimizer: Any, rank: int, flat: Tensor) -> None:
    flat.fill_(1.0 + rank)
    _set_views(model, flat)


LOOPS: dict[str, Any] = {
    "dropped": _flat_and_dropped,
    "set again": _flat_and_set_again,
    "zeroed in place": _flat_and_zeroed_in_place,
    "set by hand": _flat_and_set_by_hand,
}


def _valid_loop(rank: int, world_size: int, loop: str) -> list[list[Tensor]]:
    """The parameters where gradients are moved, and where they stay."""
    found = []
    for reduction in (zero_opt.Overlapped(), zero_opt.AtStep()):
        model = _model()
        optimizer, flat = _optimizer_over(model, reduction), _flatten(model)
        _backward(model, rank, 1.0)
        optimizer.step()
        for _ in range(3):
            LOOPS[loop](model, optimizer, rank, flat)
            optimizer.step()
        found.append([param.detach().clone() for param in model.parameters()])
        optimizer.close()
    return found


@pytest.mark.parametrize("loop", LOOPS)
def test_tensors_that_gradients_are_views_of_serve_again(loop: str) -> None:
    for moved, stayed in run_processes(2, _valid_loop, loop):
        assert_bitwise(moved, stayed)
