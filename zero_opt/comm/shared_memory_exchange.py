"""The exchange of buckets through shared memory: ranks of one host map each other's staging, and read it there.

Gradients go from where autograd left them through two small slots of staging, and parameters to where they are; see
native/exchange/host_exchange.hpp for how, and for why two slots are enough.
"""

from __future__ import annotations

import functools
import json
import os
import secrets
import select
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from ..errors import OptimizerClosed, PeerLost, StepDesync
from ..kernels.checks import GRAD_DTYPES
from ..system.extension import native, native_available
from ..system.failures import on_failure
from ..system.log import log
from ..system.shared_memory import PAGE, Arena, above_stdio, page_aligned
from . import process_identity
from .exchange import (
    NATIVE_DTYPES,
    BucketReduction,
    Exchange,
    Ident,
    ParamRuns,
    Run,
    SliceSums,
    StagingPool,
    nothing_left,
)
from .groups import Group, bytes_tensor

# The first page holds the peer words, and after them a nonce that proves whose memory it is.
_NONCE_BYTES = 16

_PASSED, _NOT_YET = 2, 3
# What one rank stages should be in a cache still when its peers read it, and waiting be rare.
_SLOT_BYTES = 1 << 19
_LINE_BYTES = 64
# Offset in the first page of the number, from 1, of the last step that failed on the arena's rank. The rank writes it
# before it publishes its part of that step's last gather, and peers read it after they have seen that part.
_FAILED_AT = 1024
# Offset of a byte that the rank sets once it takes part in no further exchange.
_LEFT_AT = _FAILED_AT + 8
# Waiting returns to Python this often, to notice a dead peer and Ctrl-C.
_SLICE_S = 0.05
# Seconds that close() waits for an exchange under way, which ends within _SLICE_S unless the machine is overloaded.
_ENDS_S = 5.0


class _Peer:
    """Another rank: its arena and its process."""

    def __init__(self, rank: int, pid: int, arena: Arena) -> None:
        self.rank, self.pid, self.arena = rank, pid, arena
        with on_failure(arena.close):
            pidfd = above_stdio(os.pidfd_open(pid))
        self._close = weakref.finalize(self, os.close, pidfd)
        self._poll = select.poll()
        self._poll.register(pidfd, select.POLLIN)

    def gone(self) -> bool:
        """Return whether the rank has left: it has set its byte, or its process has ended."""
        return bool(self.arena.bytes[_LEFT_AT]) or bool(self._poll.poll(0))

    def close(self) -> None:
        """Close the descriptors of the process and of its memory."""
        self._close()
        self.arena.close()


class HostExchange(Exchange):
    """The exchange through shared memory.

    What the kernels cannot add up (complex numbers) goes through ``fallback``, on every rank.
    """

    def __init__(self, group: Group, own: Arena, peers: Sequence[_Peer], fallback: Exchange, pool: StagingPool) -> None:
        super().__init__(pool)
        self.adds_up = GRAD_DTYPES
        self._group, self._closed, self._pid, self._reading = group, False, os.getpid(), threading.Lock()
        self._own, self._peers, self._fallback = own, {peer.rank: peer for peer in peers}, fallback
        self.nbytes = own.bytes.numel()
        arenas = [arena for _, arena in sorted({group.rank: own, **{peer.rank: peer.arena for peer in peers}}.items())]
        self._failed = [arena.view(_FAILED_AT, 1, torch.int64) for arena in arenas]
        slot_bytes = (own.bytes.numel() - PAGE) // 2
        self._ranks = native.HostRanks(group.rank, [arena.address for arena in arenas], PAGE, slot_bytes)

    def reduce_runs(self, reduction: BucketReduction) -> bool:
        ident, runs, bounds, out, sums = reduction
        if out.dtype not in NATIVE_DTYPES:
            return self._fallback.reduce_runs(reduction)
        bucket = _native_bucket(runs, bounds, out.dtype, sums)
        return self._complete(ident, partial(self._ranks.reduce, ident, bucket, out.data_ptr()))

    def gather_runs(self, ident: Ident, runs: ParamRuns, bounds: Sequence[int]) -> Callable[[], None]:
        """Gather, and be done on return."""
        dtype = runs.first.dtype
        if dtype not in NATIVE_DTYPES:
            return self._fallback.gather_runs(ident, runs, bounds)
        if runs.native is None:
            runs.native = _native_bucket(runs, bounds, dtype)
        if not self._complete(ident, partial(self._ranks.gather, ident, runs.native)):
            raise StepDesync(f"another rank skipped the parameter exchange of step {ident.step}")
        return nothing_left

    def _complete(self, ident: Ident, advance: Callable[[int, float], tuple[int, int, int]]) -> bool:
        """Go through all pieces of an exchange; returns ``False`` if a peer went on without it."""
        with self._reading, self._group.exchanging():
            return self._go_through(ident, advance)

    def _go_through(self, ident: Ident, advance: Callable[[int, float], tuple[int, int, int]]) -> bool:
        deadline, published, look = time.monotonic() + self._group.timeout_s, 0, None
        while True:
            if self._closed:
                closed = OptimizerClosed("closed while an exchange with the other ranks was under way")
                raise self._group.explain("", 0.0) or closed
            state, rank, came = advance(published, _SLICE_S)
            if state != _NOT_YET:
                return state != _PASSED
            if came > published:
                deadline, published = time.monotonic() + self._group.timeout_s, came
            look = look or self._group.lookout()
            self._group.awaits(rank)
            look()
            if self._peers[rank].gone():
                # It may have published just before it left.
                state, still, published = advance(published, 0.0)
                if state == _NOT_YET and still == rank:
                    raise self._lost(rank, ident)
            elif time.monotonic() > deadline:
                raise self._group.leave_silent(
                    rank,
                    f"rank {rank} (pid {self._peers[rank].pid}) has not come to the same exchange of step {ident.step} "
                    f"in {self._group.timeout_s:.0f} s; look at what it does (py-spy dump), or give it longer with "
                    "checks=Checks(timeout=...)",
                )

    def fail(self, step: int) -> None:
        self._failed[self._group.rank].fill_(step + 1)

    def failures(self, step: int) -> Callable[[], Sequence[int]]:
        """Return a function that reads one word of memory per rank."""
        return lambda: [rank for rank, word in enumerate(self._failed) if word.item() == step + 1]

    def _lost(self, rank: int, ident: Ident) -> PeerLost:
        """Return the error about a rank that will not come to an exchange."""
        gone = f"rank {rank} (pid {self._peers[rank].pid}) has left, or died, before the exchange of step {ident.step}"
        return self._group.explain(gone) or PeerLost(f"{gone}; restart all ranks from the last checkpoint")

    def leave(self) -> None:
        """Set this rank's byte; a forked child, which shares the memory, leaves the byte as it is."""
        self._closed = True
        if os.getpid() == self._pid and self._own.bytes.numel():
            self._own.bytes[_LEFT_AT] = 1

    def close(self) -> None:
        """End an exchange that still waits for a peer, with an error, and unmap all memory."""
        self.leave()
        for peer in self._peers.values():
            peer.close()
        self._own.close()
        if self._reading.acquire(timeout=_ENDS_S):
            for arena in (self._own, *(peer.arena for peer in self._peers.values())):
                arena.unmap()
            self._failed.clear()
            self._reading.release()


