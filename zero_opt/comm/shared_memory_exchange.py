"""The exchange of buckets through shared memory: ranks of one host map each other's staging, and read it there.

Gradients go from where autograd left them through two small slots of staging, and parameters to where they are; see
native/exchange/host_exchange.hpp for how, and for why two slots are enough.
"""

from __future__ import annotations

import functools
import json
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ..errors import StepDesync
from ..kernels.checks import GRAD_DTYPES
from ..system.extension import native, require_native
from ..system.limits import limit_in
from ..system.log import log
from ..system.shared_memory import PAGE, Arena, page_aligned
from . import process_identity
from .exchange import NATIVE_DTYPES, BucketReduction, Exchange, Ident, ParamRuns, StagingPool, nothing_left
from .groups import Group, bytes_tensor
from .hierarchical_exchange import HierarchicalExchange
from .pairwise_exchange import PairwiseExchange
from .process_identity import ProcessIdentity
from .shared_ranks import SharedPeer, SharedRanks, native_bucket

# The first page holds the peer words, and after them a nonce that proves whose memory it is.
_NONCE_BYTES = 16

# What one rank stages should be in a cache still when its peers read it, and waiting be rare.
_SLOT_BYTES = 1 << 19
_LINE_BYTES = 64


class HostExchange(Exchange):
    """The exchange through shared memory.

    What the kernels cannot add up (complex numbers) goes through ``fallback``, on every rank.
    """

    way = "shared memory"

    def __init__(self, shared: SharedRanks, fallback: PairwiseExchange, pool: StagingPool) -> None:
        super().__init__(pool)
        self.adds_up, self.nbytes = GRAD_DTYPES, shared.nbytes
        self._shared, self._fallback = shared, fallback

    @property
    def sent_nbytes(self) -> int:
        return self._sent_nbytes + self._fallback.sent_nbytes

    def reduce_runs(self, reduction: BucketReduction) -> bool:
        ident, runs, bounds, out, sums, *_ = reduction
        if out.dtype not in NATIVE_DTYPES:
            return self._shared.meet(ident) and self._fallback.reduce_runs(reduction)
        self._note_reduction(bounds, self._fallback.rank, out.element_size())
        return self._shared.reduce(ident, native_bucket(runs, bounds, out.dtype, sums), out.data_ptr())

    def gather_runs(self, ident: Ident, runs: ParamRuns, bounds: Sequence[int]) -> Callable[[], None]:
        """Gather, and be done on return."""
        dtype = runs.first.dtype
        if dtype not in NATIVE_DTYPES:
            return self._fallback.gather_runs(ident, runs, bounds)
        self._note_gather(bounds, self._fallback.rank, dtype.itemsize)
        bucket = runs.cache.get(dtype)
        if bucket is None:
            bucket = runs.cache[dtype] = native_bucket(runs, bounds, dtype)
        if not self._shared.gather(ident, bucket):
            raise StepDesync(f"another rank skipped the parameter exchange of step {ident.step}")
        return nothing_left

    def fail(self, step: int) -> None:
        self._shared.fail(step)

    def failures(self, step: int) -> Callable[[], Sequence[int]]:
        """Return a function that reads one word of memory per rank."""
        return partial(self._shared.failed, step)

    def leave(self) -> None:
        self._shared.leave()

    def close(self) -> None:
        self._shared.close()


