"""NVMeOffload where an exception is raised at any line of a step: flush() completes the step, to the bit."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import FrameType
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
from zero_opt.placement.nvme.placement import NVMePlacement

_STEP = 2
_CODES = (NVMePlacement.step.__code__, NVMePlacement._keeping.__wrapped__.__code__)

KINDS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "float32": (torch.float32, {}),
    "bfloat16": (torch.bfloat16, {}),
    "block8, split": (FORMS["block8, split"].dtype, {"cls": zero_opt.CPUAdamW, "state": FORMS["block8, split"].state}),
    "SGD": (torch.float32, {"cls": torch.optim.SGD, "lr": 0.1, "momentum": 0.9}),
}


def _in_pass(frame: FrameType) -> bool:
    return frame.f_code in _CODES


def _trained(path: Path, kind: str, due: tuple[Place, int] | None, places: dict[Place, int]) -> Any:
    """Train; in one step an exception is raised where it is due, and flush() goes on once the gradients are gone."""
    dtype, options = KINDS[kind]
    params = make_params(dtype)
    optimizer = make(params, path, **options)
    placement = placement_of(optimizer)
    tracer = Tracer(_in_pass, lambda: placement.pending)
    tracer.due = due
    for step in range(_STEP + 2):
        torch.autograd.backward(params, [values(step, 1, 0, i, s).to(dtype) for i, s in enumerate(SHAPES)])
        if step != _STEP:
            optimizer.step()
        elif due is None:
            with tracer.tracing():
                optimizer.step()
            places |= tracer.places
        else:
            with pytest.raises(Raised), tracer.tracing():
                optimizer.step()
            optimizer.zero_grad()
            torch.autograd.backward(params, [torch.full_like(param, 7.0) for param in params])
            optimizer.zero_grad()
            optimizer.flush()
        optimizer.zero_grad()
    found = [param.detach().clone() for param in params], optimizer.state_dict()["state"]
    optimizer.close()
    return found


def _slow(monkeypatch: pytest.MonkeyPatch, name: str, seconds: float) -> None:
    """Let transfers take so long that none ends before it is waited for."""
    call = getattr(os, name)

    def slow(*given: Any) -> int:
        time.sleep(seconds)
        return int(call(*given))

    monkeypatch.setattr(os, name, slow)


@pytest.mark.parametrize("slow", [None, "preadv", "pwritev"])
@pytest.mark.parametrize("apart", [False, True], ids=["", "apart"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_at_any_line_loses_no_window_and_steps_none_twice(
    kind: str, apart: bool, slow: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every line is come to for the first time, in the middle, and for the last time."""
    if apart:
        step_copies_of_params(monkeypatch)
    if slow is not None:
        _slow(monkeypatch, slow, 0.0005)
    places: dict[Place, int] = {}
    reference = _trained(tmp_path, kind, None, places)
    assert len({place.path for place in places}) >= 5
    for place, count in places.items():
        for time_ in sorted({1, (count + 1) // 2, count}):
            assert_bitwise(_trained(tmp_path, kind, (place, time_), {}), reference, f"{place}, time {time_}")
