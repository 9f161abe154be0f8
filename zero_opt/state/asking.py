"""Ask all ranks for their state, on a thread beside the caller's; see [Note: a pull] in the state service."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor

from ..comm import process_exit
from ..comm.peer_watch import Watch
from ..comm.ring import ASKED, FOR_EVER_S, RingMessage, words_of
from ..comm.side_group import SideGroup
from ..comm.transfers import TransferQueue
from ..comm.waits_beside import outcome, submitted
from ..errors import PeerLost, error_of_rank
from ..system.background_thread import SerialThread
from ..system.interrupts import uninterrupted
from .entries import Places, message_for
from .guard import Verdict
from .messages import (
    ERROR,
    GO,
    LATER,
    MARGIN_S,
    Answer,
    Awaited,
    DirectMessages,
    Pull,
    broken_if_left,
)


class Questions:
    """What this rank asks the others, one pull at a time.

    Args:
        direct: sends and receives messages to and from one rank. pass_on: begins to send words round the ring.
    """

    def __init__(
        self, side: SideGroup, direct: DirectMessages, watch: Watch, pass_on: Callable[[Tensor], None]
    ) -> None:
        self._side, self._direct, self._watch, self._pass_on = side, direct, watch, pass_on
        self._others = [(side.rank + away) % side.world_size for away in range(1, side.world_size)]  # round the ring
        self._beside, self._pulls, self._awaited = SerialThread("zero_opt state wait"), 0, Awaited()

    @contextlib.contextmanager
    def new_pull(self, step: int) -> Iterator[Pull]:
        """A context of one pull in this rank's ``step``, after which no rank waits for a word of it."""
        self._pulls += 1
        pull = Pull(self._pulls, step, self._others)
        try:
            process_exit.started(threading.Thread(target=pull.warn, name="zero_opt state warning"))
            yield pull
        finally:
            with uninterrupted():
                pull.left.set_result(None)
                if pull.waiting:
                    self._side.courtesies.do(partial(pull.stop, self._direct.send))

    def ask(self, pull: Pull, changes: int, meanwhile: Callable[[], Any]) -> tuple[Any, list[bytes | None]]:
        """Return what ``meanwhile`` does here, and the ranks' listings, ``None`` for this rank.

        Args:
            changes: commits after which the state is wanted.
        """
        return self._wait_beside(meanwhile, self._ask, pull, changes)

    def fetch(self, pull: Pull, targets: dict[int, list[Places]], meanwhile: Callable[[], Any]) -> None:
        """Do ``meanwhile`` here, and fill these places, by rank, with all other ranks' elements."""
        self._wait_beside(meanwhile, self._fetch_all, pull, targets)

    def close(self) -> None:
        """End the thread; ranks can be asked no more."""
        self._beside.close()

    def _wait_beside(self, meanwhile: Callable[[], Any], call: Callable[..., Any], *given: Any) -> tuple[Any, Any]:
        asked = submitted(self._beside, call, *given)
        try:
            return meanwhile(), outcome(asked, lambda: self._awaited.lookout(self._side.lookout(), self._watch))
        finally:
            if not asked.done():  # a rank that does not answer may keep the thread for long
                self._beside.leave()

    def _ask(self, pull: Pull, changes: int) -> list[bytes | None]:
        pull.waiting.update(self._others)
        if pull.left.done():  # before it began
            return []
        self._pass_on(words_of(*RingMessage(ASKED, self._side.rank, pull.number, changes)))
        listings = {rank: self._answer_of(rank, pull) for rank in self._others}  # the first late one holds the question
        return [listings.get(rank) for rank in range(self._side.world_size)]

    def _answer_of(self, rank: int, pull: Pull) -> bytes:
        """Return a rank's listing."""
        tag, answer = pull.tag, Answer(LATER, 0, 0, 0)
        self._awaited.message_of(rank, self._side.timeout_s)
        while answer.code == LATER or answer.pull != pull.number:
            self._direct.receive_bytes(answer.nbytes, rank, tag)  # of a pull that was given up
            answer = Answer(*self._direct.receive(words_of(*answer), rank, tag).tolist())
            pull.heard[rank] = answer.step
            self._awaited.message_of(rank, self._side.timeout_s + MARGIN_S / 2)  # it may wait itself
        if answer.code == Verdict.BEHIND.value and (left := self._watch.departures.of(rank)) is not None:
            raise PeerLost(left.text(f"rank {rank}", "has ended"))
        answer.require_ready(rank, pull.step)
        payload = self._direct.receive_bytes(answer.nbytes, rank, tag)
        if answer.code == ERROR:
            raise error_of_rank(rank, *json.loads(payload))
        del pull.heard[rank]
        return payload

    def _fetch_all(self, pull: Pull, targets: dict[int, list[Places]]) -> None:
        """Fill the places, unless the caller has left."""
        for rank in sorted(self._others):  # see [Note: the end]
            pull.waiting.remove(rank)  # KeyError: the caller has left, and does not see it
            self._fetch(rank, targets[rank], pull)

    def _fetch(self, rank: int, targets: list[Places], pull: Pull) -> None:
        tag, window = pull.tag, TransferQueue(FOR_EVER_S)
        with broken_if_left(self._side):
            self._direct.send(rank, tag + 1, GO, pull.number)
            self._awaited.message_of(rank, self._side.timeout_s)
            for _, places in targets:
                into, arrived = message_for(places)
                window.add(self._side.receive_from(into, rank, tag), into, partial(self._awaited.arrives, arrived))
            window.drain()
            error = json.loads(self._direct.receive_bytes(int(self._direct.receive(words_of(0), rank, tag)), rank, tag))
        if error is not None:
            raise error_of_rank(rank, *error)
