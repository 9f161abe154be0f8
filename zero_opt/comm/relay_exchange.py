"""Exchange accelerator tensors through host memory, where the backend has no transport of its own for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .exchange import Exchange, Gathering, Ident, PooledExchange, StagingPool

_CPU = torch.device("cpu")


class RelayExchange(PooledExchange):
    """Copies buckets to the host, exchanges them there, and copies this rank's part of the result back.

    Used for several ranks on one accelerator over gloo: NCCL refuses to share a device.
    """

    def __init__(self, host: Exchange, pool: StagingPool) -> None:
        super().__init__(pool)
        self._host = host

    def reduce_scatter(self, ident: Ident, bucket: Tensor, bounds: Sequence[int], out: Tensor) -> bool:
        staged = self._host.staging(bucket.numel(), bucket.dtype, _CPU)
        staged.copy_(bucket)
        mean = self._pool.take(1, out.numel(), out.dtype, _CPU)
        if not self._host.reduce_scatter(ident, staged, bounds, mean):
            return False
        out.copy_(mean)
        return True

    def all_gather(self, ident: Ident, bucket: Tensor, bounds: Sequence[int]) -> Gathering:
        staged = self._host.staging(bucket.numel(), bucket.dtype, _CPU)
        staged.copy_(bucket)
        chunks = self._host.all_gather(ident, staged, bounds).wait()
        arrived = []
        for start, chunk in zip(bounds, chunks, strict=False):
            arrived.append(bucket[start : start + chunk.numel()].copy_(chunk))
        return Gathering((), arrived)

    def fail(self, step: int) -> None:
        self._host.fail(step)

    def failures(self, step: int) -> Callable[[], Sequence[int]]:
        return self._host.failures(step)

    def leave(self) -> None:
        self._host.leave()

    def close(self) -> None:
        self._host.close()
