"""A class that drops or zeroes ``p.grad`` in its own step is refused where ``p.grad`` is not what it steps by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_opt
from test.support.harness import run_processes


def _drop(optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()


def _zero(optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad(set_to_none=False)


def _zero_data(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad.data.zero_()


def _leave(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad.mul_(0.5)


def _class(end: Callable[[torch.optim.Optimizer], None]) -> type[torch.optim.SGD]:
    """Return SGD that ends its step with a call."""

    class Ending(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            loss = super().step(closure)
            with torch.no_grad():
                end(self)
            return loss

    return Ending


def _backward(params: list[nn.Parameter], scale: float) -> None:
    sum((scale * param).sum() for param in params).backward()  # type: ignore[union-attr]


def _made(end: Callable[[torch.optim.Optimizer], None], **options: Any) -> tuple[list[nn.Parameter], Any]:
    params = [nn.Parameter(torch.ones(6)) for _ in range(4)]
    return params, zero_opt.ShardedOptimizer(params, _class(end), lr=0.5, **options)


def _refused(rank: int, world_size: int, end: Any, options: dict[str, Any]) -> None:
    params, optimizer = _made(end, **options)
    _backward(params, 0.0)
    optimizer.step()
    optimizer.zero_grad()
    _backward(params, 1.0)
    with pytest.raises((zero_opt.UnsupportedOptimizer, zero_opt.StepFailed), match=r"Ending drops or zeroes p\.grad"):
        optimizer.step()
    optimizer.close()


ENDS = pytest.mark.parametrize("end", [_zero, _zero_data], ids=["zeroed", "zeroed by data"])


@ENDS
@pytest.mark.parametrize(
    "reduction", [zero_opt.Overlapped(), zero_opt.AtStep(), zero_opt.AlreadyReduced()], ids=lambda p: type(p).__name__
)
def test_it_is_refused_with_the_first_gradient_that_is_not_zero(end: Any, reduction: Any) -> None:
    run_processes(2, _refused, end, {"reduction": reduction})


@ENDS
def test_and_at_one_rank_where_copies_are_stepped(end: Any) -> None:
    run_processes(1, _refused, end, {"offload": zero_opt.CPUOffload()})


def _dropped(rank: int, world_size: int, options: dict[str, Any]) -> None:
    params, optimizer = _made(_drop, **options)
    _backward(params, 0.0)
    with pytest.raises((zero_opt.UnsupportedOptimizer, zero_opt.StepFailed), match=r"Ending drops or zeroes p\.grad"):
        optimizer.step()
    optimizer.close()


@pytest.mark.parametrize("world_size", [1, 2])
def test_one_that_drops_them_is_refused_at_once(world_size: int) -> None:
    run_processes(world_size, _dropped, {"offload": zero_opt.CPUOffload()})
    if world_size > 1:
        run_processes(world_size, _dropped, {"reduction": zero_opt.AtStep()})


def _trained(rank: int, world_size: int, end: Any, options: dict[str, Any]) -> list[list[float]]:
    params, optimizer = _made(end, **options)
    for scale in (1.0, 2.0):
        _backward(params, scale)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    values: list[Tensor] = [param.detach() for param in params]
    return [value.tolist() for value in values]


def test_one_that_writes_other_values_is_not() -> None:
    for found in run_processes(2, _trained, _leave, {}):
        assert found == [[-0.5] * 6] * 4


@pytest.mark.parametrize("end", [_drop, _zero])
def test_nor_is_any_where_the_class_steps_what_the_user_has(end: Any) -> None:
    assert run_processes(1, _trained, end, {}) == [[[-0.5] * 6] * 4]
