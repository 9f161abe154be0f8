"""close(), or a load, while a step is pending."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import pytest
import torch

import zero_opt
from test.support.harness import assert_bitwise, run_processes
from test.support.late_params import as_they_are
from test.support.worker_training import LATER, backward, make, make_params


def _plain_step() -> Any:
    params = make_params()
    optimizer = zero_opt.CPUAdamW(params)
    backward(params, 1, 0)
    optimizer.step()
    return [param.detach() for param in params], optimizer.state_dict()["state"]


@as_they_are
def _close_pending(rank: int, world_size: int) -> Any:
    params = make_params()
    optimizer = make(params, offload=LATER)
    backward(params, 1, rank)
    optimizer.step()
    if rank == 0:  # nobody waits for the others
        optimizer.close()
    with contextlib.suppress(zero_opt.OptimizerClosed):
        return [param.detach() for param in params], optimizer.state_dict()["state"] if rank == 0 else None
    return None


def test_closing_with_a_step_pending(caplog: pytest.LogCaptureFixture) -> None:
    simulated = _plain_step()
    with caplog.at_level(logging.WARNING, "zero_opt"):
        found = _close_pending(0, 1)
    assert_bitwise(found, simulated)
    assert not caplog.records


def test_a_conflict_that_close_finds(caplog: pytest.LogCaptureFixture) -> None:
    params = make_params()
    optimizer = make(params, offload=LATER)
    backward(params, 1, 0)
    optimizer.step()
    with torch.no_grad():
        params[2].fill_(0.5)
    with caplog.at_level(logging.WARNING, "zero_opt"):
        optimizer.close()
    assert "lost the update of a pending step (parameter 2" in caplog.text
    assert (params[2] == 0.5).all()
    with pytest.raises(zero_opt.OptimizerClosed):
        optimizer.flush()


def test_closing_several_ranks_with_a_step_pending() -> None:
    assert run_processes(2, _close_pending)[0] is None


def test_a_load_says_that_it_drops_a_pending_step(caplog: pytest.LogCaptureFixture) -> None:
    params = make_params()
    optimizer = make(params, offload=LATER)
    backward(params, 1, 0)
    optimizer.step()
    optimizer.flush()
    saved, before = optimizer.state_dict(), [param.detach().clone() for param in params]
    optimizer.load_state_dict(saved)
    assert "pending step" not in caplog.text
    backward(params, 2, 0)
    optimizer.step()
    optimizer.load_state_dict(saved)
    assert "load_state_dict() has dropped a pending step; call opt.flush()" in caplog.text
    optimizer.flush()
    assert_bitwise([param.detach().clone() for param in params], before)
    optimizer.close()
