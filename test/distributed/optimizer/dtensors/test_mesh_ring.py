"""The ring over a mesh: who has left is known on every rank, also on one that comes late, and without the store."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

import zero_opt
from test.support.descriptors import open_files
from test.support.failures import PATIENCE_S
from test.support.fsdp_models import backward, mesh_of, sharded_net, sharded_optimizer
from test.support.harness import run_processes
from zero_opt.comm import process_exit, process_identity, ring, waits_beside
from zero_opt.errors import OptimizerClosed, PeerLost, ProcessGroupError
from zero_opt.optimizer.dtensors import mesh_params
from zero_opt.system.waiting import until

# The host of each rank.
LAYOUTS = {"one host": (0, 0, 0, 0), "two hosts": (0, 0, 1, 1), "apart": (0, 1, 2, 3)}
CALLS: dict[str, Callable[[zero_opt.ShardedOptimizer], object]] = {
    "clip_grad_norm_()": lambda optimizer: optimizer.clip_grad_norm_(1.0),
    "consolidate_state_dict()": lambda optimizer: optimizer.consolidate_state_dict(1),
}


def _made(rank: int, shape: tuple[int, ...], **options: Any) -> tuple[Any, zero_opt.ShardedOptimizer]:
    """A model and an optimizer that has taken two steps, with gradients of the next."""
    net = sharded_net(mesh_of(shape))
    optimizer = sharded_optimizer(net, **options)
    for step in range(3):
        backward(net, step, rank)
        if step < 2:
            optimizer.step()
            optimizer.zero_grad()
    return net, optimizer


def _lost(call: Callable[[], object]) -> str:
    with pytest.raises(PeerLost) as caught:
        call()
    return f"{type(caught.value).__name__}: {caught.value}"


def _watch_of(optimizer: Any) -> Any:
    (group,) = optimizer._engine._mesh._groups.values()
    return group.watch


def _store_of_rank_0(rank: int, world_size: int, folder: Path) -> None:
    """Make a process group whose store ends with rank 0."""
    port = folder / "port"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False)
        (folder / "new").write_text(str(store.port))
        (folder / "new").rename(port)
    else:
        assert until(port.exists, PATIENCE_S)
        store = dist.TCPStore("127.0.0.1", int(port.read_text()), world_size, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)


def _killed_with_the_store(
    rank: int, world_size: int, folder: Path, call: str, layout: str, shape: tuple[int, ...]
) -> str:
    """Rank 0 is killed; ranks 1 and 2 are told, and end; rank 3 comes to the call after that."""
    process_identity.host_if_known = lambda: f"host {LAYOUTS[layout][rank]}"  # type: ignore[attr-defined]
    _store_of_rank_0(rank, world_size, folder)
    _, optimizer = _made(rank, shape)
    dist.barrier()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 3:
        assert until(lambda: all((folder / f"ends {other}").exists() for other in (1, 2)), PATIENCE_S)
    said = _lost(lambda: CALLS[call](optimizer))
    process_exit.serve_to_the_end()
    (folder / f"ends {rank}").write_text(said)
    if rank != 3:
        os._exit(0)
    return said


@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("call", CALLS)
def test_a_rank_that_is_killed_with_the_store_is_named_by_all(
    call: str, layout: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    run_processes(4, _killed_with_the_store, tmp_path, call, layout, shape, backend=None, expect_errors=True)
    for rank in (1, 2, 3):
        said = (tmp_path / f"ends {rank}").read_text()
        near = LAYOUTS[layout][rank] == LAYOUTS[layout][0]
        ended = r"rank 0 \(pid \d+\) has ended" if near else "rank 0 has ended, or its host does not answer,"
        assert re.match(f"PeerLost: {ended} while {re.escape(call)} waits for it, ", said), said


def _ends(how: str, optimizer: zero_opt.ShardedOptimizer) -> None:
    """Close, or do what the exit of a program does that ends in order, or by an exception."""
    if how == "closes":
        optimizer.close()
    else:
        with mock.patch.object(process_exit, "failed", return_value=how == "fails"):
            process_exit.serve_to_the_end()


def _wait_for_all(rank: int, world_size: int) -> None:
    """Wait until all ranks are here, by the store alone: connections may have broken."""
    store: Any = dist.distributed_c10d._get_default_store()
    store.set(f"over {rank}", "")
    store.wait([f"over {other}" for other in range(world_size)])


def _one_ends(rank: int, world_size: int, how: str, call: str, options: Any) -> str:
    _, optimizer = _made(rank, (world_size,), **options)
    dist.barrier()
    said = ""
    if rank == 1:
        _ends(how, optimizer)
    else:
        said = _lost(lambda: CALLS[call](optimizer))
    _wait_for_all(rank, world_size)
    return said


WORDS = {
    "closes": "rank 1 has closed this optimizer after 2 steps; do all ranks have the same number of batches?",
    "ends": "rank 1 has ended its program after 2 steps; do all ranks have the same number of batches?",
    "fails": "rank 1 has ended its program with an exception after 2 steps; look at its log",
}


@pytest.mark.parametrize("options", [{}, {"offload": zero_opt.WorkerOffload()}], ids=["wrapped", "worker"])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("how", WORDS)
def test_a_rank_that_leaves_is_named_with_its_step_and_how_it_left(how: str, call: str, options: Any) -> None:
    found = run_processes(3, _one_ends, how, call, options)
    for said in found[:1] + found[2:]:
        assert said.startswith(f"PeerLost: {WORDS[how]}"), said


def _made_after_a_loss(rank: int, world_size: int) -> str:
    """Rank 1 fails. The others break their connections, so that no rank waits, and make an optimizer anew."""
    net, optimizer = _made(rank, (world_size,))
    dist.barrier()
    said = ""
    waits_beside._COURTESY_S = PATIENCE_S
    if rank == 1:
        _ends("fails", optimizer)
    else:
        _lost(lambda: optimizer.clip_grad_norm_(1.0))
        said = _lost(lambda: sharded_optimizer(net))
    _wait_for_all(rank, world_size)
    return said


def test_connections_that_broke_together_name_no_rank() -> None:
    for said in run_processes(3, _made_after_a_loss)[::2]:
        assert said.startswith("PeerLost: the mesh's connections have broken; restart from the last checkpoint"), said


def _leaves_as_state_travels(rank: int, world_size: int) -> str:
    """Rank 1 ends by an exception of its own before it sends its part; the others wait in FSDP's collective."""
    _, optimizer = _made(rank, (world_size,))
    if rank == 1:
        interrupted = mock.patch.object(mesh_params, "full_copy", side_effect=KeyboardInterrupt)
        with interrupted, pytest.raises(KeyboardInterrupt):
            optimizer.consolidate_state_dict(0)
        said = ""
    else:
        said = _lost(lambda: optimizer.consolidate_state_dict(0))
    _wait_for_all(rank, world_size)
    return said


