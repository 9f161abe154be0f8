"""Calls that a signal handler or another thread begins while a call of all ranks is under way: refused, and no wait."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zero_opt
from test.support.harness import run_processes
from test.support.stepped import make_stepped, take_step

CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "opt.step()": lambda optimizer, _: optimizer.step(),
    "opt.zero_grad()": lambda optimizer, _: optimizer.zero_grad(),
    "opt.close()": lambda optimizer, _: optimizer.close(),
    "opt.flush()": lambda optimizer, _: optimizer.flush(),
    "opt.clip_grad_norm_()": lambda optimizer, _: optimizer.clip_grad_norm_(1.0),
    "opt.consolidate_state_dict()": lambda optimizer, _: optimizer.consolidate_state_dict(),
    "opt.load_state_dict()": lambda optimizer, state: optimizer.load_state_dict(state),
    "opt.add_param_group()": lambda optimizer, _: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]}),
    "opt.offload_state()": lambda optimizer, _: optimizer.offload_state(),
    "opt.reload_state()": lambda optimizer, _: optimizer.reload_state(),
    "sharded_state_dict()": lambda optimizer, _: zero_opt.sharded_state_dict(optimizer),
    "load_sharded_state_dict()": lambda optimizer, state: zero_opt.load_sharded_state_dict(optimizer, state),
}
OUTER = ("opt.consolidate_state_dict()", "opt.load_state_dict()", "opt.clip_grad_norm_()")


def _errors(optimizer: Any, state: Any) -> dict[str, str]:
    """Call all that must not be called now; return what each raises."""
    errors = {}
    for name, call in CALLS.items():
        try:
            call(optimizer, state)
        except zero_opt.ZeroOptError as error:
            errors[name] = f"{type(error).__name__}: {error}"
    return errors


def _calls_meanwhile(optimizer: Any, state: Any, within: str, *, by_thread: bool) -> dict[str, str]:
    """Have all calls made inside the next agreement of all ranks; return what each will have raised."""
    errors: dict[str, str] = {}
    owner = optimizer._engine.agreement
    original = getattr(owner, within)

    def interrupted(*given: Any, **options: Any) -> Any:
        delattr(owner, within)
        if by_thread:
            thread = threading.Thread(target=lambda: errors.update(_errors(optimizer, state)))
            thread.start()
            thread.join(300)
        else:  # where a signal handler runs: on this thread, between two lines of the call
            errors.update(_errors(optimizer, state))
        return original(*given, **options)

    setattr(owner, within, interrupted)
    return errors


def _in_step(rank: int, world_size: int, by_thread: bool) -> tuple[dict[str, str], list[Any], list[Any]]:
    params, optimizer = make_stepped(2)
    state = optimizer.state_dict() if rank == 0 else {}
    plain, other = make_stepped(2)
    errors = _calls_meanwhile(optimizer, state, "agree_on_step", by_thread=by_thread) if rank == 0 else {}
    for _ in range(2):
        take_step(params, optimizer)
        take_step(plain, other)
    optimizer.close()
    other.close()
    return errors, [p.tolist() for p in params], [p.tolist() for p in plain]


@pytest.mark.parametrize("by_thread", [False, True], ids=["handler", "thread"])
def test_inside_a_step_every_other_call_is_refused_and_the_step_goes_on(by_thread: bool) -> None:
    (errors, params, plain), (_, others, _) = run_processes(2, _in_step, by_thread)
    assert errors.keys() == CALLS.keys()
    for name, text in errors.items():
        assert text.startswith(f"StepDesync: {name} was called while opt.step() is under way (from a signal"), text
        assert "set a flag there" in text
    assert params == plain == others


def _in_others(rank: int, world_size: int) -> dict[str, dict[str, str]]:
    params, optimizer = make_stepped(1)
    optimizer.consolidate_state_dict()
    optimizer.consolidate_state_dict(1)
    state = optimizer.state_dict()
    errors = {}
    for name in OUTER:
        optimizer.zero_grad()
        torch.autograd.backward(params, [torch.ones_like(param) for param in params])
        within = "agree_on_step" if "clip" in name else "together" if "load" in name else "raise_first_error"
        errors[name] = _calls_meanwhile(optimizer, state, within, by_thread=False)
        CALLS[name](optimizer, state)
    take_step(params, optimizer)
    optimizer.close()
    return errors


def test_inside_other_calls_of_all_ranks_they_are_refused_too() -> None:
    for errors in run_processes(2, _in_others):
        for outer, inner in errors.items():
            assert inner.keys() == CALLS.keys(), (outer, inner)
            for name, text in inner.items():
                assert text.startswith(f"StepDesync: {name} was called while {outer} is under way"), text


def _in_state_dict(rank: int, world_size: int) -> tuple[dict[str, str], int]:
    params, optimizer = make_stepped(2)
    errors: dict[str, str] = {}
    if rank == 0:
        full: Any = optimizer._engine.parts.full  # type: ignore[union-attr]
        here = full.here
        full.here = lambda *given: (errors.update(_errors(optimizer, {})), here(*given))[1]
        assert len(optimizer.state_dict()["state"]) == 4
        del full.here
    take_step(params, optimizer)
    return errors, len(optimizer.param_groups)


def test_inside_state_dict_on_the_same_thread_they_are_refused_too() -> None:
    (errors, groups), _ = run_processes(2, _in_state_dict)
    assert errors.keys() == CALLS.keys() and groups == 1
    for name, text in errors.items():
        assert text.startswith(f"StepDesync: {name} was called while opt.state_dict() is under way"), text


def _closure_calls(rank: int, world_size: int) -> list[Any]:
    params, optimizer = make_stepped(1)
    losses = []

    def closure() -> float:
        optimizer.zero_grad()
        torch.autograd.backward(params, [torch.full_like(param, 0.5) * (1 + i) for i, param in enumerate(params)])
        optimizer.clip_grad_norm_(1e9)
        losses.append(len(optimizer.state_dict()["state"]))
        return 1.0

    assert optimizer.step(closure) == 1.0
    plain, _ = make_stepped(2)
    assert losses == [4]
    return [p.tolist() for p in params] + [[p.tolist() for p in plain]]


def test_a_closure_may_call_them() -> None:
    for *params, plain in run_processes(2, _closure_calls):
        assert params == plain


def _hook_calls(rank: int, world_size: int) -> list[Any]:
    params, optimizer = make_stepped(1)
    optimizer.register_step_pre_hook(lambda *_: optimizer.clip_grad_norm_(1e9) and None)
    optimizer.register_step_post_hook(lambda *_: optimizer.zero_grad())
    optimizer.register_state_dict_pre_hook(lambda _: optimizer.consolidate_state_dict())
    optimizer.register_load_state_dict_pre_hook(lambda *_: optimizer.flush())
    optimizer.register_load_state_dict_post_hook(lambda _: optimizer.zero_grad())
    take_step(params, optimizer)
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    plain, _ = make_stepped(2)
    return [p.tolist() for p in params] + [[p.tolist() for p in plain]]


def test_hooks_may_call_them() -> None:
    for *params, plain in run_processes(2, _hook_calls):
        assert params == plain
