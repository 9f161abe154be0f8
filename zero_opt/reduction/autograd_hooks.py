"""When a gradient has arrived: post-accumulate hooks on the trainable parameters, and which backward they belong to."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd import function as autograd_function

_FUNCTION_FILE = autograd_function.__file__


class ArrivalHooks:
    """Calls ``arrived(param index)`` whenever autograd has accumulated into a watched parameter's grad.

    The parameters hold the callback's object only weakly: an optimizer that goes out of use stops listening.
    """

    def __init__(self, arrived: Callable[[int], None]) -> None:
        self._arrived = weakref.WeakMethod(arrived)
        self._handles: dict[int, Any] = {}

    def watch(self, index: int, param: Tensor) -> None:
        """Listen to ``param``; harmless if it is watched already."""
        if index in self._handles:
            return
        hook, frozen = partial(_announce, self._arrived, index), not param.requires_grad
        # torch registers none on a frozen one, which may be one that has state from before, and is thawed later.
        param.requires_grad_()
        try:
            self._handles[index] = param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        finally:
            param.requires_grad_(not frozen)

    def close(self) -> None:
        """Stop listening."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()


@_disable_dynamo  # a backward inside torch.compile would trace it
def _announce(method: weakref.WeakMethod[Callable[[int], None]], index: int, _: Tensor) -> None:
    arrived = method()
    if arrived is not None:
        arrived(index)


class BackwardPasses:
    """Tells whether an arrival shows that the user has started another backward pass.

    Autograd numbers graph executions as they start. A reentrant checkpoint runs inner graphs inside one backward, each
    with a number of its own; those are recognized by the autograd Function that called them. They tell nothing: which
    backward is around them shows only when it has an arrival of its own, and that started before they did.
    """

    def __init__(self) -> None:
        self._task = -1
        self._first_inner: int | None = None
        self._unfinished: set[int] = set()

    def begins(self) -> bool:
        """Whether the current arrival is in a backward that started after the last arrival."""
        task = torch._C._current_graph_task_id()
        if task == self._task:
            return False
        self._task = task
        self._unfinished.add(task)
        # Autograd calls it at the end of the pass, unless an exception ends the pass.
        torch.autograd.Variable._execution_engine.queue_callback(partial(self._unfinished.discard, task))
        if _inside_function():
            self._first_inner = task if self._first_inner is None else self._first_inner
            return False
        inner, self._first_inner = self._first_inner, None
        # The numbers are C integers of 32 bits, which wrap.
        return inner is None or 0 < (task - inner) % (1 << 32) < 1 << 31

    def broken(self) -> bool:
        """Whether a pass that had an arrival has ended in an exception, since :meth:`forget`."""
        return bool(self._unfinished - {torch._C._current_graph_task_id()})

    def forget(self) -> None:
        """Whatever has arrived is void."""
        self._unfinished.clear()


def _inside_function() -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "apply" and frame.f_code.co_filename == _FUNCTION_FILE:
            return True
        frame = frame.f_back
    return False
