"""Which process group a user means, and ranks that come together in it to make groups of their own.

[Note: a rank that does not come]
Ranks come together in the store that the process group was made with. Each says there that it has come, and draws a
number. All the numbers make a name. A rank that knows all of them says so under that name, and goes on once all ranks
have. So nothing that an earlier process group has left in the store is taken for a rank. A rank that cannot go on
leaves its error there, for ranks that come later too. Nothing is sent over the user's groups, which stay usable.

A rank that has waited a second looks, again and again, for an error of another rank; for a rank whose program has
ended, as the watch of an earlier optimizer may know; for a rank that waits for it in another group; for ranks of its
host that are stopped or have ended; and, where the user's group is gloo's, for connections of that group that are
broken. Those to a host that is silent break too, see :class:`HostLimits`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import time
import uuid
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..errors import (
    ConfigError,
    ConfigTypeError,
    PeerLost,
    PeerSilent,
    ProcessGroupError,
    RankMismatch,
    ZeroOptError,
    error_of_rank,
    name_and_text,
)
from ..system.log import log
from ..system.waiting import until
from .backend_errors import aside, closed_by_timeout
from .departures import How, rank_name
from .keepalive import HostLimits
from .meeting_places import CAME, COUNT, FAILED, Key, meeting_place, next_open, where_ranks_wait
from .parent import Parent, broken_connections, parent_of, ranks_gone
from .peer_watch import Watch
from .process_identity import ProcessIdentity
from .stops import WARN_AFTER_S, Stops
from .store import STORE_ERRORS, StoreCalls, c10d, default_store, is_of_store
from .store_keys import missing, values

# The longest pause between two questions whether all have come, per rank: the store has one server.
PAUSE_RANK_S = 0.002
# Of ranks that have not come, a look asks so many for where they are; ranks and looks take turns over them.
_ASKED = 8
# A rank looks around for the first time after so long; looks are then further and further apart.
LOOK_AFTER_S, _LOOK_APART_S, _LOOK_APART_MOST_S = 1.0, 0.25, 10.0
# Many ranks of a host look: they are apart so many times as long as the last one took, too, but no longer than this.
_TIMES_LOOKING, _LOOKING_MOST_S = 9.0, 30.0
# How long after the store's connection that to the rank which serves it may break.
_STORE_LOST_S = 1.0
# The absence of an error: rank, class, text, the meetings that are over with it, and the ranks that it gives up.
_NO_ERROR = (None, "", "", (), ())
_AGAIN = "call it again on every rank, or restart all"

# Per default store, which a process group that is initialized again has anew: in how many meetings of each group this
# rank has taken part. The same on all ranks of the group.
_met: weakref.WeakKeyDictionary[Any, Counter[Key]] = weakref.WeakKeyDictionary()
# Per default store, the watches of this process that may hear of departures, and the global ranks that each watches.
_watches: weakref.WeakKeyDictionary[Any, weakref.WeakKeyDictionary[Watch, Sequence[int]]] = weakref.WeakKeyDictionary()


def resolve_group(process_group: Any) -> dist.ProcessGroup | None:
    """Return the process group that a user means: a group, a DeviceMesh, or ``None`` for the default group.

    A mesh has one dimension, or two: hosts, and ranks of each, which are all ranks of the default group in order.

    Returns ``None`` when torch.distributed is not initialized, which is world size 1.

    Raises:
        ConfigTypeError: it is none of these. ConfigError: the group was destroyed; the mesh has other ranks.
        ProcessGroupError: WORLD_SIZE says several ranks but no process group exists, or this rank is not a member.
    """
    if process_group is not None:
        if isinstance(process_group, dist.ProcessGroup):
            if process_group not in dist.distributed_c10d._world.pg_map:
                raise ConfigError(
                    "process_group was destroyed, or torch.distributed.new_group() has not made it; pass one that is "
                    "there"
                )
            return process_group
        if process_group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ProcessGroupError("this rank is not a member of the process_group it passed")
        if isinstance(process_group, DeviceMesh):
            return _group_of_mesh(process_group)
        raise ConfigTypeError(
            f"process_group must be a ProcessGroup, a DeviceMesh or None, got {type(process_group).__name__}; "
            "pass hyperparameters and policies by name, as in lr=..., reduction=..."
        )
    if dist.is_available() and dist.is_initialized():
        return dist.group.WORLD
    world_size = os.environ.get("WORLD_SIZE", "1")
    if world_size.isdigit() and int(world_size) > 1:
        raise ProcessGroupError(
            f"WORLD_SIZE is {world_size} but torch.distributed is not initialized; call "
            "torch.distributed.init_process_group() before constructing ShardedOptimizer"
        )
    return None


def _group_of_mesh(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """Return the process group of a mesh's ranks."""
    if mesh.ndim == 1:
        return mesh.get_group()
    if mesh.ndim != 2:
        raise ConfigTypeError(
            f"process_group is a {mesh.ndim}-D DeviceMesh; pass one dimension, e.g. mesh['dp'], or two: between hosts, "
            "and inside each"
        )
    ranks, group = mesh.mesh.flatten().tolist(), dist.group.WORLD
    if group is None or ranks != list(range(group.size())):
        raise ConfigError(
            f"process_group is a 2-D DeviceMesh of ranks {mesh.mesh.tolist()}; a mesh of two dimensions must have all "
            "ranks of the default group in order, those of a host in one row; pass that mesh, or one dimension"
        )
    return group


