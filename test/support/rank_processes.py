"""Ranks as forked processes, joined by gloo."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

# Optimizers import it when first used: once here, not seconds in every rank.
import torch._dynamo
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from .failures import PATIENCE_S, Failure, RankFailed, RanksHang

_GRACE_SECONDS = 3.0
# Longer than a busy machine takes to write the stacks.
_STACK_SECONDS = 10.0
# The longest that a death goes unnoticed.
_LOOK_SECONDS = 1.0


@dataclass(frozen=True)
class _Options:
    """What a rank needs to know to start."""

    world_size: int
    backend: str | None
    timeout: float
    group_timeout: float
    folder: Path


@dataclass
class _Rank:
    """One rank as the test sees it: its process, the pipe it answers on, and what it answered."""

    rank: int
    process: BaseProcess
    pipe: Connection
    stack_file: Path
    outcome: Failure | tuple[Any] | None = field(default=None)


def run_processes(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = PATIENCE_S,
    expect_errors: bool = False,
    may_hang: Collection[int] = (),
    backend: str | None = "gloo",
    group_timeout: float | None = None,
) -> list[Any]:
    """Run `fn(rank, world_size, *args)` in `world_size` forked processes; the results in rank order.

    The first exception on a rank is raised here, with its rank and traceback in a note. `expect_errors` puts
    a `Failure` in the place of each such rank's result instead (a killed rank's has the type_name "Died").
    Ranks in `may_hang` are not waited for once the others are done; theirs has the type_name "Hang".
    `backend=None` leaves the process group to `fn`; `group_timeout` is the group's own bound in seconds.
    """
    folder = Path(tempfile.mkdtemp(prefix="zero_opt_ranks_"))
    # Longer than the harness waits by default, so that a hang is reported here, where the stacks are.
    options = _Options(world_size, backend, timeout, group_timeout or 2 * timeout, folder)
    ranks: list[_Rank] = []
    try:
        for rank in range(world_size):
            ranks.append(_fork_rank(rank, options, lambda r: fn(r, world_size, *args)))
        _collect(ranks, time.monotonic() + timeout, expect_errors, may_hang)
        return _answers(ranks, timeout, expect_errors, may_hang)
    finally:
        _end(ranks)
        shutil.rmtree(folder, ignore_errors=True)


def _fork_rank(rank: int, options: _Options, call: Callable[[int], Any]) -> _Rank:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_child_main, args=(rank, options, call, ours, theirs), name=f"rank {rank}")
    with warnings.catch_warnings():
        # Python 3.12 warns of any fork beside threads. The child runs with one torch thread, and torch's
        # pool is not entered before that is set.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    theirs.close()
    return _Rank(rank, process, ours, options.folder / f"stack_{rank}")


def _child_main(rank: int, options: _Options, call: Callable[[int], Any], ours: Connection, theirs: Connection) -> None:
    """The life of a forked rank. It leaves by os._exit: pytest's teardown belongs to the parent alone."""
    code = 1
    gc.freeze()  # a store that a failed test's traceback keeps would wait for a thread of the parent's
    try:
        ours.close()
        with open(options.folder / f"stack_{rank}", "w") as stack_file:
            faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)
            # Should the parent be killed, this ends the rank, even from inside a C++ wait.
            faulthandler.dump_traceback_later(options.timeout + 30, exit=True, file=stack_file)
            answer, code = _run_rank(rank, options, call)
            theirs.send_bytes(answer)
            sys.stdout.flush()
            sys.stderr.flush()
            if code == 0:
                # To exit with a peer's bytes unread resets the connection, and loses what is still on its
                # way to the peer.
                with contextlib.suppress(EOFError):
                    theirs.recv_bytes()
    finally:
        os._exit(code)


def _run_rank(rank: int, options: _Options, call: Callable[[int], Any]) -> tuple[bytes, int]:
    """The pickled answer of `call`, and the process's exit code."""
    try:
        _init_rank(rank, options)
        return pickle.dumps(("result", call(rank))), 0
    except BaseException as exc:
        return Failure.of(rank, exc).dumps(), 1


def _init_rank(rank: int, options: _Options) -> None:
    torch.set_num_threads(1)
    if options.backend is None:
        return
    store = FileStore(str(options.folder / "store"), options.world_size)
    dist.init_process_group(
        options.backend,
        store=store,
        rank=rank,
        world_size=options.world_size,
        timeout=timedelta(seconds=options.group_timeout),
    )
    # A rank that fails at once must not meet peers that are still connecting. Through the store, which no rank's
    # death takes away.
    store.set(f"harness/{rank}", "connected")
    store.wait([f"harness/{peer}" for peer in range(options.world_size)])


