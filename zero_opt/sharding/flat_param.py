"""A parameter seen as a 1-D tensor in storage order, without moving it.

Slices of a parameter are cut in storage order, so a channels_last or transposed parameter is sliced where it lies.
Gradients and full-shape state are brought into the same order by :meth:`FlatParam.shaped`.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from ..errors import UnsupportedParam
from ..kernels.checks import lacks_memory, reaches_beyond, shared_pair
from ..kernels.strides import contiguous_strides, is_dense, overlaps, run_of
from ..layout import ParamSpec, Span
from ..system.inference_mode import versions_of
from .late_params import Unwatched

_grad_dtype_getter = attrgetter("grad_dtype")
_VERSIONS = 1 << 32  # version counters wrap
# Held while a write of ours is counted twice, as a write and as ours, and while both counts are read. A signal handler
# may come meanwhile, and fork, or call an optimizer.
_counting = threading.RLock()
os.register_at_fork(before=_counting.acquire, after_in_parent=_counting.release, after_in_child=_counting.release)
_TRAINABLE = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128)


def check_memory(param: Tensor, label: str, *, needed: bool = True) -> None:
    """Raise UnsupportedParam, naming the parameter, unless it is strided, and its elements are there and lie apart.

    Args:
        needed: whether its memory is read. Else the parameter may be a wrapper without memory of its own.
    """
    if param.is_nested or param.layout is not torch.strided:
        kind = "a nested tensor" if param.is_nested else param.layout
        raise UnsupportedParam(f"{label} is {kind}; only dense parameters can be sharded")
    if is_wrapper(param):
        if needed:
            kind = type(_held_here(param)).__name__
            raise UnsupportedParam(
                f"{label} is a {kind} without memory of its own, which can be neither sharded nor offloaded; freeze it "
                "(requires_grad=False) before the optimizer is made, or give it an optimizer of torch's"
            )
        return
    if param.numel() and overlaps(param.shape, param.stride()):
        raise UnsupportedParam(
            f"{label} has elements that share memory (shape {tuple(param.shape)}, strides {param.stride()}); pass one "
            "that owns its elements, e.g. param.contiguous()"
        )
    if reaches_beyond(param):
        raise UnsupportedParam(
            f"{label} reaches beyond its storage of {param.untyped_storage().nbytes()} bytes, as after "
            "untyped_storage().resize_(0); bring its values back first"
        )


def is_wrapper(param: Tensor) -> bool:
    """Return whether a strided tensor, or the part of a DTensor that is here, wraps others, which have its values."""
    part = _held_here(param)
    if part.layout is not torch.strided or part.is_meta or isinstance(part, FakeTensor):
        return False
    return lacks_memory(part) and not reaches_beyond(part)


def _held_here(param: Tensor) -> Tensor:
    """Return what is here of a DTensor; any other tensor itself."""
    part: Tensor = getattr(param, "_local_tensor", param)
    return part


def check_params_apart(params: Sequence[Tensor], describe: Callable[[int], str]) -> None:
    """Raise UnsupportedParam, naming both, if two parameters have an element in common.

    Args:
        describe: names a parameter, given its position.
    """
    pair = shared_pair(params)
    if pair is None:
        return
    first, second = sorted(pair)
    if params[first] is params[second]:
        raise UnsupportedParam(f"{describe(first)} and {describe(second)} are the same tensor; pass it once")
    raise UnsupportedParam(
        f"{describe(first)} and {describe(second)} share memory; pass one of them, or a clone (tied weights are one "
        "Parameter)"
    )


def check_trainable(param: Tensor, label: str) -> None:
    """Raise UnsupportedParam, naming the parameter, unless what lies in its memory can be added up and stepped."""
    if param.dtype not in _TRAINABLE:
        raise UnsupportedParam(
            f"{label} is {param.dtype}, in which gradients cannot be added up; make it one of "
            f"{', '.join(map(str, _TRAINABLE))}, or freeze it (requires_grad=False)"
        )
    if param.is_conj() or param.is_neg():
        raise UnsupportedParam(
            f"{label} is a view that torch conjugates or negates as it reads the memory; make the parameter of "
            "tensor.resolve_conj().resolve_neg()"
        )


def check_grad_dtype(param: Tensor, label: str) -> None:
    """Raise UnsupportedParam, naming the parameter, if its gradients have a dtype of their own."""
    if _has_other_grads(param):
        raise UnsupportedParam(
            f"{label} is {param.dtype} with grad_dtype={param.grad_dtype}, but its gradient is kept and stepped as "
            f"{param.dtype}; leave grad_dtype as it is. precision=MixedPrecision(reduce_dtype=torch.float32) gives "
            "gradients more bits on their way, and master_dtype=torch.float32 gives them to the step"
        )


def _has_other_grads(param: Tensor) -> bool:
    return param.is_leaf and param.grad_dtype is not param.dtype and param.grad_dtype is not None


def element_order(shape: torch.Size, strides: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of the storage order that elements are cut in, alike for layouts with the same order."""
    dense = shape.numel() > 0 and is_dense(shape, strides)
    order = strides if dense else contiguous_strides(shape)
    return tuple(1 if size == 1 else stride for stride, size in zip(order, shape, strict=True))


