"""Ranks on one host exchange buckets through shared memory: each maps the others' staging and reads it there.

[Note: two staging slots]
Every rank goes through one sequence of exchanges, of which it may skip some: stage into its free slot, publish the
exchange's ident, wait until every peer has published it or a later one, read. A rank that stages into the slot of
exchange n again has since been through another, m, for which every peer had to publish m or a later one, and a peer
does so only when it has read n. So two slots need no further synchronisation. Where a peer has published a later one,
it has skipped this one; the exchange is void then, but only once the other peers too have published it or a later one.
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
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from .cpu_adam import native_available
from .errors import PeerLost, StepDesync
from .exchange import Exchange, Gathering, Ident, OwnPart, chunks_of, mean_in_rank_order
from .shared_memory import PAGE, Arena, page_aligned

if native_available():
    from . import _native
else:
    _native = None  # type: ignore[assignment]

_log = logging.getLogger("zero_opt")
# Differs between hosts, and between two starts of one.
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_PASSED, _NOT_YET = 2, 3
_NATIVE_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
# The first page holds the peer words, and at this offset a nonce that proves whose memory it is.
_NONCE_AT, _NONCE_BYTES = 256, 16
# Waiting returns to Python this often, to notice a dead peer and Ctrl-C.
_LOOK_S = 0.1


class ControlGroup(Protocol):
    """What the handshake needs of a process group."""

    rank: int
    world_size: int
    timeout_s: float

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """Every rank's payload, in rank order."""


class _Peer:
    """Another rank: its arena, and whether its process lives."""

    def __init__(self, rank: int, pid: int, arena: Arena) -> None:
        self.rank, self.pid, self.arena = rank, pid, arena
        pidfd = os.pidfd_open(pid)
        self._close = weakref.finalize(self, os.close, pidfd)
        self._poll = select.poll()
        self._poll.register(pidfd, select.POLLIN)

    def dead(self) -> bool:
        """Whether the process has ended."""
        return bool(self._poll.poll(0))

    def close(self) -> None:
        """Let go of the process and its memory."""
        self._close()
        self.arena.close()


def _number(ident: Ident) -> int:
    """An ident as one 64-bit word that orders as idents do and is never 0."""
    return (ident.step + 1) << 40 | ident.epoch << 20 | ident.sequence


