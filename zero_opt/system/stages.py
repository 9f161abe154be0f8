"""Calls in stages, several of which are under way at a time on one thread."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from .future import Future
from .phases import Phase

_Result = TypeVar("_Result")

# A call that pauses between its stages; what it returns is its result. If it yields pieces, it goes on when all of them
# have ended, and is sent their futures.
CallStages = Generator["Pieces | None", Any, _Result]


class Lane(NamedTuple):
    """What a call in stages has for itself while it is under way.

    Attributes:
        use: calls of another use do not begin before it has ended. number: nor do calls with the same number.
    """

    use: str
    number: int


class Pieces(NamedTuple):
    """Calls in stages, without pieces, that make up what is left of another one."""

    calls: Sequence[tuple[Lane, CallStages[Any]]]


def in_one_go(stages: CallStages[_Result]) -> _Result:
    """Run all stages of a call; returns its result."""
    ended: list[Future[Any]] | None = None
    while True:
        try:
            pieces = stages.send(ended)
        except StopIteration as over:
            result: _Result = over.value
            return result
        ended = None
        if pieces is not None:
            ended = [Future() for _ in pieces.calls]
            for future, (_, piece) in zip(ended, pieces.calls, strict=True):
                future.set_result(in_one_go(piece))


@dataclass
class _Call:
    """A call that has begun; its result or exception goes to its own future, whatever becomes of other calls."""

    lane: Lane
    stages: CallStages[Any]
    future: Future[Any]
    stages_run: int = 0
    over: bool = False
    ended: list[Future[Any]] | None = None  # of its pieces

    def advance(self) -> Pieces | None:
        """Run the next stage; returns pieces that are to be run before the one after."""
        self.stages_run += 1
        try:
            with Phase(self.lane.use):
                return self.stages.send(self.ended)
        except StopIteration as over:
            self.over = True
            self.future.set_result(over.value)
        except BaseException as error:  # raised where the future is waited for
            self.over = True
            self.future.set_exception(error)
        return None


class UnderWay:
    """The calls in stages of one thread that have begun and not ended, oldest first. Each stage is run in that order.

    The first stage of a call runs before the second one of the call before it: an exchange says in its first stage what
    it will send in its second, and what it says would else wait behind what the other sends.
    """

    def __init__(self) -> None:
        self._calls: list[_Call] = []

    def __bool__(self) -> bool:
        return bool(self._calls)

    def begin(self, lane: Lane, stages: CallStages[Any], future: Future[Any]) -> None:
        """Run the first stage of a call, once those have ended that it may not overlap with."""
        while any(call.lane == lane or call.lane.use != lane.use for call in self._calls):
            self._end_oldest()
        before, call = [*self._calls], _Call(lane, stages, future)
        pieces = call.advance()
        if pieces is None:
            for earlier in before:
                if earlier.stages_run == 1:
                    earlier.advance()
        else:
            call.ended = [Future() for _ in pieces.calls]
            for (of_piece, piece), ended in zip(pieces.calls, call.ended, strict=True):
                self.begin(of_piece, piece, ended)
            call.stages_run += 1  # its next stage is run when its pieces have ended, which are older
        self._calls.append(call)
        self._forget_ended()

    def advance(self) -> None:
        """Run the next stage of the oldest call."""
        self._calls[0].advance()
        self._forget_ended()

    def end_all(self) -> None:
        """Run all stages that are left."""
        while self._calls:
            self._end_oldest()

    def _end_oldest(self) -> None:
        oldest = self._calls[0]
        while not oldest.over:
            oldest.advance()
        self._forget_ended()

    def _forget_ended(self) -> None:
        self._calls = [call for call in self._calls if not call.over]
