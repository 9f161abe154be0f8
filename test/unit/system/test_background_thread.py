"""One background thread: calls in order, results and exceptions in futures, nothing kept alive."""

from __future__ import annotations

import gc
import math
import signal
import subprocess
import sys
import threading
import weakref

import pytest

from zero_opt.system import background_thread
from zero_opt.system.background_thread import SerialThread

PATIENCE = 60  # seconds until a test that hangs fails


class Thing:
    """Something that can be weakly referenced."""


def test_calls_run_in_order_on_one_other_thread() -> None:
    thread = SerialThread("order")
    seen: list[int] = []
    gate = threading.Event()
    first = thread.submit(gate.wait, PATIENCE)
    futures = [thread.submit(seen.append, i) for i in range(100)]
    assert seen == []
    gate.set()
    assert first.result(PATIENCE) is True
    assert [f.result(PATIENCE) for f in futures] == [None] * 100
    assert seen == list(range(100))
    idents = {thread.submit(threading.get_ident).result(PATIENCE) for _ in range(3)}
    assert len(idents) == 1
    assert threading.get_ident() not in idents
    thread.close()


def test_the_thread_is_named_a_daemon_and_starts_when_first_needed() -> None:
    before = threading.active_count()
    thread = SerialThread("zero_opt test")
    assert threading.active_count() == before
    inside = thread.submit(threading.current_thread).result(PATIENCE)
    assert inside.name == "zero_opt test"
    assert inside.daemon
    thread.close()
    inside.join(PATIENCE)
    assert not inside.is_alive()


@pytest.mark.parametrize("error", [ValueError("bad"), KeyboardInterrupt(), SystemExit(3)])
def test_an_exception_goes_to_whoever_waits_and_later_calls_still_run(error: BaseException) -> None:
    thread = SerialThread("errors")

    def fail() -> None:
        raise error

    failed, after = thread.submit(fail), thread.submit(lambda: "done")
    with pytest.raises(type(error)) as caught:
        failed.result(PATIENCE)
    assert caught.value is error
    assert after.result(PATIENCE) == "done"
    thread.close()


def test_nothing_of_a_finished_call_is_kept() -> None:
    thread = SerialThread("references")
    thing, result = Thing(), Thing()
    argument_gone, result_gone = threading.Event(), threading.Event()
    weakref.finalize(thing, argument_gone.set)
    weakref.finalize(result, result_gone.set)
    produced = [result]
    future = thread.submit(lambda _: produced.pop(), thing)
    del thing, result
    future.result(PATIENCE)
    del future
    gc.collect()
    assert argument_gone.wait(PATIENCE)
    assert result_gone.wait(PATIENCE)
    thread.close()


def test_close_runs_what_is_queued_and_can_be_called_twice() -> None:
    thread = SerialThread("close")
    gate = threading.Event()
    worker = thread.submit(threading.current_thread)
    thread.submit(gate.wait, PATIENCE)
    last = thread.submit(lambda: "ran")
    thread.close()
    thread.close()
    gate.set()
    assert last.result(PATIENCE) == "ran"
    worker.result(PATIENCE).join(PATIENCE)


def test_the_thread_ends_when_its_owner_is_forgotten() -> None:
    thread = SerialThread("forgotten")
    worker = thread.submit(threading.current_thread).result(PATIENCE)
    del thread
    gc.collect()
    worker.join(PATIENCE)
    assert not worker.is_alive()


def _exit_with(job: str, *options: str) -> None:
    """A process ends of itself although a call is under way."""
    script = (
        "import threading, time; from zero_opt.system import background_thread; background_thread._PATIENCE_S = 0.01\n"
        "started, gate = threading.Event(), threading.Event()\n"
        f"t = background_thread.SerialThread('busy', {', '.join(options)})\n"
        f"t.submit(lambda: (started.set(), {job})); started.wait()"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=PATIENCE)


def test_a_call_that_never_returns_does_not_keep_the_interpreter() -> None:
    _exit_with("gate.wait()")


def test_a_call_in_native_code_is_interrupted_before_the_interpreter_is_taken_down() -> None:
    """Were it not, it would come back to an interpreter that is gone."""
    _exit_with("gate.wait(), print('came back')", "gate.set")


def test_calls_that_are_under_way_may_finish() -> None:
    script = (
        "import threading; from zero_opt.system.background_thread import SerialThread; started = threading.Event()\n"
        "t = SerialThread('last'); t.submit(started.wait); t.submit(print, 'done'); started.set()"
    )
    ended = subprocess.run([sys.executable, "-c", script], check=True, timeout=PATIENCE, capture_output=True, text=True)
    assert ended.stdout == "done\n"


