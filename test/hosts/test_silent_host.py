"""A host that falls silent, as one that has lost power: who is named, how soon, and that no exit waits for it."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import zero_opt
from test.hosts.namespaces import fall_silent, join_host, require_namespaces
from test.support.harness import run_processes
from test.support.stepped import make_stepped, take_step
from zero_opt.comm import shared_memory_exchange
from zero_opt.comm.keepalive import ending_with_hosts
from zero_opt.optimizer import process_groups
from zero_opt.state import process_exit

SECONDS = 300  # nothing hangs
SILENT_S, PROBE_S = 3.0, 1.0
AT_MOST_S = 120


def _init(rank: int, world_size: int, folder: Path) -> int:
    """Join a host; its number. Rank 1 has one for itself."""
    host = int(rank == 1)
    join_host(rank, host, folder)
    shared_memory_exchange.host_id = lambda: f"host {host}"
    store = dist.FileStore(str(folder / "store"), world_size)
    timeout = timedelta(seconds=2 * SECONDS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    return host


def _one_falls_silent(rank: int, world_size: int, folder: Path, when: str, short: bool) -> Any:
    if short:
        process_groups.ending_with_hosts = partial(ending_with_hosts, SILENT_S, PROBE_S)  # type: ignore[attr-defined]
    process_exit._QUIET_S = 10.0 * SECONDS
    host = _init(rank, world_size, folder)
    params, optimizer = make_stepped(2)
    if rank == 1:
        if when == "while waited for":
            time.sleep(1)
        fall_silent(host)
        (folder / "silent").touch()
        time.sleep(SECONDS)
        return None
    while when == "before" and not (folder / "silent").exists():
        time.sleep(0.01)
    begun = time.monotonic()
    with pytest.raises(zero_opt.PeerLost) as caught:
        take_step(params, optimizer)
    waited = time.monotonic() - begun
    process_exit.serve_to_the_end()
    return type(caught.value).__name__, str(caught.value), waited


@pytest.mark.parametrize("when", ["before", "while waited for"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_silent_host_is_a_lost_rank(world_size: int, when: str, tmp_path: Path) -> None:
    _require_named(world_size, when, tmp_path, short=True)


@pytest.mark.skipif(os.environ.get("ZERO_OPT_HOSTS") != "long", reason="takes minutes: ZERO_OPT_HOSTS=long")
@pytest.mark.parametrize("when", ["before", "while waited for"])
def test_a_silent_host_is_a_lost_rank_within_two_minutes_by_default(when: str, tmp_path: Path) -> None:
    assert _require_named(3, when, tmp_path, short=False) < AT_MOST_S


def _require_named(world_size: int, when: str, folder: Path, short: bool) -> float:
    """Fail unless all other ranks name it; the longest that one took."""
    require_namespaces()
    found = run_processes(
        world_size, _one_falls_silent, folder, when, short, timeout=SECONDS, backend=None, may_hang={1}
    )
    for name, text, _ in found[:1] + found[2:]:
        assert name == "PeerLost", text
        assert text.startswith("rank 1 has ended, or its host does not answer, while step 2 waits for it"), text
    return max(waited for _, _, waited in found[:1] + found[2:])
