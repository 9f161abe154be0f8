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

_FUNCTION_FILE = autograd_function.__file__
_DESCRIBER_FILE = os.path.join("torch", "_subclasses", "meta_utils.py")


def inside_function() -> bool:
    """Return whether this thread is in the forward or the backward of an autograd Function."""
    codes = [frame.f_code for frame in calling_frames()]
    if any(code.co_name.startswith("apply") and code.co_filename == _FUNCTION_FILE for code in codes):
        return True
    return not _forwards().isdisjoint(codes)  # from torch 2.14 on, what calls a forward is no Python code


def _forwards() -> set[CodeType]:
    """Return the code of the forwards of all autograd Functions there are; without what decorates them."""
    found, classes = set[CodeType](), [autograd_function.Function]
    while classes:
        cls: Any = classes.pop()
        classes += cls.__subclasses__()
        code = getattr(inspect.unwrap(cls.forward), "__code__", None)
        if isinstance(code, CodeType):
            found.add(code)
    return found


def inside_conversion() -> bool:
    """Return whether this thread is in a call that moves or casts a module, as ``module.to()``."""
    return any(frame.f_code is torch.nn.Module._apply.__code__ for frame in calling_frames())


def inside_description() -> bool:
    """Return whether this thread is in torch.compile's description of a tensor, which does not ask for values."""
    codes = (frame.f_code for frame in calling_frames())
    return any(code.co_name == "describe_tensor" and code.co_filename.endswith(_DESCRIBER_FILE) for code in codes)


def calling_frames() -> Iterator[FrameType]:
    """Yield the frames of this thread's stack, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
