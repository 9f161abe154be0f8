"""Parameters that a pending step updates: training uses them as they are, and whatever else reads them is refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
import torch.utils._contextlib as decorators
from torch import Tensor, nn

from ..system.frames import calling_frames, inside_function
from .late_params import LateParams, Unwatched, late_among

_OPERATORS = "add sub mul div truediv floordiv mod pow and or xor lshift rshift"
_WRITES = frozenset(["__set__", "__setitem__", *(f"__i{name}__" for name in _OPERATORS.split())])
_BACKWARDS = (torch.autograd.backward, torch.autograd.grad, Tensor.backward)
_CALL_MODULE = nn.Module._call_impl.__code__
_DECORATORS_FILE = decorators.__file__


class PendingParams(LateParams):
    """The parameters that lack a pending step, or show predictions of it.

    Let through are what autograd records, autograd's own Functions, all of backward, what a module in training does
    with gradients enabled, and writes that read none of these parameters, which the next step notices. For the rest
    ``wait`` is called, which raises. A forward in evaluation with gradients enabled is as one in training: to tell them
    apart takes a walk of the stack for every operation.
    """

    def compiles(self) -> bool:
        return super().compiles() and torch.is_grad_enabled()

    def use(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        with Unwatched():
            if torch.is_grad_enabled():
                result = func(*args, **kwargs)
                if _recorded(result) or func in _BACKWARDS or _in_training() or _writes_alone(func, args, kwargs):
                    return result
            elif _in_autograd() or inside_function() or _decorated() or _writes_alone(func, args, kwargs):
                return func(*args, **kwargs)
        return super().use(func, args, kwargs)


def _recorded(result: Any) -> bool:
    """Return whether autograd has recorded how something was computed."""
    if isinstance(result, Tensor):
        return result.requires_grad
    return isinstance(result, (tuple, list)) and any(map(_recorded, result))


def _in_autograd() -> bool:
    return torch._C._current_graph_task_id() != -1


def _in_training(frames: Iterable[FrameType] | None = None) -> bool:
    """Return whether this thread is in backward, or in the call of a module in training."""
    calls = (frame for frame in frames or calling_frames() if frame.f_code is _CALL_MODULE)
    return _in_autograd() or any(frame.f_locals["self"].training for frame in calls)


def _decorated() -> bool:
    """Return whether a module in training calls a function of its own with a decorator that disables gradients.

    That is how ``spectral_norm`` reads a weight in a forward that is recorded.
    """
    frames = calling_frames()
    for frame in frames:
        if frame.f_code is _CALL_MODULE:
            return False
        if frame.f_code.co_name == "decorate_context" and frame.f_code.co_filename == _DECORATORS_FILE:
            return _in_training(frames)
    return False


def _writes_alone(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a function writes to parameters in place, and reads no other ones."""
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    if not (in_place or name in _WRITES) or not args:
        return False
    return bool(late_among(args[:1])) and not late_among([*args[1:], *kwargs.values()])
