"""The placement of a shard that lives in an arena and is stepped by a worker.

[Note: early copies]
A shard on an accelerator is copied to the arena as soon as it is reduced, on the side stream, where the reduction was
enqueued and the next one will be. So the copy reads what was reduced, and the next round is written after it. In
``step()`` the user's stream waits for the side stream before it reads or writes a shard. The side stream has allocated
the shard, so the allocator gives its memory to no other stream. The thread that enqueues the copy does not wait: where
it would, because the runtime has refused to lock the arena's pages, nothing is copied early. Of devices whose runtime
is never asked, it is not known.

The copy writes to a place that no worker reads: no step is pending, or the shard has a second place for gradients, to
which it goes over when a step is submitted. An event follows each copy, and a step is submitted after all of them.

At ``step()`` the arena has the gradient unless the shard was written to since (a second backward, zeros) or multiplied
(clipped, unscaled), of which the bucket tells its reader, or the arena has moved. Then, and where nothing was copied
early, ``step()`` copies. A clip factor within the step (``max_grad_norm``) multiplies nothing here. The last step tells
what to expect: of several rounds only the last one is copied early, and nothing is where gradients will be multiplied.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from threading import RLock
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...comm.exchange import SliceSums
from ...comm.groups import Group
from ...errors import StepPending, WorkerFailed, ZeroOptError
from ...kernels.runs import RunBatch
from ...policies import WorkerOffload
from ...reduction.interface import GradShard, ParamsByBucket, used_params
from ...sharding.buckets import GradBucket
from ...system.devices import is_host
from ...system.inference_mode import versions_of
from ...system.interrupts import uninterrupted
from ...system.log import log
from ...system.phases import Phase
from ...system.pinned_memory import HostMemory
from ..native_placement import NativePlacement
from ..state_shard import Kept
from .arena_shard import ArenaShard
from .cores import Confined, agreed_split
from .pace import Pace
from .process import WorkerProcess
from .results import ParamWriter, ResultDelivery, Used


class Pending(NamedTuple):
    """A step that was submitted and not brought in.

    Attributes:
        sequence: its number; ``None`` where nothing of it is on this rank.
        params: those that any rank steps. used: what is stepped here. numbers: of the step, of each slice of each.
    """

    sequence: int | None
    params: ParamsByBucket
    used: Sequence[Used]
    numbers: Sequence[Sequence[float]]


class WorkerPlacement(NativePlacement[ArenaShard, Pending]):
    """A shard in an arena, which a worker steps. The reader of buckets on accelerators.

    The gradients of a step stay where they are in the arena until it is brought in. With ``delay=1`` those of the next
    one come meanwhile, so buckets whose gradients come in backward have two buffers there.

    The lock is held where gradients come, which may be on another thread, and where the arena moves.

    Args:
        model: results arrive after the step, in the order of its modules; ``None``, within it.
        kept: what is kept of parameters.
        grad_buffers: how many each bucket has.

    Attributes:
        shard_type: the class of its shards.
    """

    _policy_name = "WorkerOffload"
    shard_type: type[ArenaShard] = ArenaShard
    _remedy = "with delay=1, call opt.flush()"

    def __init__(
        self,
        policy: WorkerOffload,
        defaults: Mapping[str, Any],
        group: Group,
        model: nn.Module | None,
        kept: Kept,
        grad_buffers: int = 1,
    ) -> None:
        super().__init__(kept)
        self._lock = RLock()
        self._grad_buffers = grad_buffers
        self._policy = policy
        self._begun = 0  # steps, those of the loaded state among them
        self._prediction = 0.0  # of the step that is being submitted: see WorkerOffload
        self._flush_denormals = bool(defaults.get("flush_denormals", False))
        split = agreed_split(policy, group)
        self._worker = WorkerProcess(policy, split.worker, split.threads)
        self._confined = Confined(split.trainer) if split.trainer else None
        self._delivery = ResultDelivery(ParamWriter(split, self._confined), model)
        self._mapped: HostMemory | None = None  # the arena as accelerators see it
        self._pace = Pace()

    # -- what there is ------------------------------------------------------------------------------------------------

    def add(self, buckets: Sequence[GradBucket]) -> None:
        added = [self.shard_type(bucket, self._kept) for bucket in buckets]
        for bucket in buckets:
            bucket.copiers = self._worker.threads
        self._extend([*self._shards.values(), *added])
        self._register(added)
        self._mark_state()
        for shard in filter(self._reads, added):
            shard.bucket.reader = self

    def _reads(self, shard: ArenaShard) -> bool:
        """Whether the placement has a use for the shard before ``step()``."""
        return shard.copied_early

    def _extend(self, shards: Sequence[ArenaShard]) -> None:
        """Give all arrays a place that have none yet."""
        with self._lock:
            self._void()
            self._await_copies()
            missing = [
                (shard, shard.missing(self._roles[shard.bucket.layout.group], self._grad_buffers)) for shard in shards
            ]
            nbytes = sum(shard.nbytes_of(arrays) for shard, arrays in missing)
            if any(arrays for _, arrays in missing):
                self.wait()
                start = self._worker.extend(nbytes)
                for shard, arrays in missing:
                    start = shard.place(arrays, start)
                for shard in shards:
                    shard.bind(self._worker.arena)
                self._mark_state()
            self._worker.start()  # its threads touch new pages first, which are near to them then
            for shard, arrays in missing:
                shard.fill_new(arrays)
            if any(arrays for _, arrays in missing):
                self._lock_pages(shards)

    def _lock_pages(self, shards: Sequence[ArenaShard]) -> None:
        """Let accelerators, if parameters are there, read and write the arena as it is mapped now."""
        devices = [shard.bucket.device for shard in shards if not is_host(shard.bucket.device)]
        if devices:
            if self._mapped is not None:
                self._mapped.release()
            self._mapped = HostMemory(self._worker.arena.bytes, devices[0])

    def _note_copies(self, shards: Iterable[ArenaShard]) -> None:
        """Record an event on the stream that has just copied to or from the arena, per device."""
        for streams in {shard.bucket.device: shard.bucket.streams for shard in shards}.values():
            _, event = streams.produced()
            with self._lock:
                if event is not None and self._mapped is not None:
                    self._mapped.used(event)

    @property
    def _copies(self) -> Sequence[Any]:
        """Events after copies to and from the arena."""
        return () if self._mapped is None else self._mapped.under_way

    def _await_copies(self) -> None:
        for event in self._copies:
            event.synchronize()

    @property
    def threads(self) -> int:
        return self._worker.threads

    def figures(self) -> Mapping[str, float]:
        return {"worker/step_s": self._worker.control.step_seconds, "worker/deaths": float(self._worker.deaths)}

    def require_not_forked(self) -> None:
        self._worker.require_not_forked()

    def _place_missing(self) -> None:
        self._extend(list(self._shards.values()))

    def _written(self) -> None:
        # Every array is a view of these bytes, and shares their version counter.
        torch.autograd.graph.increment_version([self._worker.arena.bytes])

    def _mark_state(self) -> None:
        """Remember the arena and step counts as they are, for :meth:`_written_to`."""
        state = [self._worker.arena.bytes, *(shard.steps for shard in self._shards.values())]
        self._marked = state, versions_of(state)

    def _written_to(self) -> bool:
        """Return whether the user has written to state since :meth:`_mark_state`."""
        state, versions = self._marked
        return versions_of(state) != versions or any(shard.holds_edits() for shard in self._shards.values())

    def _stop_reading(self) -> None:
        """Read no more of shards, for good."""
        with suppress(WorkerFailed):  # in a forked child, a thread that it does not have may hold the lock
            self.require_not_forked()
            with self._lock:
                for shard in filter(self._reads, self._shards.values()):
                    shard.bucket.reader = None
                self._void()

    def close(self) -> None:
        self._stop_reading()
        try:
            self.wait()
        except ZeroOptError as error:
            log.warning("the last step is lost: %s", error)
        finally:
            if self._mapped is not None:
                self._mapped.release()
                self._mapped = None
            if self._confined is not None:
                self._confined.restore()
            self._worker.close()

    # -- during backward: see ShardReader -----------------------------------------------------------------------------

    def rewrites(self, bucket: GradBucket) -> None:
        with self._lock:
            if (shard := self._shards.get(bucket.layout.index)) is not None:
                shard.reduced.note_write()

    def sums(self, bucket: GradBucket) -> Sequence[SliceSums]:  # noqa: ARG002  (of ShardReader)
        """Nowhere."""
        return ()

    def reduced(self, bucket: GradBucket) -> None:
        with self._lock:
            shard = self._shards.get(bucket.layout.index)
            if shard is not None and bucket.reader is self and shard.reduced.note_round():  # not closed meanwhile
                self._read(shard)

    def _read(self, shard: ArenaShard) -> None:
        """Read a shard that has been reduced, most likely by the last round of the step."""
        if not shard.reduced.multiplied_before:
            self._copy(shard)

    def _copy(self, shard: ArenaShard) -> None:
        """Copy the shard to the arena if it is on an accelerator and that holds up nobody; see [Note: early copies]."""
        mapped, free = self._mapped, self._pending is None or shard.has_two_places
        if shard.copied_early and free and mapped is not None and not mapped.refused:
            # What fails is made, or raises its error, in step().
            with suppress(RuntimeError), torch.no_grad(), shard.bucket.streams.side([], []):
                shard.copy_reduced()
                self._note_copies([shard])
                shard.reduced.copied = True

    def scales(self, bucket: GradBucket, factor: float) -> None:
        with self._lock:
            if (shard := self._shards.get(bucket.layout.index)) is not None:
                shard.reduced.factors.append(factor)

    def squares(self, bucket: GradBucket) -> Sequence[Tensor | None]:
        """Return none: norms are made where the shard is."""
        return [None] * len(bucket.slices)

    def _void(self) -> None:
        """Let nothing count that was read of shards."""
        for shard in self._shards.values():
            shard.reduced.copied = False

    # -- steps --------------------------------------------------------------------------------------------------------

    @property
    def spare_nbytes(self) -> int:
        return sum(shard.spare_nbytes for shard in self._shards.values())

    @property
    def lags(self) -> bool:
        return self.predicts or (self._policy.delay > 0 and self._pending is not None)

    @property
    def _late(self) -> bool:
        """Whether the next step is left pending."""
        return self._policy.delay > 0 and self._begun >= self._policy.warmup_steps

    def updated_params(self, grads: Sequence[GradShard]) -> ParamsByBucket:
        if not self._late:
            return used_params(grads)
        return {} if self._pending is None else self._pending.params

    def step(
        self, grads: Sequence[GradShard], groups: Sequence[MutableMapping[str, Any]], grad_scale: float
    ) -> Iterator[int]:
        late = self._late
        self._begun += 1
        self._prediction = self._policy.prediction if late else 0.0
        before = list(self._bring_in_last())
        with uninterrupted():
            self._pending = self._submit(grads, groups, grad_scale)
            self._mark_state()
        yield from before if late else self._bring_in_pending()

    def await_result(self, bucket: int) -> None:
        self._delivery.await_result(bucket)

    def await_results(self) -> None:
        self._delivery.await_results()

    def wait(self) -> None:
        if self._pending is not None and self._pending.sequence is not None:
            asked_for = time.monotonic()
            with Phase("worker"):
                self._await(self._pending.sequence)
            self._pace.end(asked_for, self._worker.control.step_seconds)

    def _drop_pending(self) -> None:
        self._delivery.overtaken = None
        used = () if self._pending is None else self._pending.used
        super()._drop_pending()
        for shard, _ in used:
            shard.bucket.reclaim()

    def _await(self, sequence: int) -> None:
        self._worker.wait(sequence)

    def resume(self, states: Mapping[int, Mapping[str, Any]]) -> None:
        if self._policy.warmup_steps:
            self._begun = int(max((float(state["step"]) for state in states.values() if "step" in state), default=0))

    def bring_in(self) -> Iterator[int]:
        return self._bring_in_last()

    def _bring_in_last(self) -> Iterator[int]:
        """Bring in the step before, if it is pending, and with it results of earlier ones that are on their way."""
        self._delivery.await_results()
        self._delivery.overtaken = None
        self._load_mirrors()
        brought_in = list(self._bring_in_pending())
        self._delivery.await_results()  # the next step is made where they are
        yield from brought_in

    def _bring_in_pending(self) -> Iterator[int]:
        self.wait()
        pending = self._pending
        if pending is None:
            return
        with uninterrupted():
            for (shard, positions), numbers in zip(pending.used, pending.numbers, strict=True):
                shard.count_step(positions, numbers)
            self._written()
            self._mark_state()  # should the rest fail, and be done again
            made = [Used(shard, [at for at in positions if not shard.edited(at)]) for shard, positions in pending.used]
            self._delivery.deliver(made)
            self._note_copies(shard for shard, _ in made)
            self._pending = None
        yield from pending.params

    def conflict(self) -> StepPending | None:
        flat = self._delivery.overtaken
        if flat is not None:
            return StepPending(
                f"{flat.label} was changed before the last update had arrived in it, as it may after step() has "
                "returned (overlap_param_gather), and has not got that; call opt.flush() before changing parameters, "
                "and now, on every rank, unless it is what raises this, to go on as they are"
            )
        if self._pending is not None and self._written_to():
            return StepPending(
                "opt.state was written to while a step that changes it was pending, which may have undone that, wholly "
                "or in part; with delay=1, call opt.flush() before writing to it. To go on, call it on every rank, "
                "unless it is what raises this: it brings the step in. Then set the values, by copy_(), since mul_() "
                "or add_() may find them changed already, or load a checkpoint"
            )
        return super().conflict()

    def _submit(
        self, grads: Sequence[GradShard], groups: Sequence[MutableMapping[str, Any]], grad_scale: float
    ) -> Pending:
        self._await_copies()
        used = self._take_grads(grads)
        batches: dict[tuple[int, int], tuple[Any, list[Any], list[int]]] = {}
        for shard, positions in used:
            number = shard.bucket.layout.group
            hypers, roles = self._kept.update.hypers(groups[number]), self._kept.update.roles(groups[number])
            shard.read_params(positions)
            for gradients in sorted({shard.gradients[position] for position in positions}):
                alike = [position for position in positions if shard.gradients[position] == gradients]
                scaled = hypers.for_mean_of(gradients).for_kernel(grad_scale, prediction=self._prediction)
                _, runs, addresses = batches.setdefault((number, gradients), (scaled, [], []))
                for run, address in shard.runs(alike, roles):
                    runs.append(run)
                    addresses.append(address)
        self._await_copies()
        numbers = [shard.next_steps(positions) for shard, positions in used]
        sequence = None
        if any(runs for _, runs, _ in batches.values()):
            sequence = self._send(list(batches.values()))
        for shard, _ in used:
            shard.lend_grads()
        for shard in self._shards.values():
            shard.reduced.end_step()
        return Pending(sequence, used_params(grads), used, numbers)

    def _take_grads(self, grads: Sequence[GradShard]) -> list[Used]:
        """Return what is used here. Its gradients are in the arena, or copies of them are on their way there."""
        used = []
        try:
            for grad_shard in grads:
                shard = self._shards[grad_shard.bucket]
                if positions := grad_shard.with_grad:
                    shard.take_grads(grad_shard.grads)
                    used.append(Used(shard, positions))
        finally:
            self._note_copies(self._shards[grad_shard.bucket] for grad_shard in grads)
        return used

    def _send(self, batches: Sequence[RunBatch]) -> int:
        self._pace.begin(time.monotonic())
        return self._worker.submit(batches, flush_denormals=self._flush_denormals, past_caches=self._pace.past_caches)
