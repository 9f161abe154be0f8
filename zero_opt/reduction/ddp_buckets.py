"""Gradients come from the buckets of ``DistributedDataParallel``, by its communication hook, and are reduce-scattered.

[Note: what DDP does around the hook]
DDP copies ``p.grad`` to a bucket of its own as autograd finishes it, calls the hook per full bucket, in one order, and
at the end of backward copies the buckets back to ``p.grad``: the local gradient, since the hook leaves it as it is. So
``p.grad`` is taken in the hook and replaced after DDP is done. With ``gradient_as_bucket_view`` it lies in DDP's
bucket, which the next backward writes to, and has to be copied. In its second forward DDP rebuilds its buckets, and
then points every ``p.grad`` that is not None to one of them. The reduction restores ``p.grad`` before the module's own
forward.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from ..errors import ConfigConflict, GradientConflict, ZeroOptError
from ..sharding.buckets import GradBucket
from .autograd_hooks import ArrivalHooks, ended_in_exception, graph_task
from .consumed_grad import ConsumedGrad
from .ddp_conflict import ddp_conflict, forward_of_ddp, over_other_ranks, waits_to_fill
from .grad_places import GradPlaces
from .interface import OwnRounds, ReductionParts
from .overlapped import OverlappedReduction

_NOT_REGISTERED = (
    "DistributedDataParallel has not called zero_opt.ddp_hook: call ddp.register_comm_hook(opt, zero_opt.ddp_hook) "
    "before the first backward, and run the last backward of a step outside ddp.no_sync(); or use "
    "reduction=zero_opt.AlreadyReduced(), under which DDP reduces by itself. If the hook is registered, every backward "
    "was inside ddp.no_sync(): the gradients are in p.grad still, and the next backward adds to them; or it was "
    "registered with an optimizer that is closed: make DDP anew"
)
_UNFILLED = (
    "DistributedDataParallel has not handed over all gradients of the last backward: a parameter got none, or was "
    "frozen after DistributedDataParallel was made. Make DistributedDataParallel anew with "
    "find_unused_parameters=True, and then the optimizer"
)


class _PlacesBesideDDP(GradPlaces):
    """Places of gradients of which DDP, too, keeps some in ``p.grad`` during a backward."""

    def dropped(self, among: Iterable[int]) -> list[int]:
        return [index for index in among if self[index].param.grad is None]


class DDPHookReduction(OverlappedReduction):
    """Gradients that leave for their shards when DDP hands them to its hook. A round is a backward that DDP syncs."""

    _after_exception = (
        f"{OverlappedReduction._after_exception}; if DistributedDataParallel has not finished its reduction, and says "
        "so then, make it and the optimizer anew on every rank"
    )
    _hooks_type = ArrivalHooks

    def __init__(self, parts: ReductionParts) -> None:
        super().__init__(parts)
        self._places = _PlacesBesideDDP()
        self._index: dict[int, int] = {}
        self._called = False
        self._copied: set[int] = set()  # whose pending gradients DDP has copied to its bucket
        self._moved: dict[int, Tensor] = {}  # views of rebuilt buckets that DDP's forward has pointed p.grad to
        self._handed: dict[int, Tensor] = {}
        self._handed_last = False  # whether the last bucket is among those
        self._examined: set[int] = set()  # reduced by no DDP on its own

    def watch(self, buckets: Sequence[GradBucket]) -> None:
        for bucket in buckets:
            self._index.update(zip((id(flat.param) for flat in bucket.params), bucket.layout.params, strict=True))
        super().watch(buckets)

    def _arrived(self, index: int) -> None:  # noqa: ARG002  (DDP's hook takes the gradient)
        """Note the backward, which may end in an exception."""
        self._passes.refuse_within_hook("backward()")
        with self._passes.handing_over:
            self._passes.note_arrival()
            self._synced.add(True)  # as far as is known here

    def take_bucket(self, params: Sequence[Tensor], buffer: Tensor, *, first: bool, last: bool) -> None:
        """Take the gradients of one of DDP's buckets; called in backward. Never waits for another rank.

        Raises:
            ConfigConflict: DDP is over other ranks, or has a parameter that this optimizer has not.
        """
        if not self._called and (conflict := over_other_ranks(params[0], self._parts.agreement.group.ranks)):
            raise conflict
        self._called = True
        if graph_task() == -1:
            return  # Join: a rank without inputs shadows DDP's calls, and our own hook contributes its zeros
        self._passes.refuse_within_hook("backward()")
        with self._passes.handing_over:
            if first:
                self._open_round()
            for param in params:
                self._take_from(param, buffer)
            self._handed_last = last
        if last:
            # DDP's own callback, which copies buckets to p.grad, is queued after the last bucket's hook.
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(partial(engine.queue_callback, self._end_backward))

    def _take_from(self, param: Tensor, buffer: Tensor) -> None:
        index = self._index.get(id(param))
        if index is None:
            raise ConfigConflict(
                f"DistributedDataParallel reduces a parameter of shape {tuple(param.shape)} that is not in the "
                "ShardedOptimizer whose ddp_hook it calls, or not trainable there since the last step; give one "
                "optimizer all parameters that DDP trains"
            )
        grad, value = param.grad, None
        taken = grad is self._places[index].consumed
        self._examined.add(index)
        if self._partition.places[index][0] not in self._fills:
            return  # not trainable when the ranks last agreed: it stays in p.grad until step()
        self._handed[index] = param
        if index in self._copied:
            value = self._places[index].consumed.take_pending()
        elif grad is not None and not taken:
            value = self._fresh(index, grad)
            if value.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr():
                value = value.clone()
        if taken:
            param.grad = None  # DDP is about to write to it
        if value is not None:
            self._shown.add(index)
            self._deliver(index, *self._partition.places[index], value)

    def may_copy_pending(self, param: int, target: Tensor) -> bool:
        if not self._called:
            return False
        if graph_task() != -1:
            self._copied.add(param)
            return True
        module = forward_of_ddp()
        if module is None:
            return False
        if not self._moved:
            _before_forward(module, weakref.WeakMethod(self._put_back))
        self._moved[param] = target
        return True

    def _put_back(self) -> None:
        """Restore every ``p.grad`` that DDP has pointed to a rebuilt bucket."""
        for index, view in [*self._moved.items()]:  # a copy: zero_grad() in a signal handler clears the dict
            param = self._partition.flats[index].param
            if param.grad is view:
                param.grad = self._places[index].consumed
        self._moved.clear()

    def _end_backward(self) -> None:
        """Make ``p.grad``, to which DDP has written, say again who holds the gradient."""
        for index, param in self._handed.items():
            param.grad = self._places[index].consumed if index in self._shown else None
        self._forget_handed()

    def _forget_handed(self) -> None:
        self._handed.clear()
        self._copied.clear()

    def within_hook(self) -> bool:
        """See :class:`GradReduction`. ``p.grad`` holds DDP's views from its first bucket to the backward's end."""
        return (bool(self._handed) and graph_task() != -1) or super().within_hook()

    def send_rest(self, error: ZeroOptError | None, *, absent: bool, steps: bool) -> OwnRounds:
        self._put_back()
        if self._called:
            error = error or self._left_over() or self._conflict()
        return super().send_rest(error, absent=absent, steps=steps)

    def _left_over(self) -> ZeroOptError | None:
        """Return the error of a backward that has ended, and not put every ``p.grad`` back."""
        if not self._handed or self._passes.broken():
            return None
        return ended_in_exception(self._after_exception) if self._handed_last else GradientConflict(_UNFILLED)

    def _require_synced(self) -> None:
        """Raise GradientConflict if DDP has never called the hook, and GradientsLocal; gradients stay in ``p.grad``.

        DDP calls no hook where no backward has come: zeros are then taken, with which torch makes places for state.
        """
        if not self._called:
            params = [flat.param for flat in self._partition.flats.values()]
            given = [param.grad for param in params if param.grad is not None]
            if given and (self._synced or not all(map(_is_zero, given))):
                raise GradientConflict(_UNFILLED if waits_to_fill(params) else _NOT_REGISTERED)
        super()._require_synced()

    def _conflict(self) -> GradientConflict | None:
        """Look for a DDP that reduces by itself what did not come by its hook, once per parameter."""
        flats = self._partition.flats
        unseen = {i for i, flat in flats.items() if flat.param.grad is not None} - self._examined
        conflict = ddp_conflict(flats[index].param for index in unseen)
        self._examined |= unseen if conflict is None else set()
        return conflict

    def reset(self) -> None:
        self._forget_handed()
        for index in self._moved:  # DDP's forward failed
            self._partition.flats[index].param.grad = None
        self._moved.clear()
        super().reset()


def _is_zero(grad: Tensor) -> bool:
    """Return whether a gradient that no backward has brought is zero, or was when it was reduced."""
    return isinstance(grad, ConsumedGrad) or (grad.layout is torch.strided and not grad.any())


def _before_forward(module: nn.Module, call: weakref.WeakMethod[Any]) -> None:
    """Call ``call`` once, before the module's next forward."""

    @_disable_dynamo
    def once(*_: object) -> None:
        handle.remove()
        made = call()
        if made is not None:
            made()

    handle = module.register_forward_pre_hook(once, prepend=True)
