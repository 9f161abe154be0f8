"""Where each gradient goes, and the stand-in that ``p.grad`` has once it is there.

[Note: stand-ins that somebody has kept]
A parameter uses one stand-in again in every step. If a user keeps a reference, drops ``p.grad``, and assigns the
reference later, it would stand for a newer gradient. So when a gradient is dropped, a stand-in with more references
than a new one has is voided and replaced. Callers hold none in a variable meanwhile, or it is replaced in vain.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import compress, repeat
from operator import add, attrgetter, is_, is_not, itemgetter, not_
from typing import Any, NamedTuple

from torch import Tensor

from ..errors import GradientConsumed
from ..system.inference_mode import version_of
from ..system.untraced import untraced
from .consumed_grad import ConsumedGrad, GradOwner, any_pending, not_held_here


class GradPlace(NamedTuple):
    """A parameter, the stand-in for its gradient, its bucket, and its position there: what a hook needs at once."""

    param: Tensor
    consumed: ConsumedGrad
    bucket: int
    position: int


@dataclass
class _Buffer:
    """A tensor of the user's, version ``version``, that gradients of ``numels`` by parameter were moved from."""

    tensor: weakref.ReferenceType[Tensor]
    version: int
    numels: dict[int, int]

    def require_unwritten(self, places: GradPlaces) -> None:
        """Raise GradientConsumed where the tensor was written to although all of it was moved."""
        tensor = self.tensor()
        if tensor is None or sum(self.numels.values()) != tensor.numel() or version_of(tensor) == self.version:
            return
        if all(map(places.has_taken, self.numels)):
            raise GradientConsumed(
                f"{places[min(self.numels)].consumed.label}: p.grad was a view of a tensor of {tensor.numel()} "
                "elements, from which a backward has moved it; that tensor was written to afterwards, which changes no "
                "gradient. Zero gradients with opt.zero_grad() and clip them with opt.clip_grad_norm_(), or use "
                "reduction=zero_opt.AtStep(), which leaves them where they are"
            )


_grad_of = attrgetter("grad")
_param_of, _consumed_of = itemgetter(0), itemgetter(1)  # of a place


# The bucket, and the position there, of a parameter that is not planned.
_NOWHERE = (-1, 0)


class GradPlaces(dict[int, GradPlace]):
    """The place of each parameter that is planned, or has a gradient that waits for that, by global index."""

    def __init__(self) -> None:
        super().__init__()
        self._references = 0  # to a stand-in that this table alone holds
        self._buffers: dict[int, _Buffer] = {}  # by the tensor's id

    def plan(self, index: int, param: Tensor, owner: GradOwner, label: str, at: tuple[int, int] = _NOWHERE) -> None:
        """Give a parameter its place: ``at`` a position in a bucket. A gradient that waits goes on waiting."""
        if self.has_taken(index):
            self[index] = GradPlace(param, self[index].consumed, *at)
            return
        if index in self:
            self[index].consumed.void()  # somebody may have kept it
        self[index] = GradPlace(param, ConsumedGrad(param, owner, index, label), *at)
        (self._references,) = _references([self[index].consumed])

    def has_taken(self, index: int) -> bool:
        """Return whether ``p.grad`` is the parameter's stand-in."""
        place = self.get(index)
        return place is not None and place.param.grad is place.consumed

    def hold(self, index: int, grad: Tensor) -> None:
        """Let a gradient wait in its stand-in, as one that is accumulated into that does."""
        param, consumed, _, _ = self[index]
        param.grad, consumed.pending = consumed, grad

    def require_held(self, params: Sequence[Tensor], planned: Collection[int], here: GradOwner) -> None:
        """Raise GradientConflict for the gradient of a parameter that is not planned, if it is not held here.

        Raises:
            GradientConsumed: the user has written to a tensor that gradients were moved from.
        """
        for index, param in enumerate(params if len(planned) < len(params) else ()):
            if index not in planned and isinstance(grad := param.grad, ConsumedGrad) and not self.has_taken(index):
                raise not_held_here(grad, here)
        for buffer in self._buffers.values():
            buffer.require_unwritten(self)

    def dropped(self, among: Iterable[int]) -> list[int]:
        """Return those whose ``p.grad`` is another, or None; other threads of autograd may have put new ones there."""
        indices = [*among]
        places = [*map(self.__getitem__, indices)]
        kept = map(is_, map(_grad_of, map(_param_of, places)), map(_consumed_of, places))
        return [*compress(indices, map(not_, kept))]

    def taken(self) -> bool:
        """Return whether every gradient has been taken, and nothing was added to it since."""
        places = self.values()
        same = all(map(is_, map(_grad_of, map(_param_of, places)), map(_consumed_of, places)))
        return same and not any_pending(map(_consumed_of, places))

    def any_grad(self) -> bool:
        """Return whether a parameter has a gradient."""
        return any(map(is_not, map(_grad_of, map(_param_of, self.values())), repeat(None)))

    def forget_pending(self, indices: Collection[int]) -> None:
        """Forget what autograd has accumulated into these since they were taken."""
        grads = [*map(_consumed_of, map(self.__getitem__, indices))]
        for grad in grads if any_pending(grads) else ():
            grad.pending = None
        for key, buffer in [*self._buffers.items()]:
            for index in indices:
                buffer.numels.pop(index, None)
            if not buffer.numels:
                del self._buffers[key]

    def note_view(self, index: int, grad: Tensor) -> None:
        """Note that a gradient is moved which is a view of a tensor of the user's; those that autograd makes are none.

        The tensor may hold gradients of others, which autograd goes on to write. So it counts once all of it was moved.
        """
        base: Any = grad._base
        buffer = self._buffers.get(id(base))
        if buffer is None or buffer.tensor() is not base:
            buffer = self._buffers[id(base)] = _Buffer(weakref.ref(base), 0, {})
        buffer.version, buffer.numels[index] = version_of(base), grad.numel()

    def renew(self, indices: Collection[int]) -> None:
        """Give another stand-in to those that were dropped, but kept; see [Note: stand-ins that somebody has kept]."""
        counts = _references([*map(_consumed_of, map(self.__getitem__, indices))])
        if max(counts, default=0) <= self._references:
            return
        for index in [index for index, count in zip(indices, counts, strict=True) if count > self._references]:
            old = self[index].consumed
            owner = old.owner()
            if owner is not None:
                self[index] = self[index]._replace(consumed=ConsumedGrad(self[index].param, owner, index, old.label))
                old.void()

    def end(self, unstepped: Collection[int]) -> None:
        """Void the stand-ins of ``unstepped`` gradients, and drop all others."""
        for index, (param, consumed, *_) in self.items():
            if index in unstepped or consumed.pending is not None:
                consumed.void()
            elif param.grad is consumed:
                param.grad = None


@untraced  # torch.compile knows no reference counts
def _references(grads: list[ConsumedGrad]) -> list[int]:
    """Return how many references there are to each, weak ones too. Callers pass a list of their own, which counts."""
    return list(map(add, map(sys.getrefcount, grads), map(weakref.getweakrefcount, grads)))