def build_host_exchange(
    group: Group, messages: PairwiseExchange, pool: StagingPool, largest_bucket_bytes: int
) -> Exchange:
    """Return the exchange that uses the memory which ranks of one host share, as far as they do. Collective.

    Returns:
        The exchange through shared memory if all ranks are on one host; the one in two stages if hosts have as many
        ranks each, a power of two that follow each other; else ``messages``, also where a rank cannot map the memory of
        another rank of its host.
    """
    nbytes = own_nbytes(group.world_size, largest_bucket_bytes)
    own: Arena | None = None
    offer: dict[str, Any] = {"host": "", "error": ""}
    try:
        offer["host"] = process_identity.host_id()
        own, nonce = _new_arena(nbytes), secrets.token_bytes(_NONCE_BYTES)
        own.view(native.PEER_WORDS_NBYTES, _NONCE_BYTES, torch.uint8).copy_(bytes_tensor(nonce))
        offer.update(process=ProcessIdentity.of_this_process(), fd=own.fd, nonce=nonce.hex())
    except Exception as error:  # whatever it is, the other ranks must not wait for this one
        offer["error"] = f"rank {group.rank} has no shared memory: {_why(error)}"
    offers = [json.loads(p) for p in group.all_gather_bytes(json.dumps(offer).encode())]
    per_host = ranks_per_host([other["host"] for other in offers])
    failures, peers = [other["error"] for other in offers], list[SharedPeer]()
    if own is not None and per_host > 1 and not any(failures):
        first = group.rank - group.rank % per_host
        failures = _map_all(group, {rank: offers[rank] for rank in range(first, first + per_host)}, nbytes, peers)
        if not any(failures):
            if per_host == group.world_size:
                return HostExchange(SharedRanks(group, own, peers), messages, pool)
            messages.connect(range(group.rank % per_host, group.world_size, per_host))
            return HierarchicalExchange(SharedRanks(group, own, peers, divisor=1), messages, per_host, pool)
    if own is not None:
        own.close()
    if group.rank == 0 and per_host > 1:
        _warn_once(next(filter(None, failures)))
    return messages


def ranks_per_host(hosts: Sequence[str]) -> int:
    """Return how many ranks share each host, if their sums can be added up there first, or all ranks share one.

    Args:
        hosts: by rank. A host without a name may be any host.

    Returns:
        The number of ranks for one host; for several the power of two of which each host has as many ranks, with
        consecutive numbers; else 1. See [Note: order of summation] in comm/exchange.py.
    """
    names = {host for host in hosts if host}
    if len(names) <= 1:
        return len(hosts)
    count = len(hosts) // len(names)
    blocks = [set(hosts[first : first + count]) for first in range(0, len(hosts), count)]
    aligned = "" not in hosts and len(blocks) == len(names) and all(len(block) == 1 for block in blocks)
    return count if aligned and count.bit_count() == 1 else 1


def own_nbytes(world_size: int, largest_bucket_bytes: int) -> int:
    """Return the bytes of shared memory that each rank adds: a page of words, and two slots of staging."""
    slot_bytes = max(min(_SLOT_BYTES, largest_bucket_bytes), _LINE_BYTES * world_size)
    return PAGE + 2 * page_aligned(slot_bytes)


def _new_arena(nbytes: int) -> Arena:
    require_native()
    return Arena.create("zero_opt exchange", nbytes)


def _map_all(group: Group, offers: Mapping[int, dict[str, Any]], nbytes: int, peers: list[SharedPeer]) -> list[str]:
    """Map other ranks' memory and add them to ``peers``; returns each rank's failure, "" if none. Collective.

    Args:
        offers: by rank, of the ranks of this host.
    """
    failure = ""
    try:
        peers.extend(_map_peers(group.rank, offers, nbytes))
    except Exception as error:  # whatever it is, the other ranks must not wait for this one
        failure = f"rank {group.rank} cannot map another rank's memory: {_why(error)}"
    return [payload.decode() for payload in group.all_gather_bytes(failure.encode())]


def _map_peers(rank: int, offers: Mapping[int, dict[str, Any]], nbytes: int) -> Iterable[SharedPeer]:
    for other, offer in offers.items():
        if other != rank:
            process, nonce = ProcessIdentity(*offer["process"]), bytes.fromhex(offer["nonce"])
            arena = Arena.of_peer(process.pid, offer["fd"], nbytes, (native.PEER_WORDS_NBYTES, nonce))
            yield SharedPeer(other, process, arena)


def _why(error: Exception) -> str:
    """Return what is wrong without descriptor numbers, so that the next optimizer gives the same warning."""
    text = (error.strerror if isinstance(error, OSError) else None) or str(error)
    limit = limit_in(text)
    return text if limit is None else f"{text}; raise the limit of {limit}"


@functools.cache
def _warn_once(reason: str) -> None:
    log.warning("exchanging gradients through torch.distributed, not shared memory (%s)", reason)
