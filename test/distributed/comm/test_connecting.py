"""Groups that all ranks make or none, and that give back what they took."""

from __future__ import annotations

import gc
import os
import re
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zero_opt
from test.support.failures import PATIENCE_S
from test.support.harness import run_processes
from zero_opt.comm import connecting, process_exit
from zero_opt.comm.connecting import made_by_all
from zero_opt.comm.groups import Group, connect
from zero_opt.system.background_thread import SerialThread
from zero_opt.system.waiting import until


def _made(**reduction: Any) -> zero_opt.ShardedOptimizer:
    param = torch.nn.Parameter(torch.ones(1000))
    policy = zero_opt.Overlapped(**reduction)
    optimizer = zero_opt.ShardedOptimizer([param], torch.optim.SGD, lr=0.5, reduction=policy)
    param.sum().backward()
    optimizer.step()
    return optimizer


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


# -- what a rank lacks ------------------------------------------------------------------------------------------------


def _few_descriptors() -> Callable[[], None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (_descriptors() + 10, limits[1]))
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def _few_threads(prefix: str = "zero_opt") -> Callable[[], None]:
    """Refuse to start threads whose names begin with ``prefix``, as a system at its limit does."""
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name.startswith(prefix):
            raise RuntimeError("can't start new thread")
        start(thread)

    threading.Thread.start = refused  # type: ignore[method-assign]
    return lambda: setattr(threading.Thread, "start", start)


def _lacks(rank: int, world_size: int, take: Callable[[], Callable[[], None]]) -> tuple[str, str]:
    """The last rank lacks something; then it has it again."""
    give_back = take() if rank == world_size - 1 else int
    with pytest.raises(zero_opt.OutOfResources) as found:
        _made()
    give_back()
    dist.barrier()
    _made().close()
    return str(found.value), type(found.value).__name__


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    ("take", "words"),
    [(_few_descriptors, "file descriptors, but this process has"), (_few_threads, "more threads and got 0")],
    ids=["descriptors", "threads"],
)
def test_what_one_rank_lacks_is_its_error_on_all_and_all_can_go_on(
    world_size: int, take: Callable[[], Callable[[], None]], words: str
) -> None:
    found = run_processes(world_size, _lacks, take)
    for rank, (message, _) in enumerate(found):
        assert words in message and "ulimit" in message
        assert message.startswith(f"rank {world_size - 1}: ") == (rank != world_size - 1)


def _lacks_with_the_store(rank: int, world_size: int, folder: Path) -> str:
    """Rank 0, whose end is that of the store, lacks descriptors before the other one has come."""
    port, failed = folder / "port", folder / "failed"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False)
        (folder / "made").write_text(str(store.port))
        (folder / "made").rename(port)
    else:
        assert until(port.exists, PATIENCE_S)
        store = dist.TCPStore("127.0.0.1", int(port.read_text()), world_size, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    if rank == 0:
        _few_descriptors()
        leave = connecting.Connecting.leave
        connecting.Connecting.leave = lambda *given: (leave(*given), failed.touch())  # type: ignore[method-assign]
    else:
        assert until(failed.exists, PATIENCE_S)
    with pytest.raises(zero_opt.ZeroOptError) as found:
        _made()
    if rank == 0:
        os._exit(1)
    return f"{type(found.value).__name__}: {found.value}"


def test_a_rank_that_serves_the_store_ends_once_all_have_heard_what_it_lacks(tmp_path: Path) -> None:
    _, said = run_processes(2, _lacks_with_the_store, tmp_path, backend=None, expect_errors=True)
    assert re.match("OutOfResources: rank 0: .* file descriptors, but this process has", said), said


def test_descriptors_are_counted_by_the_limit_where_there_is_none_to_count_them() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        assert connecting._open_descriptors() == 3
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert connecting._open_descriptors() > 3


# -- what fails in the middle -----------------------------------------------------------------------------------------


class _Group:
    """Notes when it is closed, and when the other ranks hear of an error."""

    def __init__(self) -> None:
        self.noted: list[str] = []

    def close(self) -> None:
        self.noted.append("closed")


def _make(rank: int, error: Exception, count: int, other: _Group) -> None:
    """Make two groups, with the other ranks; rank 1 fails after so many."""
    assert dist.group.WORLD is not None
    begun = connect(dist.group.WORLD, groups=2)
    assert begun is not None
    leave = begun.leave
    begun.leave = lambda found: (other.noted.append("told"), leave(found))[1]  # type: ignore[method-assign]
    with made_by_all(begun) as made:
        made.append(other)
        for index in range(3):
            if rank == 1 and index == count:
                raise error
            if index < 2:
                made.append(Group(dist.group.WORLD, None, f"group {index}", begun))


def _fails_after(rank: int, world_size: int, error: Exception, count: int) -> tuple[str, list[str]]:
    """The other ranks wait for rank 1's address, or until all have made their groups."""
    other = _Group()
    with pytest.raises(zero_opt.ZeroOptError) as found:
        _make(rank, error, count, other)
    dist.barrier()
    return f"{type(found.value).__name__}: {found.value}", other.noted


@pytest.mark.parametrize("count", [0, 1, 2])
@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(24, "Too many open files"), "OutOfResources: "),
        (RuntimeError("can't start new thread"), "OutOfResources: "),
        (MemoryError("no memory"), "ProcessGroupError: "),
        (RuntimeError("gloo: connectFullMesh failed: Connection refused"), "ProcessGroupError: "),
        (zero_opt.OutOfMemory("no room"), "OutOfMemory: "),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_failure_in_the_middle_ends_the_waits_of_all(error: Exception, expected: str, count: int) -> None:
    found = run_processes(3, _fails_after, error, count)
    text = "torchrun" if "refused" in str(error) else str(error)
    for rank, (message, noted) in enumerate(found):
        assert message.startswith(expected if rank == 1 else f"{expected}rank 1: ")
        assert text in message
        assert noted[:2] == ["told", "closed"]  # in the other order, ranks that still connect report a lost connection


