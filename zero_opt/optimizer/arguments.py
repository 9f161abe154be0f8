"""Checks of what users pass: arguments of the wrapped class, and parameters that can be sharded."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from ..errors import (
    ConfigConflict,
    ConfigError,
    ConfigTypeError,
    UnsupportedOptimizer,
    UnsupportedParam,
    ZeroOptError,
    quoted,
)
from ..field_checks import is_on
from ..kernels.native_optimizer import NativeOptimizer, refuse_own_options
from ..sharding.flat_param import (
    check_grad_dtype,
    check_memory,
    check_params_apart,
    check_trainable,
    is_dtensor,
    is_wrapper,
)
from ..sharding.param_groups import hypers_of, params_of, set_hypers
from ..sharding.wrapped_class import needs_closure
from ..system.inference_mode import versions_of
from ..system.interrupts import uninterrupted
from ..system.log import log
from .hyperparameters import require_types

# Methods that a class may have of its own and that are not called, and what happens instead.
_NOT_CALLED = {
    "zero_grad": "opt.zero_grad() drops gradients itself",
    "state_dict": "opt.state_dict() gathers the state itself",
}
# Classes of which the log has told that.
_logged: WeakSet[type[torch.optim.Optimizer]] = WeakSet()


@contextmanager
def adopt_errors() -> Iterator[None]:
    """Raise torch's complaints about arguments as errors of ours that are also torch's type."""
    try:
        yield
    except ZeroOptError:
        raise
    except TypeError as error:
        raise ConfigTypeError(str(error)) from error
    except ValueError as error:
        raise ConfigError(str(error)) from error
    except RuntimeError as error:
        if type(error) is not RuntimeError:  # out of memory and the like
            raise
        raise ConfigConflict(str(error)) from error


def refusal_of_others(others: Sequence[object]) -> ConfigTypeError | None:
    """Return the error if ``step()`` is given more than a closure by position."""
    if not others:
        return None
    return ConfigTypeError(f"step() takes one closure, or nothing, got {len(others)} more: {quoted(others)}")


def refusal_of_step(closure: object, options: Mapping[str, object]) -> ConfigTypeError | None:
    """Return the error if a step over several ranks is given anything other than a closure, or nothing."""
    if options:
        return ConfigTypeError(f"step() over several ranks takes a closure alone, got {sorted(options)}")
    if closure is None or callable(closure):
        return None
    return ConfigTypeError(f"step() takes a closure that computes the loss, or nothing, got {quoted(closure)}")


def template_of(
    cls: type[torch.optim.Optimizer], groups: Sequence[Any], defaults: Mapping[str, Any], first: int = 0
) -> torch.optim.Optimizer:
    """Return the wrapped class over parameters without values: it checks arguments, and knows all defaults.

    Args:
        groups: param groups, numbered from ``first``, or parameters.

    Raises:
        UnsupportedOptimizer: the class cannot be sharded. Whatever the class raises about its arguments.
    """
    if needs_closure(cls):
        raise UnsupportedOptimizer(
            f"{cls.__name__} evaluates the loss several times per step on all parameters at once and cannot be sharded "
            "over several ranks, nor with an offload or masters; use it at world size 1 without"
        )
    require_types(cls, groups, defaults, first)
    for number, group in enumerate(groups if issubclass(cls, NativeOptimizer) else (), first):
        if isinstance(group, Mapping):
            refuse_own_options(group, number)  # the class would number them from 0
    params: list[Tensor] = []
    entries = [_on_meta(entry, params) for entry in groups]
    before = versions_of(params)
    template = cls(entries, **defaults)
    check_options(template.param_groups)
    _require_as_given(template, entries, params)
    if versions_of(params) != before:
        raise UnsupportedOptimizer(
            f"{cls.__name__} writes to its parameters when it is constructed, and cannot be sharded over several "
            "ranks, nor with an offload or masters; write to them before that"
        )
    _refuse_untold(template)
    return template


def completed_group(
    cls: type[torch.optim.Optimizer], user: torch.optim.Optimizer, defaults: Mapping[str, Any], late: dict[str, Any]
) -> dict[str, Any]:
    """Return a param group that comes late, as an ``add_param_group`` of the class's own completes it.

    Other param groups get the hyperparameters that it gives them.

    Args:
        user: has those, and the defaults as they are now. defaults: what the class was constructed with.
    """
    if cls.add_param_group is torch.optim.Optimizer.add_param_group or issubclass(cls, NativeOptimizer):
        return late
    template, added = template_of(cls, user.param_groups, defaults), list[Tensor]()
    params = params_of(template.param_groups)
    template.defaults.update(user.defaults)
    for group, made in zip(user.param_groups, template.param_groups, strict=True):
        set_hypers(made, hypers_of(group))  # the constructor may have changed them once more
    template.add_param_group(_on_meta(late, added))
    _require_as_given(template, [*user.param_groups, late], [*params, *added])
    for group, made in zip(user.param_groups, template.param_groups, strict=False):
        set_hypers(group, hypers_of(made))
    return {**late, **hypers_of(template.param_groups[-1])}


@uninterrupted()  # what a signal handler raises is not the class's
def loaded_groups(
    cls: type[torch.optim.Optimizer],
    saved: Sequence[Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
    defaults: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """Return the hyperparameters of a state dict as a class of the user's own completes them, one dict per group.

    That is what its ``load_state_dict`` and ``__setstate__`` make of them, given a state dict without state.

    Args:
        groups: those that the optimizer has. defaults: what it was constructed with.
    """
    base, hypers = torch.optim.Optimizer, [hypers_of(group) for group in saved]
    if cls.load_state_dict is base.load_state_dict and cls.__setstate__ is base.__setstate__:
        return hypers
    params = list[Tensor]()
    try:
        template = cls([_on_meta(group, params) for group in groups], **defaults)
        numbers = iter(range(len(params)))
        ids = [[next(numbers) for _ in group["params"]] for group in template.param_groups]
        numbered = [{**copy.deepcopy(group), "params": at} for group, at in zip(hypers, ids, strict=True)]
        template.load_state_dict({"state": {}, "param_groups": numbered})
    except Exception as error:  # it may need state
        log.warning(
            "%s cannot complete the param groups of a state dict without its state (%s: %s); they are loaded as they "
            "are",
            *(cls.__name__, type(error).__name__, error),
        )
        return hypers
    return [hypers_of(group) for group in template.param_groups]


def _require_as_given(template: torch.optim.Optimizer, entries: Sequence[Any], params: Sequence[Tensor]) -> None:
    """Raise UnsupportedOptimizer for a class that divides, reorders or leaves out param groups, or what is trained."""
    groups = len(entries) if entries and isinstance(entries[0], Mapping) else 1
    made, given = ([id(p) for p in each if p.requires_grad] for each in (params_of(template.param_groups), params))
    if len(template.param_groups) != groups or made != given:
        raise UnsupportedOptimizer(
            f"{type(template).__name__} makes other param groups of those that it is given, which cannot be followed "
            "over several ranks, nor with an offload or masters; pass the groups that it makes"
        )


def _refuse_untold(template: torch.optim.Optimizer) -> None:
    """Raise UnsupportedOptimizer for a class that saves more than state and param groups; log what is not called."""
    cls, name = type(template), type(template).__name__
    own = set[str]()
    if cls.state_dict is not torch.optim.Optimizer.state_dict:
        with suppress(Exception):  # a class may save itself by other functions
            saved = template.state_dict()
            kept = zip(saved["param_groups"], template.param_groups, strict=True)
            own = {*map(str, saved.keys() - {"state", "param_groups"})}
            own.update(str(key) for group, live in kept for key in group.keys() - live.keys())
    if own:
        raise UnsupportedOptimizer(
            f"{name} saves {', '.join(map(repr, sorted(own)))} in its state dict beside state and param groups, which "
            "would be in no checkpoint over several ranks, nor with an offload or masters; keep it in the param groups"
        )
    if cls in _logged or issubclass(cls, NativeOptimizer):
        return
    _logged.add(cls)
    for method, instead in _NOT_CALLED.items():
        if getattr(cls, method) is not getattr(torch.optim.Optimizer, method):
            log.warning(
                "%s.%s() is not called over several ranks, nor with an offload or masters: %s", name, method, instead
            )


def _on_meta(entry: Any, params: list[Tensor]) -> Any:
    """Return what a class is given, with parameters without values, which ``params`` gets too."""
    if isinstance(entry, Tensor):
        if entry.is_nested:
            raise UnsupportedParam("a parameter is a nested tensor; only dense parameters can be sharded")
        if entry.is_quantized:
            raise UnsupportedParam(
                f"a parameter of shape {tuple(entry.shape)} is quantized ({entry.dtype}), and cannot be trained; leave "
                "it out of the parameters"
            )
        if is_wrapper(entry) and not is_dtensor(entry):  # whose own operations may not know the meta device
            values = torch.empty_strided(entry.shape, entry.stride(), dtype=entry.dtype, device="meta")
        else:
            values = entry.detach().to("meta", copy=True)
        param = torch.nn.Parameter(values, requires_grad=entry.requires_grad)
        vars(param).update(vars(entry))
        params.append(param)
        return param
    if isinstance(entry, tuple) and len(entry) == 2:
        return (entry[0], _on_meta(entry[1], params))
    if isinstance(entry, Mapping) and "params" in entry:
        inner = entry["params"]
        return {
            **entry,
            "params": _on_meta(inner, params) if isinstance(inner, Tensor) else [_on_meta(e, params) for e in inner],
        }
    return entry


def check_options(groups: Iterable[Mapping[str, Any]]) -> None:
    """Raise UnsupportedOptimizer for hyperparameters that cannot be sharded."""
    for group, option in itertools.product(groups, ("differentiable", "capturable")):
        if is_on(group.get(option)):
            raise UnsupportedOptimizer(
                f"{option}=True cannot be sharded over several ranks, nor offloaded; leave it False"
            )


def checked_groups(
    groups: Sequence[Mapping[str, Any]], describe: Callable[[int], str], reduce_dtype: torch.dtype | None = None
) -> None:
    """Raise UnsupportedParam, naming it, for a parameter that cannot be sharded.

    Args:
        reduce_dtype: a dtype of the gradient path, ``None`` for each parameter's own.
    """
    params = [param for group in groups for param in group["params"]]
    for index, param in enumerate(params):
        if param.is_inference() and param.requires_grad:
            raise UnsupportedParam(
                f"{describe(index)} was made under torch.inference_mode() and cannot be trained; make the model "
                "outside it, or clone the parameter there"
            )
        if param.is_meta:
            raise UnsupportedParam(f"{describe(index)} is on the meta device; materialize the model first")
        if getattr(param, "_is_flat_param", False) or getattr(param, "_fsdp_flattened", False):
            raise UnsupportedParam(
                f"{describe(index)} belongs to FullyShardedDataParallel (FSDP1), which does not say what part of it "
                "this rank has; use torch.distributed.fsdp.fully_shard (FSDP2)"
            )
        if param.is_complex() and reduce_dtype is not None:
            raise UnsupportedParam(
                f"{describe(index)} is {param.dtype}, and reduce_dtype={reduce_dtype} would drop the imaginary part of "
                "its gradient; leave reduce_dtype and accumulate_dtype None"
            )
        check_memory(param, describe(index), needed=param.requires_grad)
        if param.requires_grad:
            check_trainable(param, describe(index))
        check_grad_dtype(param, describe(index))
    check_params_apart(params, describe)