def test_a_rank_that_leaves_ends_the_waits_for_its_state() -> None:
    found = run_processes(3, _leaves_as_state_travels)
    for said in found[:1] + found[2:]:
        assert said.startswith("PeerLost: rank 1 has left training after 2 steps, because an exception there"), said


def _killed_between_calls(rank: int, world_size: int) -> tuple[str, str]:
    """The rank that lives is in no call as it hears of the other; then in FSDP's forward, and in a call."""
    net, optimizer = _made(rank, (world_size,))
    watch = _watch_of(optimizer)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    assert until(lambda: watch.departures.has_lost(1), PATIENCE_S)
    with pytest.raises(RuntimeError) as forward:
        backward(net, 3, rank)
    return str(forward.value), _lost(lambda: optimizer.clip_grad_norm_(1.0))


def test_a_rank_that_is_killed_while_no_rank_waits_is_known_at_once() -> None:
    (forward, said), *_ = run_processes(2, _killed_between_calls, expect_errors=True)
    assert "closed" in forward or "closure" in forward, forward
    assert re.match(r"PeerLost: rank 1 \(pid \d+\) has ended while clip_grad_norm_\(\) waits for it", said), said


def _own_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("zero_opt")]


def _sockets() -> int:
    return sum(what.startswith("socket:") for _, what in open_files())


def _closed(rank: int, world_size: int, shape: tuple[int, ...]) -> tuple[bool, list[str], bool]:
    net = sharded_net(mesh_of(shape))
    backward(net, 0, rank)
    dist.barrier()
    sockets = _sockets()
    optimizer = sharded_optimizer(net)
    optimizer.clip_grad_norm_(1.0)
    assert _sockets() > sockets
    dist.barrier()
    optimizer.close()
    with pytest.raises(OptimizerClosed):
        optimizer.clip_grad_norm_(1.0)
    dist.barrier()
    freed = until(lambda: not _own_threads() and _sockets() <= sockets, PATIENCE_S)
    backward(net, 1, rank)  # the mesh's own connections hold
    return freed, _own_threads(), process_exit.running == set()


@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=str)
def test_closing_frees_threads_and_connections_and_leaves_the_mesh_alone(shape: tuple[int, ...]) -> None:
    ranks = 2 * len(shape)
    assert run_processes(ranks, _closed, shape) == [(True, [], True)] * ranks


def _forked(rank: int, world_size: int) -> float:
    """A child that closes, and exits, disturbs no rank."""
    net, optimizer = _made(rank, (world_size,))
    dist.barrier()
    child = os.fork()
    if child == 0:
        signal.alarm(int(PATIENCE_S))  # should it hang, nobody else would end it
        refused = 0
        try:
            optimizer.clip_grad_norm_(1.0)
        except ProcessGroupError:
            refused = 7
        optimizer.close()
        process_exit.serve_to_the_end()
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    dist.barrier()
    norm = optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    backward(net, 3, rank)
    return float(norm)


def test_a_forked_child_leaves_the_ring_alone() -> None:
    norms = run_processes(2, _forked)
    assert norms[0] == norms[1] > 0.0


def _constructed_again(rank: int, world_size: int) -> bool:
    """After a construction that all ranks have refused, nothing is left of its connections."""
    net = sharded_net(mesh_of((world_size,)))
    with pytest.raises(zero_opt.RankMismatch):
        sharded_optimizer(net, max_grad_norm=1.0 + rank)
    assert until(lambda: not _own_threads() and not process_exit.running, PATIENCE_S)
    optimizer = sharded_optimizer(net)
    backward(net, 0, rank)
    return bool(optimizer.clip_grad_norm_(1.0) > 0.0)


def test_a_construction_that_is_refused_leaves_no_ring() -> None:
    assert run_processes(2, _constructed_again) == [True, True]


def _dropped_in_turn(rank: int, world_size: int) -> None:
    """Both ranks leave at about the same time. One that waits for a limit outlasts the harness's, and so fails."""
    net = sharded_net(mesh_of((2,)))
    forever = 2 * PATIENCE_S
    limits = (ring, "FAREWELL_S"), (mesh_params, "_GROUPS_END_S"), (waits_beside, "_COURTESY_S")
    with contextlib.ExitStack() as patched:
        for where, name in limits:
            patched.enter_context(mock.patch.object(where, name, forever))
        for _ in range(12):
            optimizer = sharded_optimizer(net)
            dist.barrier()
            del optimizer
            gc.collect()


def test_two_ranks_that_leave_at_once_wait_for_no_limit() -> None:
    run_processes(2, _dropped_in_turn)
