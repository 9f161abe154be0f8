"""What every exchange of buckets between ranks has in common: names, staging, arithmetic, the interface."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..kernels.adam_state import HALVES
from ..system.extension import native, native_available

# Of which the native kernels compute means, and what they call them.
NATIVE_DTYPES = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}


class Ident(NamedTuple):
    """Names one bucket exchange; later exchanges compare greater, on every rank alike."""

    step: int
    epoch: int
    sequence: int


class StagingPool:
    """Buffers that buckets pass through, reused from step to step.

    A buffer is keyed by use (``slot``), dtype and device, and grows to the most asked for.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}
        self._reserved: dict[tuple[torch.dtype, torch.device], int] = {}
        self._lock = threading.Lock()

    def reserve(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        """Let what :meth:`staging` gives from now on have room for this much.

        A buffer that grew later would be replaced, and the one before kept alive by all who hold views of it.
        """
        with self._lock:
            largest = self._reserved[dtype, device] = max(numel, self._reserved.get((dtype, device), 0))
            for key in [key for key in self._buffers if key[1:] == (dtype, device)]:
                if self._buffers[key].numel() < largest:
                    del self._buffers[key]

    def staging(self, slot: int, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """As :meth:`take`, from a buffer that keeps its place until more is reserved."""
        self.take(slot, max(numel, self._reserved.get((dtype, device), 0)), dtype, device)
        return self.take(slot, numel, dtype, device)

    def take(self, slot: int, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A 1-D buffer of ``numel`` elements; its values are whatever the last user left."""
        key = (slot, dtype, device)
        with self._lock:
            buffer = self._buffers.get(key)
            if buffer is None or buffer.numel() < numel:
                # Padding is sent too: zeros keep it finite and the transfer deterministic.
                buffer = self._buffers[key] = torch.zeros(numel, dtype=dtype, device=device)
        return buffer[:numel]

    def release(self) -> None:
        """Let go of all buffers; who holds views of them must let go too. They are made anew when next asked for."""
        with self._lock:
            self._buffers.clear()

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(b.numel() * b.element_size() for b in self._buffers.values())


def mean_in_rank_order(parts: Iterator[Tensor], world_size: int, out: Tensor) -> None:
    """Write the sum of ``parts``, added in the order given, divided by ``world_size``, to ``out``.

    bf16 and fp16 are accumulated in fp32 and rounded once. A part may be overwritten once the second next is asked for.
    """
    total = torch.empty_like(out, dtype=torch.float32) if out.dtype in HALVES else out
    first, second = next(parts), next(parts)
    if total is out:
        torch.add(first, second, out=total)
    else:
        total.copy_(first).add_(second)
    for part in parts:
        total.add_(part)
    total.div_(world_size)
    if total is not out:
        out.copy_(total)


def add_mean(parts: Sequence[Tensor], out: Tensor, *, add: bool) -> None:
    """Write the mean of one chunk per rank, as :func:`mean_in_rank_order` does, to ``out``, or add it to ``out``."""
    if out.is_cpu and out.dtype in NATIVE_DTYPES and native_available():
        addresses = [part.data_ptr() for part in parts]
        native.mean(out.numel(), NATIVE_DTYPES[out.dtype], addresses, out.data_ptr(), add)
    elif add:
        mean = torch.empty_like(out)
        mean_in_rank_order(iter(parts), len(parts), mean)
        out.add_(mean)
    else:
        mean_in_rank_order(iter(parts), len(parts), out)


def chunks_of(bucket: Tensor, bounds: Sequence[int]) -> list[Tensor]:
    """Every rank's part of a bucket, in rank order."""
    return [bucket[start:stop] for start, stop in pairwise(bounds)]


class Gathering:
    """An all-gather under way."""

    def __init__(self, works: Sequence[Any], chunks: Sequence[Tensor]) -> None:
        self._works, self._chunks = works, chunks

    def wait(self) -> Sequence[Tensor]:
        """Every rank's shard, in rank order, once all are there."""
        for work in self._works:
            work.wait()
        self._works = ()
        return self._chunks


class Run(NamedTuple):
    """Elements of a bucket that lie together in memory, as a 1-D tensor; ``None`` where all are zero.

    Attributes:
        start: index in the bucket of the first one.
        add: whether their mean is added to what the shard holds, or overwrites it.
    """

    start: int
    numel: int
    values: Tensor | None
    add: bool = False


class SliceSums(NamedTuple):
    """Where to add up the squares of one slice of a shard, while it is in the cache.

    Attributes:
        start: index in the shard of its first element.
        squares: (sums_of(numel),), fp64, as :func:`zero_opt.cpu_adam.grad_squares` takes them.
    """

    start: int
    numel: int
    squares: Tensor


class DirectExchange(Protocol):
    """An exchange that reads gradients and writes parameters where they are, so that nothing has to be staged.

    Attributes:
        adds_up: the dtypes of shards whose squares it adds up as it reduces them.
    """

    adds_up: Sequence[torch.dtype]

    def reduce_runs(
        self, ident: Ident, runs: Sequence[Run], bounds: Sequence[int], out: Tensor, sums: Sequence[SliceSums] = ()
    ) -> bool:
        """As :meth:`Exchange.reduce_scatter`. Elements of ``out`` that no run covers are left alone.

        Args:
            sums: ascending; none unless :attr:`adds_up` has the dtype. Undefined when the result is ``False``.
        """

    def gather_runs(self, ident: Ident, runs: Sequence[Run], bounds: Sequence[int]) -> Callable[[], None]:
        """Start bringing every other rank's shard into this rank's runs, none of which is ``None``.

        The result ends it, and must be called.

        Raises:
            StepDesync: another rank skipped this exchange.
        """


class Exchange(Protocol):
    """How the ranks of a group exchange buckets. One exchange at a time, except as :attr:`gathers_ahead` says.

    Attributes:
        gathers_ahead: how many all-gathers may be started before the oldest has been read.
        blocks: whether calls wait, for other ranks or for copies, so that a background thread has to make them. Else
            they only enqueue work on the current stream, and each reduction has to be matched by one on every rank.
        nbytes: memory of its own, beside the pool.
    """

    gathers_ahead: int
    blocks: bool

    @property
    def nbytes(self) -> int:
        """See the class."""

    def staging(self, numel: int, dtype: torch.dtype, device: torch.device, turn: int = 0) -> Tensor:
        """Where to put together the bucket of the next exchange, as a 1-D tensor; what it holds is undefined.

        ``turn`` counts all-gathers under way at a time.
        """

    def reduce_scatter(self, ident: Ident, bucket: Tensor, bounds: Sequence[int], out: Tensor) -> bool:
        """Write the mean over ranks of this rank's shard of ``bucket``, from :meth:`staging`, to ``out``.

        Called in the same order on every rank, except that a rank may skip exchanges that an exception kept it from.
        Returns ``False``, with ``out`` undefined, when another rank skipped this one.
        """

    def all_gather(self, ident: Ident, bucket: Tensor, bounds: Sequence[int]) -> Gathering:
        """Start bringing every rank's shard here; this rank's is in place in ``bucket``, from :meth:`staging`."""

    def direct(self, dtype: torch.dtype) -> DirectExchange | None:
        """The exchange as one that needs no staging, if it is one for tensors of this dtype."""

    def fail(self, step: int) -> None:
        """Have the following all-gathers tell the other ranks that this step failed on this rank."""

    def failures(self, step: int) -> Callable[[], Sequence[int]]:
        """Begin to ask on which ranks a step failed. Every rank calls this once it has started the step's last gather.

        Returns:
            A function. Once that gather has ended, it returns the ranks that called :meth:`fail` before the gather, the
            same on every rank. An exchange that would have to wait for other ranks to know returns none.
        """

    def leave(self) -> None:
        """Leave all future exchanges: no rank waits for this one in them, and this one waits for no other."""

    def close(self) -> None:
        """Release what is held."""


class PooledExchange:
    """What exchanges have in common whose staging is ordinary memory from a pool."""

    gathers_ahead, nbytes, blocks = 0, 0, True
    adds_up: Sequence[torch.dtype] = ()

    def __init__(self, pool: StagingPool) -> None:
        self._pool = pool

    def staging(self, numel: int, dtype: torch.dtype, device: torch.device, turn: int = 0) -> Tensor:
        return self._pool.staging(turn, numel, dtype, device)

    def direct(self, dtype: torch.dtype) -> DirectExchange | None:  # noqa: ARG002
        return None

    def fail(self, step: int) -> None:
        """See :class:`Exchange`."""

    def failures(self, step: int) -> Callable[[], Sequence[int]]:  # noqa: ARG002
        """See :class:`Exchange`; reports no rank."""
        return tuple

    def leave(self) -> None:
        """See :class:`Exchange`; breaking the connections is enough."""

    def close(self) -> None:
        """Nothing is held."""


def close_all(exchanges: Mapping[str, Exchange]) -> None:
    """Close these exchanges, which are by device type."""
    for exchange in exchanges.values():
        exchange.close()
