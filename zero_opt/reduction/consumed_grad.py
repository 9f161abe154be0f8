"""``p.grad`` once a bucket has taken its values: a tensor without storage that refuses to be read.

``None`` would be simpler but silently wrong: ``torch.nn.utils.clip_grad_norm_`` skips parameters whose grad is None,
so it would return 0 and clip nothing. Autograd may still accumulate into the tensor, which opens the next round.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from operator import attrgetter, is_not
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..errors import GradientConflict, GradientConsumed, UnsupportedParam
from ..system.devices import read_here
from ..system.frames import called_by_autograd, inside_conversion, inside_description

aten = torch.ops.aten

_METADATA_CALLS = frozenset(
    {
        aten.detach.default,
        aten.alias.default,
        aten.sym_size.default,
        aten.sym_stride.default,
        aten.sym_numel.default,
        aten.sym_storage_offset.default,
        aten.is_same_size.default,
    }
)


class GradOwner(Protocol):
    """The reduction that holds the values a ConsumedGrad stands for."""

    def zero_consumed(self, param: int) -> None:
        """Make the held gradient of one parameter zero."""

    def release(self, param: int) -> Tensor | None:
        """Give up the gradient of a parameter that waits for a step of the owner's; ``None`` if none merely waits."""

    def may_copy_pending(self, param: int, target: Tensor) -> bool:  # noqa: ARG002
        """Return whether the caller may copy to ``target`` what was accumulated after the gradient was taken."""
        return False

    def unscale_consumed(self, inv_scale: Tensor) -> bool:
        """Multiply every held gradient by ``inv_scale``; returns whether any rank found a non-finite value."""


