"""Which meeting of a group is the next in which no rank has failed."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from zero_opt.comm import meeting_places
from zero_opt.comm.meeting_places import CAME, COUNT, FAILED, Key, meeting_place, next_open

KEY: Key = ("group", (0, 1))


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = dist.HashStore()
    monkeypatch.setattr(meeting_places, "default_store", lambda prefix: dist.PrefixStore(prefix, ours))


def _come(number: int, *ranks: int) -> None:
    for rank in ranks:
        meeting_place(KEY, number).set(f"{CAME}/{rank}", "")
        meeting_place(KEY, number).add(COUNT, 1)


def test_meetings_that_have_failed_are_left_out() -> None:
    for number in (0, 1, 2, 4):
        meeting_place(KEY, number).set(FAILED, "[]")
        _come(number, 0)
    assert next_open(KEY, 0, 1) == (3, False)
    assert next_open(KEY, 3, 1) == (5, False)
    _come(3, 0)
    assert next_open(KEY, 0, 1) == (3, True)


def test_where_this_rank_has_come_before_ranks_of_an_earlier_group_may_have() -> None:
    _come(1, 0, 1)
    assert next_open(KEY, 0, 1) == (1, False)


def test_groups_meet_in_places_of_their_own() -> None:
    _come(1, 0)
    assert next_open(("other", (0, 1)), 0, 1) == (1, False)