def test_a_thread_that_has_returned_and_still_frees_what_it_held_is_waited_for() -> None:
    """Its jobs are over, and so is its function: the object is freed with what the thread has of its own."""
    script = (
        "import atexit, threading, time; atexit.register(print, 'finalized')\n"  # runs after the exit has waited
        "from zero_opt.system import background_thread; background_thread._PATIENCE_S = 300\n"
        "class Last:\n"
        "    def __del__(self): begun.set(); time.sleep(1); print('freed')\n"
        "begun, local = threading.Event(), threading.local()\n"
        "t = background_thread.SerialThread('last'); t.submit(lambda: setattr(local, 'last', Last()))\n"
        "t.close(); begun.wait()"
    )
    ended = subprocess.run([sys.executable, "-c", script], check=True, timeout=300, capture_output=True, text=True)
    assert ended.stdout == "freed\nfinalized\n"


def test_other_threads_meet_no_finalizers_that_interpreter_exit_goes_through() -> None:
    """It fails if another thread adds or drops one meanwhile."""
    before = list(weakref.finalize._registry)  # type: ignore[attr-defined]
    thread = SerialThread("zero_opt test")
    thread.submit(int).result()
    assert list(weakref.finalize._registry) == before  # type: ignore[attr-defined]
    thread.close()
    assert thread.ended


LEAVES_A_CALL = """
import threading
from zero_opt.system import background_thread
background_thread._PATIENCE_S = 3600.0
thread, began = background_thread.SerialThread("left"), threading.Event()
thread.submit(lambda: (began.set(), threading.Event().wait(3600.0)))
began.wait(3600.0)
thread.leave()
"""


def test_exit_does_not_wait_for_a_call_that_was_left() -> None:
    subprocess.run([sys.executable, "-c", LEAVES_A_CALL], check=True, timeout=PATIENCE)


def test_a_thread_that_was_left_is_waited_for_again_once_it_has_another_call() -> None:
    thread = SerialThread("left")
    thread.leave()  # before its first call
    for _ in range(2):
        assert thread.submit(int).result(PATIENCE) == 0
        assert background_thread._threads._listed[thread._thread] == math.inf
        thread.leave()
        assert background_thread._threads._listed[thread._thread] < math.inf
    thread.close()


_INTERRUPTED_EXIT = """
import atexit, ctypes, os, signal
from zero_opt.system import background_thread
threads = background_thread._threads
join, hold = threads.join, threads.hold
threads.hold = lambda: print("held") or hold()
signal.signal(signal.SIGINT, signal.default_int_handler)
"""
_INTERRUPTED = {
    "while it waits": "threads.join = lambda *given: os.kill(os.getpid(), signal.SIGINT) or join(*given)",
    "before its first line": "atexit.register(ctypes.CDLL(None).kill, os.getpid(), signal.SIGINT)",
}


@pytest.mark.parametrize("when", _INTERRUPTED)
def test_threads_are_held_at_the_exit_whatever_interrupts_it(when: str) -> None:
    script = _INTERRUPTED_EXIT + _INTERRUPTED[when]
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, {*done.stdout.split()}) == (0, {"held"})
    assert "KeyboardInterrupt" in done.stderr


@pytest.mark.usefixtures("alarm")
def test_a_signal_while_the_thread_starts_leaves_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    start, thread = threading.Thread.start, SerialThread("zero_opt alarmed")

    def alarmed(started: threading.Thread) -> None:
        start(started)
        signal.raise_signal(signal.SIGALRM)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", alarmed)
        with pytest.raises(TimeoutError, match="no more time"):
            thread.submit(int)
    try:
        assert thread.submit(threading.current_thread).result(PATIENCE) in threading.enumerate()
        assert [other.name for other in threading.enumerate()].count("zero_opt alarmed") == 1
    finally:
        thread.close()


BEGINS_AT_EXIT = """
import atexit
import torch
atexit.register(lambda: background_thread.run_apart(slow, 0.05))  # runs after what the package has registered
from zero_opt.system import background_thread

def slow():
    while True:
        torch.ones(1000).sum()
"""


def test_a_thread_that_begins_once_the_others_have_ended_does_not_abort_the_process() -> None:
    """As one that tells the other ranks, at the end, why this one ends."""
    done = subprocess.run([sys.executable, "-c", BEGINS_AT_EXIT], capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stderr) == (0, "")


BEGINS_IN_FINALIZATION = """
import sys
from zero_opt.system import background_thread

class Trainer:
    def __del__(self):
        print(sys.is_finalizing(), background_thread.run_apart(lambda: None, 5.0).result(0))

trainer = Trainer()
trainer.itself = trainer
"""


def test_a_finalizer_that_the_end_of_the_interpreter_calls_needs_no_thread() -> None:
    """No thread can begin any more, and before Python 3.12 ``Thread.start`` waits for it."""
    done = subprocess.run(
        [sys.executable, "-c", BEGINS_IN_FINALIZATION], capture_output=True, text=True, timeout=PATIENCE
    )
    assert (done.stdout, done.returncode, done.stderr) == ("True None\n", 0, "")
