"""Ranks on one host exchange buckets through shared memory: each maps the others' staging and reads it there.

Gradients go from where autograd left them through two small slots of staging, and parameters to where they are; see
native/host_exchange.hpp for how, and for why two slots are enough.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import platform
import secrets
import select
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from .cpu_adam import native_available
from .cpu_adam.checks import GRAD_DTYPES
from .errors import OptimizerClosed, PeerLost, StepDesync
from .exchange import (
    NATIVE_DTYPES,
    DirectExchange,
    Exchange,
    Gathering,
    Ident,
    PooledExchange,
    Run,
    SliceSums,
    StagingPool,
    chunks_of,
)
from .shared_memory import PAGE, Arena, page_aligned

if native_available():
    from . import _native
else:
    _native = None  # type: ignore[assignment]

_log = logging.getLogger("zero_opt")
# Differs between hosts, and between two starts of one.
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_PASSED, _NOT_YET = 2, 3
# What one rank stages should be in a cache still when its peers read it, and waiting be rare.
_SLOT_BYTES = 1 << 19
_LINE_BYTES = 64
# The first page holds the peer words, and at this offset a nonce that proves whose memory it is.
_NONCE_AT, _NONCE_BYTES = 256, 16
# A byte that its owner sets once it takes part in no further exchange.
_LEFT_AT = _NONCE_AT + _NONCE_BYTES
# Waiting returns to Python this often, to notice a dead peer and Ctrl-C.
_LOOK_S = 0.05


class ControlGroup(Protocol):
    """What the handshake needs of a process group."""

    rank: int
    world_size: int
    timeout_s: float

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """Every rank's payload, in rank order."""

    def explain(self, text: str, patience_s: float | None = None) -> PeerLost | None:
        """The error that names who has left, where a rank is gone, if that can be told."""


class _Peer:
    """Another rank: its arena, and whether it takes part."""

    def __init__(self, rank: int, pid: int, arena: Arena) -> None:
        self.rank, self.pid, self.arena = rank, pid, arena
        pidfd = os.pidfd_open(pid)
        self._close = weakref.finalize(self, os.close, pidfd)
        self._poll = select.poll()
        self._poll.register(pidfd, select.POLLIN)

    def gone(self) -> bool:
        """Whether the rank takes part in no further exchange: it says so, or its process has ended."""
        return bool(self.arena.bytes[_LEFT_AT]) or bool(self._poll.poll(0))

    def close(self) -> None:
        """Let go of the process and its memory."""
        self._close()
        self.arena.close()


def _number(ident: Ident) -> int:
    """An ident as one 64-bit word that orders as idents do and is never 0."""
    return (ident.step + 1) << 40 | ident.epoch << 20 | ident.sequence


class HostExchange(PooledExchange):
    """See the module. What the kernels cannot add up (complex numbers) goes through ``fallback``, on every rank."""

    def __init__(
        self, group: ControlGroup, own: Arena, peers: Sequence[_Peer], fallback: Exchange, pool: StagingPool
    ) -> None:
        super().__init__(pool)
        self.adds_up = GRAD_DTYPES
        self._group, self._closed, self._pid = group, False, os.getpid()
        self._own, self._peers, self._fallback = own, {peer.rank: peer for peer in peers}, fallback
        self.nbytes = own.bytes.numel()
        arenas = {group.rank: own.address, **{peer.rank: peer.arena.address for peer in peers}}
        slot_bytes = (own.bytes.numel() - PAGE) // 2
        self._ranks = _native.HostRanks(group.rank, [arenas[rank] for rank in sorted(arenas)], PAGE, slot_bytes)

    def direct(self, dtype: torch.dtype) -> DirectExchange | None:
        """See :class:`Exchange`."""
        return self if dtype in NATIVE_DTYPES else self._fallback.direct(dtype)

    def reduce_runs(
        self, ident: Ident, runs: Sequence[Run], bounds: Sequence[int], out: Tensor, sums: Sequence[SliceSums] = ()
    ) -> bool:
        """See :class:`DirectExchange`."""
        bucket = _bucket(runs, bounds, out.dtype, sums)
        return self._complete(ident, partial(self._ranks.reduce, _number(ident), bucket, out.data_ptr()))

    def gather_runs(self, ident: Ident, runs: Sequence[Run], bounds: Sequence[int]) -> Callable[[], None]:
        """See :class:`DirectExchange`; complete on return."""
        dtype = next(run.values.dtype for run in runs if run.values is not None)
        if not self._complete(ident, partial(self._ranks.gather, _number(ident), _bucket(runs, bounds, dtype))):
            raise StepDesync(f"another rank skipped the parameter exchange of step {ident.step}")
        return _nothing_left

    def _complete(self, ident: Ident, advance: Callable[[int, float], tuple[int, int, int]]) -> bool:
        """Go through all pieces of an exchange; ``False`` if a peer went on without it."""
        deadline, published = time.monotonic() + self._group.timeout_s, 0
        while True:
            state, rank, came = advance(published, _LOOK_S)
            if state != _NOT_YET:
                return state != _PASSED
            if came > published:
                deadline, published = time.monotonic() + self._group.timeout_s, came
            if self._closed:
                closed = OptimizerClosed("closed while an exchange with the other ranks was under way")
                raise self._group.explain("", 0.0) or closed
            if self._peers[rank].gone():
                # It may have published just before that.
                state, still, published = advance(published, 0.0)
                if state == _NOT_YET and still == rank:
                    raise self._lost(rank, ident)
            elif time.monotonic() > deadline:
                raise PeerLost(
                    f"rank {rank} (pid {self._peers[rank].pid}) has not come to the same exchange of step "
                    f"{ident.step} in {self._group.timeout_s:.0f} s"
                )

    def _lost(self, rank: int, ident: Ident) -> PeerLost:
        """The error about a rank that will not come to an exchange."""
        gone = f"rank {rank} (pid {self._peers[rank].pid}) has left, or died, before the exchange of step {ident.step}"
        return self._group.explain(gone) or PeerLost(f"{gone}; restart all ranks from the last checkpoint")

    def reduce_scatter(self, ident: Ident, bucket: Tensor, bounds: Sequence[int], out: Tensor) -> bool:
        """See :class:`Exchange`."""
        if bucket.dtype not in NATIVE_DTYPES:
            return self._fallback.reduce_scatter(ident, bucket, bounds, out)
        return self.reduce_runs(ident, [Run(0, bucket.numel(), bucket)], bounds, out)

    def all_gather(self, ident: Ident, bucket: Tensor, bounds: Sequence[int]) -> Gathering:
        """See :class:`Exchange`; complete on return."""
        if bucket.dtype not in NATIVE_DTYPES:
            return self._fallback.all_gather(ident, bucket, bounds)
        self.gather_runs(ident, [Run(0, bucket.numel(), bucket)], bounds)
        return Gathering((), chunks_of(bucket, bounds))

    def leave(self) -> None:
        """See :class:`Exchange`; a fork, whose memory this is too, leaves nothing."""
        self._closed = True
        if os.getpid() == self._pid:
            self._own.bytes[_LEFT_AT] = 1

    def close(self) -> None:
        """See :class:`Exchange`; an exchange that still waits for a peer ends with an error."""
        self.leave()
        for peer in self._peers.values():
            peer.close()
        self._own.close()