def _is_missing(rank: int, world_size: int, place: str, folder: Path) -> str:
    """The last rank says and hears nothing, as one that is killed: the others wait for its address, or for the end."""

    def nothing(*_: Any) -> None:
        assert until(lambda: len(os.listdir(folder)) == world_size - 1, PATIENCE_S)
        raise zero_opt.ProcessGroupError("the others' waits have ended")

    connecting._CONNECT_S, connecting._FOUND_S = 2.0, 0.0
    if rank == world_size - 1:
        setattr(connecting.Connecting, place, nothing)
        connecting.Connecting.look = lambda _: None  # type: ignore[method-assign]
    with pytest.raises(zero_opt.ZeroOptError) as found:
        _made()
    (folder / str(rank)).touch()
    return f"{type(found.value).__name__}: {found.value}"


@pytest.mark.parametrize("place", ["addresses", "meet"])
def test_a_rank_that_is_killed_while_ranks_connect_ends_the_waits_of_the_others(place: str, tmp_path: Path) -> None:
    *others, last = run_processes(3, _is_missing, place, tmp_path)
    for message in others:
        assert message.startswith("ProcessGroupError: ") and "not all ranks have connected within 3 s" in message
    assert last == "ProcessGroupError: the others' waits have ended"


# Forks three ranks, of which rank 1 leaves as the others wait for its address, and prints their exit statuses. Ranks
# end as programs do.
LEFT_ALONE = """
import os, signal, sys
import torch, torch.distributed as dist, zero_opt
from zero_opt.comm.connecting import Connecting

def interrupt(*_): raise KeyboardInterrupt
def kill(*_): os.kill(os.getpid(), signal.SIGKILL)

def make():
    return zero_opt.ShardedOptimizer([torch.nn.Parameter(torch.ones(3))], torch.optim.SGD, lr=0.5)

folder, how = sys.argv[1:]
pids = {}
for rank in range(3):
    pid = os.fork()
    if pid == 0:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", store=dist.FileStore(folder + "/store", 3), rank=rank, world_size=3)
        first = make()
        if rank == 1:
            Connecting.connected = globals()[how]
        try:
            make()
        except (zero_opt.PeerLost, KeyboardInterrupt):
            sys.exit()
        sys.exit("no error")
    pids[pid] = rank
found = {}
for _ in range(3):
    pid, status = os.wait()
    found[pids[pid]] = os.waitstatus_to_exitcode(status)
print(*(found[rank] for rank in range(3)))
"""


