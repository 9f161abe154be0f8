"""A signal whose handler raises, at any line of a step: it is made or not, and the steps after it go on."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from zero_opt import CPUSGD, AdamState, CPUAdamW

STEPS = 3
Make = Callable[[list[Parameter]], torch.optim.Optimizer]
CASES: dict[str, tuple[torch.dtype, Make]] = {
    "adam": (torch.float32, CPUAdamW),
    "sgd": (torch.float32, lambda params: CPUSGD(params, lr=0.1, momentum=0.9, dampening=0.5)),
    "split": (torch.bfloat16, lambda params: CPUAdamW(params, lr=0.1, state=AdamState(master="split"))),
    "block8": (torch.bfloat16, lambda params: CPUAdamW(params, lr=0.1, state=AdamState("block8", "float32"))),
}


class Interrupted(BaseException):
    """What the handler raises."""


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, interrupt)
    yield
    signal.signal(signal.SIGUSR1, before)


class Lines:
    """Counts the lines of the kernels' modules that a step comes to first, and sends a signal at one of them."""

    def __init__(self, due: int) -> None:
        self._due = due
        self.seen: set[tuple[str, int]] = set()

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if not str(frame.f_globals.get("__name__")).startswith("zero_opt.kernels."):
            return None
        place = (frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and place not in self.seen:
            self.seen.add(place)
            if len(self.seen) == self._due:
                signal.raise_signal(signal.SIGUSR1)
        return self


def trained(case: str, interrupted: int, due: int) -> tuple[list[Tensor], bool]:
    """Return the params after all steps, and whether the signal came, at a line of one of them; due 0: without it."""
    dtype, make = CASES[case]
    params = [Parameter(torch.linspace(-1, 1, 70).to(dtype)) for _ in range(2)]
    optimizer, came = make(params), False
    for number in range(STEPS):
        for param in params:
            param.grad = torch.linspace(-1, 2 + number, 70).to(dtype)
        if number != interrupted:
            optimizer.step()
        elif due:
            sys.settrace(Lines(due))
            try:
                optimizer.step()
            except Interrupted:
                came = True
            finally:
                sys.settrace(None)
    return [param.detach() for param in params], came


@pytest.mark.parametrize("interrupted", [0, STEPS - 2])
@pytest.mark.parametrize("case", CASES)
def test_an_interrupted_step_is_made_or_not_and_training_goes_on(case: str, interrupted: int) -> None:
    whole, _ = trained(case, STEPS, 0)
    without, _ = trained(case, interrupted, 0)
    due, found = 1, set()
    while True:
        params, came = trained(case, interrupted, due)
        if not came:
            break
        made = all(map(torch.equal, params, whole))
        assert made or all(map(torch.equal, params, without)), due
        found.add(made)
        due += 1
    assert found == {True, False}
