"""Waits of construction for keys that other ranks write."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from zero_opt.comm.connecting import Connecting
from zero_opt.errors import ProcessGroupError


def _out_of_patience() -> Any:
    connecting: Any = object.__new__(Connecting)
    connecting._world_size, connecting.patience_s = 2, 0.0
    connecting.ask = lambda call, *arguments: call(*arguments)
    return connecting


def test_a_rank_that_comes_as_patience_ends_is_not_missed() -> None:
    """The store has no key when it is asked for all of them, and then has them all."""
    answers, look = iter([False]), list[int]()
    store = SimpleNamespace(check=lambda keys: next(answers, True), multi_get=list, has_extended_api=lambda: True)
    found = _out_of_patience().wait_for(store, ["a/0", "a/1"], lambda: look.append(1))
    assert found == ["a/0", "a/1"]
    assert look


def test_a_rank_that_does_not_come_is_named() -> None:
    store = HashStore()
    store.set("a/0", "")
    with pytest.raises(ProcessGroupError, match="Missing: rank 1: it has ended"):
        _out_of_patience().wait_for(store, ["a/0", "a/1"], lambda: None)
