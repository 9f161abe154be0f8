"""The shard lives and is stepped where the parameters are, by the wrapped class itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..buckets import GradBucket
from ..cpu_adam import CPUAdam, CPUAdamW, native_available
from ..flat_param import FlatParam
from ..layout import ParamSlice
from ..reduction.base import GradShard
from .base import AtOnce, ParamState

_SLICE_INVARIANT: dict[type[torch.optim.Optimizer], type[CPUAdam | CPUAdamW]] = {
    torch.optim.Adam: CPUAdam,
    torch.optim.AdamW: CPUAdamW,
}
# What belongs to the user's groups alone: the inner optimizer has its own params, and no names for them.
_OUTER_KEYS = ("params", "param_names")


def bare_step(optimizer: torch.optim.Optimizer, closure: Any = None, **options: Any) -> Any:
    """``optimizer.step`` without the profiler label and step hooks, which run once, for the optimizer the user made."""
    method = type(optimizer).step
    if getattr(method, "hooked", False):
        method = method.__wrapped__  # type: ignore[attr-defined]
    return method(optimizer, **options) if closure is None else method(optimizer, closure, **options)


def hypers_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters of a param group."""
    return {key: value for key, value in group.items() if key not in _OUTER_KEYS}


def steps_params_apart(optimizer_class: type[torch.optim.Optimizer]) -> bool:
    """Whether the class is known to keep no state but that of single parameters."""
    return optimizer_class.__module__.split(".")[:2] == ["torch", "optim"] or optimizer_class in (CPUAdam, CPUAdamW)