@pytest.mark.parametrize(("how", "statuses"), [("interrupt", "0 0 0"), ("kill", "0 -9 0")])
def test_ranks_that_have_given_up_connecting_end_as_any_program(how: str, statuses: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", LEFT_ALONE, str(tmp_path), how]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert ended.stdout.split() == statuses.split(), ended.stderr


def _cannot_start(rank: int, world_size: int) -> str:
    optimizer = _made(exchange="backend")
    give_back = _few_threads()
    thread = SerialThread("zero_opt test")
    with pytest.raises(zero_opt.OutOfResources) as found:
        thread.submit(int)
    give_back()
    optimizer.close()
    return str(found.value)


def test_a_thread_that_cannot_be_started_under_way() -> None:
    for message in run_processes(2, _cannot_start):
        assert "can't start new thread" in message and "ulimit -u" in message


def _lacks_the_rings_thread(rank: int, world_size: int) -> str:
    give_back = _few_threads("zero_opt ring")
    with pytest.raises(zero_opt.OutOfResources) as found:
        _made()
    give_back()
    process_exit.serve_to_the_end()  # as the process ends
    return str(found.value)


def test_a_process_ends_as_any_where_the_rings_thread_could_not_be_started() -> None:
    for message in run_processes(2, _lacks_the_rings_thread):
        assert "can't start new thread" in message


# -- what close() gives back ------------------------------------------------------------------------------------------


def _closes_many(rank: int, world_size: int, exchange: str) -> list[tuple[int, int]]:
    """Return descriptors and threads before, and after one and ten optimizers that are made and closed."""
    gc.collect()  # what earlier tests have left in the process that this one is forked from
    found: list[tuple[int, int]] = []
    for count in (0, 1, 9):
        kept = [_made(exchange=exchange) for _ in range(count)]  # what a user still refers to
        for optimizer in kept:
            optimizer.close()
        _until_served()
        dist.barrier()
        end = time.monotonic() + PATIENCE_S / 4
        while found and _threads() > found[0][1] and time.monotonic() < end:
            time.sleep(0.01)  # the kernel takes a moment to forget a thread that has been joined
        found.append((_descriptors(), _threads()))
    return found


def _until_served() -> None:
    """Wait for the threads that serve state until all ranks have closed."""
    for thread in threading.enumerate():
        if thread.name.startswith("zero_opt"):
            thread.join(PATIENCE_S)


@pytest.mark.parametrize("exchange", ["auto", "backend"])
def test_close_gives_back_descriptors_and_threads(exchange: str) -> None:
    for before, one, ten in run_processes(2, _closes_many, exchange):
        assert one == before
        assert ten == before


@pytest.mark.parametrize(
    ("needed", "most", "way"),
    [
        (50, 1 << 20, "with 'ulimit -n 4096' or"),
        (9000, 1 << 20, "with 'ulimit -n 9000' or"),
        (50, 1000, "with 'ulimit -n 1000' or"),
        (9000, resource.RLIM_INFINITY, "with 'ulimit -n 9000' or"),
        (1001, 1000, "which only root can: the hard limit is 1,000 "),
    ],
)
def test_nobody_is_told_to_go_beyond_the_hard_limit(needed: int, most: int, way: str) -> None:
    assert connecting._how_to_raise(needed, most).startswith(way)


def _late(rank: int, world_size: int) -> list[float]:
    """Rank 1 is later than ranks may be that connect: with gradients, with parameters, and with state."""
    connecting._CONNECT_S = 1.0
    connecting._CONNECT_RANK_S = 0.0
    params = [torch.nn.Parameter(torch.ones(500)) for _ in range(3)]
    reduction = zero_opt.Overlapped(bucket_mb=0.001, exchange="backend")
    optimizer = zero_opt.ShardedOptimizer(params, torch.optim.SGD, lr=0.5, momentum=0.9, reduction=reduction)
    for late in (1, 2, 0):
        if rank == late % world_size:
            time.sleep(1.5)
        torch.stack([param.sum() for param in params]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if rank == 1:
        time.sleep(1.5)
    optimizer.consolidate_state_dict(to=0)
    if rank == 1:
        time.sleep(1.5)
    dist.barrier()
    found = [float(param.detach()[0]) for param in params]
    optimizer.close()
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_wait_for_each_other_longer_than_they_may_take_to_connect(world_size: int) -> None:
    found = run_processes(world_size, _late, group_timeout=PATIENCE_S)
    assert found == [found[0]] * world_size and len(set(found[0])) == 1
