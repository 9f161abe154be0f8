"""What the stack of a thread says of torch's functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from zero_opt.system import frames
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


def _apply(function: Any, value: Tensor) -> Tensor:
    """Call what torch 2.14 has for ``Function.apply``."""
    result: Tensor = super(torch.autograd.Function, function).apply(value)  # type: ignore[misc]
    return result


@pytest.fixture(params=["as it is", "without Python"])
def apply(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tensor]:
    """What applies a Function, as in this torch or as from torch 2.14 on."""
    if request.param == "as it is":
        return lambda function, value: function.apply(value)
    monkeypatch.setattr(frames, "_APPLY_IS_PYTHON", False)
    return _apply


@pytest.mark.parametrize("function", [Plain, WithSetup, Decorated])
def test_a_function_is_seen_in_forward_and_backward(function: Any, apply: Callable[..., Tensor]) -> None:
    SEEN.clear()
    result = apply(function, torch.zeros(2, requires_grad=True))
    assert set(SEEN) == {True}
    result.sum().backward()
    assert SEEN == [True, True]


class Forwards(torch.nn.Module):
    """Looks in a module's forward."""

    def forward(self) -> None:
        """Look."""
        _look()


@pytest.mark.usefixtures("apply")
def test_a_forward_that_nothing_applies_is_no_function() -> None:
    """As in evaluation, of a fused kernel."""
    SEEN.clear()
    Plain.forward(None, torch.zeros(2))
    Forwards()()
    assert SEEN == [False, False]


@pytest.mark.usefixtures("apply")
def test_nothing_else_is_taken_for_a_function() -> None:
    SEEN.clear()
    _look()
    torch.no_grad()(_look)()
    value = torch.zeros(2, requires_grad=True)
    value.register_hook(lambda _: _look())
    value.sum().backward()
    assert SEEN == [False] * 3
