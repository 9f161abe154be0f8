"""How many ranks of this host step on the same cores."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

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


def agreed_sharers(group: Group, usable: Sequence[int]) -> int:
    """Return how many ranks of this host may run on some of these cores, this one included. Collective."""
    mine = {"host": host_if_known(), "cores": usable}
    offers = [json.loads(payload) for payload in group.all_gather_bytes(json.dumps(mine).encode())]
    near = [offer["cores"] for offer in offers if offer["host"] and offer["host"] == mine["host"]]
    return meet_sharers(max(1, sum(not set(usable).isdisjoint(cores) for cores in near)))


def shared_by(sharers: int) -> str:
    """Return the end of a message about cores that so many ranks share."""
    return f", which {sharers} ranks share" if sharers > 1 else ""