def place_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return what is another once the data of a tensor was re-pointed."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


class _VersionCounter:
    """How many of the writes that a version counter counts are ours."""

    def __init__(self) -> None:
        self.own_writes = 0


class FlatParam:
    """One parameter and its 1-D storage-order view.

    A dense parameter is aliased. One with gaps between its elements is mirrored: :meth:`load` copies it into the
    mirror before it is read, :meth:`store` copies the mirror back after it is written.

    Attributes:
        param: the user's parameter; never re-pointed, never replaced. The user may re-point it to data of any shape.
        shape, numel: the parameter's when it was planned.
        flat: 1-D tensor, numel elements, storage order. A write to it does not raise the parameter's version counter:
            the end of :func:`own_writes` does.
        strides: strides that turn a 1-D run in storage order back into the parameter's shape.
    """

    def __init__(self, param: Tensor, label: str) -> None:
        self.param, self.label = param, label
        check_memory(param, label)
        self.shape, self.numel = param.shape, param.numel()
        self._planned = self._identity()
        self._counter = _VersionCounter()
        self.remake_views()

    def _identity(self) -> tuple[Any, ...]:
        """Return what the plan, and gradients and state on their way, depend on."""
        param = self.param
        return param.dtype, param.device, tuple(param.shape), element_order(param.shape, param.stride())

    def remake_views(self) -> None:
        """Make the views anew, of the parameter's data as it is now."""
        param = self.param
        self._where = place_of(param)
        self.mirrored = not is_dense(param.shape, param.stride())
        self.strides = contiguous_strides(param.shape) if self.mirrored else param.stride()
        source = param.data  # unlike detach(), with a version counter of its own
        self.flat = run_of(source.contiguous() if self.mirrored else source)

    @property
    def edits(self) -> int:
        """A number that changes whenever the user has written to the parameter, as far as its version counter tells."""
        return edits_of([self])[0]

    def spec(self, group: int) -> ParamSpec:
        """Return what the planner needs to know."""
        param = self.param
        return ParamSpec(param.numel(), param.element_size(), group, str(param.dtype), str(param.device))

    def moved(self) -> bool:
        """Whether ``param.data`` was re-pointed, so that :meth:`remake_views` is called for.

        Raises:
            UnsupportedParam: shape, order of elements, dtype or device changed, so that the plan no longer fits; or
                elements share memory now, or gradients have another dtype.
        """
        check_grad_dtype(self.param, self.label)
        if not self.repointed:
            return False
        if self._identity() != self._planned:
            was, now = (
                f"{dtype} on {device} of shape {shape} and strides {order}"
                for dtype, device, shape, order in (self._planned, self._identity())
            )
            raise UnsupportedParam(
                f"{self.label} was {was} when the optimizer was made and is {now} now; move, cast or convert the model "
                "(memory_format too) before constructing the optimizer"
            )
        check_memory(self.param, self.label)
        return True

    @property
    def repointed(self) -> bool:
        """Whether ``param.data`` was re-pointed, to data that the plan may not fit. Of a late one, too."""
        with Unwatched():
            return place_of(self.param) != self._where

    def elements(self) -> Tensor:
        """Return the parameter as it is now, 1-D in storage order; what it was last if the plan does not fit it.

        On any thread, also of a late parameter.
        """
        with Unwatched():
            return self.flatten(self.param.detach()) if self._identity() == self._planned else self.flat

    def as_planned(self) -> Tensor:
        """Return the parameter in the shape and order of the plan; if it has others by now, what it was last."""
        return self.shaped(self.elements())

    def load(self) -> None:
        """Bring a mirror up to date with the parameter, unless that does not fit any more."""
        if self.mirrored and self._identity() == self._planned:
            self.shaped(self.flat).copy_(self.param.detach())

    def store(self) -> None:
        """Bring the parameter up to date with its mirror, unless it does not fit any more."""
        if self.mirrored and self._identity() == self._planned:
            self.param.data.copy_(self.shaped(self.flat))

    def shaped(self, run: Tensor) -> Tensor:
        """View a 1-D run of numel elements, in storage order, in the parameter's shape."""
        return run.as_strided(self.shape, self.strides, run.storage_offset())

    def shaped_if_whole(self, run: Tensor) -> Tensor:
        """View a slice, 1-D in storage order, in the parameter's shape if it is the whole parameter; else return it."""
        return self.shaped(run) if run.numel() == self.numel else run

    def part(self, span: Span) -> Tensor:
        """Return the tensor that an inner optimizer steps for a slice: in the parameter's shape if whole, else 1-D.

        The result aliases the parameter (or its mirror); it is a leaf that needs no gradient.
        """
        return self.shaped_if_whole(self.flat[span.start : span.stop])

    def flatten(self, value: Tensor) -> Tensor:
        """Return ``value``, of the parameter's shape, as a 1-D run in storage order; a view if the strides allow it.

        Of a tensor that wraps others it is a plain copy.
        """
        plain = type(value) is Tensor or not is_wrapper(value)
        if plain and value.layout is torch.strided and value.stride() == self.strides:
            return value.as_strided((value.numel(),), (1,), value.storage_offset())
        run = torch.empty(value.numel(), dtype=value.dtype, device=value.device)
        self.shaped(run).copy_(value)
        return run


