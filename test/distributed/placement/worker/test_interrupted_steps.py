"""A step that a signal handler's exception ends on one rank: flush() completes it once the rank's worker has it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zero_opt
from test.support.harness import assert_bitwise, run_processes
from test.support.stepped import make_stepped, take_step


class _Handlers(Exception):
    """Of a signal handler."""


def _interrupted(rank: int, world_size: int, begun: bool) -> tuple[str, list[torch.Tensor], list[torch.Tensor]]:
    params, optimizer = make_stepped(2, offload=zero_opt.WorkerOffload())
    placement: Any = optimizer._engine.placement  # type: ignore[union-attr]

    def raises(*_: object) -> None:
        if not begun or placement._pending is not None:
            raise _Handlers

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(placement, "wait" if begun else "_submit", raises)
        with pytest.raises(_Handlers if rank == 1 else zero_opt.StepFailed):
            take_step(params, optimizer)
    try:
        optimizer.flush()
        said = "complete"
    except zero_opt.StepFailed as error:
        said = str(error)
    whole, other = make_stepped(3, offload=zero_opt.WorkerOffload())
    other.close()
    optimizer.close()
    return said, [param.detach() for param in params], [param.detach() for param in whole]


def test_a_step_that_the_worker_has_is_completed() -> None:
    for said, params, whole in run_processes(2, _interrupted, True):
        assert said == "complete"
        for param, other in zip(params, whole, strict=True):
            assert_bitwise(param, other)


def test_a_step_that_was_not_begun_fails_again_on_every_rank() -> None:
    found = run_processes(2, _interrupted, False)
    for (said, params, whole), (_, others, _) in zip(found, found[::-1], strict=True):
        assert "step 2 failed with _Handlers" in said
        assert said.endswith("load a checkpoint, or go on")
        for param, other in zip(params, others, strict=True):
            assert_bitwise(param, other)
        assert any(not torch.equal(param, other) for param, other in zip(params, whole, strict=True))
