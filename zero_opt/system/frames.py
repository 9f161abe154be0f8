"""The stack of the calling thread, and what it says of torch's functions that have called."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

import torch
import torch.autograd.function as autograd_function
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_FUNCTION_FILE = autograd_function.__file__
# From torch 2.14 on, the function that calls a forward has no frame.
_APPLY_IS_PYTHON = isinstance(vars(autograd_function.Function)["apply"], classmethod)
# Files of the wrappers by which torch.compile skips a mode's ``__torch_dispatch__``.
_WRAPPER_FILES = (os.path.join("torch", "_compile.py"), os.path.join("torch", "_dynamo", "eval_frame.py"))
# Of threads that run Python from their beginning on: of a program, of one that "python -m" starts, of any other thread.
_OUTERMOST = ("<module>", "_run_module_as_main", "_bootstrap")
_DESCRIBER_FILE = os.path.join("torch", "_subclasses", "meta_utils.py")


def inside_function() -> bool:
    """Return whether this thread is in the forward or the backward of an autograd Function."""
    codes = (frame.f_code for frame in calling_frames())
    if any(code.co_name.startswith("apply") and code.co_filename == _FUNCTION_FILE for code in codes):
        return True
    return not _APPLY_IS_PYTHON and any(map(_is_forward, calling_frames()))


def _is_forward(frame: FrameType) -> bool:
    """Return whether a frame is that of a Function's forward, called by ``apply``; it must have that name."""
    code = frame.f_code
    if code.co_name != "forward" or not code.co_varnames:
        return False
    first = frame.f_locals.get(code.co_varnames[0])
    if isinstance(first, torch.nn.Module):
        return False
    return isinstance(first, autograd_function.FunctionCtx) or code in _forwards_without_context()


def _forwards_without_context() -> set[CodeType | None]:
    """Return the code of the forwards of all Functions that take no context; without what decorates them."""
    found, classes = set[CodeType | None](), [autograd_function.Function]
    while classes:
        cls: Any = classes.pop()
        classes += cls.__subclasses__()
        if cls.setup_context is not autograd_function.Function.setup_context:
            found.add(getattr(inspect.unwrap(cls.forward), "__code__", None))
    return found


def inside_conversion() -> bool:
    """Return whether this thread is in a call that moves or casts a module, as ``module.to()``."""
    return any(frame.f_code is torch.nn.Module._apply.__code__ for frame in calling_frames())


def inside_description() -> bool:
    """Return whether this thread is in torch.compile's description of a tensor, which does not ask for values."""
    codes = (frame.f_code for frame in calling_frames())
    return any(code.co_name == "describe_tensor" and code.co_filename.endswith(_DESCRIBER_FILE) for code in codes)


def called_by_autograd() -> bool:
    """Return whether autograd's engine itself has called the operator that this thread is in, not a hook or a Function.

    The user's modes may lie between. On the thread of an accelerator the engine has no frame. Nor has it one where it
    was not called by torch's Python functions, as by TorchScript: then it is taken for the caller under
    ``create_graph=True``.
    """
    outermost: FrameType | None = None
    for frame in calling_frames():
        code = frame.f_code
        if code is _engine_run_backward.__code__:
            return outermost is None or _is_of_a_mode(outermost)
        if not code.co_filename.endswith(_WRAPPER_FILES):
            outermost = frame
    assert outermost is not None, "this function has a caller"
    return _is_of_a_mode(outermost) or (outermost.f_code.co_name in _OUTERMOST and torch.is_grad_enabled())


def _is_of_a_mode(frame: FrameType) -> bool:
    """Return whether a frame is that of a mode's ``__torch_dispatch__``, or of what wraps that."""
    code = frame.f_code
    first = frame.f_locals.get(code.co_varnames[0]) if code.co_varnames else None
    if isinstance(first, tuple) and first:  # of a wrapper that takes any arguments
        first = first[0]
    return code.co_name == "__torch_dispatch__" or isinstance(first, (TorchDispatchMode, TorchFunctionMode))


def calling_frames() -> Iterator[FrameType]:
    """Yield the frames of this thread's stack, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
