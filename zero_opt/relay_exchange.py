"""Exchange accelerator tensors through host memory, where the backend has no transport of its own for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .exchange import Exchange, Gathering, Ident, StagingPool

_CPU = torch.device("cpu")


class RelayExchange:
    """Copies buckets to the host, exchanges them there, and copies this rank's part of the result back.

    Used for several ranks on one accelerator over gloo: NCCL refuses to share a device.
    """

    scratch_shards, gathers_ahead, nbytes = 0, 0, 0

    def __init__(self, host: Exchange, pool: StagingPool) -> None:
        self._host, self._pool = host, pool

    def staging(self, numel: int, dtype: torch.dtype, device: torch.device, turn: int = 0) -> Tensor:
        """See :class:`Exchange`; on the device."""
        return self._pool.staging(turn, numel, dtype, device)

    def reduce_scatter(
        self,
        ident: Ident,
        bucket: Tensor,
        bounds: Sequence[int],
        out: Tensor,
        scratch: Tensor,  # noqa: ARG002
    ) -> bool:
        """See :class:`Exchange`."""
        staged = self._host.staging(bucket.numel(), bucket.dtype, _CPU)
        staged.copy_(bucket)
        needed = self._host.scratch_shards * out.numel()
        work = self._pool.take(1, needed + out.numel(), out.dtype, _CPU)
        if not self._host.reduce_scatter(ident, staged, bounds, work[needed:], work[:needed]):
            return False
        out.copy_(work[needed:])
        return True

    def all_gather(self, ident: Ident, bucket: Tensor, bounds: Sequence[int]) -> Gathering:
        """See :class:`Exchange`."""
        staged = self._host.staging(bucket.numel(), bucket.dtype, _CPU)
        staged.copy_(bucket)
        chunks = self._host.all_gather(ident, staged, bounds).wait()
        arrived = []
        for start, chunk in zip(bounds, chunks, strict=False):
            arrived.append(bucket[start : start + chunk.numel()].copy_(chunk))
        return Gathering((), arrived)

    def close(self) -> None:
        """See :class:`Exchange`."""
        self._host.close()
