"""Which process group a user means, and ranks that come together in it to make groups of their own.

[Note: a rank that does not come]
A rank makes its groups together with the others of the group that it was passed. One that was passed something that is
no group, or another group than they were, will never come. So a rank that refuses its argument says so in the store
that the process group was made with, and a rank that has waited a second says there where it waits, and looks who has
refused, or waits for it elsewhere. Who is waited for elsewhere takes part there too, but without giving a name. So the
call that others are in ends on all of them, and the user's groups can be used as before. While ranks come within the
second nothing is written, nor read; later the looks are further and further apart.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswer
from typing import Any, Protocol, TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..errors import (
    ConfigTypeError,
    PeerLost,
    PeerSilent,
    ProcessGroupError,
    RankMismatch,
    ZeroOptError,
    error_of_rank,
    name_and_text,
)
from ..system.background_thread import SerialThread
from ..system.log import log
from .peer_watch import SLICE_S, WARN_AFTER_S, first_line

# Its private parts carry no types.
_c10d: Any = dist.distributed_c10d

NAME_BYTES = 16
_NO_NAME = bytes(NAME_BYTES)
# A rank looks at the store for the first time after so long.
_LOOK_AFTER_S, _LOOK_APART_S = 1.0, 0.25
# So long a rank that refuses stays to end the waits of others, and so long they count on that.
_STAY_S, _GIVEN_UP_S = 4.0, 3.5
# How long the store may take to answer: its server may be the rank that is missing.
_ANSWER_S = 2.0
# How many ranks are looked at while nobody is known to have refused: each look asks the store once per rank.
_NEIGHBOURS = 4
# What to do about a rank that does not come.
_CONSTRUCT = "every rank of the process group must construct it: look at what they do (py-spy dump, ps)"
_Answer = TypeVar("_Answer")
Key = tuple[str, tuple[int, ...]]

# Per group, in how many meetings this rank has taken part; the same on all its ranks. Per rank, its refusals heard of.
_met: Counter[Key] = Counter()
_heard: Counter[int] = Counter()


class Names(Protocol):
    """An exchange of names that is under way in a group."""

    def done_within(self, seconds: float) -> bool:
        """Wait for so long at the most; whether it is over."""

    def names(self) -> list[bytes]:
        """What the ranks have given, in rank order, once it is over."""


Exchanging = Callable[[dist.ProcessGroup, bytes], Names]


def resolve_group(process_group: Any) -> dist.ProcessGroup | None:
    """The process group a user means: a group, a 1-D DeviceMesh, or ``None`` for the default group.

    Returns ``None`` when torch.distributed is not initialized, which is world size 1.

    Raises:
        ProcessGroupError: WORLD_SIZE says several ranks but no process group exists, or this rank is not a member.
    """
    if process_group is not None:
        if isinstance(process_group, dist.ProcessGroup):
            return process_group
        if process_group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ProcessGroupError("this rank is not a member of the process_group it passed")
        if isinstance(process_group, DeviceMesh):
            if process_group.ndim != 1:
                raise ConfigTypeError(
                    f"process_group is a {process_group.ndim}-D DeviceMesh; pass one dimension, e.g. mesh['dp']"
                )
            return process_group.get_group()
        raise ConfigTypeError(
            f"process_group must be a ProcessGroup, a 1-D DeviceMesh or None, got {type(process_group).__name__}; "
            "pass hyperparameters and policies by name, as in lr=..., reduction=..."
        )
    if dist.is_available() and dist.is_initialized():
        return dist.group.WORLD
    launched = os.environ.get("WORLD_SIZE", "1")
    if launched.isdigit() and int(launched) > 1:
        raise ProcessGroupError(
            f"WORLD_SIZE is {launched} but torch.distributed is not initialized; call "
            "torch.distributed.init_process_group() before constructing ShardedOptimizer"
        )
    return None


def agreed_group(process_group: Any, exchange: Exchanging) -> dist.ProcessGroup | None:
    """:func:`resolve_group` where the other ranks are about to meet this one; see [Note: a rank that does not come].

    Raises:
        ConfigTypeError, ProcessGroupError: as there. What is no group is an error on ranks that wait for this one too,
            and here up to four seconds later, if none does. A rank that is no member is right to be none.
    """
    try:
        return resolve_group(process_group)
    except ConfigTypeError as error:
        if dist.is_available() and dist.is_initialized() and dist.get_backend() != "threaded":
            _refuse(error, exchange)
        raise


def _refuse(error: ZeroOptError, exchange: Exchanging) -> None:
    """Say so, and stay until the waits of others for this rank are ended, or all have refused; for a while at most."""
    board, end = _Board(), time.monotonic() + _STAY_S
    done = _answered(lambda: board.refuse(error))
    while not done and time.monotonic() < end:
        time.sleep(SLICE_S)
        done = _answered(lambda: board.end_waits(exchange))
    _answered(board.hear_all)


def common_name(parent: dist.ProcessGroup, exchange: Exchanging, obstacle: ZeroOptError | None = None) -> str:
    """A name that nothing has had, the same on every rank of the group. Collective.

    Args:
        exchange: starts to exchange names in a group.
        obstacle: why this rank cannot continue, if so; raised on all ranks.

    Raises:
        ConfigTypeError, ProcessGroupError: another rank's argument is no group. RankMismatch: it is another group.
        PeerSilent: a rank does not come within the group's timeout. PeerLost: one has ended. ZeroOptError: a rank's
            obstacle.
    """
    key = _key_of(parent)
    _met[key] += 1
    if obstacle is not None:
        _answered(lambda: _Board().refuse(obstacle))
    under_way = exchange(parent, uuid.uuid4().bytes if obstacle is None else _NO_NAME)
    wait, begun = _Wait(key, exchange), time.monotonic()
    try:
        while not under_way.done_within(SLICE_S):
            wait.look(time.monotonic() - begun)
        names = under_way.names()
    except PeerLost as error:
        raise wait.lost(error, time.monotonic() - begun) from error
    finally:
        wait.over()
    refusals = [_Board().refusal(rank, key) for rank, name in zip(key[1], names, strict=True) if name == _NO_NAME]
    if refusals:
        wait.leave_others()
        raise obstacle or refusals[0]
    return names[0].hex()


def _answered(call: Callable[[], _Answer]) -> _Answer | None:
    """What a call that asks the store returns; ``None`` if it takes too long."""
    thread = SerialThread("zero_opt meeting")
    try:
        try:
            future: Future[_Answer] = thread.submit(call)
        except RuntimeError:  # this process can get no thread
            return call()
        return future.result(_ANSWER_S)
    except NoAnswer:
        return None
    finally:
        thread.close()


def _key_of(group: dist.ProcessGroup) -> Key:
    return group.group_name, tuple(dist.get_process_group_ranks(group))


class _Board:
    """What ranks say to each other in the store. Ranks are those of the default group."""

    def __init__(self) -> None:
        self._store = _c10d.PrefixStore("zero_opt/meeting", _c10d._get_default_store())
        self.rank = dist.get_rank()
        self.others = [rank for rank in range(dist.get_world_size()) if rank != self.rank]

    def _said(self, key: str) -> Any:
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def wait_in(self, key: Key) -> None:
        """This rank waits in a group."""
        self._store.set(f"waits/{self.rank}", json.dumps([*key, _met[key]]))

    def wait_nowhere(self, key: Key) -> None:
        """This rank has waited in a group, and waits no longer."""
        self._store.set(f"waits/{self.rank}", json.dumps([key[0], [], _met[key]]))

    def absent(self, key: Key) -> list[int]:
        """The ranks of a group, counted within it, that have not said that they wait where this one does, or did."""
        said: dict[int, Any] = {
            rank: self._said(f"waits/{rank}") or ("", [], 0) for rank in key[1] if rank != self.rank
        }
        return [key[1].index(rank) for rank, (name, _, number) in said.items() if (name, number) != (key[0], _met[key])]

    def waiting_for_me(self, ranks: Sequence[int]) -> Iterator[tuple[int, Key]]:
        """Of these ranks, which wait for this one, and in what group."""
        for rank in ranks:
            name, members, number = self._said(f"waits/{rank}") or ("", [], 0)
            key = (name, tuple(members))
            if self.rank in members and number == _met[key] + 1:
                yield rank, key

    def refuse(self, error: ZeroOptError) -> None:
        """This rank will not come to where others may wait for it."""
        number = self._refusals(self.rank) + 1
        self._store.set(f"refused/{self.rank}", json.dumps([number, *name_and_text(error)]))
        self._store.add("refusals", 1)

    def _refusals(self, rank: int) -> int:
        return int((self._said(f"refused/{rank}") or [0])[0])

    def unheard(self, ranks: Sequence[int]) -> list[int]:
        """Of these ranks, those that have refused since this one last heard of it."""
        return [rank for rank in ranks if self._refusals(rank) > _heard[rank]]

    def any_refusals(self) -> int:
        """How many refusals of whatever rank there have been."""
        return int(self._store.add("refusals", 0))

    def refusal(self, rank: int, key: Key) -> ZeroOptError:
        """What a rank has refused with."""
        number, name, message = self._said(f"refused/{rank}") or (0, "ProcessGroupError", "passed another group")
        _heard[rank] = number
        return error_of_rank(key[1].index(rank), name, message)

    def take_leave(self, key: Key, exchange: Exchanging) -> None:
        """End a wait for this rank."""
        for group in list(_c10d._world.pg_map):
            if _key_of(group) == key:
                _met[key] += 1
                exchange(group, _NO_NAME)
                return

    def end_waits(self, exchange: Exchanging) -> bool:
        """End the waits of others for this rank; whether there were any, or all others have refused too."""
        keys = {key for _, key in self.waiting_for_me(self.others)}
        for key in keys:
            self.take_leave(key, exchange)
        return bool(keys) or len(self.unheard(self.others)) == len(self.others)

    def hear_all(self) -> None:
        """What others have refused so far is not about a meeting to come."""
        _heard.update({rank: self._refusals(rank) - _heard[rank] for rank in self.others})


class _Wait:
    """One wait in a group."""

    def __init__(self, key: Key, exchange: Exchanging) -> None:
        self._key, self._exchange = key, exchange
        self._board: _Board | None = None
        self._due, self._refused, self._warned = _LOOK_AFTER_S, False, False

    def look(self, waited: float) -> None:
        """Look around, if it is time to, ``waited`` seconds after the beginning.

        Raises:
            ZeroOptError: another rank's, which has refused and does not wait for this one any more.
        """
        if waited < self._due:
            return
        if waited > WARN_AFTER_S and not self._warned:
            self._warn(waited)
        first, self._board = self._board is None, self._board or _Board()
        board = self._board
        if first:
            _answered(lambda: board.wait_in(self._key))
        self._due = max(waited + _LOOK_APART_S, 1.25 * waited)
        gone = _answered(lambda: self._look_around(board))
        if gone is not None and waited > _GIVEN_UP_S:
            raise board.refusal(gone, self._key)

    def _look_around(self, board: _Board) -> int | None:
        """Leave the groups in which others wait for this rank; a rank that has refused."""
        members = self._key[1]
        here = members.index(board.rank)
        around = [*members[here + 1 :], *members[:here]]
        refused = board.any_refusals() > 0
        gone = board.unheard(around) if refused else []
        waiting = {key: rank for rank, key in board.waiting_for_me(around if refused else around[:_NEIGHBOURS])}
        waiting.pop(self._key, None)
        for key, rank in waiting.items():  # several ranks wait in one call
            if not self._refused:
                board.refuse(RankMismatch(_difference((board.rank, self._key), (rank, key))))
                self._refused = True
            board.take_leave(key, self._exchange)
        return gone[0] if gone else None

    def leave_others(self) -> None:
        """This rank has been left, and will not come to where others still wait for it."""
        board = _Board()
        _answered(lambda: self._look_around(board))

    def over(self) -> None:
        """This rank does not wait any more."""
        if self._board is not None:
            board = self._board
            _answered(lambda: board.wait_nowhere(self._key))

    def _absent(self) -> str:
        """Names of the ranks that have not come."""
        board, ranks = self._board, list[int]()
        if board is not None:
            with contextlib.suppress(RuntimeError):  # the store's server is lost
                ranks = _answered(lambda: board.absent(self._key)) or []
        return (
            ", ".join(f"rank {rank}" for rank in ranks) or f"one or more of the other ranks ({len(self._key[1]) - 1})"
        )

    def _warn(self, waited: float) -> None:
        """Say once whom this rank waits for."""
        self._warned = True
        log.warning("ShardedOptimizer() has waited %d s for %s; %s", waited, self._absent(), _CONSTRUCT)

    def lost(self, error: PeerLost, waited: float) -> PeerLost:
        """Return what the backend's error means."""
        if "imed out" not in first_line(error) and "imeout" not in first_line(error):
            return PeerLost(
                "a rank of the process group has ended, or does not answer, while this one waited in "
                f"ShardedOptimizer(); look at the ranks' logs, and restart all ({first_line(error)})"
            )
        return PeerSilent(
            f"{self._absent()} did not come to ShardedOptimizer() in {waited:.1f} s; {_CONSTRUCT}, or give them longer "
            f"with init_process_group(timeout=...) ({first_line(error)})"
        )


def _difference(*there: tuple[int, Key]) -> str:
    """The same words on both ranks."""
    first, second = (f"{key[0]!r} of ranks {list(key[1])} on rank {rank}" for rank, key in sorted(there))
    return f"process_group is {first} and {second}; pass the same one on every rank"
