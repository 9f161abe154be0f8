"""Parameters that a pending step updates: training uses them as they are, and whatever else reads them is refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
import torch.utils._contextlib as decorators
from torch import Tensor, nn
from torch.distributed.utils import _sync_module_states

from ..system.frames import calling_frames, inside_function
from .late_params import LateParams, Unwatched, late_among

_OPERATORS = "add sub mul div truediv floordiv mod pow and or xor lshift rshift"
_WRITES = frozenset(["__set__", "__setitem__", *(f"__i{name}__" for name in _OPERATORS.split())])
_BACKWARDS = (torch.autograd.backward, torch.autograd.grad, Tensor.backward)
_CALL_MODULE = nn.Module._call_impl.__code__
_SEND_STATES: Any = _sync_module_states
_MOVES = (nn.Module._apply.__code__, _SEND_STATES.__code__)
_DECORATORS_FILE = decorators.__file__


class PendingParams(LateParams):
    """The parameters that lack a pending step, or show predictions of it.

    Let through are what autograd records, autograd's own Functions, all of backward, what a module in training does
    with gradients enabled, what moves parameters and leaves them as late (``module.to()``, DDP), and writes that read
    none of these parameters, which the next step notices. For the rest ``wait`` is called, which raises. A forward in
    evaluation with gradients enabled is as one in training: to tell them apart takes a walk of the stack for every
    operation.
    """

    def compiles(self) -> bool:
        return torch.compiler.is_compiling() and torch.is_grad_enabled()

    def use(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        with Unwatched():
            if torch.is_grad_enabled():
                result = func(*args, **kwargs)
                if _recorded(result) or func in _BACKWARDS or _in_training(calling_frames()):
                    return result
                if _in_autograd() or _writes_alone(func, args, kwargs) or _moves():
                    return result
            elif _in_autograd() or _writes_alone(func, args, kwargs) or inside_function() or _moves() or _decorated():
                return func(*args, **kwargs)
        return super().use(func, args, kwargs)


def _recorded(result: Any) -> bool:
    """Return whether autograd has recorded how something was computed."""
    if isinstance(result, Tensor):
        return result.requires_grad
    return isinstance(result, (tuple, list)) and any(map(_recorded, result))


def _in_autograd() -> bool:
    """Return whether this thread is in backward."""
    return torch._C._current_graph_task_id() != -1


def _in_training(frames: Iterable[FrameType]) -> bool:
    """Return whether a module in training is called in any of these frames."""
    return any(frame.f_code is _CALL_MODULE and frame.f_locals["self"].training for frame in frames)


def _moves() -> bool:
    """Return whether a module moves its parameters, or DDP sends them to all ranks."""
    return any(frame.f_code in _MOVES for frame in calling_frames())


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
