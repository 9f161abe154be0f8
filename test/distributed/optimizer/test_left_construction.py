"""Exceptions that leave ``ShardedOptimizer()`` on one rank alone, once its groups are connected: the others hear."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zero_opt
from test.support.failures import PATIENCE_S
from test.support.harness import run_processes
from zero_opt.comm.exchange import StagingPool
from zero_opt.optimizer import parts, planning
from zero_opt.optimizer.process_groups import OwnGroups
from zero_opt.optimizer.sharded_optimizer import ShardedOptimizer
from zero_opt.placement.in_process.placement import DevicePlacement
from zero_opt.sharding.partition import Partition
from zero_opt.state.visible_state import VisibleState

# Where each of these is called: before the first message, between messages, and after the last.
PLACES: dict[str, tuple[Any, str]] = {
    "check": (ShardedOptimizer, "_validate"),
    "reduction": (parts, "build_reduction"),
    "parts": (parts, "FullState"),
    "groups": (DevicePlacement, "add_group"),
    "partition": (Partition, "add"),
    "exchange": (planning, "build_exchange"),
    "placement": (DevicePlacement, "add"),
    "staging": (StagingPool, "reserve"),
    "view": (VisibleState, "add"),
    "service": (OwnGroups, "serve"),
}
HEARD = "rank 1 has left training before its first step, because an exception there"


def _leaves(rank: int, world_size: int, place: str, error: type[BaseException]) -> str:
    def strike(*_: Any, **__: Any) -> Any:
        raise error("no room")

    params = [nn.Parameter(torch.ones(500))]
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(*PLACES[place], strike, raising=False)
        with pytest.raises(BaseException) as caught:  # noqa: PT011  (whichever it is)
            zero_opt.ShardedOptimizer(params, torch.optim.AdamW, lr=1e-3)
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, zero_opt.OutOfMemory])
@pytest.mark.parametrize("place", PLACES)
def test_the_other_ranks_hear_which_rank_has_left(place: str, error: type[BaseException], world_size: int) -> None:
    found = run_processes(world_size, _leaves, place, error, group_timeout=PATIENCE_S)
    told = ": rank 1: no room"  # where all ranks tell each other of errors, before they go on
    for rank, said in enumerate(found):
        if rank == 1:
            assert said == f"{error.__name__}: no room"
        else:
            assert said.startswith(f"PeerLost: {HEARD}") or (told in said and issubclass(error, Exception)), said