def grad_dtypes_of(params: Collection[Tensor]) -> list[torch.dtype | None]:
    """Return the ``grad_dtype`` of each leaf, ``None`` of other tensors."""
    try:
        return list(map(_grad_dtype_getter, params))
    except RuntimeError:
        return [param.grad_dtype if param.is_leaf else None for param in params]


def edits_of(flats: Collection[FlatParam]) -> list[int]:
    """Return :attr:`FlatParam.edits` of each parameter, without a call per parameter."""
    params = [flat.param for flat in flats]
    with _counting:
        pairs = zip(versions_of(params), flats, strict=True)
        return [(version - flat._counter.own_writes) % _VERSIONS for version, flat in pairs]


def moved_of(flats: Mapping[int, FlatParam]) -> list[int]:
    """Return the keys of the parameters that have :meth:`FlatParam.moved`; raise what that raises."""
    elsewhere = [
        key for key, flat in flats.items() if place_of(flat.param) != flat._where or _has_other_grads(flat.param)
    ]
    return [key for key in elsewhere if flats[key].moved()]


class OwnWrites:
    """Parameters that are written to within a context by us, not by the user.

    The writes go to the memory: to :attr:`FlatParam.flat` or to ``param.data``. Their end raises the version counters,
    once each, so that a graph that has saved a parameter notices. Writes that come after ``step()`` are counted in it:
    a graph that was made before it and goes backward after it notices, and none that is made meanwhile is disturbed.
    """

    def __init__(self, flats: Iterable[FlatParam]) -> None:
        # One of those that share a counter. Inference tensors have none.
        params = {flat._counter: flat.param for flat in flats if not flat.param.is_inference()}
        self._counters, self._params = [*params], [*params.values()]

    @contextmanager
    def ours(self) -> Iterator[None]:
        """Within the context, writes to the memory of these parameters are ours. Any thread may enter it."""
        try:
            yield
        finally:
            self.count()

    def count(self) -> None:
        """Count a write to each, which may come later."""
        with _counting:
            torch.autograd.graph.increment_version(self._params)
            for counter in self._counters:
                counter.own_writes += 1


def own_writes(flats: Iterable[FlatParam]) -> AbstractContextManager[None]:
    """Return a context in which writes to the memory of these parameters are ours, not edits of the user's."""
    return OwnWrites(flats).ours()


def share_counters(known: Iterable[FlatParam], added: Sequence[FlatParam]) -> None:
    """Find out which added parameters have a version counter in common with others, as views of one tensor do.

    A write to one of them raises the counter of all. Only raising counters shows which parameters share one, since they
    may have separate memory by then (``model.to``). The counters are restored, as a graph may hold the parameters.
    """
    old, fresh = ([flat for flat in flats if not flat.param.is_inference()] for flats in (known, added))
    with _unsafe_preserve_version_counter(tuple(flat.param for flat in (*old, *fresh))):
        counts = _raise_counters((*old, *fresh), by=fresh)
        with_known = any(counts[: len(old)])
        rest = [flat for flat, count in zip((*old, *fresh), counts, strict=True) if count > 1 or (count and with_known)]
        while rest:
            sharing = [flat for flat, count in zip(rest, _raise_counters(rest, by=rest[:1]), strict=True) if count]
            counter = sharing[0]._counter  # that of a known parameter, if any shares it: known ones come first
            for flat in sharing:
                flat._counter = counter
            rest = [flat for flat in rest if flat._counter is not counter]


def _raise_counters(flats: Sequence[FlatParam], by: Sequence[FlatParam]) -> list[int]:
    """Raise the counters of ``by`` by one, and return how much that raises those of ``flats``."""
    before = [flat.param._version for flat in flats]
    if by:
        torch.autograd.graph.increment_version([flat.param for flat in by])
    return [(flat.param._version - was) % _VERSIONS for flat, was in zip(flats, before, strict=True)]


def is_dtensor(value: object) -> bool:
    """Whether ``value`` is a DTensor. Does not import their module, which takes long."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)
