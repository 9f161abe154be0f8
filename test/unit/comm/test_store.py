"""Calls of a store that does not answer."""

from __future__ import annotations

import threading

import pytest

import zero_opt
from test.support.failures import PATIENCE_S
from zero_opt.comm import store


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