def _collect(ranks: list[_Rank], deadline: float, expect_errors: bool, may_hang: Collection[int]) -> None:
    """Read the ranks' answers and deaths until all are known or the time is up."""
    failed = False
    while any(r.outcome is None and r.rank not in may_hang for r in ranks):
        left = [r for r in ranks if r.outcome is None]
        ready = wait([r.pipe for r in left], timeout=max(0.0, min(_LOOK_SECONDS, deadline - time.monotonic())))
        # The pipe of a dead rank stays open as long as a process that the rank has forked.
        answered = [r for r in left if r.pipe in ready or not r.process.is_alive()]
        if not answered and time.monotonic() >= deadline:
            return
        for r in answered:
            r.outcome = _read_answer(r)
            if isinstance(r.outcome, Failure) and not failed:
                failed = True
                if not expect_errors:
                    _raise_after(ranks, r.outcome, deadline)


def _read_answer(r: _Rank) -> Failure | tuple[Any]:
    try:
        if not r.pipe.poll():
            raise EOFError
        kind, answer = pickle.loads(r.pipe.recv_bytes())
    except (EOFError, OSError):
        r.process.join(_GRACE_SECONDS)
        code = r.process.exitcode
        how = f"killed by signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        return Failure(r.rank, "Died", f"{how} before it answered")
    if kind == "result":
        return (answer,)
    assert isinstance(answer, Failure)
    return answer


def _raise_after(ranks: list[_Rank], failure: Failure, deadline: float) -> None:
    """Raise `failure` after giving the other ranks a moment to fail by themselves, and say how they stand."""
    exc = failure.as_exception()
    if failure.exception is not None:
        exc.add_note(failure.traceback)
    others = [r for r in ranks if r.outcome is None]
    end = min(deadline, time.monotonic() + _GRACE_SECONDS)
    for r in others:
        if r.pipe.poll(max(0.0, end - time.monotonic())):
            r.outcome = _read_answer(r)
        if isinstance(r.outcome, Failure):
            exc.add_note(f"rank {r.rank} then failed too: {r.outcome.type_name}: {r.outcome.message}")
    running = [r for r in others if r.outcome is None]
    if running:
        exc.add_note("ranks still running:\n" + _stacks(running))
    raise exc


def _answers(ranks: list[_Rank], timeout: float, expect_errors: bool, may_hang: Collection[int]) -> list[Any]:
    hung = [r for r in ranks if r.outcome is None]
    unexpected = [r for r in hung if r.rank not in may_hang]
    if unexpected:
        names = [r.rank for r in unexpected]
        raise RanksHang(f"ranks {names} of {len(ranks)} still running after {timeout:g} s\n{_stacks(hung)}")
    answers: list[Any] = []
    for r in ranks:
        if r.outcome is None:
            r.outcome = Failure(r.rank, "Hang", "was still running when the others were done")
        if isinstance(r.outcome, tuple):
            answers.append(r.outcome[0])
        elif expect_errors or r.rank in may_hang:
            answers.append(r.outcome)
        else:
            raise RankFailed(f"rank {r.rank}: {r.outcome.type_name}: {r.outcome.message}")
    return answers


def _stacks(ranks: list[_Rank]) -> str:
    """What `ranks` are doing, from their own fault handlers; a stopped process cannot tell."""
    for r in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(_pid(r), signal.SIGUSR1)
    return "\n".join(f"--- rank {r.rank} (pid {_pid(r)}) ---\n{text}" for r, text in zip(ranks, _dumps(ranks)))


def _dumps(ranks: list[_Rank]) -> list[str]:
    """What the fault handlers write, once all that can have written it, and it has stopped growing."""
    deadline = time.monotonic() + _STACK_SECONDS
    before, texts = [""], [""]
    while time.monotonic() < deadline and (texts != before or not all(texts)):
        time.sleep(0.05)
        before, texts = texts, [_dump(r) for r in ranks]
    return texts


def _dump(r: _Rank) -> str:
    """A rank's stack as far as it is written; why there is none to wait for, or "" if it is still to come."""
    written = r.stack_file.read_text() if r.stack_file.exists() else ""
    state = Path(f"/proc/{_pid(r)}/stat").read_text().rpartition(")")[2].split()[0]
    return written or ("no stack: the process is stopped or gone\n" if state in "TZ" else "")


def _end(ranks: list[_Rank]) -> None:
    """Release the ranks that wait for it, and kill, by pid, those that do not go."""
    deadline = time.monotonic() + _GRACE_SECONDS
    for r in ranks:
        if isinstance(r.outcome, tuple):
            # Said, not only hung up: ranks forked later hold this pipe's end too.
            with contextlib.suppress(OSError):
                r.pipe.send_bytes(b"go")
        r.pipe.close()
    for r in ranks:
        if isinstance(r.outcome, tuple):
            r.process.join(max(0.0, deadline - time.monotonic()))
        if r.process.is_alive():
            r.process.kill()
        r.process.join()
        r.process.close()


def _pid(r: _Rank) -> int:
    pid = r.process.pid
    assert pid is not None  # the process was started
    return pid
