"""Every state of trainer and worker, whoever dies when: no step is lost or made twice, and nothing waits for ever."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from test.crash.explore import Explored, Violation, explore
from test.crash.model import Budget, Model, State, Step
from test.crash.programs import LONG

NOTHING = Budget(0, 0, 0, 0, 0, 0)
# Names, and models small enough to visit every state of.
MODELS = {
    "two lanes": Model(2, 2, 2, 2, NOTHING._replace(kills=2)),
    "all kinds of trouble": Model(1, 2, 2, 2, Budget(1, 1, 1, 1, 1, 1)),
    "one lane, any trainer": Model(1, 2, 2, 3, Budget(2, 1, 0, 0, 0, 1)),
}
LONG_MODELS = {
    "two lanes, four deaths": Model(2, 2, 2, 3, NOTHING._replace(kills=4)),
    "all kinds of trouble, two lanes": Model(2, 1, 2, 2, Budget(2, 1, 1, 1, 1, 1)),
    "three blocks, three steps": Model(1, 3, 3, 2, Budget(3, 1, 1, 0, 0, 0)),
    "two lanes, stops and growth": Model(2, 2, 2, 2, Budget(1, 1, 1, 1, 0, 0)),
}
TRIED = {**MODELS, **LONG_MODELS} if LONG else MODELS


def explored(model: Model, name: str) -> Explored:
    begin = time.monotonic()
    found = explore(model)
    took = f"{time.monotonic() - begin:.0f} s"
    print(f"\nmodel {name}: {found.states} states, {found.transitions} transitions, longest {found.longest}; {took}")
    return found


@pytest.mark.parametrize("name", TRIED)
def test_every_state_is_right_and_everything_ends(name: str) -> None:
    found = explored(TRIED[name], name)
    assert found.states > 1000
    if name != "all kinds of trouble":
        return
    # Nothing that the model knows of is out of reach.
    expected = {
        *("start", "submit", "extend", "extend: grow", "Control.stop", "close", "start: ready", "start: WorkerFailed"),
        *("wait: done", "wait: _spawn", "wait: dead", "wait: hang_timeout", "wait: hang_timeout of one that is slow"),
        *("end: reaped", "lock_arena", "finish_step", "finish_step: nonfinite", "finish_step: completed"),
        *("serve: ready", "serve: stop", "watch: the trainer is gone", "the kernel ends the worker"),
        *("SIGKILL", "SIGKILL to the trainer", "SIGSTOP", "SIGCONT"),
        *(f"run_lane 0: {what}" for what in ("copy_home begins", "copy_home ends", "adam begins", "adam ends")),
        *("run_lane 0: commit", "run_lane 0: commit the lane"),
    }
    assert found.actions == expected


@pytest.mark.parametrize(
    ("broken", "what"),
    [
        (["log"], "not applied once to every block|applied twice"),
        (["early commit"], "not applied once to every block"),
        (["early completion"], "not applied once to every block"),
        (["reap", "lock"], "two workers write at once"),
    ],
)
def test_what_is_wrong_is_found(broken: list[str], what: str) -> None:
    model = Model(1, 2, 2, 2, NOTHING._replace(kills=1, impatience=1), frozenset(broken))
    with pytest.raises(Violation, match=what) as caught:
        explore(model)
    assert len(str(caught.value).splitlines()) > 4


@pytest.mark.parametrize("broken", ["reap", "lock"])
def test_either_of_two_guards_keeps_workers_apart(broken: str) -> None:
    """The trainer reaps before it spawns, and a worker takes a lock that its predecessor has to its end."""
    explore(Model(1, 2, 2, 2, NOTHING._replace(kills=1, impatience=1), frozenset([broken])))


class Endless(Model):
    """A trainer that gives nothing up, and workers that are stopped again and again."""

    def successors(self, state: State) -> Iterator[Step]:
        yield from super().successors(state)
        if state.worker is not None and state.worker.stopped:
            yield "nothing", state


class Stuck(Model):
    """Nobody sees that the worker is dead."""

    def _waiting(self, state: State) -> Iterator[Step]:
        for action, after in super()._waiting(state):
            if action != "wait: dead":
                yield action, after


def test_models_that_do_not_end_are_found() -> None:
    budget = NOTHING._replace(kills=1, stops=1)
    with pytest.raises(Violation, match="may come again and again"):
        explore(Endless(1, 1, 1, 2, budget))
    with pytest.raises(Violation, match="nothing can happen any more"):
        explore(Stuck(1, 1, 1, 2, NOTHING._replace(kills=1)))
