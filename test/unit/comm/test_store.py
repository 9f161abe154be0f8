"""Calls of a store that does not answer."""

from __future__ import annotations

import math
import threading

import pytest

import zero_opt
from test.support.failures import PATIENCE_S
from zero_opt.comm import peer_watch, store
from zero_opt.comm.peer_watch import Watch
from zero_opt.comm.process_identity import ProcessIdentity
from zero_opt.system import background_thread


def test_a_wait_for_an_answer_ends_once_the_store_is_called_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that makes connections may wait there, and must be over before the interpreter's exit."""
    monkeypatch.setattr(store, "_ANSWER_S", PATIENCE_S)
    answered, calls, said = threading.Event(), store.StoreCalls(), list[str]()

    asked = threading.Event()

    def call() -> None:
        try:
            calls(lambda: (asked.set(), answered.wait()))
        except zero_opt.PeerLost as error:
            said.append(str(error))

    waiting = threading.Thread(target=call, daemon=True)
    waiting.start()
    asked.wait(PATIENCE_S)
    calls.close()
    waiting.join(PATIENCE_S / 10)
    answered.set()
    assert said and said[0].startswith("the process group's store is called no more")


@pytest.mark.parametrize("caller", ["meeting", "watch"])
def test_the_exit_waits_for_no_store_that_has_not_answered(caller: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_ANSWER_S", 0.1)
    monkeypatch.setattr(peer_watch, "_STORE_S", 0.1)
    answered = threading.Event()
    calls = store.StoreCalls()
    watch = Watch(None, 0, [ProcessIdentity("host", pid, pid) for pid in (10, 11)], (60.0, 30.0))
    if caller == "watch":
        assert watch._ask(answered.wait) is None
    else:
        with pytest.raises(zero_opt.PeerLost, match="has not answered"):
            calls(answered.wait)
    thread = (watch if caller == "watch" else calls)._thread._thread
    assert background_thread._threads._listed[thread] < math.inf
    answered.set()
    calls.close()
    watch.close()
