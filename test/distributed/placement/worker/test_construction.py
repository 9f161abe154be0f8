"""WorkerOffload that one rank or all cannot construct: the reason is told everywhere, and nothing stays behind."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import zero_opt
from test.support.harness import run_processes
from test.support.worker_training import LATER, NOW, make, make_params
from zero_opt.system import shared_memory


def _construct_apart(rank: int, world_size: int, offloads: Any, error: Any) -> str:
    with pytest.raises(error) as caught:
        make(make_params(), offload=offloads[rank])
    return str(caught.value)


@pytest.mark.parametrize("offloads", [(None, NOW), (LATER, None), (NOW, LATER)])
def test_ranks_that_offload_differently(offloads: Any) -> None:
    for message in run_processes(2, _construct_apart, offloads, zero_opt.RankMismatch):
        assert message.startswith("offload: ")


def test_cores_that_one_rank_does_not_have() -> None:
    offloads = (NOW, zero_opt.WorkerOffload(cores=(4000,)))
    for message in run_processes(2, _construct_apart, offloads, zero_opt.ConfigError):
        assert "4000" in message


def test_cores_come_back_when_construction_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.sched_getaffinity(0), torch.get_num_threads()
    monkeypatch.setattr(shared_memory, "memory_left", lambda: 10)
    with pytest.raises(zero_opt.OutOfMemory) as caught:
        make(make_params(), offload=LATER)
    assert (os.sched_getaffinity(0), torch.get_num_threads()) == before
    assert caught.tb  # it keeps everything that was made
