"""How many ranks of this host step on the same cores."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Sequence
from typing import NamedTuple

from ..comm.groups import Group
from ..comm.process_identity import host_if_known
from ..kernels.threads import checked_threads, meet_sharers
from ..system.log import log


def agree_on_threads(policy: str, threads: int | None, group: Group) -> None:
    """Learn which other ranks of this host share its cores, and log how many threads step on this rank. Collective.

    Args:
        policy: the name of the policy by which they step.
        threads: the user's number, or ``None`` for :func:`default_threads`.
    """
    usable = sorted(os.sched_getaffinity(0))
    shared, count = shared_by(agreed_sharers(group, usable)), checked_threads(threads)
    log.info("rank %d: %s steps with %d threads on %d cores%s", group.rank, policy, count, len(usable), shared)


class Seat(NamedTuple):
    """A rank of this host: the cores that it may run on, and the NUMA node of its accelerator, if known."""

    cores: frozenset[int]
    node: int | None = None


class Seats(NamedTuple):
    """The ranks of this host, in the order of the group; ``own`` is the position of this one."""

    ranks: Sequence[Seat]
    own: int

    @property
    def mine(self) -> Seat:
        """This rank."""
        return self.ranks[self.own]

    @property
    def sharers(self) -> int:
        """How many ranks may run on some of this one's cores, this one included."""
        return sum(not self.mine.cores.isdisjoint(seat.cores) for seat in self.ranks)


def agreed_seats(group: Group, usable: Collection[int], node: int | None = None) -> Seats:
    """Return the ranks of this host, each with the cores and the node that it passes. Collective."""
    mine = {"host": host_if_known(), "cores": sorted(usable), "node": node}
    offers = [json.loads(payload) for payload in group.all_gather_bytes(json.dumps(mine).encode())]
    near = [rank for rank, offer in enumerate(offers) if rank == group.rank or offer["host"] == mine["host"] != ""]
    seats = [Seat(frozenset(offers[rank]["cores"]), offers[rank]["node"]) for rank in near]
    return Seats(seats, near.index(group.rank))


def agreed_sharers(group: Group, usable: Sequence[int]) -> int:
    """Return how many ranks of this host may run on some of these cores, this one included. Collective."""
    return meet_sharers(agreed_seats(group, usable).sharers)


def shared_by(sharers: int) -> str:
    """Return the end of a message about cores that so many ranks share."""
    return f", which {sharers} ranks share" if sharers > 1 else ""