def hosts_of(process_group: Any) -> int:
    """Return how many hosts there are, according to a 2-D mesh of several ranks each; 1 for any other group."""
    if not isinstance(process_group, DeviceMesh) or process_group.ndim != 2:
        return 1
    hosts, per_host = process_group.shape
    return hosts if per_host > 1 else 1


def require_still_alone() -> None:
    """Raise ProcessGroupError if this process has other ranks now; it had no process group to begin with."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise ProcessGroupError(
            "this optimizer was constructed before torch.distributed.init_process_group(), so it neither reduces "
            "gradients nor shards state; construct it afterwards"
        )


def ended_by(error: BaseException, name: str, call: str) -> str:
    """Return what other ranks are told once an exception has ended, on the rank of that name, a call outside of a step.

    ``call``: what the user has called.
    """
    said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return f"an exception on {name} ({said}) has ended {call} there; {_AGAIN}"


def meetings_counted() -> dict[Key, int]:
    """Return in how many meetings of each group this rank has taken part, of groups of the default store."""
    return dict(_met.get(c10d._get_default_store(), {})) if dist.is_initialized() else {}


class Patience(NamedTuple):
    """How long a rank waits while it makes groups.

    Attributes:
        come_s: seconds that ranks may take to come. timeout_s: seconds that a collective of the groups may take.
        hang_timeout_s: seconds after which a rank of this host that is stopped is an error.
        limits: on silent hosts; held once this rank has waited a second.
        call, must: what the user has called, and what every rank must do, for messages.
        watch: makes what looks at the ranks once all have come. compared: whether the call compares what it is about,
            so that a rank may come late to a call that another has made since.
    """

    come_s: float
    timeout_s: float
    hang_timeout_s: float
    limits: HostLimits | None = None
    call: str = "ShardedOptimizer()"
    must: str = "construct it"
    watch: Callable[..., Watch] = Watch
    compared: bool = True


class Meeting:
    """One coming together of all ranks of a group. See [Note: a rank that does not come].

    Attributes:
        ask: calls the store. rank: this rank in the group.
        name: a name that nothing has had, the same on all ranks; "" until all have come.
        watch: looks at what keeps this rank waiting, once all have come. several_hosts: whether they run on several.
    """

    watch: Watch
    several_hosts = False
    _stops: Stops | None = None

    def __init__(self, parent: dist.ProcessGroup | Parent, patience: Patience) -> None:
        self._parent, self._patience, self._call = parent_of(parent), patience, patience.call
        self._waiting = f"this one waits for it in {self._call}"
        self._come = f"every rank of the process group must {patience.must}: look at what they do (py-spy dump, ps)"
        self._key: Key = self._parent.name, self._parent.ranks
        self._met = _met.setdefault(c10d._get_default_store(), Counter())
        self.rank, self.ask, self._next = self._parent.rank, StoreCalls(), (0, False)
        self._due, self._looks, self._warned = LOOK_AFTER_S, 0, False
        self._begin(self._met[self._key])

    def _begin(self, number: int) -> None:
        """Be in the meeting of that number, to which this rank has not come."""
        self._number, self._place, self.name = number, meeting_place(self._key, number), ""
        self._absent: list[int] = []
        # Arrivals when all that had come was read last: fewer than there are ranks are not worth reading.
        self._read, self._first = len(self._key[1]) - 1, False
        self._calls, self._stopped_at = tuple[str, ...](), math.inf

    def come(self, require: Callable[[], None]) -> None:
        """Come, and wait for the other ranks. Collective.

        Args:
            require: raises an error, which is raised on all ranks, if this rank cannot go on.

        Raises:
            RankMismatch: another rank has been passed another group, or is in another call. PeerSilent: a rank does not
                come in time, or is stopped. PeerLost: one has ended, its host is silent, an exception has ended its
                call, or the store is lost. ZeroOptError: a rank's error.
        """
        met, come_s, pause_s = False, self._patience.come_s, PAUSE_RANK_S * len(self._key[1])
        try:
            self._take_number()
            require()
            met = self.ask(self._arrive) or until(lambda: self.ask(self._complete), come_s, self._look_around, pause_s)
            if not met:
                raise PeerSilent(
                    f"{self._named()} did not come to {self._call} in {come_s:.1f} s; {self._come}, or give them "
                    "longer with init_process_group(timeout=...)"
                )
        except BaseException as error:
            self.leave(meaning := self.meaning(error))
            if meaning is not error:
                raise meaning from error
            raise
        finally:
            if self._due > LOOK_AFTER_S:  # others know where this rank has waited
                with contextlib.suppress(*STORE_ERRORS):
                    self.ask(where_ranks_wait().set, str(dist.get_rank()), "")
            if not met:
                self.ask.close()
        self._place, self._stops = default_store(self.name), Stops(self.watch, self._waiting)

    def leave(self, error: BaseException) -> None:
        """Let the others hear of the error with which this rank leaves, unless another rank has left before.

        An exception that is none of ours, as of Ctrl-C, is a PeerLost there, which names this rank.
        """
        self._take_number()
        if not isinstance(error, PeerSilent) and self._stops is None:  # given up here, it may be waited for again
            with contextlib.suppress(*STORE_ERRORS):
                self.ask(self._heard)
                self._goes_on()
        ours, name = isinstance(error, ZeroOptError), self._name(self.rank)
        told = error if ours else PeerLost(ended_by(error, name, self._call))
        if is_of_store(error):
            told = PeerLost(f"{name}: {error}")
        late = sorted(self.watch.departures.unanswering) if self.name else self._absent
        absent = late if isinstance(error, PeerSilent) else []
        said = json.dumps([self.rank, *name_and_text(told), [[self._key, self._number]], absent])

        def put() -> None:
            self._place.compare_set(FAILED, "", said)
            if self.name:  # others may know already that this rank has come, and go on
                default_store(self.name).compare_set(FAILED, "", said)

        with contextlib.suppress(*STORE_ERRORS):
            self.ask(put)

    def _take_number(self) -> None:
        """Count this meeting, before others can learn of it; one that ends earlier leaves its number to the next."""
        self._met[self._key] = max(self._met[self._key], self._number + 1)

    def _goes_on(self) -> bool:
        """Go on to the meeting in which ranks wait for this one that have given it up here; returns whether any do."""
        goes_on = self._next[1] and self._next[0] > self._number
        if goes_on:
            self._begin(self._next[0])
            self._take_number()
        return goes_on

    def look(self) -> None:
        """Raise the error with which another rank has left, or that of a rank that has ended, or is stopped."""
        error = self.ask(self._heard)
        if self._stops is None and self._goes_on():
            error = None
            self.ask(self._arrive)
        error = error or self._ended()
        if error is not None:
            raise error
        if self._stops is not None:
            self._stops.look()

    def _keys(self, kind: str) -> list[str]:
        return [f"{kind}/{rank}" for rank in range(len(self._key[1]))]

    def _arrive(self) -> bool:
        """Say that this rank has come; returns whether all have."""
        said = [uuid.uuid4().hex, ProcessIdentity.of_this_process(), self._call]
        self._place.set(f"{CAME}/{self.rank}", json.dumps(said))
        self._first = self._place.add(COUNT, 1) == 1
        return self._complete()

    def _complete(self) -> bool:
        """Return whether all ranks have come, and know of each other."""
        count = self._place.add(COUNT, 0)
        if count > self._read:
            self._read_came(count)
        complete = bool(self.name) and default_store(self.name).add(COUNT, 0) == len(self._key[1])
        if complete:
            require_same(self._calls)
        return complete

    def _read_came(self, count: int) -> None:
        """Read what the ranks have said on coming, if all have, and let them know that this rank has read it.

        Args:
            count: how often ranks have come here, with those of an earlier process group. Ranks that come later change
                both the count and what is read.
        """
        if not self._place.check(self._keys(CAME)):
            return
        came, self._read = values(self._place, self._keys(CAME)), count
        name = f"zero_opt/{hashlib.sha256(b''.join(came)).hexdigest()[:32]}"
        if name != self.name:
            _, identities, self._calls = zip(*map(json.loads, came), strict=True)
            ranks = [ProcessIdentity(*identity) for identity in identities]
            self.several_hosts = not all(rank.is_near(ranks[self.rank]) for rank in ranks)
            timeouts = self._patience.timeout_s, self._patience.hang_timeout_s
            store, build = default_store(f"{name}/watch"), self._patience.watch
            self.name, self.watch = name, build(store, self.rank, ranks, timeouts)
            self.watch.gone = partial(ranks_gone, self._parent)
            _watches.setdefault(c10d._get_default_store(), weakref.WeakKeyDictionary())[self.watch] = self._key[1]
            default_store(name).set(f"seen/{self.rank}", "")
            default_store(name).add(COUNT, 1)

    def _look_around(self, waited: float) -> None:
        """Look around, if it is time to, ``waited`` seconds after the beginning.

        Raises:
            ZeroOptError: why this rank waits in vain.
        """
        if waited < self._due:
            return
        begun, self._looks = time.monotonic(), self._looks + 1
        self.look()
        if self._patience.limits is not None:
            self._patience.limits.hold()
        error = self._elsewhere() or self._stopped(waited) or self._broken()
        if error is not None:
            raise error
        taken, apart = time.monotonic() - begun, min(max(_LOOK_APART_S, 0.25 * waited), _LOOK_APART_MOST_S)
        self._due = waited + taken + max(apart, min(_TIMES_LOOKING * taken, _LOOKING_MOST_S))
        if waited > WARN_AFTER_S and not self._warned:
            self._warned = True
            log.warning("%s has waited %d s for %s; %s", self._call, waited, self._named(), self._come)

    def _heard(self) -> ZeroOptError | None:
        """Return the error with which another rank has left this meeting, and maybe another one."""
        said = json.loads(self._place.get(FAILED)) if self._place.check([FAILED]) else _NO_ERROR
        rank, name, text, meetings, absent = said
        for (group, ranks), number in meetings:
            key = group, tuple(ranks)
            self._met[key] = max(self._met[key], number + 1)
        if rank in (None, self.rank):
            return None
        if self.rank in absent:
            if self._patience.compared:
                self._next = next_open(self._key, self._number, self.rank)
                self._met[self._key] = max(self._met[self._key], self._next[0])
            again = "where that rank has called again since, call again here at once, while it waits"
            return PeerSilent(f"{self._name(rank)} has given up waiting for this one: {text}; {again}")
        error = error_of_rank(rank, name, text)
        return type(error)(text) if isinstance(error, PeerLost) else error  # it names the rank that it is about

    def _ended(self) -> PeerLost | None:
        """Return the error about a rank whose program has ended, as an earlier optimizer's watch has heard.

        Its process may live on to serve that optimizer's state, with all its connections.
        """
        known, here = [*_watches.get(c10d._get_default_store(), weakref.WeakKeyDictionary()).items()], self._key[1]
        heard = [(members[other.rank], other.how) for watch, members in known for other in watch.departures]
        for member, how in heard:
            if (how.ends_unserved or how is How.ENDED) and member in here:
                by = " with an exception" * (how is How.FAILED)
                return PeerLost(
                    f"{self._name(here.index(member))} has ended its program{by} while another waited for it in "
                    f"{self._call}; look at its log, and restart all ranks"
                )
        return None

    def _elsewhere(self) -> RankMismatch | None:
        """Say where this rank waits, and return the error if a rank that has not come waits for it elsewhere."""
        here, members, at = dist.get_rank(), self._key[1], where_ranks_wait()
        self.ask(at.set, str(here), json.dumps([self._key, self._number]))
        self._absent = self._missing_from(self._place, CAME)
        if not self._absent and self.name:
            self._absent = self._missing_from(default_store(self.name), "seen")
        first = (self.rank + self._looks) * _ASKED % max(len(self._absent), 1)
        for rank in (members[index] for index in [*self._absent[first:], *self._absent[:first]][:_ASKED]):
            said = self.ask(at.get, str(rank)) if self.ask(at.check, [str(rank)]) else b""
            (group, ranks), number = json.loads(said or '[["", []], 0]')
            there = group, tuple(ranks)
            if here in ranks and there != self._key and number == self._met[there]:
                sides = sorted([(here, self._key), (rank, there)])
                words = (f"{key[0]!r} of ranks {list(key[1])} on rank {member}" for member, key in sides)
                error = RankMismatch(f"process_group is {' and '.join(words)}; pass the same one on every rank")
                both = [(self._key, self._number), (there, number)]
                for key, count in both:
                    said = json.dumps([key[1].index(here), *name_and_text(error), both, []])
                    self.ask(meeting_place(key, count).compare_set, FAILED, "", said)
                self._met[there] += 1
                return error
        return None

    def _missing_from(self, place: Any, kind: str) -> list[int]:
        """Return the ranks without a key of this kind. The first rank that has come looks for all."""
        report, keys = f"missing {kind}", self._keys(kind)
        if not self._first and self.ask(place.check, [report]):
            reported = json.loads(self.ask(place.get, report))
            keys = [keys[rank] for rank in reported]
            if len(keys) > _ASKED:
                return [int(rank) for rank in reported]
        absent = [int(key.rpartition("/")[2]) for key in missing(partial(self.ask, place.check), keys)]
        if self._first:
            self.ask(place.set, report, json.dumps(absent))
        return absent

    def _stopped(self, waited: float) -> PeerSilent | None:
        """Return the error about ranks of this host that have come, and have been stopped for too long since.

        What a process left in the store that has ended may be from an earlier process group.
        """
        stopped = self.watch.stopped() if self.name else []
        self._stopped_at = min(self._stopped_at, waited) if stopped else math.inf
        return self.watch.hung(stopped, waited - self._stopped_at, self._waiting) if stopped else None

    def _broken(self) -> PeerLost | None:
        """Return the error about a rank to which the user's group has no connection any more, if there is one."""
        for rank, text in broken_connections(self._parent):
            if closed_by_timeout(text):  # the connection is gone, and the rank may be there
                how = f"a call of the process group has waited too long for {self._name(rank)}, and {self._call} needs"
                return PeerLost(f"{how} it; look at its log, and restart all ranks ({text})")
            return PeerLost(self._lost_in_call(rank, text))
        return None

    def meaning(self, error: BaseException) -> BaseException:
        """Return what ends this rank's part: the loss of a rank, where the store has failed and that tells why."""
        return (self.lost(_STORE_LOST_S) if is_of_store(error) else None) or error

    def lost(self, seconds: float = 0.0) -> PeerLost | None:
        """Return the error about the one rank that has ended its connections of the user's group within seconds."""
        gone = list[int]()

        def one() -> bool:
            gone[:] = ranks_gone(self._parent)
            return len(gone) == 1

        return PeerLost(self._lost_in_call(gone[0])) if until(one, seconds) else None

    def _lost_in_call(self, rank: int, text: str = "") -> str:
        how = f"{self._name(rank)} has ended, or its host does not answer, while another waited for it in {self._call}"
        return f"{how}; look at its log, and restart all ranks{aside(text)}"

    def _name(self, rank: int) -> str:
        return rank_name(rank, self._key[1][rank])

    def _named(self) -> str:
        """Return names of the ranks that have not come."""
        others = f"one or more of the other ranks ({len(self._key[1]) - 1})"
        return ", ".join(map(self._name, self._absent)) or others


def require_same(calls: Sequence[str]) -> None:
    """Raise RankMismatch unless all ranks are in the same call; "" is a message in the middle of one."""
    for rank, call in enumerate(calls):
        if call != calls[0] and "" in (call, calls[0]):
            (within, _), (left, called) = sorted([(0, calls[0]), (rank, call)], key=lambda each: each[1])
            raise RankMismatch(
                f"rank {within} is in the middle of a call where rank {left} called {called}: an exception has ended "
                f"the call there; look at the log of rank {left}, and restart all ranks"
            )
        if call != calls[0]:
            raise RankMismatch(
                f"rank 0 called {calls[0]} where rank {rank} called {call}; every rank must call both, in one order"
            )
