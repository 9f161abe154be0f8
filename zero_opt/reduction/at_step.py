"""``step()`` reduce-scatters whatever is in ``p.grad``; until then the user may read and edit it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from ..comm.agreement import StepAgreement
from ..comm.exchange import Ident
from ..errors import GradientConflict, ZeroOptError
from ..sharding.buckets import GradBucket
from .ddp_conflict import ddp_conflict
from .grad_norm import scale_
from .interface import GradShard, Parts, ReductionReport, shard_list
from .sparse import SparseGrads, sparse_refusal


class _Signature:
    """Which gradients there are, and which version of each; holds none of them."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        grads = [param.grad for param in params]
        # Not id(): a new gradient may be given the address, and so the id, of the one it replaces.
        self._seen = [None if grad is None else (weakref.ref(grad), grad._version) for grad in grads]

    def matches(self, params: Sequence[Tensor]) -> bool:
        """Whether nothing has changed."""
        if len(params) != len(self._seen):
            return False
        for param, seen in zip(params, self._seen, strict=True):
            grad = param.grad
            if (grad is None) != (seen is None):
                return False
            if grad is not None and seen is not None and (seen[0]() is not grad or seen[1] != grad._version):
                return False
        return True

    def gone(self, params: Sequence[Tensor]) -> bool:
        """Whether no gradient is left of those there were: all have been dropped or replaced."""
        return not any(
            seen is not None and param.grad is not None and seen[0]() is param.grad
            for param, seen in zip(params, self._seen, strict=False)
        )


class AtStepReduction:
    """See the module.

    Where the engine collects several times before the step (to clip, to unscale), unchanged gradients are reduced once.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._sparse = SparseGrads(parts)
        self._signature: _Signature | None = None
        self._shards: list[GradShard] = []
        self._scaled, self.grad_scale = False, 1.0
        self._spent = False  # a step has been taken with the shards
        self._sequence = 0
        self._alone = False

    def report(self, error: ZeroOptError | None, *, absent: bool) -> ReductionReport:  # noqa: ARG002  (the protocol's)
        """See :class:`GradReduction`; nothing is sent before the ranks have agreed."""
        params, before = self._parts.all_params, self._signature
        fresh = before is None or not before.matches(params)
        if before is not None and before.gone(params):
            self._scaled, self.grad_scale = False, 1.0  # the gradients that were clipped are no more
        if fresh and self._scaled and not self._spent and error is None:
            error = GradientConflict(
                "p.grad was edited after opt.clip_grad_norm_(), which had reduced it already; edit first, then clip"
            )
        error = error or self._conflict(params)
        rounds = int(fresh) + int(fresh and self._sparse.any_here())
        return ReductionReport(rounds, error or sparse_refusal(self._parts.partition))

    def disagreed(self) -> None:
        """Nothing has been sent."""

    def collect(self, agreed: StepAgreement) -> Sequence[GradShard]:
        if agreed.rounds:
            if self._spent:
                self._scaled, self._spent, self.grad_scale = False, False, 1.0
            self._reduce(agreed.used, sparse=agreed.rounds > 1)
            self._signature = _Signature(self._parts.all_params)
        return self._shards

    def _conflict(self, params: Sequence[Tensor]) -> GradientConflict | None:
        """Look for another reducer where gradients come for the first time."""
        if self._alone or self._parts.partition.world_size == 1:
            return None
        with_grad = [param for param in params if param.grad is not None]
        conflict = ddp_conflict(with_grad)
        self._alone = bool(with_grad) and conflict is None
        return conflict

    def _reduce(self, used: int, *, sparse: bool) -> None:
        parts = self._parts
        apart = self._sparse.reduce() if sparse else 0
        sequence, self._sequence = self._sequence, self._sequence + len(parts.partition.buckets)
        for position, bucket in enumerate(parts.partition.buckets):
            members = bucket.layout.params
            if not any(used >> index & 1 for index in members if not apart >> index & 1):
                continue
            fill = bucket.fill()
            for at, flat in enumerate(bucket.params):
                if flat.param.grad is not None and not apart >> members[at] & 1:
                    fill.put(at, flat.param.grad.detach())
            ident = Ident(parts.count.step, parts.count.epoch, sequence + position)
            bucket.launch(fill)
            overwrite = [False] * len(bucket.slices)
            bucket.reduce(fill, ident, overwrite, parts.exchange_of(bucket), parts.pool)
        parts.partition.join()
        self._shards = self._sparse.merge(shard_list(parts, used)) if sparse else shard_list(parts, used)

    def scale(self, factor: Tensor) -> None:
        """See :class:`GradReduction`; scales ``p.grad`` too, to which the next backward may add."""
        self._scaled, self._spent = True, False
        params = self._parts.all_params
        scale_([param.grad.detach() for param in params if param.grad is not None], factor)
        scale_([grad for shard in self._shards for grad in shard.grads if grad is not None], factor)
        self._signature = _Signature(params)

    def scale_in_step(self, factor: Tensor) -> None:
        self._scaled, self._spent = True, False
        self.grad_scale *= float(factor)

    def no_sync(self) -> AbstractContextManager[None]:
        """See :class:`GradReduction`; it never does."""
        return nullcontext()

    def reset(self) -> None:
        self._signature, self._scaled, self._spent, self.grad_scale = None, False, False, 1.0

    def stepped(self) -> None:
        """A second step() without a new backward uses the same shards, clipped if they were, as torch does."""
        self._spent, self._sequence = True, 0

    def watch(self, buckets: Sequence[GradBucket]) -> None:
        """Gradients are read when needed; nothing to watch."""

    @property
    def shards_count(self) -> bool:
        """See :class:`GradReduction`; what they hold was reduced within a call of all ranks."""
        return True

    def close(self) -> None:
        """Nothing to stop."""
