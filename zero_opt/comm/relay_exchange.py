"""The exchange of accelerator tensors through host memory, for backends that cannot carry them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from ..system.devices import HOST
from .exchange import MEAN, BucketReduction, Exchange, Ident, ParamRuns, Run, StagedExchange, StagingPool, nothing_left


class RelayExchange(StagedExchange):
    """The exchange that copies buckets to the host, has ``host`` exchange them, and copies the result back.

    Used for several ranks on one accelerator over gloo: NCCL refuses to share a device.
    """

    def __init__(self, rank: int, host: Exchange, pool: StagingPool) -> None:
        super().__init__(rank, pool)
        self._host, self.way = host, f"copies in host memory, {host.way}"

    @property
    def sent_nbytes(self) -> int:
        return self._host.sent_nbytes

    def _on_host(self, bucket: Tensor) -> Tensor:
        return self._pool.staging(0, bucket.numel(), bucket.dtype, HOST).copy_(bucket)

    def reduce_scatter(self, ident: Ident, bucket: Tensor, bounds: Sequence[int], out: Tensor) -> bool:
        mean = self._pool.buffer(MEAN, out.numel(), out.dtype, HOST)
        runs = [Run(0, bucket.numel(), self._on_host(bucket))]
        if not self._host.reduce_runs(BucketReduction(ident, runs, bounds, mean)):
            return False
        out.copy_(mean)
        return True

    def all_gather(self, ident: Ident, bucket: Tensor, bounds: Sequence[int]) -> Callable[[], None]:
        staged = self._on_host(bucket)
        self._host.gather_runs(ident, ParamRuns([Run(0, bucket.numel(), staged)]), bounds)()
        bucket.copy_(staged)
        return nothing_left

    def fail(self, step: int) -> None:
        self._host.fail(step)

    def failures(self, step: int) -> Callable[[], Sequence[int]]:
        return self._host.failures(step)

    def leave(self) -> None:
        self._host.leave()

    def close(self) -> None:
        self._host.close()
