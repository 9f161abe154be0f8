"""``p.grad`` holds the mean already: this rank steps its slice of it. No gradient traffic (ZeRO-1)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product, repeat

import torch
from torch import Tensor

from ..comm.agreement import StepAgreement
from ..comm.transfers import TransferQueue
from ..errors import GradientConflict, ZeroOptError
from ..kernels import copy_
from ..kernels.strides import resolved
from ..layout import ParamSlice, indices_of
from ..sharding.buckets import GradBucket
from ..sharding.flat_param import is_wrapper
from .consumed_grad import consumed_conflict
from .grad_norm import scale_
from .grad_samples import GradComparison
from .interface import GradReduction, GradShard, OwnRounds, ReductionParts
from .shard_squares import ShardSquares
from .sparse import sparse_refusal


class AlreadyReducedGrads(GradReduction):
    """Gradients whose mean over the ranks is in ``p.grad`` when the engine collects them.

    Users edit them until the step. For that they are copied to where a worker reads them, and where the last step asked
    for squares, these are added up in the same pass over memory.
    """

    def __init__(self, parts: ReductionParts) -> None:
        super().__init__(parts)
        self._copies: list[Tensor] = []
        self._squares: dict[int, ShardSquares] = {}  # by bucket
        self._steps = False
        self._comparison = GradComparison(parts.partition, parts.agreement.group)

    def watch(self, buckets: Sequence[GradBucket]) -> None:
        for bucket in buckets:
            if bucket.copiers and bucket.reader is None:
                bucket.reader = self._squares[bucket.layout.index] = ShardSquares(bucket)

    def send_rest(self, error: ZeroOptError | None, *, absent: bool, steps: bool) -> OwnRounds:  # noqa: ARG002
        self._steps = steps
        error = error or consumed_conflict(self._parts.all_params)
        sample = self._comparison.sample(self._parts.count.step)
        return OwnRounds(0, error or sparse_refusal(self._parts), sample=sample)

    def collect(self, agreed: StepAgreement) -> Sequence[GradShard]:
        """Return slices of ``p.grad``, as views where its strides are the parameter's; for a step, see the class."""
        self._require_all_used(agreed)
        self._comparison.require_same(agreed, self._parts.count.step)
        self._copies.clear()
        sent = self._to_absentees(agreed) if agreed.absent else {}
        shards, used = [], indices_of(agreed.used)
        for bucket in self._partition.buckets:
            grads = [sent[piece.param] if piece.param in sent else self._slice(piece) for piece in bucket.slices]
            shards.append(GradShard(bucket.layout.index, bucket.slices, grads, bucket.layout.params_in(used)))
        return self._copied_to_arena(shards)

    def _copied_to_arena(self, shards: Sequence[GradShard]) -> list[GradShard]:
        """Copy gradients of a step to where a worker reads them, in one call. Return the shards as they are then."""
        copied, copies = list[GradShard](), list[tuple[Tensor, Tensor, Tensor | None]]()
        for shard in shards:
            bucket, squares = self._partition.buckets[shard.bucket], self._squares.get(shard.bucket)
            if squares is not None:
                squares.forget()  # those of before are of other values, and were asked for before this step
            pairs = bucket.arena_places(shard.grads) if self._steps else None
            if pairs is None:
                copied.append(shard)
                continue
            sums = [part.squares for part in squares.sums(bucket)] if squares is not None else []
            summed = zip(pairs, sums or repeat(None), strict=bool(sums))
            copies += [(pair[0].run, pair[1], place) for pair, place in summed if pair is not None]
            copied.append(shard._replace(grads=[pair and pair[0].grad for pair in pairs]))
        if copies:
            copiers = max(bucket.copiers for bucket in self._partition.buckets)
            copy_(*zip(*copies, strict=True), threads=max(copiers, torch.get_num_threads()))
        return copied

    def _require_all_used(self, agreed: StepAgreement) -> None:
        """Raise GradientConflict, on every rank, for a gradient that only some have: no mean of all ranks."""
        for rank, report in enumerate(agreed.reports):
            missing = 0 if report.absent else agreed.used & ~report.used
            if missing:
                index = (missing & -missing).bit_length() - 1
                other = next(rank for rank, report in enumerate(agreed.reports) if report.used >> index & 1)
                raise GradientConflict(
                    f"{self._partition.flats[index].label} has a gradient on rank {other} but none on rank "
                    f"{rank}, so p.grad is not yet reduced; reduce it (DDP does, in a backward outside ddp.no_sync(), "
                    "if it was trainable when DDP was made) or use reduction=zero_opt.AtStep() without DDP"
                )

    def _to_absentees(self, agreed: StepAgreement) -> dict[int, Tensor]:
        """Send ranks that have run out of inputs their slices of the mean; returns those this rank receives."""
        group, partition = self._parts.agreement.group, self._partition
        present = next(rank for rank in range(group.world_size) if rank not in agreed.absent)
        received, window, used = dict[int, Tensor](), TransferQueue(), indices_of(agreed.used)
        for bucket, rank in product(partition.buckets, agreed.absent):
            for piece in bucket.layout.slices(rank):
                if piece.param not in used:
                    continue
                flat, run = partition.flats[piece.param], None
                if group.rank == present and flat.param.grad is not None:
                    run = flat.flatten(resolved(flat.param.grad.detach()))[slice(*piece.in_param)].cpu()
                elif group.rank == rank:
                    run = received[piece.param] = torch.empty(
                        piece.in_param.numel, dtype=flat.param.dtype, device="cpu"
                    )
                window.add(group.move(run, present, rank, piece.in_param.numel, flat.param.dtype), run)
        window.drain()
        on_device = {index: run.to(partition.flats[index].param.device) for index, run in received.items()}
        self._copies += on_device.values()
        return {index: partition.flats[index].shaped_if_whole(run) for index, run in on_device.items()}

    def _slice(self, piece: ParamSlice) -> Tensor | None:
        flat = self._partition.flats[piece.param]
        if flat.param.grad is None:
            return None
        own = flat.param.grad.detach()
        grad = resolved(own)
        if type(grad) is not Tensor and is_wrapper(grad):
            grad = flat.shaped(flat.flatten(grad))
        if grad is not own:
            self._copies.append(grad)
        if grad.is_sparse or (piece.in_param.numel == grad.numel() and grad.stride() == flat.strides):
            return grad
        run = flat.flatten(grad)[piece.in_param.start : piece.in_param.stop]
        if grad.stride() != flat.strides:
            self._copies.append(run)
        return flat.shaped_if_whole(run)

    def scale(self, factor: Tensor) -> None:
        """Multiply ``p.grad`` itself, as ``torch.nn.utils.clip_grad_norm_`` does."""
        grads = (flat.param.grad for flat in self._partition.flats.values())
        scale_([*(grad.detach() for grad in grads if grad is not None), *self._copies], factor)

    scale_in_step = scale

    def end_step(self) -> None:
        self._copies.clear()
        for squares in self._squares.values():
            squares.end_step()
