"""``step()`` reduce-scatters whatever is in ``p.grad``; until then the user may read and edit it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, auto

import torch
from torch import Tensor

from ..comm.agreement import StepAgreement
from ..comm.exchange import Ident
from ..comm.waits_beside import outcome
from ..errors import GradientConflict, OutOfResources, StepDesync, ZeroOptError
from ..layout import indices_of
from ..sharding.buckets import scale_shards
from ..system.devices import has_streams
from ..system.future import Future
from ..system.inference_mode import version_of
from .consumed_grad import consumed_conflict
from .ddp_conflict import ddp_conflict
from .grad_norm import scale_
from .grad_samples import few_values
from .interface import GradReduction, GradShard, OwnRounds, ReductionParts, SealedRound
from .sparse import SparseGrads, sparse_grads, sparse_refusal


class _Signature:
    """Which gradients there were, and at which version of each. Holds none of them.

    Args:
        sampled: also look at a few values of each. Not all that torch writes to a gradient raises its version:
            GradScaler's unscaling, collectives and fused steps do not, and they change every element.
    """

    def __init__(self, params: Iterable[Tensor], *, sampled: bool = False) -> None:
        grads = [param.grad for param in params]
        # Not id(): a new gradient may be given the address, and so the id, of the one it replaces.
        self._seen = [(_no_grad, None) if grad is None else (weakref.ref(grad), version_of(grad)) for grad in grads]
        self._samples = _samples(grads) if sampled else None

    def matches(self, params: Sequence[Tensor]) -> bool:
        """Return whether these are still the same, unwritten gradients, and parameters added since have none."""
        known = len(self._seen)
        same = all(param.grad is None for param in params[known:]) and all(
            seen() is param.grad and version == (None if param.grad is None else version_of(param.grad))
            for param, (seen, version) in zip(params[:known], self._seen, strict=True)
        )
        if not same or self._samples is None:
            return same
        now = _samples([param.grad for param in params])
        # As integers, by which NaN equals itself.
        return all(
            torch.equal(one.view(torch.int64), two.view(torch.int64))
            for one, two in zip(self._samples, now, strict=True)
        )

    def first_added(self, params: Sequence[Tensor]) -> int | None:
        """Return the first parameter with a gradient that was added since, if the others' gradients are the same."""
        known = len(self._seen)
        added = [index for index, param in enumerate(params) if index >= known and param.grad is not None]
        return added[0] if added and self.matches(params[:known]) else None

    def gone(self, params: Sequence[Tensor]) -> bool:
        """Return whether all gradients that there were have been dropped or replaced."""
        return not any(
            param.grad is not None and seen() is param.grad
            for param, (seen, _) in zip(params, self._seen, strict=False)
        )


