"""Ranks as threads of this process, over torch's in-process "threaded" process group."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import HashStore
from torch.testing._internal.distributed import multi_threaded_pg

from .failures import PATIENCE_S, Failure, RanksHang

# Private parts of torch, which carry no types.
_threaded: Any = multi_threaded_pg
_c10d: Any = _distributed_c10d

_GRACE_SECONDS = 2.0
_POLL_SECONDS = 0.05


def run_threads(world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = PATIENCE_S) -> list[Any]:
    """Run `fn(rank, world_size, *args)` on `world_size` threads and return the results in rank order.

    The first exception that a rank raises itself is raised here with its rank in a note; the others are woken
    from the collectives that they wait in. Ranks still running after `timeout` seconds are a `RanksHang`.
    """
    outcomes: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
    with _threaded_world() as world:
        store = HashStore()
        store.set_timeout(timedelta(seconds=timeout + _GRACE_SECONDS))

        def rank_main(rank: int) -> None:
            call = partial(fn, rank, world_size, *args)
            outcomes.put((rank, _run_rank(rank, world_size, world, store, call)))

        # Daemons, so that a rank which never ends cannot keep the interpreter from ending.
        threads = [
            threading.Thread(target=rank_main, args=(rank,), name=f"rank {rank}", daemon=True)
            for rank in range(world_size)
        ]
        for thread in threads:
            thread.start()
        results, failure = _collect(threads, outcomes, time.monotonic() + timeout)
        stacks = "" if len(results) == world_size else _stacks(threads)
        _let_go(threads, wake=len(results) < world_size)
    if failure is not None:
        exc = failure.as_exception()
        if stacks:
            exc.add_note("ranks still running:\n" + stacks)
        raise exc
    if len(results) < world_size:
        hung = sorted(set(range(world_size)) - results.keys())
        raise RanksHang(f"ranks {hung} of {world_size} still running after {timeout:g} s\n{stacks}")
    return [results[rank] for rank in range(world_size)]


@contextlib.contextmanager
def _threaded_world() -> Iterator[object]:
    """Give every thread a torch.distributed world of its own, and take it away again whatever happens."""
    _threaded.ProcessLocalGroup.reset()
    _c10d._set_thread_isolation_mode(True)
    world = _threaded._install_threaded_pg()
    if not hasattr(world, "comms"):  # which torch 2.11 looks for in it, and forgets to make
        world.comms = []
    try:
        yield world
    finally:
        _threaded._uninstall_threaded_pg()
        _c10d._set_thread_isolation_mode(False)
        _threaded.ProcessLocalGroup.reset()


def _run_rank(rank: int, world_size: int, world: object, store: HashStore, call: Callable[[], Any]) -> Any:
    """The result of `call` on this thread, a `Failure`, or None for a rank that another's failure ended."""
    torch.set_num_threads(1)
    try:
        dist.init_process_group(backend="threaded", rank=rank, world_size=world_size, store=store)
        try:
            return (call(),)
        finally:
            # After a hang the test's world is gone; a late rank must not take down a later test's.
            if dist.distributed_c10d._world is world and dist.is_initialized():
                dist.destroy_process_group()
    except BaseException as exc:
        if isinstance(exc, SystemExit) and _threaded.ProcessLocalGroup._terminate.is_set():
            return None
        _wake_ranks(exc)
        return Failure.of(rank, exc)


def _wake_ranks(reason: BaseException) -> None:
    """End every rank that waits in a collective of the threaded group."""
    # It walks a dict that running ranks change, and leaves the rest asleep if it meets that: try again.
    for _ in range(100):
        try:
            _threaded.ProcessLocalGroup.exception_handle(reason)
            return
        except RuntimeError:
            time.sleep(0.001)


def _collect(
    threads: list[threading.Thread], outcomes: queue.SimpleQueue[tuple[int, Any]], deadline: float
) -> tuple[dict[int, Any], Failure | None]:
    """Take what the ranks put down until all have, or the time is up (short, once one has failed)."""
    results: dict[int, Any] = {}
    failure: Failure | None = None
    for _ in threads:
        try:
            rank, outcome = outcomes.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            break
        if isinstance(outcome, Failure):
            failure = failure or outcome
            deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        elif outcome is not None:
            results[rank] = outcome[0]
    return results, failure


def _stacks(threads: list[threading.Thread]) -> str:
    """The Python stacks of the ranks that still run."""
    frames = sys._current_frames()
    texts = []
    for thread in threads:
        frame = frames.get(thread.ident or 0)
        if thread.is_alive() and frame is not None:
            texts.append(f"--- {thread.name} ---\n" + "".join(traceback.format_stack(frame)))
    return "\n".join(texts)


def _let_go(threads: list[threading.Thread], wake: bool) -> None:
    """Wait briefly for the ranks to end, waking them if need be: a failed test should leave little behind."""
    deadline = time.monotonic() + _GRACE_SECONDS
    for thread in threads:
        while thread.is_alive() and time.monotonic() < deadline:
            if wake:
                _wake_ranks(RuntimeError("the test is over"))
            thread.join(_POLL_SECONDS)
