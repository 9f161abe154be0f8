"""Ranks of one host that map each other's memory, and go through exchanges together."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ..errors import OptimizerClosed, PeerLost
from ..system.extension import native
from ..system.shared_memory import PAGE, Arena
from .exchange import NATIVE_DTYPES, Ident, Run, SliceSums
from .groups import Group
from .process_identity import ProcessIdentity

_PASSED, _NOT_YET = 2, 3
# Offset in the first page of the number, from 1, of the last step that failed on the arena's rank. The rank writes it
# before it publishes its part of that step's last gather, and peers read it after they have seen that part.
_FAILED_AT = 1024
# Offset of a byte that the rank sets once it takes part in no further exchange.
_LEFT_AT = _FAILED_AT + 8
# Waiting returns to Python this often, to notice a dead peer and Ctrl-C.
_SLICE_S = 0.05
# Seconds that close() waits for an exchange under way, which ends within _SLICE_S unless the machine is overloaded.
_ENDS_S = 5.0


class SharedPeer:
    """Another rank: its arena and its process. It takes no descriptor, since a host may have many ranks."""

    def __init__(self, rank: int, process: ProcessIdentity, arena: Arena) -> None:
        self.rank, self.process, self.arena = rank, process, arena

    @property
    def pid(self) -> int:
        """Of the process."""
        return self.process.pid

    def gone(self) -> bool:
        """Return whether the rank has left: it has set its byte, or its process has ended."""
        return bool(self.arena.bytes[_LEFT_AT]) or self.process.has_ended()


class SharedRanks:
    """The ranks whose memory this rank maps, and this rank.

    Attributes:
        nbytes: of the memory that this rank adds.
    """

    def __init__(self, group: Group, own: Arena, peers: Sequence[SharedPeer], *, divisor: int = 0) -> None:
        """``divisor``: of what :meth:`reduce` adds up; 0 for the number of ranks."""
        self._group, self._closed, self._pid, self._reading = group, False, os.getpid(), threading.Lock()
        self._ended_by: PeerLost | None = None
        self._own, self._peers = own, {peer.rank: peer for peer in peers}
        self.nbytes = own.bytes.numel()
        arenas = {group.rank: own, **{peer.rank: peer.arena for peer in peers}}
        self._ranks = sorted(arenas)
        addresses = [arenas[rank].address for rank in self._ranks]
        self._failed = {rank: arenas[rank].view(_FAILED_AT, 1, torch.int64) for rank in self._ranks}
        slot_bytes, turn = (self.nbytes - PAGE) // 2, self._ranks.index(group.rank)
        self._native = native.HostRanks(turn, addresses, PAGE, slot_bytes, divisor)

    def reduce(self, ident: Ident, bucket: Any, address: int) -> bool:
        """Bring the sum over the ranks of this rank's shard of a bucket, divided, to an address.

        Args:
            bucket: native, with one shard per rank.

        Returns:
            ``False``, with undefined values there, when another rank skipped this exchange.
        """
        return self._complete(ident, partial(self._native.reduce, ident, bucket, address))

    def gather(self, ident: Ident, bucket: Any) -> bool:
        """Bring every other rank's shard of a native bucket into its runs, or return ``False`` as :meth:`reduce`."""
        return self._complete(ident, partial(self._native.gather, ident, bucket))

    def meet(self, ident: Ident) -> bool:
        """Return whether all ranks take part in an exchange, which then goes another way."""
        return self.reduce(ident, native_bucket([], [0] * (len(self._ranks) + 1), torch.float32), 0)

    def _complete(self, ident: Ident, advance: Callable[[int, float], tuple[int, int, int]]) -> bool:
        """Go through all pieces of an exchange; returns ``False`` if a peer went on without it.

        One that a lost rank has ended is the last one: other ranks may still read what this rank has published for it.
        """
        with self._reading, self._group.exchanging():
            try:
                return self._go_through(ident, advance)
            except PeerLost as error:
                self._ended_by = self._ended_by or error
                self.leave()
                raise

    def _go_through(self, ident: Ident, advance: Callable[[int, float], tuple[int, int, int]]) -> bool:
        deadline, published, look = time.monotonic() + self._group.timeout_s, 0, None
        while True:
            if self._closed:
                closed = OptimizerClosed("closed while an exchange with the other ranks was under way")
                raise self._ended_by or self._group.explain("", 0.0) or closed
            state, turn, came = advance(published, _SLICE_S)
            if state != _NOT_YET:
                return state != _PASSED
            if came > published:
                deadline, published = time.monotonic() + self._group.timeout_s, came
            look = look or self._group.lookout()
            rank = self._ranks[turn]
            self._group.awaits(rank)
            look()
            if self._peers[rank].gone():
                # It may have published just before it left.
                state, still, published = advance(published, 0.0)
                if state != _NOT_YET:
                    return state != _PASSED
                if still == turn:
                    raise self._lost(rank, ident)
            elif time.monotonic() > deadline:
                raise self._group.leave_silent(
                    rank,
                    f"rank {rank} (pid {self._peers[rank].pid}) has not come to the same exchange of step {ident.step} "
                    f"in {self._group.timeout_s:.0f} s; look at what it does (py-spy dump), or give it longer with "
                    "checks=Checks(timeout=...)",
                )

    def fail(self, step: int) -> None:
        """Note, where the other ranks read it, that a step failed on this rank."""
        self._failed[self._group.rank].fill_(step + 1)

    def failed(self, step: int) -> list[int]:
        """Return the ranks that have noted that this step failed."""
        return [rank for rank, word in self._failed.items() if word.item() == step + 1]

    def _lost(self, rank: int, ident: Ident) -> PeerLost:
        """Return the error about a rank that will not come to an exchange."""
        gone = f"rank {rank} (pid {self._peers[rank].pid}) has left, or died, before the exchange of step {ident.step}"
        return self._group.explain(gone) or PeerLost(f"{gone}; restart all ranks from the last checkpoint")

    def leave(self) -> None:
        """Set this rank's byte; a forked child leaves the byte as it is."""
        self._closed, own = True, self._own.bytes  # which another thread may unmap
        if os.getpid() == self._pid and own.numel():
            own[_LEFT_AT] = 1

    def close(self) -> None:
        """End an exchange that still waits for a peer, with an error, and unmap all memory."""
        self.leave()
        self._own.close()
        # In a forked child, a thread that it does not have may hold the lock forever.
        if self._reading.acquire(timeout=_ENDS_S if os.getpid() == self._pid else 0.0):
            for arena in (self._own, *(peer.arena for peer in self._peers.values())):
                arena.unmap()
            self._failed.clear()
            self._reading.release()


def native_bucket(
    runs: Sequence[Run], bounds: Sequence[int], dtype: torch.dtype, sums: Sequence[SliceSums] = ()
) -> Any:
    """Return what the native exchange takes; the caller keeps the tensors alive."""
    listed = [(start, numel, 0 if tensor is None else tensor.data_ptr(), add) for start, numel, tensor, add in runs]
    places = [(part.start, part.numel, part.squares.data_ptr()) for part in sums]
    return native.HostBucket(listed, list(bounds), NATIVE_DTYPES[dtype], places)
