"""A rank that is killed where no ring tells of it, as the connections of the user's process group show."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import zero_opt
from test.support.failures import PATIENCE_S
from test.support.harness import run_processes
from zero_opt.comm import process_identity
from zero_opt.comm.groups import Group
from zero_opt.system.waiting import until

# The host of each rank.
LAYOUTS = {"apart": (0, 1, 2), "beside another": (0, 0, 1)}
CALLS: dict[str, Callable[[], object]] = {
    "ShardedOptimizer()": lambda: zero_opt.ShardedOptimizer([torch.nn.Parameter(torch.ones(3))], torch.optim.Adam),
    "broadcast_params()": lambda: zero_opt.broadcast_params(torch.nn.Linear(2, 2)),
}


def _serve_the_store(rank: int, world_size: int, folder: Path) -> None:
    """Make a process group whose store rank 0 serves."""
    if rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        (folder / "new").write_text(str(port))
        (folder / "new").rename(folder / "port")
    assert until(lambda: (folder / "port").exists(), PATIENCE_S)
    store = dist.TCPStore("127.0.0.1", int((folder / "port").read_text()), world_size, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    dist.barrier()


def _store_is_killed(rank: int, world_size: int, folder: Path, call: str, layout: str) -> str:
    """Rank 0 is killed with the store once the ranks are connected; the others do not end before both are told."""
    process_identity.host_if_known = lambda: f"host {LAYOUTS[layout][rank]}"  # type: ignore[attr-defined]
    _serve_the_store(rank, world_size, folder)
    if rank == 0:
        Group.all_gather = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment,method-assign]
    with pytest.raises(zero_opt.PeerLost) as caught:
        CALLS[call]()
    (folder / f"told {rank}").touch()
    while not all((folder / f"told {other}").exists() for other in (1, 2)):
        time.sleep(0.01)
    return str(caught.value)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("call", CALLS)
def test_a_rank_that_is_killed_with_the_store_is_named(call: str, layout: str, tmp_path: Path) -> None:
    ranks = 3, _store_is_killed, tmp_path, call, layout
    for said in run_processes(*ranks, timeout=PATIENCE_S, backend=None, expect_errors=True)[1:]:
        assert isinstance(said, str), said
        assert said.startswith("rank 0 "), said
        assert " has ended" in said and call in said, said