def _samples(grads: Iterable[Tensor | None]) -> list[Tensor]:
    """Return copies of a few values of each gradient, in fp64, in a tensor per device."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for grad in grads:
        if grad is not None:
            by_device.setdefault(grad.device, []).append(few_values(grad))
    return [torch.cat(views).to(torch.float64) for views in by_device.values()]


def _not_as_clipped(added: int | None) -> GradientConflict:
    if added is not None:
        return GradientConflict(
            f"parameter {added} has a gradient that opt.clip_grad_norm_() has not clipped, as opt.add_param_group() "
            "has added the parameter since: add the group first, then clip"
        )
    return GradientConflict(
        "p.grad was edited after opt.clip_grad_norm_(), or another backward has added to it; clipping had reduced it "
        "already: run every backward of the step, and edit first, then clip (scaler.unscale_(opt), too, comes before "
        "it, or is left out)"
    )


def _no_grad() -> None:
    """Return no gradient, as a reference to one does that is gone."""


class _Since(Enum):
    """What has come to gradients since they were reduced."""

    REDUCED = auto()  # nothing
    SCALED = auto()  # a factor, of clipping
    STEPPED = auto()  # a step: another one reduces them again
    KEPT = auto()  # clipping and then a step, in host memory: another step takes them as they are


class AtStepReduction(GradReduction):
    """Gradients that stay in ``p.grad`` until the engine collects them.

    Where the engine collects several times before the step (to clip, to unscale), unchanged gradients are reduced once.
    After a step they are reduced again, changed or not: the replay of a CUDA graph writes to gradients, and raises no
    version. Where no graph can be, in host memory, further steps take clipped gradients as they are, as torch does.
    """

    grads_are_local = True

    def __init__(self, parts: ReductionParts) -> None:
        super().__init__(parts)
        self._sparse = SparseGrads(parts)
        self._reduced: _Signature | None = None
        self._used = 0  # a bit per parameter that had a gradient on any rank
        self._with_sparse = False
        self._since = _Since.REDUCED
        self._sequence = 0
        self._alone = False

    def send_rest(self, error: ZeroOptError | None, *, absent: bool, steps: bool) -> OwnRounds:  # noqa: ARG002
        """Look for gradients that are not reduced yet. Sends nothing before the ranks have agreed."""
        params, reduced = self._parts.all_params, self._reduced
        fresh = not self._is_reduced(steps=steps)
        gone = reduced is not None and reduced.gone(params)
        if fresh and self._since is _Since.SCALED and not gone and error is None:
            error = _not_as_clipped(None if reduced is None else reduced.first_added(params))
        error = error or consumed_conflict(params) or self._conflict(params)
        rounds = int(fresh) + int(fresh and bool(sparse_grads(self._parts.all_params)))
        return OwnRounds(rounds, error or sparse_refusal(self._parts) or self._no_thread())

    def _no_thread(self) -> OutOfResources | None:
        """Return the error if this process gets no thread for its exchanges."""
        parts = self._parts
        return parts.thread.refusal() if any(exchange.overlaps for exchange in parts.exchanges.values()) else None

    def collect(self, agreed: StepAgreement) -> Sequence[GradShard]:
        if agreed.rounds:
            self._since, self.step_factor = _Since.REDUCED, 1.0
            self._reduce(agreed.used, sparse=agreed.rounds > 1)
            self._count_writes()
            self._reduced = _Signature(self._parts.all_params)
        return self._shards()

    def _count_writes(self) -> None:
        """Put copies in the place of gradients that were made in inference mode, of which torch counts no writes."""
        for param in self._parts.all_params:
            if param.grad is not None and param.grad.is_inference():
                param.grad = param.grad.clone()

    def _shards(self) -> list[GradShard]:
        """Return the reduced gradients, where they may be written to; see [Note: who owns a shard's memory]."""
        shards = self._parts.shards(self._used)
        return self._sparse.merge(shards) if self._with_sparse else shards

    def _conflict(self, params: Sequence[Tensor]) -> GradientConflict | None:
        """Look for another reducer where gradients come for the first time."""
        if self._alone or self._partition.world_size == 1:
            return None
        with_grad = [param for param in params if param.grad is not None]
        conflict = ddp_conflict(with_grad)
        self._alone = bool(with_grad) and conflict is None
        return conflict

    def _reduce(self, used: int, *, sparse: bool) -> None:
        parts = self._parts
        dense = indices_of(used).difference(self._sparse.reduce() if sparse else ())
        sequence, self._sequence = self._sequence, self._sequence + len(self._partition.buckets)
        futures, reduced = list[Future[bool]](), list[bool]()
        for position, bucket in enumerate(self._partition.buckets):
            members = bucket.layout.params
            if dense.isdisjoint(members):
                continue
            fill = bucket.fill()
            for at, flat in enumerate(bucket.params):
                if flat.param.grad is not None and members[at] in dense:
                    fill.put(at, flat.param.grad.detach())
            ident = Ident(parts.count.step, parts.count.epoch, sequence + position)
            bucket.seal(fill)
            sealed = SealedRound(bucket, fill, ident, [False] * len(bucket.slices))
            if parts.exchange_of(bucket).overlaps:
                futures.append(parts.reduce(sealed))
            else:  # on this thread, which has nothing else to do
                reduced.append(parts.reduce_here(sealed))
        group = parts.agreement.group
        with group.exchanging():
            reduced += [outcome(future, group.lookout) for future in futures]
        self._partition.join()
        if not all(reduced):
            raise StepDesync("another rank left this step early; call opt.zero_grad() on every rank, and repeat it")
        self._used, self._with_sparse = used, sparse

    def scale(self, factor: Tensor) -> None:
        """See :class:`GradReduction`. Scales ``p.grad`` too, to which the next backward may add."""
        self._scale_local(factor)
        self._scale_reduced(factor)

    def scale_in_step(self, factor: Tensor) -> None:
        """See :class:`GradReduction`. Scales ``p.grad`` at once, which the step does not read."""
        super().scale_in_step(factor)
        self._scale_local(factor)
        self._note_scaled()

    @contextmanager
    def unscaling(self, factor: Tensor) -> Iterator[None]:
        reduced = self._is_reduced(steps=True)
        yield
        if reduced:
            self._scale_reduced(factor)

    def _scale_local(self, factor: Tensor) -> None:
        scale_([param.grad.detach() for param in self._parts.all_params if param.grad is not None], factor)
        self._since = _Since.SCALED

    def _scale_reduced(self, factor: Tensor) -> None:
        """Follow what has multiplied every gradient since it was reduced."""
        used = indices_of(self._used)
        scale_shards([bucket for bucket in self._partition.buckets if bucket.layout.params_in(used)], factor)
        if self._with_sparse:
            self._sparse.scale(factor)
        self._note_scaled()

    def _note_scaled(self) -> None:
        """Note that ``p.grad`` is what was reduced, but for factors."""
        self._reduced = _Signature(self._parts.all_params, sampled=True)

    def _is_reduced(self, *, steps: bool) -> bool:
        """Return whether the shards hold what ``p.grad`` holds, and need not be reduced again.

        Args:
            steps: for a step, which may take clipped gradients again.
        """
        same = self._reduced is not None and self._reduced.matches(self._parts.all_params)
        return same and (self._since in (_Since.REDUCED, _Since.SCALED) or (steps and self._since is _Since.KEPT))

    def reset(self) -> None:
        self._reduced, self._since, self.step_factor = None, _Since.REDUCED, 1.0

    def end_step(self) -> None:
        graphs = any(has_streams(bucket.device) for bucket in self._partition.buckets)
        clipped = self._since in (_Since.SCALED, _Since.KEPT)
        self._since, self._sequence = _Since.KEPT if clipped and not graphs else _Since.STEPPED, 0
