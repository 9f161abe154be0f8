"""Ranks that call again what one of them has called alone."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zero_opt
from test.support.failures import PATIENCE_S
from test.support.harness import assert_bitwise, run_processes


def _all_try_again(rank: int, world_size: int) -> Tensor:
    """Rank 0 calls alone, twice, and gives up; then all call, and the others again as they hear of it."""
    store, model = dist.distributed_c10d._get_default_store(), torch.nn.Linear(3, 3)
    for _ in range(2 if rank == 0 else 0):
        with pytest.raises(zero_opt.PeerSilent, match="did not come to broadcast_params"):
            zero_opt.broadcast_params(model)
    store.set(f"told {rank}", "")
    store.wait(["told 0"], timedelta(seconds=PATIENCE_S))
    for _ in range(0 if rank == 0 else 2):
        with pytest.raises(zero_opt.PeerSilent, match=r"rank 0 has given up waiting .* call again here at once"):
            zero_opt.broadcast_params(model)
    zero_opt.broadcast_params(model)
    return model.weight.detach()


def test_every_call_that_a_rank_has_missed_is_an_error_there_and_then_all_meet() -> None:
    """Else its first call could meet the second one of another rank, about another model."""
    first, *others = run_processes(3, _all_try_again, group_timeout=15)
    for other in others:
        assert_bitwise(other, first)
