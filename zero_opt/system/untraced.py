"""Functions that torch.compile leaves as they are."""

from __future__ import annotations

from typing import Any

import torch
from torch._compile import _disable_dynamo


def untraced_frames(function: Any) -> Any:
    """Return ``function``, whose calls torch.compile traces no more than what they call, at no cost per call.

    Where it compiles the caller, it goes on to trace the call there.
    """
    frames = getattr(torch._C._dynamo, "eval_frame", None)
    try:
        skip = frames._FrameAction.SKIP  # type: ignore[union-attr]
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))  # type: ignore[union-attr]
    except AttributeError:  # another version of torch
        return _disable_dynamo(function)
    return function


def untraced(function: Any) -> Any:
    """Return ``function``, which torch.compile traces neither itself nor in what it calls, at no cost per call."""
    function = untraced_frames(function)
    function._torchdynamo_disable = True  # where it would be inlined
    return function
