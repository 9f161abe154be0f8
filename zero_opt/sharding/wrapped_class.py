"""Facts about the wrapped optimizer class."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.algorithms.join import Joinable

from ..errors import ConfigConflict, ConfigTypeError, UnsupportedOptimizer, quoted
from ..field_checks import is_on
from ..kernels.table import NATIVE_CLASSES
from ..system.inference_mode import versions_of
from .param_groups import param_name

_OF_TORCH = ("Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
_WITH_FUSED = (torch.optim.Adagrad, torch.optim.Adam, torch.optim.SGD)
_elementwise: set[type[torch.optim.Optimizer]] = {*NATIVE_CLASSES, *(getattr(torch.optim, n) for n in _OF_TORCH)}


def register_elementwise(cls: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Declare that an optimizer class updates every element by itself; usable as a class decorator.

    Its parameters may then be cut anywhere, which balances ranks to the element. A class whose update of an element
    looks at other elements (norms, factored or matrix moments) must not be registered: it would silently be wrong.
    Every rank calls it, before it constructs an optimizer of the class. ``docs/drop-in.md`` says what else a class may
    rely on.

    Args:
        cls: the optimizer class. Subclasses of it are not registered with it.

    Returns:
        The class itself.

    Raises:
        ConfigTypeError: not an optimizer class.
    """
    given: object = cls
    if not isinstance(given, type) or not issubclass(given, torch.optim.Optimizer):
        instance = isinstance(given, torch.optim.Optimizer)
        hint = f"; write register_elementwise({type(given).__name__})" if instance else ""
        raise ConfigTypeError(f"register_elementwise() takes an optimizer class, got {in_short(given)}{hint}")
    check_wrapped_class(cls)
    _elementwise.add(cls)
    return cls


def is_elementwise(cls: type[torch.optim.Optimizer]) -> bool:
    """Whether parameters may be cut anywhere; subclasses are not assumed to be like their base."""
    return cls in _elementwise


def check_wrapped_class(cls: object) -> None:
    """Raise ConfigTypeError unless ``cls`` is an optimizer class."""
    if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer):
        if issubclass(cls, Joinable):
            raise ConfigTypeError(
                f"optimizer_class {cls.__name__} shards an optimizer itself; pass the class to shard, such as "
                "torch.optim.AdamW"
            )
        return
    hint = ""
    if isinstance(cls, torch.optim.Optimizer):
        hint = f"; pass the class, not an instance: ShardedOptimizer(params, {type(cls).__name__}, lr=...)"
    elif isinstance(cls, (Iterable, torch.nn.Module)) and not isinstance(cls, str):
        hint = "; parameters come first: ShardedOptimizer(params, optimizer_class, lr=...)"
    raise ConfigTypeError(
        f"optimizer_class must be a torch.optim.Optimizer subclass such as torch.optim.AdamW, got {in_short(cls)}{hint}"
    )


def in_short(value: object) -> str:
    """Return how messages show an argument: its repr if that is short, else its type."""
    if value is None or isinstance(value, (bool, int, float, str, type)):
        return quoted(value)
    return f"a {torch.typename(value)}"


def check_type(name: str, value: object, kind: type) -> None:
    """Raise ConfigTypeError unless an argument is of the type it must be."""
    if not isinstance(value, kind):
        raise ConfigTypeError(f"{name} must be a {kind.__name__}, got {in_short(value)}")


def require_real_if_fused(
    cls: type[torch.optim.Optimizer], groups: Sequence[Mapping[str, Any]], stepped: Container[int] = ()
) -> None:
    """Raise ConfigConflict for a complex parameter, not frozen, in a param group with ``fused=True``.

    Args:
        groups: all param groups. stepped: global indices of those to be stepped although they are frozen.
    """
    start = 0
    for group in groups if issubclass(cls, _WITH_FUSED) else ():
        for index, param in enumerate(group["params"] if is_on(group.get("fused")) else (), start):
            if param.dtype.is_complex and (param.requires_grad or index in stepped):
                raise ConfigConflict(
                    f"{param_name(groups, index)} is {param.dtype}, and fused=True steps real parameters alone; leave "
                    "fused out, or give complex parameters a param group of their own with fused=False"
                )
        start += len(group["params"])


def needs_closure(cls: type[torch.optim.Optimizer]) -> bool:
    """Whether ``step`` cannot be called without a closure."""
    closure = inspect.signature(cls.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def evaluated(
    cls: type[torch.optim.Optimizer], loss: Sequence[Any], stepped: Sequence[tuple[Tensor, Tensor]]
) -> Callable[[], Any] | None:
    """Return what stands for a closure that has been evaluated, for one step of the class; None if it takes none.

    Args:
        loss: what the closure has returned; empty if there is none. stepped: first of each pair, what the class steps.
    """
    if not loss or "closure" not in inspect.signature(cls.step).parameters:
        return None
    losses, params = [*loss], [part for part, _ in stepped]
    versions = versions_of(params)

    def closure() -> Any:
        if not losses or versions_of(params) != versions:
            raise UnsupportedOptimizer(
                f"{cls.__name__} evaluates the closure of step() several times, or once it has moved parameters, and "
                "cannot be sharded over several ranks, nor with an offload or masters; use it at world size 1 without"
            )
        return losses.pop()

    return closure


def bare_step(optimizer: torch.optim.Optimizer, closure: Any = None, **options: Any) -> Any:
    """``optimizer.step`` without the profiler label and step hooks, which run once, for the optimizer the user made."""
    method = type(optimizer).step
    if getattr(method, "hooked", False):
        method = method.__wrapped__  # type: ignore[attr-defined]
    return method(optimizer, **options) if closure is None else method(optimizer, closure, **options)


def steps_params_apart(optimizer_class: type[torch.optim.Optimizer]) -> bool:
    """Whether the class is known to keep state of single parameters alone."""
    return optimizer_class.__module__.split(".")[:2] == ["torch", "optim"] or optimizer_class in NATIVE_CLASSES
