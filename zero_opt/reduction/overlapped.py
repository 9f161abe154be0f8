"""Reduce-scatter during backward: a bucket leaves as soon as its gradients have arrived.

[Note: rounds and windows]
A window is what lies between two steps; only ``step()`` closes it. A round is one exchange of every bucket, and each
backward is a round of its own: its mean is added to the shard. A rank that has had fewer rounds than another when
``step()`` is called sends zeros for the rest, so the ranks always exchange the same buckets the same number of times.

[Note: launch order]
Buckets are exchanged in one order on all ranks, or two ranks could each wait for the other's bucket. A bucket that is
complete waits for those before it. At first the order is the plan's, last parameters first. The first backward after
parameters were planned gives another: the one in which buckets were completed on rank 0.

[Note: the deferred bucket]
The last bucket of a backward is complete when that ends, so no computation hides its exchange. Through shared memory an
exchange occupies a core, for which a background thread would compete with the user's: step() makes it instead, or the
next backward or ``zero_grad()`` hands it to the thread.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..comm.agreement import StepAgreement
from ..comm.exchange import Ident
from ..comm.waits_beside import outcome
from ..errors import GradientsLocal, StepDesync, ZeroOptError
from ..layout import indices_of
from ..sharding.buckets import Fill, GradBucket, scale_shards
from ..system.background_thread import CallingThread
from ..system.devices import HOST, is_host
from ..system.future import Future
from ..system.interrupts import uninterrupted
from .autograd_hooks import ArrivalHooks, BackwardPasses, NativeHooks, NativeRound, ended_in_exception, graph_task
from .consumed_grad import ConsumedGrad, GradOwner, not_held_here, set_again, sparse, taken_over
from .dropped_grads import OwnSums, require_same_restarts
from .grad_places import GradPlaces
from .interface import GradReduction, GradShard, OwnRounds, ReductionParts, SealedRound
from .round_matching import RoundMatching, left_early, order_digest, require_same_order
from .shard_squares import ShardSquares


class OverlappedReduction(GradReduction, GradOwner):
    """Gradients that leave for their shards during backward, and are consumed; see the module.

    ``_launch_order`` has all buckets, ``_active`` those with a trainable parameter, in that order; ``_completed`` has
    those that were completed here, until the ranks have agreed on rank 0's order. ``_live`` holds the parameters whose
    slices of the shard hold a gradient to add to, ``_shown`` those whose ``p.grad`` says so, as far as this rank knows.
    ``_owned`` has those with a slice here. Hooks, and what they call, run on autograd's threads, under a lock.
    """

    _after_exception = "call opt.zero_grad() on every rank and repeat it"
    _hooks_type: type[ArrivalHooks] = NativeHooks

    def __init__(self, parts: ReductionParts) -> None:
        super().__init__(parts)
        self._hooks = self._hooks_type(self._arrived)
        self._passes = BackwardPasses(self._hooks)
        self._squares, self._matching = list[ShardSquares](), RoundMatching(parts)
        self._sync, self._places, self._owned = True, GradPlaces(), set[int]()
        self._live, self._shown, self._sums = set[int](), set[int](), OwnSums()
        self._void: Future[None] | None = None  # of what is on the thread behind rounds that are void
        self._launch_order, self._active = list[int](), list[int]()
        self._collecting = False  # from send_rest() to the end of collect(), between which ranks may plan more buckets
        self._completed: list[int] | None = []
        self._planned_in_step = self._made_state = self._spoiled = False
        self._forget_rounds()
        self._forget_backwards()

    def _forget_rounds(self) -> None:
        """Begin to count rounds, after the ranks have agreed on those before, or those are void."""
        self._fills: dict[int, Fill] = {}
        self._task: int | None = None  # whose arrivals belong to the round under way
        self._native_round: NativeRound | None = None  # None too while _arrived() runs; see [Note: the usual gradient]
        self._rounds, self._next = 0, 0
        self._withdrawn: set[int] = set()  # dropped or zeroed while their bucket was still to be launched in this round
        self._sums.forget_rounds()
        self._futures: list[Future[bool]] = []
        self._deferred: SealedRound | None = None

    def _forget_backwards(self) -> None:
        """Begin an epoch: no backward has delivered anything to it."""
        self._native_round = None
        self._delivered: set[int] = set()  # but for those of the last round
        self._in_round: set[int] = set()  # delivered in it
        self._synced: set[bool] = set()  # of the backwards in this epoch
        self._local: set[int] = set()  # whose gradient has begun afresh inside no_sync()
        self._sequence = 0
        self._unscaled: bool | None = None  # what GradScaler has been told

    def watch(self, buckets: Sequence[GradBucket]) -> None:
        """See :class:`GradReduction`. Collective.

        A rank may be in a round of the buckets before, which the others answer in ``step()``: until then none has more.
        """
        with uninterrupted():
            for bucket in buckets:
                for position, (index, flat) in enumerate(zip(bucket.layout.params, bucket.params, strict=True)):
                    self._places.plan(index, flat.param, self, flat.label, (bucket.layout.index, position))
                self._owned.update(piece.param for piece in bucket.slices)
                if bucket.reader is None and is_host(bucket.device):  # the placement does not read it
                    bucket.reader = ShardSquares(bucket)
                    self._squares.append(bucket.reader)
                self._launch_order.append(bucket.layout.index)
        self._completed, self._planned_in_step = [], True
        if not self._parts.agreement.any(self._collecting or self._rounds > 0 or self._matching.unanswered):
            self._activate()

    def hook_params(self) -> None:
        with uninterrupted():  # a parameter may be hooked wholly, or not
            for index, param in enumerate(self._parts.all_params):
                self._hooks.watch(index, param)

    def _activate(self) -> None:
        """Leave out buckets with nothing trainable; called when the ranks agree on what is trainable."""
        buckets = self._partition.buckets
        self._active = [i for i in self._launch_order if any(flat.param.requires_grad for flat in buckets[i].params)]

    # -- during backward ----------------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients stay local and full-size, to be reduced with the next backward outside the context."""
        before, self._sync, self._task, self._native_round = self._sync, False, None, None
        try:
            yield
        finally:
            self._sync, self._task, self._native_round = before, None, None

    def within_hook(self) -> bool:
        return self._passes.within_hook()

    def _arrived(self, index: int) -> None:
        """Hook: autograd, with a thread per device, has accumulated into a grad. Never waits for another rank."""
        self._passes.refuse_within_hook("backward()")
        with self._passes.handing_over:
            self._native_round, task = None, graph_task()
            if task != self._task:
                begins = self._passes.note_arrival()
                self._synced.add(self._sync)
                if not self._sync:
                    if not self._places.has_taken(index):
                        self._local.add(index)
                    return
                if begins or not self._fills:
                    self._open_round()
                self._task = task
            if index in self._in_round:
                self._open_round()
            self._take(index)
            lists = self._places, self._fills, self._sums, self._rounds, self._withdrawn
            self._native_round = NativeRound(task, self._in_round, self._shown, *lists, self._local)

    def _take(self, index: int) -> None:
        """Move a parameter's gradient into its bucket's current round."""
        place = self._places.get(index)
        if place is None or place.bucket not in self._fills:
            del place  # which would be a reference to the stand-in
            self._set_aside(index)
            return
        param, consumed, bucket, position = place
        grad = param.grad
        if grad is None:
            return  # a hook of the user's has dropped it
        if grad is consumed:
            grad = consumed.take_pending()
            if grad is None:
                return
        else:
            if type(grad) is not Tensor or grad.layout is not torch.strided or index in self._shown:
                del consumed, place  # which would be references to the stand-in
                grad = self._fresh(index, grad)
                consumed = self._places[index].consumed
            if grad._is_view():
                self._places.note_view(index, grad)
            try:
                param.grad = consumed
            except RuntimeError:  # it does not fit: the parameter has another shape, dtype or device by now
                self._partition.flats[index].moved()
                raise
            self._shown.add(index)
        self._deliver(index, bucket, position, grad)

    def _set_aside(self, index: int) -> None:
        """Let a gradient wait for step() in its stand-in: the ranks have still to agree that it is trainable."""
        param, flats = self._parts.all_params[index], self._partition.flats
        if self._places.has_taken(index) or (grad := taken_over(param.grad, self)) is None:
            return  # another optimizer, which trains it, may have taken it: a step of this one would say so
        if index in flats:
            flats[index].moved()  # raises where the gradient would not fit
        else:
            self._places.plan(index, param, self, self._partition.describe(index))
        self._places.hold(index, self._fresh(index, grad))
        self._shown.add(index)

    def _deliver(self, index: int, bucket: int, position: int, grad: Tensor) -> None:
        """Put one gradient into its bucket's current round, and send what is complete."""
        if self._fills[bucket].sealed:
            self._open_round()
        self._in_round.add(index)
        self._sums.add(index, self._rounds)
        self._withdrawn.discard(index)
        self._local.discard(index)
        if self._fills[bucket].put(position, grad):
            if self._completed is not None and bucket not in self._completed:
                self._completed.append(bucket)
            self._launch_complete()

    def _fresh(self, index: int, given: Any) -> Tensor:
        """Check a gradient that starts afresh, as ``p.grad`` was None before, and forget the one before; return it."""
        if (grad := taken_over(given, self)) is None:
            raise not_held_here(given, self)
        if grad.layout is not torch.strided:
            raise sparse(self._places[index].consumed.label)
        if index in self._shown:  # else the shard holds what other ranks alone have contributed so far
            self._start_afresh([index])
        self._places[index].consumed.pending = None
        return grad

    def _open_round(self) -> None:
        """Launch what is left of the round before, and begin one; see [Note: rounds and windows]."""
        self._native_round = None
        self._launch_all()
        self._submit_deferred()
        partition = self._partition
        self._start_afresh(self._places.dropped(self._shown))
        self._delivered |= self._in_round
        self._scale_held()
        self._fills = {index: partition.buckets[index].fill() for index in self._active}
        self._in_round.clear()
        self._withdrawn.clear()
        self._rounds, self._next = self._rounds + 1, 0

    def _scale_held(self) -> None:
        """Multiply the held gradients by :attr:`step_factor`, before the next round is added to them."""
        factor, self.step_factor = self.step_factor, 1.0
        if factor == 1.0 or not self._live:
            return
        for bucket in self._partition.buckets:
            if bucket.shard_nbytes:
                with torch.no_grad(), bucket.streams.side([], []):
                    bucket.scale(torch.tensor(factor, dtype=torch.float32, device=HOST), factor)

    def _start_afresh(self, dropped: Collection[int]) -> None:
        """Let the next gradients of these start afresh, whose ``p.grad`` the user has dropped."""
        self._restart(dropped)
        self._shown.difference_update(dropped)
        self._places.renew(dropped)

    def _forget_all(self) -> None:
        """Let every gradient start afresh; the rounds of this epoch are forgotten next."""
        self._places.forget_pending(self._places)
        self._sums.clear()
        self._live.clear()
        self._shown.clear()
        self._places.renew(self._places)

    def _restart(self, indices: Collection[int]) -> None:
        """Void what has been exchanged of these gradients."""
        self._sums.restart(self._shown.intersection(indices), self._rounds)
        self._live.difference_update(indices)
        if opened := {bucket for bucket, fill in self._fills.items() if not fill.sealed}:
            self._withdrawn.update(index for index in indices if self._places[index].bucket in opened)
        self._places.forget_pending(indices)

    def _launch_complete(self) -> None:
        """Launch the buckets that are complete, in order; see [Note: launch order]."""
        while self._next < len(self._active) and self._fills[self._active[self._next]].complete:
            self._launch()

    def _launch_all(self) -> None:
        """Launch what is left of the current round, with zeros for gradients that have not come."""
        while self._fills and self._next < len(self._active):
            self._launch()

    def _launch(self) -> None:
        bucket = self._partition.buckets[self._active[self._next]]
        fill = self._fills[bucket.layout.index]
        bucket.seal(fill)
        self._next += 1
        owned = [piece.param for piece in bucket.slices]
        accumulate = [index in self._live for index in owned]
        self._live.update(owned)
        self._live -= self._withdrawn  # other ranks may have sent theirs before they dropped it
        ident = Ident(self._parts.count.step, self._parts.count.epoch, self._sequence)
        self._sequence += 1
        sealed = SealedRound(bucket, fill, ident, accumulate)
        if self._next == len(self._active) and self._may_defer(bucket):
            self._deferred = sealed
        else:
            self._futures += self._matching.launch(partial(self._parts.reduce, sealed))

    def _may_defer(self, bucket: GradBucket) -> bool:
        """Whether step() may exchange a bucket itself; see [Note: the deferred bucket]."""
        idle = self._void is None or self._void.done()
        # A placement that reads shards may begin its step early.
        return idle and isinstance(bucket.reader, ShardSquares) and self._parts.occupies_core(bucket)

    def _submit_deferred(self) -> None:
        sealed, self._deferred = self._deferred, None
        if sealed is not None:
            self._futures.append(self._parts.reduce(sealed))

    # -- at step() ----------------------------------------------------------------------------------------------------

    def send_rest(self, error: ZeroOptError | None, *, absent: bool, steps: bool) -> OwnRounds:  # noqa: ARG002
        if self._passes.broken():
            error = error or ended_in_exception(self._after_exception)
        if self._spoiled:
            error = error or StepDesync(
                "the ranks were at different points of this step; call opt.zero_grad() on every rank, and repeat it"
            )
        try:
            self._places.require_held(self._parts.all_params, self._partition.flats, self)
            self._require_synced()
            self._take_plain()
        except ZeroOptError as own:
            error = error or own
        if not self._fills and self._void is not None and not self._void.done():
            # Exchanges that zero_grad() has voided must end before the shards are read, and end with this one's.
            self._open_round()
        self._launch_all()
        self._collecting, self._planned_in_step = True, False
        told = self._sums.restarted, self._matching.abandoned, order_digest(self._active)
        return OwnRounds(self._rounds, error, *told)

    def disagreed(self) -> None:
        """Void this epoch: buckets that were launched may answer those of another step."""
        self._spoiled = True

    def collect(self, agreed: StepAgreement) -> Sequence[GradShard]:
        require_same_order(agreed)
        self._parts.reduce_zeros(self._matching.missing(agreed, self._active))
        self._futures += self._matching.launch_held()
        require_same_restarts(agreed, self._sums, self._parts)
        while self._rounds < agreed.rounds:
            self._open_round()
            self._launch_all()
        self._exchange_late(agreed.used)
        self._matching.agreed(agreed.rounds)
        group = self._parts.agreement.group
        with group.exchanging():
            reduced = [outcome(future, group.lookout) for future in self._futures]
        if self._deferred is not None:
            sealed, self._deferred = self._deferred, None
            self._futures.append(CallingThread().submit(self._parts.reduce_here, sealed))
            reduced.append(self._futures[-1].result(0))
        self._partition.join()
        if not all(reduced):
            raise left_early()
        self._forget_rounds()
        if self._planned_in_step:  # what came of those buckets came now: a backward shows when they are complete
            self._completed = []
        elif self._completed is not None and agreed.rounds:
            self._learn_order()
        self._activate()
        self._collecting = False
        self._show_used(agreed.used)
        return self._parts.shards(agreed.used)

    def _exchange_late(self, used: int) -> None:
        """Exchange buckets that had nothing trainable when the ranks last agreed, but have a gradient now."""
        buckets = self._partition.buckets
        inactive = [index for index in self._launch_order if index not in self._active]
        late = [index for index in inactive if not indices_of(used).isdisjoint(buckets[index].layout.params)]
        if not late:
            return
        self._active, self._fills = late, {}  # the round before is on its way
        self._open_round()
        for bucket in late:
            for index in buckets[bucket].layout.params:
                self._take(index)
        self._launch_all()

    def _require_synced(self) -> None:
        """Raise GradientsLocal if no backward was meant to reduce its gradients, and they are in ``p.grad`` still."""
        if self._synced == {False} and any(param.grad is not None for param in self._parts.all_params):
            raise GradientsLocal(
                "every backward since the last step that reached parameters was inside no_sync(), so each rank has its "
                "own gradients alone; run the last backward of a step outside no_sync(), or drop them with "
                "opt.zero_grad() on every rank; with reduction=zero_opt.AtStep() every step reduces what there is"
            )

    def _take_plain(self) -> None:
        """Take gradients that were set by hand or left by ``no_sync``; notice those dropped after the last backward."""
        if self._places.taken():
            return
        dropped = []
        for index in self._partition.flats:
            param, consumed, bucket, _ = self._places[index]
            grad = param.grad
            if grad is consumed and consumed.pending is None:
                continue
            if grad is None:
                if index in self._shown:
                    dropped.append(index)
                continue
            if isinstance(grad, ConsumedGrad) and grad is not consumed:
                raise not_held_here(grad, self)
            if bucket not in self._active:
                continue
            reduced = index in self._delivered or index in self._in_round
            if reduced and grad is not consumed and index not in self._local:
                raise set_again(consumed.label)
            if not self._fills or index in self._in_round:
                self._open_round()
            self._take(index)
        self._start_afresh(dropped)

    def _learn_order(self) -> None:
        """Adopt rank 0's order of completion; not after one step without a backward, by which torch makes state."""
        mine = [*dict.fromkeys([*(self._completed or []), *self._launch_order])]
        *order, backward = self._parts.agreement.from_rank_0([*mine, bool(self._synced)])
        if backward or self._made_state:
            self._launch_order, self._completed = order, None
        else:
            self._completed, self._made_state = [], True

    def _show_used(self, used: int) -> None:
        """Make ``p.grad`` say what the shards hold: a parameter used on any rank has a gradient on all."""
        places, indices = self._places, indices_of(used)
        shown = map(places.__getitem__, indices)
        for param, consumed, *_ in [place for place in shown if place.param.grad is not place.consumed]:
            param.grad = consumed
        self._shown |= indices
        self._sums.agreed(indices)
        self._live &= indices
        zeroed = (indices & self._owned) - self._live  # in place, and nothing added since
        for bucket in self._partition.buckets if zeroed else ():
            for piece in (piece for piece in bucket.slices if piece.param in zeroed):
                bucket.writable(keep=True)[slice(*piece.in_shard)].zero_()
                self._live.add(piece.param)

    def end_step(self) -> None:
        self._forget_backwards()
        self._matching.end_step()
        for squares in self._squares:
            squares.end_step()

    def reset(self) -> None:
        """See :class:`GradReduction`. Exchanges under way end by themselves; nothing reads their results."""
        self._spoiled = self._collecting = False
        self._parts.reduce_zeros(self._matching.complete_round(self._active))
        self._submit_deferred()  # other ranks may wait for it
        if self._rounds and self._parts.thread.accepts_calls:
            self._void = self._parts.thread.submit(bool)  # is over when they are
        self._passes.forget()
        if self._places.any_grad():
            self._start_afresh(self._places.dropped(self._places))
        else:  # all were dropped
            self._forget_all()
        self._forget_rounds()
        self._forget_backwards()
        self.step_factor = 1.0

    # -- what ConsumedGrad asks for -----------------------------------------------------------------------------------

    def scale(self, factor: Tensor) -> None:
        scale_shards([bucket for bucket in self._partition.buckets if bucket.shard_nbytes], factor)

    def zero_consumed(self, param: int) -> None:
        self._passes.refuse_within_hook("p.grad.zero_()")
        place = self._places[param]
        fill = self._fills.get(place.bucket)
        if fill is not None and not fill.sealed:
            fill.grads[place.position] = None
        self._restart([param])

    def release(self, param: int) -> Tensor | None:
        place = self._places[param]
        return None if place.bucket in self._fills else place.consumed.take_pending()

    def unscale_consumed(self, inv_scale: Tensor) -> bool:
        """See :class:`GradOwner`. Collective: GradScaler calls it on every rank.

        GradScaler calls once per dtype of the gradients that a rank has. The first call serves all dtypes and ranks.
        """
        if self._unscaled is None or self._rounds:
            self._unscaled = self._parts.unscale(inv_scale)
        return self._unscaled

    @property
    def begun(self) -> bool:
        return self._rounds > 0 and not (self._spoiled or self._passes.broken())

    @property
    def holds_gradients(self) -> bool:
        return bool(self._live) and not self._matching.holding

    def close(self) -> None:
        self._hooks.close()
        self._places.end(self._delivered | self._in_round)
        self._forget_rounds()
