"""What a rank does for the others alone keeps it no longer than a little, even if the backend never returns."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from test.support.failures import PATIENCE_S
from zero_opt.comm import waits_beside
from zero_opt.comm.groups import Group
from zero_opt.comm.waits_beside import Courtesies


@pytest.fixture
def blocked(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Calls of this wait for ever, until the test is over."""
    monkeypatch.setattr(waits_beside, "_COURTESY_S", 0.1)
    event = threading.Event()
    yield event
    event.set()


def _ended(call: Any) -> bool:
    """Whether a call returns in time."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(PATIENCE_S / 4)
    return not thread.is_alive()


def test_what_does_not_come_back_is_left_and_nothing_follows_it(blocked: threading.Event) -> None:
    courtesies, done = Courtesies(), list[int]()
    courtesies.do(lambda: done.append(1))
    begun = time.monotonic()
    courtesies.do(blocked.wait)
    assert time.monotonic() - begun < PATIENCE_S / 4
    assert courtesies.stuck
    courtesies.do(lambda: done.append(2))
    assert done == [1]
    blocked.set()
    deadline = time.monotonic() + PATIENCE_S
    while courtesies.stuck and time.monotonic() < deadline:
        time.sleep(0.01)
    courtesies.do(lambda: done.append(3))
    assert done == [1, 3]


@pytest.mark.parametrize("where", ["recv", "farewell", "shutdown"])
def test_a_group_is_left_where_the_backend_does_not_return(blocked: threading.Event, where: str) -> None:
    asked = list[str]()

    def called(name: str) -> Any:
        def call(*_: object) -> Any:
            asked.append(name)
            if name == where:
                blocked.wait()
            return SimpleNamespace(wait=lambda *_: None)

        return call

    group: Any = object.__new__(Group)
    group._pid, group._broken, group._aborted = os.getpid(), threading.Lock(), threading.Lock()
    group._used, group.backend, group.device_backends, group._stages = {1}, "gloo", {}, []
    group.farewell, group._waits, group.courtesies = called("farewell"), SimpleNamespace(close=list), Courtesies()
    backend = SimpleNamespace(shutdown=called("shutdown"))
    group._pg = SimpleNamespace(recv=called("recv"), _get_backend=lambda _: backend)
    assert _ended(group.disconnect)
    assert _ended(group.close)
    assert asked[-1] == where
    assert group._pg is None
