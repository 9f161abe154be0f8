"""Every state that a model can come to."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from test.crash.model import Model, State


class Violation(AssertionError):
    """The model came to a state that must not be; the message has the way there."""


@dataclass(frozen=True)
class Explored:
    """How many states and transitions there are, how long the longest way is, and the names of actions taken."""

    states: int
    transitions: int
    longest: int
    actions: frozenset[str]


def explore(model: Model) -> Explored:
    """Visit every state, the nearest first.

    Raises:
        Violation: a state is wrong, or has no way on, or can be come to again, so that it may never end.
    """
    start = model.initial()
    came: dict[State, tuple[State, str] | None] = {start: None}
    following: dict[State, list[State]] = {}
    waiting, actions = deque([start]), set()
    while waiting:
        state = waiting.popleft()
        if what := model.wrong(state):
            raise Violation(_way(came, state, what))
        following[state] = []
        for action, after in model.successors(state):
            actions.add(action)
            following[state].append(after)
            if after not in came:
                came[after] = (state, action)
                waiting.append(after)
        if not following[state] and not model.over(state):
            raise Violation(_way(came, state, "nothing can happen any more"))
    return Explored(len(came), sum(map(len, following.values())), _longest(following, start), frozenset(actions))


def _longest(following: dict[State, list[State]], start: State) -> int:
    """The longest way; there is one if no state leads back to itself, and then everything ends."""
    arriving = dict.fromkeys(following, 0)
    for states in following.values():
        for state in states:
            arriving[state] += 1
    assert arriving[start] == 0
    lengths, free, seen = {start: 0}, [start], 0
    while free:
        state = free.pop()
        seen += 1
        for after in following[state]:
            lengths[after] = max(lengths.get(after, 0), lengths[state] + 1)
            arriving[after] -= 1
            if not arriving[after]:
                free.append(after)
    if seen != len(following):
        raise Violation(f"{len(following) - seen} states may come again and again")
    return max(lengths.values())


def _way(came: dict[State, tuple[State, str] | None], state: State, what: str) -> str:
    lines, at = [f"{what}: {state}"], state
    while (step := came[at]) is not None:
        at, action = step
        lines.append(action)
    return "\n  ".join(lines[:1] + lines[:0:-1])