class HostExchange:
    """See the module. Buckets larger than a slot go through ``fallback``, alike on every rank."""

    scratch_shards, gathers_ahead = 0, 0

    def __init__(self, group: ControlGroup, own: Arena, peers: Sequence[_Peer], fallback: Exchange) -> None:
        self._rank, self._timeout_s = group.rank, group.timeout_s
        self._own, self._peers, self._fallback = own, {peer.rank: peer for peer in peers}, fallback
        self._slot_bytes = (own.bytes.numel() - PAGE) // 2
        self._slot = 0

    @property
    def nbytes(self) -> int:
        """See :class:`Exchange`; the arena, of which only the part that buckets fill is ever touched."""
        return self._own.bytes.numel()

    def _fits(self, bucket: Tensor) -> bool:
        return bucket.numel() * bucket.element_size() <= self._slot_bytes

    def _staged(self, arena: Arena, slot: int, numel: int, dtype: torch.dtype) -> Tensor:
        return arena.view(PAGE + slot * self._slot_bytes, numel, dtype)

    def staging(self, numel: int, dtype: torch.dtype, device: torch.device, turn: int = 0) -> Tensor:
        """See :class:`Exchange`; the slot that the last exchange did not use."""
        if numel * dtype.itemsize > self._slot_bytes:
            return self._fallback.staging(numel, dtype, device, turn)
        return self._staged(self._own, self._slot, numel, dtype)

    def _exchange(self, ident: Ident, bucket: Tensor) -> list[Tensor] | None:
        """Every rank's staged bucket, in rank order; ``None`` if a peer went on without this exchange."""
        number = _number(ident)
        _native.publish(self._own.address, self._slot, number)
        self._slot ^= 1
        slots = {rank: self._wait(peer, number) for rank, peer in self._peers.items()}  # all: see the note
        if _PASSED in slots.values():
            return None
        buckets = {
            rank: self._staged(self._peers[rank].arena, slot, bucket.numel(), bucket.dtype)
            for rank, slot in slots.items()
        }
        buckets[self._rank] = bucket
        return [buckets[rank] for rank in sorted(buckets)]

    def _wait(self, peer: _Peer, number: int) -> int:
        deadline = time.monotonic() + self._timeout_s
        while (found := _native.wait_staged(peer.arena.address, number, _LOOK_S)) == _NOT_YET:
            if peer.dead():
                # It may have published just before it ended.
                found = _native.wait_staged(peer.arena.address, number, 0)
                if found == _NOT_YET:
                    raise PeerLost(f"rank {peer.rank} (pid {peer.pid}) has died; restart from the last checkpoint")
                break
            if time.monotonic() > deadline:
                raise PeerLost(
                    f"rank {peer.rank} (pid {peer.pid}) has not come to the same exchange in {self._timeout_s:.0f} s"
                )
        return found

    def reduce_scatter(self, ident: Ident, bucket: Tensor, bounds: Sequence[int], out: Tensor, scratch: Tensor) -> bool:
        """See :class:`Exchange`."""
        if not self._fits(bucket):
            scratch = out.new_empty(self._fallback.scratch_shards * out.numel())
            return self._fallback.reduce_scatter(ident, bucket, bounds, out, scratch)
        buckets = self._exchange(ident, bucket)
        if buckets is None:
            return False
        start, stop = bounds[self._rank], bounds[self._rank + 1]
        _mean([staged[start:stop] for staged in buckets], out)
        return True

    def in_place(self, bucket: Tensor) -> bool:
        """See :class:`InPlaceExchange`."""
        return self._fits(bucket)

    def reduce_scatter_in_place(
        self, ident: Ident, bucket: Tensor, bounds: Sequence[int], out: Tensor, own: Sequence[OwnPart]
    ) -> bool:
        """See :class:`InPlaceExchange`."""
        buckets = self._exchange(ident, bucket)
        if buckets is None:
            return False
        start = bounds[self._rank]
        for (low, high), values in own:
            parts = [staged[start + low : start + high] for staged in buckets]
            parts[self._rank] = values
            _mean(parts, out[low:high])
        return True

    def all_gather(self, ident: Ident, bucket: Tensor, bounds: Sequence[int]) -> Gathering:
        """See :class:`Exchange`; the chunks are the peers' own memory, to be read before the next exchange."""
        if not self._fits(bucket):
            gathering = self._fallback.all_gather(ident, bucket, bounds)
            gathering.wait()
            return gathering
        buckets = self._exchange(ident, bucket)
        if buckets is None:
            raise StepDesync(f"another rank skipped the parameter exchange of step {ident.step}")
        return Gathering((), [chunks_of(staged, bounds)[rank] for rank, staged in enumerate(buckets)])

    def close(self) -> None:
        """See :class:`Exchange`."""
        for peer in self._peers.values():
            peer.close()
        self._own.close()


def _mean(parts: Sequence[Tensor], out: Tensor) -> None:
    dtype = _NATIVE_DTYPES.get(out.dtype)
    if dtype is None:
        mean_in_rank_order(iter(parts), len(parts), out)
    elif out.numel():
        _native.mean(out.numel(), dtype, [part.data_ptr() for part in parts], out.data_ptr())


def build_host_exchange(group: ControlGroup, fallback: Exchange, slot_bytes: int) -> Exchange:
    """A shared-memory exchange if every rank can map every other's memory, else ``fallback``. Collective."""
    own, error = None, "the native extension is not built"
    if _native is not None:
        try:
            own, error = _new_arena(slot_bytes), ""
        except OSError as found:
            error = f"shared memory: {found}"
    offer: dict[str, Any] = {"host": _host(), "error": error}
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
        return HostExchange(group, own, peers, fallback)
    for peer in peers:
        peer.close()
    if own is not None:
        own.close()
    _explain(group.rank, offers, verdicts)
    return fallback


def _new_arena(slot_bytes: int) -> Arena:
    arena = Arena.create("zero_opt exchange", PAGE + 2 * page_aligned(slot_bytes))
    nonce = torch.frombuffer(bytearray(secrets.token_bytes(_NONCE_BYTES)), dtype=torch.uint8)
    arena.bytes[_NONCE_AT : _NONCE_AT + _NONCE_BYTES] = nonce
    return arena


def _nonce(arena: Arena) -> str:
    return bytes(arena.bytes[_NONCE_AT : _NONCE_AT + _NONCE_BYTES].tolist()).hex()


def _host() -> str:
    try:
        with open(_BOOT_ID, encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return platform.node()


def _map_peers(rank: int, offers: Sequence[dict[str, Any]]) -> Iterable[_Peer]:
    for other, offer in enumerate(offers):
        if other == rank:
            continue
        if offer["host"] != _host():
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
