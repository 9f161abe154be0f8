"""NVMeOffload where an exception is raised at any line of a step: flush() completes the step, to the bit."""

from __future__ import annotations

import inspect
import itertools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import zero_opt
from test.support.compact_training import FORMS
from test.support.harness import assert_bitwise
from test.support.nvme_training import make, placement_of, step_copies_of_params
from test.support.raised_anywhere import Place, Raised, Tracer
from test.support.scenario import values
from test.support.worker_training import SHAPES, make_params
from zero_opt.placement.nvme import step as nvme_step
from zero_opt.placement.nvme.extents import FileShard
from zero_opt.placement.nvme.placement import NVMePlacement
from zero_opt.placement.nvme.step import FileStep
from zero_opt.placement.nvme.window_pass import Disk, WindowPass

_STEP = 1
_CODES = (NVMePlacement.step.__code__, inspect.unwrap(NVMePlacement._keeping).__code__)

KINDS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "float32": (torch.float32, {}),
    "bfloat16": (torch.bfloat16, {}),
    "block8, split": (FORMS["block8, split"].dtype, {"cls": zero_opt.CPUAdamW, "state": FORMS["block8, split"].state}),
    "SGD": (torch.float32, {"cls": torch.optim.SGD, "lr": 0.1, "momentum": 0.9}),
}


def _trained(path: Path, kind: str, trouble: Callable[[Any], AbstractContextManager[None]] | None = None) -> Any:
    """Train; one step is taken within the trouble, and flush() goes on once its gradients are gone."""
    dtype, options = KINDS[kind]
    params = make_params(dtype)
    optimizer = make(params, path, **options)
    for step in range(_STEP + 2):
        torch.autograd.backward(params, [values(step, 1, 0, i, s).to(dtype) for i, s in enumerate(SHAPES)])
        if step != _STEP or trouble is None:
            optimizer.step()
        else:
            with trouble(placement_of(optimizer)):
                optimizer.step()
            optimizer.zero_grad()
            torch.autograd.backward(params, [torch.full_like(param, 7.0) for param in params])
            optimizer.zero_grad()
            optimizer.flush()
        optimizer.zero_grad()
    found = [param.detach().clone() for param in params], optimizer.state_dict()["state"]
    optimizer.close()
    return found


@contextmanager
def _raised_at(due: tuple[Place, int], came: list[int], placement: NVMePlacement) -> Iterator[None]:
    """Notes how often the place was come to; as often as is due where the exception was raised."""
    tracer = Tracer(lambda frame: frame.f_code in _CODES, lambda: placement.pending)
    tracer.due = due
    with suppress(Raised), tracer.tracing():
        yield
    came.append(tracer.places.get(due[0], 0))


@contextmanager
def _counting(places: dict[Place, int], placement: NVMePlacement) -> Iterator[None]:
    tracer = Tracer(lambda frame: frame.f_code in _CODES, lambda: placement.pending)
    with tracer.tracing():
        yield
    places |= tracer.places


@contextmanager
def _raised_beside(
    place: tuple[Any, str], due: int, after: bool, calls: list[int], placement: NVMePlacement
) -> Iterator[None]:
    """The call with this number raises before, or after, what it does."""
    called = getattr(*place)

    def call(*given: Any, **named: Any) -> Any:
        calls[0] += placement.pending
        strikes = placement.pending and calls[0] == due
        if strikes and not after:
            raise Raised
        result = called(*given, **named)
        if strikes:
            raise Raised
        return result

    with pytest.MonkeyPatch.context() as patch, suppress(Raised):
        patch.setattr(*place, call)
        yield


def _slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no transfer end before it is waited for."""
    for name in ("preadv", "pwritev"):
        call = getattr(os, name)

        def slow(*given: Any, call: Any = call) -> Any:
            time.sleep(0.0005)
            return call(*given)

        monkeypatch.setattr(os, name, slow)


_PARTS = 24


@pytest.mark.sampled(3)
@pytest.mark.parametrize("part", range(_PARTS))
@pytest.mark.parametrize("apart", [False, True], ids=["params", "copies"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_at_any_line_loses_no_window_and_steps_none_twice(
    kind: str, apart: bool, part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first, the middle and the last time that a line is come to, in turn from one line to the next."""
    if apart:
        step_copies_of_params(monkeypatch)
    _slow(monkeypatch)
    reference, places = _trained(tmp_path, kind), dict[Place, int]()
    _trained(tmp_path, kind, partial(_counting, places))
    assert len({place.path for place in places}) >= 5
    raised = []
    for number, (place, count) in list(enumerate(places.items()))[part::_PARTS]:
        due, came = 0, [(1, (count + 1) // 2, count)[number % 3]]
        while due != came[-1]:  # transfers that end sooner than when places were counted pass some less often
            due = came[-1]
            found = _trained(tmp_path, kind, partial(_raised_at, (place, due), came))
            assert_bitwise(found, reference, f"{place}, time {due}")
        raised.append(due > 0)
    assert any(raised)


CALLS = [
    (Disk, "read"),
    (Disk, "write"),
    (nvme_step, "step_runs"),
    (FileStep, "_land"),
    (FileStep, "follow"),
    (FileStep, "store"),
    (FileShard, "count_step"),
    (WindowPass, "run"),
]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("place", CALLS, ids=lambda place: place[1])
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_an_exception_beside_a_call_loses_no_window_and_steps_none_twice(
    kind: str, place: tuple[Any, str], after: bool, tmp_path: Path
) -> None:
    """Each call of a step in turn."""
    reference = _trained(tmp_path, kind)
    for due in itertools.count(1):
        calls = [0]
        found = _trained(tmp_path, kind, partial(_raised_beside, place, due, after, calls))
        assert_bitwise(found, reference, f"call {due}")
        if calls[0] < due:  # there are no more
            break
    assert due > 1
