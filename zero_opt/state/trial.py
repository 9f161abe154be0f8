"""Trials of an optimizer class on a few zeros: which hyperparameters it takes, which state a step makes."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from fractions import Fraction
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedOptimizer
from ..sharding.param_groups import hypers_of, set_hypers
from ..sharding.wrapped_class import bare_step, is_elementwise, steps_params_apart
from ..system.interrupts import uninterrupted

# A trial of a parameter with at most so many elements has as many.
_REAL_NUMEL = 1 << 14
# Elements of two trials from which the state of any number follows: whole blocks, by whatever a class may group.
_FEW, _MORE = 1 << 12, 1 << 13


def is_known(cls: type[torch.optim.Optimizer]) -> bool:
    """Return whether a step on zeros tells the state of any parameter, as it does of torch's and registered classes."""
    return steps_params_apart(cls) or is_elementwise(cls)


def _own(value: Any) -> Any:
    """Return a copy of what a class may write to, in containers of any depth; all else as it is."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if type(value) in (list, tuple, set):
        return type(value)(map(_own, value))
    return {key: _own(item) for key, item in value.items()} if type(value) is dict else value


def _in_numbers(value: Any) -> Any:
    """Return a tuple with numbers in the place of tensors of one element; all else as it is."""
    if type(value) is not tuple:
        return value
    return tuple(item.item() if isinstance(item, Tensor) and item.numel() == 1 else item for item in value)


class Trial:
    """One parameter under an optimizer of its own. The class may raise anything about the arguments it is given.

    Hyperparameters are its own: a class may write to them in its step.

    Args:
        like: the parameter's values, whose memory it takes. hypers: of its param group.
        **arguments: the class's own.
    """

    def __init__(
        self, cls: type[torch.optim.Optimizer], like: Tensor, hypers: Mapping[str, Any], **arguments: Any
    ) -> None:
        self.param = torch.nn.Parameter(like, requires_grad=False)
        self.optimizer = cls([{**hypers, "params": [self.param]}], **arguments)
        self.set_hypers(self.hypers)

    @property
    def hypers(self) -> dict[str, Any]:
        """The hyperparameters as the class has completed them."""
        return hypers_of(self.optimizer.param_groups[0])

    def set_hypers(self, hypers: Mapping[str, Any]) -> None:
        """Give the param group these hyperparameters in place of its own."""
        set_hypers(self.optimizer.param_groups[0], {key: _own(value) for key, value in hypers.items()})

    @property
    def state(self) -> Mapping[str, Any]:
        """The parameter's live state; empty if there is none."""
        return self.optimizer.state.get(self.param) or {}

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Make one step with a gradient of zeros, of a layout that the class takes."""
        layout = torch.sparse_coo if isinstance(self.optimizer, torch.optim.SparseAdam) else torch.strided
        self.param.grad = torch.zeros_like(self.param, layout=layout)
        try:
            bare_step(self.optimizer, closure)
        finally:
            self.param.grad = None


def trial_of(
    cls: type[torch.optim.Optimizer], hypers: Mapping[str, Any], own: Mapping[str, Any], like: Tensor
) -> Trial:
    """Return a trial of a class with these hyperparameters.

    If the class refuses them together but accepts each alone, the trial starts from ``own``, which it accepts: a step
    may work with such a combination, as momentum 0 beside ``nesterov=True``. So it may with a number beside a tensor in
    one tuple, as schedulers leave betas, of which the values are what the class has to accept.

    Raises:
        Exception: whatever the class raises about them.
    """
    known = inspect.signature(cls).parameters  # the class checks arguments, but not what stands in a group

    def taken(values: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in values.items() if key in known}

    arguments, own = taken(hypers), taken(own)
    try:
        return Trial(cls, like, {}, **arguments)
    except ValueError as error:
        for key, given in arguments.items():
            for others, value in product(({}, own), (given, _in_numbers(given))):
                with suppress(ValueError, TypeError):  # an argument may have no default
                    Trial(cls, like, {}, **{**others, key: value})
                    break
            else:
                raise error from None
        return Trial(cls, like, {}, **own)


@uninterrupted()  # what a signal handler raises is not the class's
def state_after_a_step(cls: type[torch.optim.Optimizer], hypers: Mapping[str, Any], like: Tensor) -> Mapping[str, Any]:
    """Return the state that a parameter gets; empty if the class cannot step it so (without a closure, say)."""
    try:
        trial = Trial(cls, like, hypers)
        trial.step()
    except Exception:  # whatever a class raises
        return {}
    return trial.state


class StateSizes:
    """Bytes of state that a class makes for a parameter in its first step, by key, learned by trials.

    Small parameters are tried as they are. For large ones, an elementwise class is tried on two small parameters, since
    its state grows evenly; any other class on one without memory, which makes state before it misses the values.
    """

    def __init__(self, cls: type[torch.optim.Optimizer], defaults: Mapping[str, Any]) -> None:
        self._class, self._defaults = cls, dict(defaults)
        self._even = is_elementwise(cls)
        self._known: dict[tuple[int, tuple[int, ...], torch.dtype], Mapping[str, int]] = {}
        self._slopes: dict[tuple[int, torch.dtype], Mapping[str, tuple[int, Fraction]]] = {}

    def of(self, group: int, hypers: Mapping[str, Any], shape: Sequence[int], dtype: torch.dtype) -> Mapping[str, int]:
        """Return the bytes by key of the state of a parameter, or of a part of one.

        Args:
            group: number of the param group that has these ``hypers``.

        Raises:
            UnsupportedOptimizer: the class cannot be tried; the message has its reason.
        """
        key = (group, tuple(shape), dtype)
        if key not in self._known:
            numel = math.prod(shape)
            if numel <= _REAL_NUMEL:
                self._known[key] = self._tried(hypers, torch.zeros(tuple(shape), dtype=dtype, device="cpu"))
            elif self._even:
                self._known[key] = self._grown(group, hypers, numel, dtype)
            else:
                self._known[key] = self._tried(hypers, torch.empty(tuple(shape), dtype=dtype, device="meta"))
        return self._known[key]

    def _grown(self, group: int, hypers: Mapping[str, Any], numel: int, dtype: torch.dtype) -> Mapping[str, int]:
        if (group, dtype) not in self._slopes:
            few, more = (self._tried(hypers, torch.zeros(count, dtype=dtype, device="cpu")) for count in (_FEW, _MORE))
            slopes = {role: Fraction(more[role] - few[role], _MORE - _FEW) for role in few}
            self._slopes[group, dtype] = {role: (few[role], slope) for role, slope in slopes.items()}
        lines = self._slopes[group, dtype].items()
        return {role: math.ceil(start + (numel - _FEW) * slope) for role, (start, slope) in lines}

    @uninterrupted()
    def _tried(self, hypers: Mapping[str, Any], like: Tensor) -> Mapping[str, int]:
        given = dict(hypers)
        if like.is_meta and given.get("fused"):
            given["fused"] = False  # the fused kernel needs memory, and the state is the same
        trial = Trial(self._class, like, given, **self._defaults)
        try:
            trial.step()
        except Exception as error:  # whatever a class raises
            if not trial.state and like.numel():
                raise UnsupportedOptimizer(
                    f"what {self._class.__name__} keeps is not to be learned: its step failed on zeros of shape "
                    f"{tuple(like.shape)} on {like.device} ({type(error).__name__}: {error})"
                ) from error
        tensors = {key: value for key, value in trial.state.items() if isinstance(value, Tensor)}
        return {key: value.numel() * value.element_size() for key, value in tensors.items()}
