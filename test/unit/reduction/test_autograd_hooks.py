"""Which parameters have arrived, and which backward an arrival belongs to."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint

from test.support.tripwire import Failed, Tripwire
from zero_opt.reduction import autograd_hooks
from zero_opt.reduction.autograd_hooks import ArrivalHooks, BackwardPasses


class Listener:
    """Records arrivals, and those that begin a backward."""

    def __init__(self, params: list[Parameter]) -> None:
        self.arrived: list[int] = []
        self.began: list[int] = []
        self.hooks = ArrivalHooks(self.note)
        self.passes = BackwardPasses(self.hooks)
        for index, param in enumerate(params):
            self.hooks.watch(index, param)

    def note(self, index: int) -> None:
        if self.passes.note_arrival():
            self.began.append(len(self.arrived))
        self.arrived.append(index)


def params(count: int = 3) -> list[Parameter]:
    return [Parameter(torch.full((2,), float(i + 1))) for i in range(count)]


def product(values: list[Parameter]) -> Tensor:
    total = values[0]
    for value in values[1:]:
        total = torch.sin(total * value)  # type: ignore[assignment]
    return total.sum()


def test_every_trainable_param_arrives_once_per_backward_with_its_grad() -> None:
    watched = params()
    listener = Listener(watched)
    product(watched).backward()
    assert sorted(listener.arrived) == [0, 1, 2]
    assert all(param.grad is not None for param in watched)
    product(watched).backward()
    assert sorted(listener.arrived) == [0, 0, 1, 1, 2, 2]
    assert listener.began == [0, 3]


def test_unused_params_do_not_arrive() -> None:
    watched = params()
    listener = Listener(watched)
    product(watched[:2]).backward()
    assert sorted(listener.arrived) == [0, 1]


def test_a_tied_param_arrives_once() -> None:
    (tied,) = params(1)
    listener = Listener([tied])
    (torch.sin(tied) * torch.cos(tied)).sum().backward()
    assert listener.arrived == [0]


def test_watching_twice_is_harmless() -> None:
    watched = params(1)
    listener = Listener(watched)
    listener.hooks.watch(0, watched[0])
    product(watched).backward()
    assert listener.arrived == [0]


def test_a_frozen_param_is_heard_once_it_is_unfrozen() -> None:
    watched = params()
    listener = Listener(watched)
    watched[2].requires_grad_(False)
    product(watched).backward()
    assert sorted(listener.arrived) == [0, 1]
    watched[2].requires_grad_(True)
    product(watched).backward()
    assert sorted(listener.arrived) == [0, 0, 1, 1, 2]


def test_closing_stops_listening_and_others_still_hear() -> None:
    watched = params()
    first, second = Listener(watched), Listener(watched)
    first.hooks.close()
    first.hooks.close()
    product(watched).backward()
    assert first.arrived == []
    assert sorted(second.arrived) == [0, 1, 2]


def test_a_listener_out_of_use_is_freed_and_hears_nothing() -> None:
    watched = params()
    listener = Listener(watched)
    heard = listener.arrived
    del listener
    gc.collect()
    product(watched).backward()
    assert heard == []
    assert not any(param._post_accumulate_grad_hooks for param in watched)  # type: ignore[attr-defined]


def test_reentrant_checkpoints_are_not_backwards_of_their_own() -> None:
    first, inner, last = params()
    listener = Listener([first, inner, last])

    def block(x: Tensor) -> Tensor:
        return torch.sin(x * inner)

    def once(depth: int) -> None:
        x: Any = torch.ones(2, requires_grad=True) * first
        for _ in range(depth):
            x = checkpoint(block, x, use_reentrant=True)
        (x * last).sum().backward()

    for begun, depth in enumerate([2, 1, 3]):
        before = len(listener.arrived)
        once(depth)
        assert listener.arrived[before:] == [2, *[1] * depth, 0]
        assert listener.began[begun:] == [before]


def test_a_backward_that_starts_inside_a_checkpoint_does_not_begin_again_outside() -> None:
    first, inner = params(2)
    listener = Listener([first, inner])
    for _ in range(2):
        y: Any = checkpoint(lambda x: torch.sin(x * inner), first * 2, use_reentrant=True)
        y.sum().backward()
    assert listener.arrived == [1, 0, 1, 0]
    assert listener.began == []
    product([first]).backward()
    assert listener.began == [4]


def test_backward_through_autograd_backward_begins_one_pass() -> None:
    watched = params(2)
    listener = Listener(watched)
    torch.autograd.backward([product(watched[:1]), product(watched[1:])])
    assert sorted(listener.arrived) == [0, 1]
    assert listener.began == [0]


def test_a_pass_that_ends_in_an_exception_is_known_until_forgotten() -> None:
    watched = params(2)
    listener = Listener(watched)
    seen_within: list[bool] = []
    watched[0].register_post_accumulate_grad_hook(lambda _: seen_within.append(listener.passes.broken()))
    product(watched).backward()
    assert not listener.passes.broken()
    assert seen_within == [False]  # a pass under way is not a broken one
    loss = Tripwire.apply(torch.sin(watched[1])).sum() + watched[0].sum()  # type: ignore[no-untyped-call]
    with pytest.raises(Failed):
        loss.backward()
    assert listener.passes.broken()
    product(watched).backward()
    assert listener.passes.broken()
    listener.passes.forget()
    assert not listener.passes.broken()


def test_a_pass_that_is_forgotten_in_a_hook_and_goes_on_is_known_to_end_in_an_exception() -> None:
    watched = params()
    listener = Listener(watched)
    watched[2].register_post_accumulate_grad_hook(lambda _: listener.passes.forget())
    loss = Tripwire.apply(torch.sin(watched[0]))  # type: ignore[no-untyped-call]
    with pytest.raises(Failed):
        torch.sin(torch.sin(loss * watched[1]) * watched[2]).sum().backward()
    assert listener.arrived == [2, 1]
    assert listener.passes.broken()
    listener.passes.forget()
    product(watched).backward()
    assert not listener.passes.broken()


def test_what_was_missed_keeps_no_parameter_alive() -> None:
    watched = params(1)
    watched[0].register_post_accumulate_grad_hook(_raises_once())
    listener = Listener(watched)
    with pytest.raises(KeyboardInterrupt):
        product(watched).backward()
    assert listener.passes.broken()
    there = weakref.ref(watched.pop())
    del listener
    gc.collect()
    assert there() is None


def _raises_once() -> Callable[..., None]:
    """Return a hook whose first call raises."""
    calls = iter([True])

    def hook(*_: object) -> None:
        if next(calls, False):
            raise KeyboardInterrupt

    return hook


def test_a_gradient_is_missed_if_an_earlier_hook_of_the_users_raises() -> None:
    watched, order = params(), list[str]()
    for param in watched:
        param.register_post_accumulate_grad_hook(_raises_once())
        param.register_post_accumulate_grad_hook(lambda _: order.append("user"))
    listener = Listener(watched)
    for param in watched:
        param.register_post_accumulate_grad_hook(lambda _: order.append(f"{len(listener.arrived)} arrived"))
    for _ in watched:  # each raises at its first gradient
        with pytest.raises(KeyboardInterrupt):
            product(watched).backward()
        assert listener.passes.broken()
    listener.passes.forget()
    assert not listener.passes.broken()
    order.clear()
    listener.arrived.clear()
    product(watched).backward()
    assert order == ["user", "1 arrived", "user", "2 arrived", "user", "3 arrived"]
    assert not listener.passes.broken()


def test_a_gradient_is_missed_if_a_signal_handler_raises_in_the_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the hook's first instruction, where Python runs handlers of signals that came in native code."""
    watched, announce, interrupt = params(), autograd_hooks._announce, _raises_once()

    def interrupted(*args: Any) -> None:
        interrupt()
        announce(*args)

    monkeypatch.setattr(autograd_hooks, "_announce", interrupted)
    listener = Listener(watched)
    with pytest.raises(KeyboardInterrupt):
        product(watched).backward()
    assert listener.arrived == []
    assert listener.passes.broken()
    product(watched).backward()
    assert len(listener.arrived) == 3
    assert listener.passes.broken(), "a whole backward was added to what came before"
    listener.passes.forget()
    product(watched).backward()
    assert not listener.passes.broken()


def test_a_missed_gradient_of_another_thread_is_not_forgotten() -> None:
    """Threads of autograd may be between a gradient and its call at the same time."""
    watched = params(1)
    listener = Listener(watched)
    hooks = [*watched[0]._post_accumulate_grad_hooks.values()]  # type: ignore[attr-defined]
    hooks[0](watched[0])  # its thread raises before the call
    product(watched).backward()
    assert listener.passes.broken()
