"""Post-accumulate hooks, which tell when a gradient has arrived, and the backward passes that they are called in."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain, repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import ConfigConflict, StepDesync
from ..sharding.buckets import Fill
from ..sharding.late_params import Unwatched, is_late
from ..system.extension import native, native_available
from ..system.frames import inside_function
from ..system.inference_mode import outside_inference_mode
from ..system.untraced import untraced
from .dropped_grads import OwnSums
from .grad_places import GradPlaces

_in_inference_mode = torch.is_inference_mode_enabled
graph_task = torch._C._current_graph_task_id
# What a hook of the extension needs of torch.
_TORCH = (Tensor, torch.strided, graph_task, torch._C._is_torch_function_mode_enabled)


class ArrivalHooks:
    """Hooks that call ``arrived(param index)`` whenever autograd has accumulated into a watched parameter's grad.

    The parameters hold the method's object only weakly: the hooks of an optimizer that is gone do nothing.

    [Note: gradients that nobody heard of]
    Between accumulation and the call an exception may come: of a hook that the user has registered before, or of a
    signal handler, which Python runs at the first instruction of a function. So the first hook of each parameter is
    made of built-in functions, in which no handler runs: it appends to a list. Every call takes one element away when
    it is over. No parameter is in the list: one that is in a list that its own hook holds would never be freed.
    """

    def __init__(self, arrived: Callable[[int], None]) -> None:
        method: Any = arrived
        self._owner, self._arrived = weakref.ref(method.__self__), method.__func__
        self._handles: dict[int, list[Any]] = {}
        self._unheard: list[None] = []  # as many as calls have not ended

    @property
    def missed(self) -> bool:
        """Whether a gradient has come without a call that ended; false in a backward, where one may be under way."""
        return bool(self._unheard) and graph_task() == -1

    def forget_missed(self) -> None:
        """Forget gradients that came without a call: they are void."""
        self._unheard.clear()

    def watch(self, index: int, param: Tensor) -> None:
        """Hook ``param``, if it may have a gradient and is not hooked yet. To be called where no signal interrupts."""
        if index in self._handles or not can_have_grad(param):
            return
        frozen = not param.requires_grad
        # torch registers no hook on a frozen parameter, which may have state from before and be thawed later.
        param.requires_grad_()
        try:
            self._handles[index] = self._registered(index, param)
        finally:
            param.requires_grad_(not frozen)

    def _registered(self, index: int, param: Any) -> list[Any]:
        """Register a hook before those that the parameter has, and one behind them; return their handles."""
        before = dict(param._post_accumulate_grad_hooks or {})
        for key in before:
            del param._post_accumulate_grad_hooks[key]
        handles = [param.register_post_accumulate_grad_hook(partial(next, map(self._unheard.append, repeat(None))))]
        param._post_accumulate_grad_hooks.update(before)  # torch calls them in the order in which they were put in
        return [*handles, param.register_post_accumulate_grad_hook(self._announcing(index, param))]

    def _announcing(self, index: int, param: Tensor) -> Callable[[Tensor], None]:
        kind = None if is_late(param) else type(param)
        return partial(_announce, self._owner, self._arrived, self._unheard, index, kind)

    def close(self) -> None:
        """Remove all hooks."""
        for handle in chain(*self._handles.values()):
            handle.remove()
        self._handles.clear()

    def __del__(self) -> None:
        self.close()


class NativeRound(NamedTuple):
    """What the hook of a usual gradient reads and changes; see [Note: the usual gradient].

    ``task`` is the pass whose gradients the round under way takes, ``rounds`` the number of that round. The others are
    the attributes of :class:`OverlappedReduction`.
    """

    task: int
    in_round: set[int]
    shown: set[int]
    places: GradPlaces
    fills: Mapping[int, Fill]
    sums: OwnSums
    rounds: int
    withdrawn: set[int]
    local: set[int]


class NativeHooks(ArrivalHooks):
    """Hooks of an :class:`OverlappedReduction`, most of whose gradients the extension takes.

    [Note: the usual gradient]
    The hook is a function of the extension, native/bindings/bind_arrivals.cpp. A usual gradient is not the first one of
    a backward, nor the last of its bucket, nor added to one before; it is no view, and lies in host memory. The
    extension does with it what ``_arrived`` would do, by what the reduction has put in ``_native_round``. That is None
    while ``_arrived`` runs, on whatever thread, or a round is opened, and from the end of the round on. All other
    gradients are left to ``_arrived``.

    The function notes that a gradient has come before it calls Python, so it needs no other hook before it. Two kinds
    of parameters keep the hooks of :class:`ArrivalHooks`, and all their gradients go through Python: those that already
    have hooks, one of which may raise, and those of a subclass of Tensor or Parameter, whose code may run when
    ``p.grad`` is read or set. In a torch function mode, the function leaves every gradient to Python.
    """

    def _registered(self, index: int, param: Any) -> list[Any]:
        known = type(param) in (Tensor, nn.Parameter)
        if not known or param._post_accumulate_grad_hooks or not native_available():
            return super()._registered(index, param)
        otherwise = self._announcing(index, param)
        hook = native.arrival_hook(self._owner, index, type(param), otherwise, self._unheard, _TORCH)
        return [param.register_post_accumulate_grad_hook(hook)]


def can_have_grad(param: Tensor) -> bool:
    """Return whether torch lets a parameter require a gradient, as it does not with integers (quantized weights)."""
    return (param.is_floating_point() or param.is_complex()) and not param.is_inference()


@untraced  # a backward inside torch.compile would trace it
def _announce(
    owner: weakref.ReferenceType[Any],
    arrived: Callable[[Any, int], None],
    unheard: list[None],
    index: int,
    kind: type | None,
    param: Tensor,
) -> None:
    there = owner()
    if there is None:
        pass
    elif type(param) is kind and not _in_inference_mode():  # as nearly always, where each call is a tenth of the hook
        arrived(there, index)
    elif is_late(param):
        with Unwatched(), outside_inference_mode():
            arrived(there, index)
    else:
        with outside_inference_mode():
            arrived(there, index)
    del unheard[-1:]


def ended_in_exception(remedy: str) -> StepDesync:
    """Return the error of a step after a backward that has raised."""
    return StepDesync(
        f"a backward ended in an exception; {remedy}. One that is still running in another thread is reported the same "
        "way: call step() after it ends"
    )


# In the place of the number of a pass that compiled autograd runs.
_COMPILED = -2


class BackwardPasses:
    """The backward passes in which gradients have arrived.

    Autograd numbers graph executions as they start. A reentrant checkpoint runs inner graphs inside one backward, each
    with a number of its own; an inner graph is recognized by the autograd Function that called it. Which backward is
    around inner graphs shows only when that has an arrival of its own: then its number is lower than theirs.

    Attributes:
        handing_over: held by the thread whose hook hands a gradient over.
    """

    def __init__(self, hooks: ArrivalHooks) -> None:
        self._hooks, self._task = hooks, -1
        self.handing_over: Any = threading.RLock()
        self._first_inner: int | None = None
        self._unfinished: set[int] = set()

    def within_hook(self) -> bool:
        """Return whether the caller's thread hands a gradient over: a handler or a finalizer has interrupted it."""
        return bool(self.handing_over._is_owned())

    def refuse_within_hook(self, call: str) -> None:
        """Raise StepDesync if a signal handler or a finalizer makes this call while a hook hands a gradient over."""
        if self.within_hook():
            raise StepDesync(
                f"{call} was called while another backward hands a gradient over (from a signal handler or a "
                "finalizer): set a flag there, and make the call after the backward has returned. If the backward ends "
                "in this error, call opt.zero_grad() on every rank, and repeat the step"
            )

    def note_arrival(self) -> bool:
        """Return whether this arrival is in a backward that started after the last arrival.

        Raises:
            ConfigConflict: compiled autograd runs it.
        """
        task = graph_task()
        if task == self._task:
            return False
        if getattr(sys.modules.get("torch._dynamo.compiled_autograd"), "in_compiled_autograd_region", False):
            self._unfinished.add(_COMPILED)
            raise ConfigConflict(
                "compiled autograd (torch._dynamo.config.compiled_autograd) reads gradients that this reduction has "
                "moved; use reduction=zero_opt.AtStep()"
            )
        self._task = task
        self._unfinished.add(task)
        # Autograd calls back at the end of the pass, unless an exception ends the pass.
        torch.autograd.Variable._execution_engine.queue_callback(partial(self._unfinished.discard, task))
        if inside_function():
            self._first_inner = task if self._first_inner is None else self._first_inner
            return False
        inner, self._first_inner = self._first_inner, None
        # The numbers are C integers of 32 bits, which wrap.
        return inner is None or 0 < (task - inner) % (1 << 32) < 1 << 31

    def broken(self) -> bool:
        """Return whether a pass that has brought a gradient has ended in an exception since :meth:`forget`."""
        return bool(self._unfinished - {graph_task()}) or self._hooks.missed

    def forget(self) -> None:
        """Forget passes that have ended in an exception: what has arrived is void.

        A pass that still runs is begun anew with its next arrival.
        """
        self._task, self._first_inner = -1, None
        self._unfinished.clear()
        self._hooks.forget_missed()
