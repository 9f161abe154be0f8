"""Background threads: listed until they are dead, and none aborts a process that exits."""

from __future__ import annotations

import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from test.support.failures import PATIENCE_S
from zero_opt.system import threads
from zero_opt.system.threads import BackgroundThreads


def test_a_thread_is_a_daemon_and_is_listed_until_it_is_dead() -> None:
    background, gate = BackgroundThreads(), threading.Event()
    thread = threading.Thread(target=gate.wait, args=(PATIENCE_S,))
    background.start(thread)
    assert thread.daemon
    assert background.alive() == [thread]
    assert background.join(0.0) == [thread]
    gate.set()
    assert background.join(PATIENCE_S) == []
    assert not thread.is_alive()
    assert background._listed == {}


def test_threads_that_a_thread_starts_are_waited_for() -> None:
    background, seen = BackgroundThreads(), list[int]()

    def start(left: int) -> None:
        seen.append(left)
        if left:
            background.start(threading.Thread(target=start, args=(left - 1,)))

    background.start(threading.Thread(target=start, args=(5,)))
    assert background.join(PATIENCE_S) == []
    assert seen == [5, 4, 3, 2, 1, 0]


def test_all_threads_together_are_waited_for_no_longer_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, waited = [0.0], list[float]()

    class Stuck(threading.Thread):
        def join(self, timeout: float | None = None) -> None:
            assert timeout is not None
            waited.append(timeout)
            clock[0] += timeout

    background, gate = BackgroundThreads(), threading.Event()
    stuck = [Stuck(target=gate.wait, args=(PATIENCE_S,)) for _ in range(3)]
    for thread in stuck:
        background.start(thread)
    monkeypatch.setattr(threads, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    assert background.join(5.0) == stuck
    assert waited == [5.0, 0.0, 0.0]
    gate.set()


def test_what_starts_no_thread_lists_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    background = BackgroundThreads()
    with pytest.raises(RuntimeError, match="can't start"):
        background.start(threading.Thread())
    assert background._listed == {}


# Two ranks in one process. A thread waits for a message that is sent once the interpreter is being finalized,
# when it restores the builtins. So the thread comes back from native code to an interpreter that ends its threads.
_RETURNS_DURING_FINALIZATION = """
import builtins, os, threading, time, torch, torch.distributed as dist
from concurrent.futures import ThreadPoolExecutor
from torch._C._distributed_c10d import HashStore, ProcessGroupGloo
from zero_opt.system import background_thread
background_thread._PATIENCE_S = 0.01
store = HashStore()
with ThreadPoolExecutor(2) as pool:
    first, second = pool.map(lambda rank: ProcessGroupGloo(store, rank, 2), range(2))
waits, received = threading.Event(), torch.zeros(1)
def wait():
    work = first.recv([received], 1, 7)
    waits.set()
    work.wait()
thread = background_thread.SerialThread("waits for a message")
thread.submit(wait)
waits.wait()
class Sends:
    def __init__(self, *needed):
        self.needed = needed
    def __del__(self):
        second, tensor, sleep, write = self.needed
        write(1, b"sent\\n")
        second.send([tensor], 0, 7).wait()
        sleep(3)
builtins.sends = Sends(second, torch.ones(1), time.sleep, os.write)  # the thread keeps this module's globals
"""


def test_a_thread_that_returns_from_native_code_during_finalization_does_not_abort() -> None:
    pytest.importorskip("zero_opt._native")
    ended = subprocess.run(
        [sys.executable, "-c", _RETURNS_DURING_FINALIZATION], timeout=PATIENCE_S, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stdout) == (0, "sent\n"), ended.stderr


def test_other_threads_still_end_the_process_as_the_handler_before_does() -> None:
    pytest.importorskip("zero_opt._native")
    script = (
        "import ctypes, ctypes.util, threading; from zero_opt import _native\n"
        "_native.hold_threads([threading.get_ident() + 1])\n"
        "ctypes.CDLL('libstdc++.so.6')['_ZSt9terminatev']()"
    )
    ended = subprocess.run([sys.executable, "-c", script], timeout=PATIENCE_S, capture_output=True, text=True)
    assert ended.returncode == -6
    assert "terminate called without an active exception" in ended.stderr
