"""``doctor --ranks`` on ranks that agree, differ, do not come, or do not reach each other."""

from __future__ import annotations

import contextlib
import io
import os
import socket
from collections.abc import Mapping

import torch.distributed as dist

from test.support.rank_processes import run_processes
from zero_opt.tools.compare_ranks import print_comparison

# Said of a rank, for it alone.
Variables = Mapping[int, Mapping[str, str]]


def _free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def _compared(
    rank: int, world_size: int, port: int, launched: int, variables: Variables, patience_s: float
) -> tuple[int, str, str]:
    """Return the exit status, and what was printed to both streams."""
    del world_size
    launch = {"RANK": str(rank), "WORLD_SIZE": str(launched), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.pop("GLOO_SOCKET_IFNAME")  # of which the table says what each rank has
    os.environ.update({"LOCAL_WORLD_SIZE": str(launched), **launch, **variables.get(rank, {})})
    told, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(told), contextlib.redirect_stderr(errors):
        status = print_comparison("0.1.0", patience_s=patience_s)
    return status, told.getvalue(), errors.getvalue()


def _run(
    started: int, launched: int, variables: Variables | None = None, patience_s: float = 30.0
) -> list[tuple[int, str, str]]:
    return run_processes(started, _compared, _free_port(), launched, variables or {}, patience_s, backend=None)


def _without_rank_0(rank: int, world_size: int, port: int) -> tuple[int, str, str] | None:
    if rank == 0:
        return None
    return _compared(rank, world_size, port, world_size, {1: {"TORCHELASTIC_USE_AGENT_STORE": "True"}}, 0.5)


def test_ranks_of_a_host_agree() -> None:
    (status, told, _), *others = _run(3, 3)
    assert status == 0, told
    assert "ok   ranks          3 of 3 have come" in told and "ok   messages" in told
    assert others == [(0, "", "")] * 2


def test_all_ranks_end_alike_where_they_differ() -> None:
    runs = _run(2, 2, {1: {"NCCL_ALGO": "Ring"}})
    assert [run[0] for run in runs] == [1, 1]
    assert "BAD  NCCL_ALGO      rank 0: unset; rank 1: Ring" in runs[0][1]
    assert "ok   messages" in runs[0][1]
    assert not runs[1][1]


def test_ranks_that_do_not_come_are_named() -> None:
    runs = _run(2, 4, patience_s=10.0)
    assert [run[0] for run in runs] == [1, 1]
    assert "BAD  ranks          2 of 4 have come, ranks 2-3 not" in runs[0][1] and "messages" not in runs[0][1]


def test_rank_0_that_does_not_come_is_named() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    (failed, (status, told, error)) = run_processes(2, _without_rank_0, store.port, backend=None)
    assert failed is None and status == 1 and not told
    assert error == "error: rank 1 has had no answer from rank 0; its log may say more\n"


def test_ranks_that_reach_the_store_but_not_each_other() -> None:
    runs = _run(2, 2, {1: {"GLOO_SOCKET_IFNAME": "nowhere"}}, patience_s=10.0)
    assert [run[0] for run in runs] == [1, 1]
    assert "BAD  messages" in runs[0][1] and "see GLOO_SOCKET_IFNAME" in runs[0][1]
    assert "ok   GLOO_SOCKET_IFNAME rank 0: unset; rank 1: nowhere" in runs[0][1]
