"""The rule that an optimizer is in one call at a time, whatever a signal handler or another thread asks of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from threading import get_ident
from typing import Any, TypeVar, cast

import torch
from torch._compile import _disable_dynamo

from ..errors import ParamsReplaced, StepDesync
from ..sharding.late_params import Unwatched
from ..system.inference_mode import outside_inference_mode

_NO_CONTEXT = nullcontext()
_Watched: Any = torch._C._EnableTorchFunction
_Read = TypeVar("_Read")
_Method = TypeVar("_Method", bound=Callable[..., Any])


class OneCall:
    """The calls that one optimizer is in.

    Only ``state_dict()`` may be called beside another call, since :class:`StateGuard` keeps readers and changes apart.
    Other calls are refused at once: inside a call that waits for the other ranks, they would wait for themselves.

    Attributes:
        watch: what is called when a call has ended, so that late parameters are watched. Within a call they are not.
        under_way: the call that is under way, as messages name it. ``None`` while the user's closure runs in it.
        reading: the threads that are inside ``state_dict()``.
        within_hook: whether the caller's thread is handing a gradient over in a backward.
    """

    def __init__(self) -> None:
        self.watch: Callable[[], None] | None = None
        self.under_way: str | None = None
        self.reading = set[int]()
        self.within_hook: Callable[[], bool] = bool

    def refusal(self, call: str, under_way: str | None) -> StepDesync:
        """Return the error for a call that begins while another one is under way."""
        return StepDesync(
            f"{call} was called while {under_way} is under way (from a signal handler, a hook or another thread): "
            f"set a flag there, and call it once {under_way} has returned"
        )

    def read(self, state_dict: Callable[[], _Read]) -> _Read:
        """Return the state dict that ``state_dict`` returns, in any inference mode of the caller's."""
        thread = get_ident()
        if thread in self.reading:
            return state_dict()
        try:
            self.reading.add(thread)
            with outside_inference_mode(), Unwatched():
                return state_dict()
        finally:
            self.reading.discard(thread)

    def outside(self, closure: Callable[[], _Read]) -> _Read:
        """Return what the user's closure returns, which may call the optimizer as if no call were under way.

        Raises:
            StepDesync: a call that another thread has begun meanwhile is under way still.
        """
        call, self.under_way = self.under_way, None
        try:
            with _Watched():
                result = closure()
        finally:
            other, self.under_way = self.under_way, call
        if other is not None:
            raise self.refusal(other, call)
        return result


def one_call(call: str, *, replans: bool = False, traced: bool = False) -> Callable[[_Method], _Method]:
    """Decorate a method that changes the optimizer, or is collective.

    The method's object has its :class:`OneCall` as ``_one_call``. The method raises StepDesync, and does nothing, while
    another such call of the optimizer is under way. Within the method, closures included, there is no inference mode:
    state and staging outlive it. All this takes 0.5 us.

    Args:
        call: the method's name in messages.
        replans: if the method raises ParamsReplaced, which it does on every rank and before it changes anything, call
            ``_replan()`` of its object, which plans the parameters that there are now, and the method once more.
        traced: torch.compile may trace into the method. What it cannot trace, it calls.
    """

    def decorate(method: _Method) -> _Method:
        @wraps(method)
        def alone(self: Any, /, *args: Any, **kwargs: Any) -> Any:
            one: OneCall = self._one_call
            if one.reading and get_ident() in one.reading:  # a signal handler has interrupted state_dict()
                raise one.refusal(call, "opt.state_dict()")
            if one.within_hook():
                raise one.refusal(call, "backward()")
            # From here to "try" nothing is called, so the interpreter runs no signal handler and no other thread: two
            # calls cannot both begin, and an exception of a handler cannot leave a call that has ended under way.
            if one.under_way is not None:
                raise one.refusal(call, one.under_way)
            one.under_way = call
            try:
                with outside_inference_mode(), _NO_CONTEXT if one.watch is None else Unwatched():
                    try:
                        return method(self, *args, **kwargs)
                    except ParamsReplaced:
                        if not replans:
                            raise
                    self._replan()
                    return method(self, *args, **kwargs)
            finally:
                try:
                    if one.watch is not None:
                        one.watch()
                finally:
                    one.under_way = None

        return cast(_Method, alone if traced else _disable_dynamo(alone))

    return decorate
