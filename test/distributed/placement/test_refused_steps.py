"""Steps that are called again while one rank cannot complete the step before: no rank takes them."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import zero_opt
from test.support.harness import assert_bitwise, run_processes
from test.support.nvme_training import in_file
from test.support.worker_training import end_workers, make, make_params, train, values_of

# What recovers, and the steps that follow.
LATER = {"flush()": (), "flush() and steps": (6, 7), "step()": (6, 7)}
_FAILURES = (zero_opt.WorkerDied, zero_opt.WorkerFailed, zero_opt.StorageFailed, zero_opt.StepFailed)


def _ended(optimizer: zero_opt.ShardedOptimizer, params: list[nn.Parameter]) -> Any:
    """Parameters, and their state."""
    optimizer.flush()
    state = optimizer.state_dict()["state"]
    optimizer.close()
    return values_of(params), state


def _without_refused(rank: int, world_size: int, offload: Any, then: str) -> Any:
    """Steps 0 to 3, and those that follow."""
    params = make_params()
    optimizer = make(params, offload=offload)
    for step in (0, 1, 2, 3, *LATER[then]):
        train(optimizer, params, range(step, step + 1), rank)
        if step < 6:
            optimizer.flush()
    return _ended(optimizer, params)


def _refused(rank: int, world_size: int, offload: Any, fault: Any, then: str) -> Any:
    """The same; a fault on rank 1 from step 3 to 5, of which step 3 alone is taken."""
    params = make_params()
    optimizer = make(params, offload=offload)
    for step in range(3):
        train(optimizer, params, range(step, step + 1), rank)
        optimizer.flush()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            fault(patch, optimizer)
        for step in (3, 4, 5):
            # A late step, and one whose last write fails, return where they were made.
            with suppress(*_FAILURES) if step == 3 else pytest.raises(_FAILURES):
                train(optimizer, params, range(step, step + 1), rank)
    if then != "step()":
        optimizer.flush()
    for step in LATER[then]:
        train(optimizer, params, range(step, step + 1), rank)
    return _ended(optimizer, params)


def _compare(offload: Any, fault: Any, then: str) -> None:
    found = run_processes(2, _refused, offload, fault, then)
    assert_bitwise(found[0], found[1])
    expected = run_processes(2, _without_refused, offload, then)
    if then == "step()":  # its gradients are of parameters that lack a part
        assert _counts(found[0]) == _counts(expected[0])
    else:
        assert_bitwise(found, expected)


def _counts(ended: Any) -> list[float]:
    """How many steps each parameter has had."""
    _, state = ended
    return [state[index]["step"].item() for index in sorted(state)]


class _BadDisk:
    """The disk fails in each read, or in each write."""

    def __init__(self, call: str) -> None:
        self._call = call

    def __call__(self, patch: pytest.MonkeyPatch, optimizer: zero_opt.ShardedOptimizer) -> None:
        patch.setattr(os, self._call, _broken)


def _broken(*_: object) -> int:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize("then", LATER)
@pytest.mark.parametrize("options", [{}, {"delay": 1}, {"speculate": True}], ids=str)
def test_without_a_worker(options: dict[str, Any], then: str) -> None:
    _compare(zero_opt.WorkerOffload(**options, max_deaths=1), end_workers, then)


@pytest.mark.parametrize("then", LATER)
@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_with_a_disk_that_fails(tmp_path: Path, call: str, then: str) -> None:
    _compare(in_file(tmp_path), _BadDisk(call), then)


def test_an_edit_is_told_of_after_a_flush_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params = make_params()
    optimizer = make(params, offload=in_file(tmp_path))
    train(optimizer, params, range(1), 0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", _broken)
        with pytest.raises(zero_opt.StorageFailed):
            train(optimizer, params, range(1, 2), 0)
        optimizer.state.pop(params[2])
        with pytest.raises(zero_opt.StorageFailed):
            optimizer.flush()
    with pytest.raises(zero_opt.StepPending, match="was changed while a step for it was pending"):
        optimizer.flush()
    optimizer.flush()
    optimizer.close()
