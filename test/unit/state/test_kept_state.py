"""Full state that is kept until the live state is edited, in whatever way."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from zero_opt.placement import ReadThrough
from zero_opt.placement.read_through import MadeState
from zero_opt.state.kept_state import KeptState

FULL = {0: {"step": 2}}


def _live() -> list[dict[str, Any]]:
    return [{"step": 1, "exp_avg": torch.zeros(3)}, {"step": 1, "exp_avg": torch.zeros(3)}]


def _exchange(live: list[Any]) -> None:
    live[0], live[1] = live[1], live[0]


def _rename(live: list[Any]) -> None:
    live[0]["mean"] = live[0].pop("exp_avg")


EDITS: dict[str, Callable[[list[Any]], object]] = {
    "number": lambda live: live[0].update(step=100),
    "value": lambda live: live[1].update(exp_avg=torch.zeros(3)),
    "write": lambda live: live[1]["exp_avg"].fill_(1),
    "key added": lambda live: live[0].update(more=None),
    "key dropped": lambda live: live[1].pop("exp_avg"),
    "key renamed": _rename,
    "entry": lambda live: live.__setitem__(0, dict(live[0])),
    "entry added": lambda live: live.append({}),
    "entry dropped": lambda live: live.pop(),
    "entries exchanged": _exchange,
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_it_is_kept_until_an_edit(edit: Callable[[list[Any]], object]) -> None:
    kept, live = KeptState(), _live()
    assert kept.current(live) is None
    kept.keep(FULL, live)
    assert kept.current(iter(live)) is FULL
    edit(live)
    assert kept.current(live) is None


def test_another_value_never_gets_the_identity_of_the_one_before() -> None:
    kept, live = KeptState(), _live()
    for _ in range(20):
        kept.keep(FULL, live)
        for _ in range(2):  # what the first has freed, the second may get
            live[0]["exp_avg"] = torch.zeros(3)
        assert kept.current(live) is None


def test_what_is_forgotten_is_freed() -> None:
    kept, live = KeptState(), _live()
    kept.keep(FULL, live)
    value = weakref.ref(live.pop()["exp_avg"])
    assert value() is not None
    kept.forget()
    gc.collect()
    assert value() is None
    assert kept.current(live) is None


class _Counted(MadeState):
    def __init__(self, number: int) -> None:
        self.number = number

    def __getitem__(self, key: str) -> Any:
        return {"step": self.number, "exp_avg": torch.full((3,), float(self.number))}[key]

    def __iter__(self) -> Iterator[str]:
        return iter(("step", "exp_avg"))

    def __len__(self) -> int:
        return 2

    @property
    def nbytes(self) -> int:
        return 0


@pytest.mark.parametrize("key", ["step", "exp_avg"])
@pytest.mark.parametrize("held", [False, True], ids=["new", "read before"])
def test_values_that_are_made_when_read_count_once_they_are_adopted(key: str, held: bool) -> None:
    shown, kept = ReadThrough(_Counted(1)), KeptState()
    live = [shown, *_live()]
    if held:
        shown["exp_avg"]
    kept.keep(FULL, live)
    assert kept.current(live) is FULL
    shown[key] = 5.0 if key == "step" else torch.ones(3)
    with shown.settled():
        pass
    assert kept.current(live) is None
    kept.keep(FULL, live)
    shown["exp_avg"].zero_()
    with shown.settled():
        pass
    assert kept.current(live) is None
