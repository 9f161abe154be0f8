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
    """Rank 0 calls alone, twice, and gives up; then all call."""
    store, model = dist.distributed_c10d._get_default_store(), torch.nn.Linear(3, 3)
    if rank == 0:
        for _ in range(2):
            with pytest.raises(zero_opt.PeerSilent, match="did not come to broadcast_params"):
                zero_opt.broadcast_params(model)
        store.set("told 0", "")
    store.wait(["told 0"], timedelta(seconds=PATIENCE_S))
    zero_opt.broadcast_params(model)
    return model.weight.detach()


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_of_which_one_has_called_alone_meet_where_all_call_again(world_size: int) -> None:
    first, *others = run_processes(world_size, _all_try_again, group_timeout=8)
    for other in others:
        assert_bitwise(other, first)