def _nothing_left() -> None:
    """An exchange that is complete already."""


def _bucket(runs: Sequence[Run], bounds: Sequence[int], dtype: torch.dtype, sums: Sequence[SliceSums] = ()) -> Any:
    """What the native exchange takes; the caller keeps the tensors alive."""
    listed = [(run.start, run.numel, 0 if run.values is None else run.values.data_ptr(), run.add) for run in runs]
    places = [(part.start, part.numel, part.squares.data_ptr()) for part in sums]
    return _native.HostBucket(listed, list(bounds), NATIVE_DTYPES[dtype], places)


def build_host_exchange(
    group: ControlGroup, fallback: Exchange, pool: StagingPool, largest_bucket_bytes: int
) -> Exchange:
    """A shared-memory exchange if every rank can map every other's memory, else ``fallback``. Collective."""
    own, error = None, "the native extension is not built"
    if _native is not None:
        try:
            own, error = _new_arena(own_nbytes(group.world_size, largest_bucket_bytes)), ""
        except OSError as found:
            error = f"shared memory: {found}"
    offer: dict[str, Any] = {"host": host_id(), "error": error}
    if own is not None:
        offer.update(pid=os.getpid(), fd=own.fd, nonce=_nonce(own))
    offers = [json.loads(p) for p in group.all_gather_bytes(json.dumps(offer).encode())]
    peers: list[_Peer] = []
    if own is not None and all(other["error"] == "" for other in offers):
        try:
            peers.extend(_map_peers(group.rank, offers))
        except OSError as found:
            error = f"mapping a peer's memory: {found}"
    verdicts = [p.decode() for p in group.all_gather_bytes(error.encode())]
    if own is not None and len(peers) == group.world_size - 1 and not any(verdicts):
        return HostExchange(group, own, peers, fallback, pool)
    for peer in peers:
        peer.close()
    if own is not None:
        own.close()
    _explain(group.rank, offers, verdicts)
    return fallback


def own_nbytes(world_size: int, largest_bucket_bytes: int) -> int:
    """Bytes of shared memory that each rank adds: a page of words, and two slots of staging."""
    slot_bytes = max(min(_SLOT_BYTES, largest_bucket_bytes), _LINE_BYTES * world_size)
    return PAGE + 2 * page_aligned(slot_bytes)


def _new_arena(nbytes: int) -> Arena:
    arena = Arena.create("zero_opt exchange", nbytes)
    nonce = torch.frombuffer(bytearray(secrets.token_bytes(_NONCE_BYTES)), dtype=torch.uint8)
    arena.bytes[_NONCE_AT : _NONCE_AT + _NONCE_BYTES] = nonce
    return arena


def _nonce(arena: Arena) -> str:
    return bytes(arena.bytes[_NONCE_AT : _NONCE_AT + _NONCE_BYTES].tolist()).hex()


def host_id() -> str:
    """Names this host, and this start of it."""
    try:
        with open(_BOOT_ID, encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return platform.node()


def _map_peers(rank: int, offers: Sequence[dict[str, Any]]) -> Iterable[_Peer]:
    for other, offer in enumerate(offers):
        if other == rank:
            continue
        if offer["host"] != host_id():
            raise OSError("ranks are on different hosts")
        arena = Arena.of_peer(offer["pid"], offer["fd"])
        if arena.bytes.numel() <= PAGE or _nonce(arena) != offer["nonce"]:
            arena.close()
            raise OSError(f"process {offer['pid']} here is not rank {other} (another process namespace)")
        yield _Peer(other, offer["pid"], arena)


def _explain(rank: int, offers: Sequence[dict[str, Any]], verdicts: Sequence[str]) -> None:
    """Say on rank 0 why the ranks do not share memory; that they are on several hosts needs no saying."""
    if rank == 0 and len({offer["host"] for offer in offers}) == 1:
        _warn_once(next((verdict for verdict in verdicts if verdict), "unknown"))


@functools.cache
def _warn_once(reason: str) -> None:
    _log.warning("exchanging gradients through torch.distributed, not shared memory (%s)", reason)