class ConsumedGrad(torch.Tensor):
    """A stand-in for a gradient that lies, reduced and sharded, in its optimizer.

    Shape, dtype, device and strides are the parameter's; there is no data. Reading values raises
    :class:`GradientConsumed`. What autograd accumulates into it waits in :attr:`pending`.
    """

    pending: Tensor | None
    owner: Callable[[], GradOwner | None]
    param: int
    label: str

    @staticmethod
    def __new__(
        cls: type[ConsumedGrad],
        like: Tensor,
        owner: GradOwner | None,
        param: int,
        label: str,
        device: torch.device | None = None,
    ) -> ConsumedGrad:
        self: ConsumedGrad = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=_grad_strides(like), dtype=like.dtype, device=device or like.device
        )
        # C++ that asks for a pointer without an operator, as to_dlpack() does, gets torch's error, not a null pointer.
        torch._C._set_throw_on_mutable_data_ptr(self)
        self.pending, self.param, self.label = None, param, label
        self.owner = _nobody if owner is None else weakref.ref(owner)
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ConsumedGrad({self.label}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __format__(self, format_spec: str) -> str:
        return self._refuse() if format_spec else str(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> ConsumedGrad:
        """Return one whose values are gone: a copy has no reduced gradient. A copied parameter has none at all."""
        copied: ConsumedGrad = memo.setdefault(id(self), _converted(self))
        return copied

    def void(self) -> None:
        """Stand for no gradient any more: reading this, or stepping by it, raises an error from now on."""
        self.pending, self.owner = None, _nobody

    def take_pending(self) -> Tensor | None:
        """Return what autograd has accumulated since the last call."""
        pending, self.pending = self.pending, None
        return pending

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise _refusal("reading it", (self,))

    # These reach no operator, so __torch_dispatch__ never sees them.
    tolist = numpy = item = data_ptr = __array__ = __dlpack__ = __float__ = __int__ = __bool__ = _refuse

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return storage without data to torch.compile, which describes the gradient of every parameter it meets."""
        return Tensor.untyped_storage(self) if inside_description() else self._refuse()

    @property
    def data(self) -> Tensor:
        """The tensor's data. Setting it is refused here: ``__torch_dispatch__`` does not see that."""
        return Tensor.data.__get__(self)  # type: ignore[attr-defined, no-any-return]

    @data.setter
    def data(self, value: Tensor) -> None:
        if value is self:  # as model.cpu() does, of a model that is on the CPU
            return
        if not isinstance(value, ConsumedGrad) or value.owner() is not None:  # else what _converted() has returned
            raise _refusal("setting its data", (self,))
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _METADATA_CALLS:
            return args[0]
        handler = _HANDLERS.get(func)
        if handler is not None:
            handled = handler(*args, **(kwargs or {}))
            if handled is not NotImplemented:
                return handled
        raise _refusal(func, args)


_pending_of = attrgetter("pending")


def any_pending(grads: Iterable[ConsumedGrad]) -> bool:
    """Return whether autograd has accumulated into any of these since it was taken."""
    return any(map(is_not, map(_pending_of, grads), repeat(None)))


def _nobody() -> None:
    """Return None, as a weak reference does to an owner that is gone."""


def _gone(grad: ConsumedGrad) -> str:
    return (
        f"the values of the gradient of {grad.label} are gone: a later one has replaced it, or its ShardedOptimizer "
        "was closed. Set p.grad to None (model.zero_grad()), and repeat the backward; to keep gradients, use "
        "reduction=zero_opt.AtStep()"
    )


def not_held_here(grad: ConsumedGrad, here: GradOwner | None = None) -> GradientConflict:
    """Return the error for a gradient of another parameter or optimizer (not ``here``), or whose values are gone."""
    if grad.owner() is None:
        return GradientConflict(_gone(grad))
    if grad.owner() is here:
        return GradientConflict(
            f"p.grad of another parameter was set to the gradient of {grad.label}, whose values have moved; to swap "
            "gradients by hand, use reduction=zero_opt.AtStep()"
        )
    return GradientConflict(
        f"{grad.label} is reduced by two ShardedOptimizers; close() the older one (if nothing refers to it any more, "
        "gc.collect() ends it; if the hook of a DistributedDataParallel does, delete that, too). If it had gradients, "
        "drop them with model.zero_grad()"
    )


def taken_over(grad: Tensor | None, here: GradOwner) -> Tensor | None:
    """Return a gradient, or what merely waits in another owner's stand-in; ``None`` where the values have moved."""
    if not isinstance(grad, ConsumedGrad):
        return grad
    owner = grad.owner()
    return None if owner is None or owner is here else owner.release(grad.param)


def set_again(label: str) -> GradientConflict:
    """Return the error for a gradient that came by no backward, and after the parameter's had been reduced."""
    return GradientConflict(
        f"{label}: p.grad was set again after it had been reduced. If DistributedDataParallel reduces this model too, "
        "use reduction=zero_opt.AlreadyReduced(); to edit gradients by hand before step(), use "
        "reduction=zero_opt.AtStep()"
    )


def sparse(label: str) -> UnsupportedParam:
    """Return the error for a sparse gradient, which no bucket takes."""
    return UnsupportedParam(f"{label} has a sparse gradient; use reduction=zero_opt.AtStep() and SparseAdam")


def consumed_conflict(params: Iterable[Tensor]) -> GradientConflict | None:
    """Return :func:`not_held_here` of the first consumed gradient, for a reduction that consumes none itself."""
    grads = (param.grad for param in params)
    return next((not_held_here(grad) for grad in grads if isinstance(grad, ConsumedGrad)), None)


def _grad_strides(param: Tensor) -> tuple[int, ...]:
    """Return the strides that autograd gives a gradient of ``param``: others draw a warning when it accumulates."""
    return torch.empty_like(param, device="meta").stride()


# What to do instead. For an operation that is not named below, the first is the most likely one.
_EDIT = "to read or edit gradients before step(), use reduction=zero_opt.AtStep()"
_CLIP = "to clip, or to log the norm, call opt.clip_grad_norm_(max_norm) on every rank, or pass max_grad_norm"
_DDP = (
    "under DistributedDataParallel, use reduction=zero_opt.AlreadyReduced(), or zero_opt.DDPHook() with "
    "zero_opt.ddp_hook"
)
_WAYS_OUT = (_EDIT, _CLIP, _DDP)
_REDUCE = "gradients are averaged already: leave your own all-reduce out"
_FINITE = 'to look for inf and NaN, pass checks=zero_opt.Checks(nonfinite="skip") or "raise"'
_STEP = "a parameter is stepped by one optimizer: take it out of the other"
_CONVERT = (
    "move or cast the model before its optimizer is made; what leaves dtypes, devices and shapes alone, as "
    "model.share_memory(), comes after opt.zero_grad()"
)
_SCALE = "to scale gradients, scale the loss before backward"
# What a user who calls an operator most likely wants, by the operator's name.
_WANTED = {
    **dict.fromkeys(("norm", "linalg_vector_norm", "_foreach_norm"), _CLIP),
    "isnan": _FINITE,
    **dict.fromkeys(
        ("lerp_", "_foreach_lerp_", "_foreach_add_", "_fused_adam_", "_fused_adamw_", "_fused_sgd_"), _STEP
    ),
    **dict.fromkeys(("mul", "mul_", "div", "div_", "_foreach_mul_", "_foreach_div_"), _SCALE),
}


def _refusal(func: Any, args: tuple[Any, ...]) -> GradientConsumed:
    met = [leaf for leaf in tree_leaves(args) if isinstance(leaf, ConsumedGrad)]
    if met and met[0].owner() is None:
        return GradientConsumed(_gone(met[0]))
    label = met[0].label if met else "a parameter"
    namespace, name, *_ = (*str(func).split("."), "")
    first = _REDUCE if namespace == "c10d" else _WANTED.get(name, _EDIT)
    if func in (aten.copy_.default, aten.mul.out) and torch._C._current_graph_task_id() != -1:  # as DDP's buckets do
        first = _DDP
    elif name.endswith("_") and isinstance(args[0], torch.nn.Parameter):
        first = _STEP
    others = f" Otherwise: {'; '.join(way for way in _WAYS_OUT if way is not first)}."
    if inside_conversion():
        first, others = _CONVERT, ""
    return GradientConsumed(
        f"{first[0].upper()}{first[1:]}. {func} met the gradient of {label}, whose values have moved into a sharded "
        f"gradient bucket.{others}"
    )


def _accumulate(target: Any, value: Any, *, alpha: Any = 1) -> Any:
    """Do ``target += value`` for autograd, and for hooks during a backward."""
    inside_backward = torch._C._current_graph_task_id() != -1
    if not isinstance(target, ConsumedGrad) or isinstance(value, ConsumedGrad) or not inside_backward or alpha != 1:
        return NotImplemented
    if not isinstance(value, Tensor) or value.shape != target.shape or value.is_complex() > target.is_complex():
        return NotImplemented  # a hook's: autograd adds nothing but gradients of this shape
    # The producer of ``value`` may use its memory again: torch adds it to p.grad at once.
    pending = target.pending
    target.pending = value.detach().to_dense().clone() if pending is None else pending + value
    if pending is not None:
        read_here(pending)
    return target


def _accumulate_with_graph(target: Any, value: Any, *, alpha: Any = 1) -> Any:
    """Do ``target + value`` for autograd, under ``create_graph=True``. A hook that adds so reads values: refused."""
    return _accumulate(target, value, alpha=alpha) if called_by_autograd() else NotImplemented


def _copy(target: Any, source: Any, non_blocking: bool = False) -> Any:  # noqa: ARG001  (as torch calls it)
    """Copy to a bucket of DistributedDataParallel's what was accumulated, where its communication hook is ours."""
    if not isinstance(source, ConsumedGrad) or isinstance(target, ConsumedGrad):
        return NotImplemented
    owner = source.owner()
    if owner is None or not owner.may_copy_pending(source.param, target):
        return NotImplemented
    return target.zero_() if source.pending is None else target.copy_(source.pending)


def _zero(target: Any) -> Any:
    owner = target.owner()
    if owner is not None:
        owner.zero_consumed(target.param)  # may refuse
    target.pending = None
    return target


def _follow(grad: Any, **how: Any) -> Any:
    """Let a gradient that is gone follow its parameter, where a model is moved or cast."""
    return _converted(grad, **how) if isinstance(grad, ConsumedGrad) and grad.owner() is None else NotImplemented


def _converted(grad: Any, *, dtype: torch.dtype | None = None, device: torch.device | None = None, **_: Any) -> Any:
    """Return one whose values are gone, of another dtype or device."""
    like = torch.empty_strided(grad.shape, grad.stride(), dtype=dtype or grad.dtype, device="meta")
    return ConsumedGrad(like, None, grad.param, grad.label, device or grad.device)


def _cannot_take_data(target: Any, source: Any) -> bool:  # noqa: ARG001  (as torch calls it)
    """Answer ``module.to()``, which asks whether it can assign ``grad.data``; if not it assigns ``grad``."""
    return False


def _foreach_zero(targets: Sequence[Tensor]) -> None:
    for target in targets:
        target.zero_()


def _unscale(grads: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Unscale for GradScaler: plain gradients as torch does, consumed ones in the shards of all ranks."""
    plain = [grad for grad in grads if not isinstance(grad, ConsumedGrad)]
    owners = {id(grad.owner()): grad.owner() for grad in grads if isinstance(grad, ConsumedGrad)}
    # Owners first: they take in plain gradients of theirs (from no_sync), which must not be unscaled twice.
    for owner in owners.values():
        if owner is not None and owner.unscale_consumed(inv_scale):
            found_inf.fill_(1.0)
    if plain:
        torch._amp_foreach_non_finite_check_and_unscale_(plain, found_inf, inv_scale)


_HANDLERS: dict[Any, Callable[..., Any]] = {
    aten.add_.Tensor: _accumulate,
    aten.add.Tensor: _accumulate_with_graph,
    aten.copy_.default: _copy,
    aten._has_compatible_shallow_copy_type.default: _cannot_take_data,
    aten.zero_.default: _zero,
    aten._to_copy.default: _follow,
    aten.empty_like.default: _follow,
    aten._foreach_zero_.default: _foreach_zero,
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
}