class DevicePlacement(AtOnce):
    """Steps slices in place: the inner optimizer's parameters alias the user's."""

    def __init__(self, optimizer_class: type[torch.optim.Optimizer], defaults: Mapping[str, Any]) -> None:
        self._class, self._defaults = optimizer_class, dict(defaults)
        self._inner: torch.optim.Optimizer | None = None
        self._groups: list[dict[str, Any]] = []
        self._stepped: dict[int, Tensor] = {}
        self._flats: dict[int, FlatParam] = {}
        self._slices: dict[int, ParamSlice] = {}

    def add_group(self, hypers: Mapping[str, Any]) -> None:
        """See :class:`Placement`."""
        group = {**hypers_of(hypers), "params": []}
        if self._inner is None:
            self._inner = self._class([group], **self._defaults)
        else:
            self._inner.add_param_group(group)

    def drop_groups(self, kept: int) -> None:
        """See :class:`Placement`."""
        if kept:
            del self._optimizer.param_groups[kept:]
        else:
            self._inner = None

    def add(self, buckets: Sequence[GradBucket]) -> None:
        """See :class:`Placement`."""
        inner = self._optimizer
        added: dict[int, list[Tensor]] = {}
        for bucket in buckets:
            flats = dict(zip(bucket.layout.params, bucket.params, strict=True))
            for piece in bucket.slices:
                part = flats[piece.param].part(piece.in_param)
                self._stepped[piece.param], self._flats[piece.param] = part, flats[piece.param]
                self._slices[piece.param] = piece
                added.setdefault(piece.group, []).append(part)
        for group, parts in added.items():
            # Some classes (Adagrad) make state when constructed: let a fresh one make it for these.
            hypers = {**hypers_of(inner.param_groups[group]), "params": parts}
            inner.state.update(self._class([hypers], **self._defaults).state)
            inner.param_groups[group]["params"].extend(parts)

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        assert self._inner is not None, "add_group comes first"
        return self._inner

    def repoint(self, params: Sequence[int]) -> None:
        """See :class:`Placement`."""
        for index in params:
            if index in self._stepped:
                self._stepped[index].data = self._flats[index].part(self._slices[index].in_param)

    def step(
        self, grads: Sequence[GradShard], groups: Sequence[MutableMapping[str, Any]], grad_scale: float
    ) -> Iterator[int]:
        """See :class:`Placement`."""
        inner = self._optimizer
        for flat in self._flats.values():
            flat.load()
        for outer, own in zip(groups, inner.param_groups, strict=True):
            own.update(hypers_of(outer))
        yield from self._step_shards(grads, grad_scale)
        for outer, own in zip(groups, inner.param_groups, strict=True):
            outer.update(hypers_of(own))  # some classes keep adapted values in their groups

    def _step_shards(self, grads: Sequence[GradShard], grad_scale: float) -> Iterator[int]:
        """All at once: a class may keep state per group or per step."""
        self._step_together(grads, self._optimizer, grad_scale)
        yield from (shard.bucket for shard in grads if shard.used)

    def _step_together(self, grads: Sequence[GradShard], stepper: torch.optim.Optimizer, grad_scale: float) -> None:
        native = isinstance(stepper, (CPUAdam, CPUAdamW))
        options = {"grad_scale": grad_scale} if native else {}
        parts = []
        for shard in grads:
            for piece, grad in zip(shard.slices, shard.grads, strict=True):
                if grad is not None:
                    part = self._stepped[piece.param]
                    if grad_scale != 1 and not native:
                        grad = grad * grad_scale  # not in place: it may be the user's own
                    part.grad = grad if grad.dtype is part.dtype else grad.to(part.dtype)
                    parts.append(part)
        bare_step(stepper, **options)
        for part in parts:
            part.grad = None

    def state(self) -> Iterator[tuple[int, ParamState]]:
        """See :class:`Placement`."""
        states = self._optimizer.state
        for index, part in self._stepped.items():
            state = states.get(part)
            if state is not None:
                yield index, state

    def adopt(self, index: int, state: ParamState | None) -> bool:
        """See :class:`Placement`."""
        part, states = self._stepped[index], self._optimizer.state
        if state is None:
            states.pop(part, None)
        else:
            states[part] = state
        return False

    def param_of(self, index: int) -> Tensor:
        """See :class:`Placement`."""
        return self._stepped[index]

    def load(self, states: Mapping[int, Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> None:
        """See :class:`Placement`. Dtypes are cast, and missing keys filled in, by the wrapped class."""
        inner = self._optimizer
        number: dict[Tensor, int] = {}
        packed = []
        for own, hypers in zip(inner.param_groups, groups, strict=True):
            ids = [number.setdefault(part, len(number)) for part in own["params"]]
            packed.append({**hypers_of(hypers), "params": ids})
        local = {number[self._stepped[index]]: dict(state) for index, state in states.items()}
        inner.load_state_dict({"state": local, "param_groups": packed})

    def close(self) -> None:
        """See :class:`Placement`."""
        self._stepped.clear()
        self._flats.clear()


class BucketwisePlacement(DevicePlacement):
    """Steps one bucket at a time, so that it can be on its way to the other ranks while the next is stepped."""

    def _step_shards(self, grads: Sequence[GradShard], grad_scale: float) -> Iterator[int]:
        for shard in grads:
            if any(grad is not None for grad in shard.grads):
                self._step_together([shard], self._stepper_of(shard), grad_scale)
            if shard.used:
                yield shard.bucket

    def _stepper_of(self, shard: GradShard) -> torch.optim.Optimizer:  # noqa: ARG002  (all alike)
        """What steps a bucket."""
        return self._optimizer


class FusedAdamPlacement(BucketwisePlacement):
    """Steps fused fp32 CPU buckets of torch's Adam and AdamW with the native kernel, the others with the class itself.

    torch's fused CPU Adam changes bits with where a tensor is cut; the native kernel has the same bits and does not.
    """

    def __init__(self, optimizer_class: type[torch.optim.Optimizer], defaults: Mapping[str, Any]) -> None:
        super().__init__(optimizer_class, defaults)
        self._native = _SLICE_INVARIANT[optimizer_class]([{"params": []}])

    @classmethod
    def serves(cls, optimizer_class: type[torch.optim.Optimizer]) -> bool:
        """Whether there is a native kernel for this class here."""
        return optimizer_class in _SLICE_INVARIANT and native_available()

    def _stepper_of(self, shard: GradShard) -> torch.optim.Optimizer:
        inner, piece = self._optimizer, shard.slices[0]
        part = self._stepped[piece.param]
        if not (inner.param_groups[piece.group]["fused"] and part.dtype is torch.float32 and part.is_cpu):
            return inner
        # Loading replaces both.
        self._native.param_groups, self._native.state = inner.param_groups, inner.state
        return self._native
