"""What the stack of a thread says of torch's functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from zero_opt.system.frames import inside_function

SEEN: list[bool] = []


def _look() -> None:
    SEEN.append(inside_function())


class Plain(torch.autograd.Function):
    """Looks in its forward and in its backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:  # type: ignore[override]
        _look()
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        _look()
        return grad


class WithSetup(Plain):
    """Has a forward without a context."""

    @staticmethod
    def forward(value: Tensor) -> Tensor:  # type: ignore[override]
        _look()
        return value.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep nothing."""


class Decorated(Plain):
    """Has a forward that is wrapped, as under autocast."""

    @staticmethod
    @torch.no_grad()
    def forward(ctx: Any, value: Tensor) -> Tensor:  # type: ignore[override]
        _look()
        return value.clone()


def _by_torch(function: Any, value: Tensor) -> Tensor:
    result: Tensor = function.apply(value)
    return result


def _without_python(function: Any, value: Tensor) -> Tensor:
    """Call what torch 2.14 has for ``Function.apply``."""
    result: Tensor = super(torch.autograd.Function, function).apply(value)  # type: ignore[misc]
    return result


@pytest.mark.parametrize("apply", [_by_torch, _without_python])
@pytest.mark.parametrize("function", [Plain, WithSetup, Decorated])
def test_a_function_is_seen_in_forward_and_backward(function: Any, apply: Callable[..., Tensor]) -> None:
    SEEN.clear()
    result = apply(function, torch.zeros(2, requires_grad=True))
    assert set(SEEN) == {True}
    result.sum().backward()
    assert SEEN == [True, True]


def test_nothing_else_is_taken_for_a_function() -> None:
    SEEN.clear()
    _look()
    torch.no_grad()(_look)()
    value = torch.zeros(2, requires_grad=True)
    value.register_hook(lambda _: _look())
    value.sum().backward()
    assert SEEN == [False] * 3