def _native_bucket(
    runs: Sequence[Run], bounds: Sequence[int], dtype: torch.dtype, sums: Sequence[SliceSums] = ()
) -> Any:
    """Return what the native exchange takes; the caller keeps the tensors alive."""
    listed = [(start, numel, 0 if tensor is None else tensor.data_ptr(), add) for start, numel, tensor, add in runs]
    places = [(part.start, part.numel, part.squares.data_ptr()) for part in sums]
    return native.HostBucket(listed, list(bounds), NATIVE_DTYPES[dtype], places)


def build_host_exchange(group: Group, fallback: Exchange, pool: StagingPool, largest_bucket_bytes: int) -> Exchange:
    """Return a shared-memory exchange if every rank can map every other's memory, else ``fallback``. Collective."""
    nbytes = own_nbytes(group.world_size, largest_bucket_bytes)
    own: Arena | None = None
    offer: dict[str, Any] = {"host": "", "error": ""}
    try:
        offer["host"] = process_identity.host_id()
        own, nonce = _new_arena(nbytes), secrets.token_bytes(_NONCE_BYTES)
        own.view(native.PEER_WORDS_NBYTES, _NONCE_BYTES, torch.uint8).copy_(bytes_tensor(nonce))
        offer.update(pid=os.getpid(), fd=own.fd, nonce=nonce.hex())
    except Exception as error:  # whatever it is, the other ranks must not wait for this one
        offer["error"] = f"rank {group.rank} has no shared memory: {_why(error)}"
    offers = [json.loads(p) for p in group.all_gather_bytes(json.dumps(offer).encode())]
    # A host without a name may be any host. Ranks on several hosts are no reason to warn.
    several = len({other["host"] for other in offers if other["host"]}) > 1
    failures, peers = [other["error"] for other in offers], list[_Peer]()
    if own is not None and not several and not any(failures):
        failures = _map_all(group, offers, nbytes, peers)
        if not any(failures):
            return HostExchange(group, own, peers, fallback, pool)
    for peer in peers:
        peer.close()
    if own is not None:
        own.close()
    if group.rank == 0 and not several:
        _warn_once(next(filter(None, failures)))
    return fallback


def own_nbytes(world_size: int, largest_bucket_bytes: int) -> int:
    """Return the bytes of shared memory that each rank adds: a page of words, and two slots of staging."""
    slot_bytes = max(min(_SLOT_BYTES, largest_bucket_bytes), _LINE_BYTES * world_size)
    return PAGE + 2 * page_aligned(slot_bytes)


def _new_arena(nbytes: int) -> Arena:
    if not native_available():
        raise OSError("the native extension is not built")
    return Arena.create("zero_opt exchange", nbytes)


def _map_all(group: Group, offers: Sequence[dict[str, Any]], nbytes: int, peers: list[_Peer]) -> list[str]:
    """Map the other ranks' memory and add them to ``peers``; returns each rank's failure, "" if none. Collective."""
    failure = ""
    try:
        peers.extend(_map_peers(group.rank, offers, nbytes))
    except Exception as error:  # whatever it is, the other ranks must not wait for this one
        failure = f"rank {group.rank} cannot map another rank's memory: {_why(error)}"
    return [payload.decode() for payload in group.all_gather_bytes(failure.encode())]


def _map_peers(rank: int, offers: Sequence[dict[str, Any]], nbytes: int) -> Iterable[_Peer]:
    for other, offer in enumerate(offers):
        if other != rank:
            pid, token = offer["pid"], (native.PEER_WORDS_NBYTES, bytes.fromhex(offer["nonce"]))
            yield _Peer(other, pid, Arena.of_peer(pid, offer["fd"], nbytes, token))


def _why(error: Exception) -> str:
    """Return what is wrong without descriptor numbers, so that the next optimizer gives the same warning."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


@functools.cache
def _warn_once(reason: str) -> None:
    log.warning("exchanging gradients through torch.distributed, not shared memory (%s)", reason)
