"""Waits that Ctrl-C, or the exception of a signal handler, ends: that rank is out of training, and the others know."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zero_opt
from test.support.failures import PATIENCE_S
from test.support.harness import run_processes
from test.support.stepped import lost_in, make_stepped, take_step
from zero_opt.comm import process_identity
from zero_opt.comm.agreement import Agreement
from zero_opt.comm.groups import Group
from zero_opt.optimizer.planning import Planner
from zero_opt.optimizer.sharded import ShardedEngine
from zero_opt.sharding.gather import ParamGather
from zero_opt.state.full_state import FullState
from zero_opt.state.visible_state import VisibleState


class _Alarm(RuntimeError):
    """Of a signal handler; a backend's errors are RuntimeErrors too."""


CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "step": take_step,
    "clip": lambda params, optimizer: optimizer.clip_grad_norm_(1.0),
    "load": lambda params, optimizer: optimizer.load_state_dict(torch.optim.AdamW(params, lr=1e-3).state_dict()),
    "add": lambda params, optimizer: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]}),
    "consolidate": lambda params, optimizer: optimizer.consolidate_state_dict(),
    "sharded": lambda params, optimizer: zero_opt.sharded_state_dict(optimizer),
    "flush": lambda params, optimizer: optimizer.flush(),
}
HOWS: dict[str, type[BaseException]] = {"Ctrl-C": KeyboardInterrupt, "handler": _Alarm}
PLACES = {
    "agreement": zero_opt.Overlapped(0.002),
    "shared memory": zero_opt.AtStep(0.002),
    "messages": zero_opt.AtStep(0.002, exchange="backend"),
    "background": zero_opt.Overlapped(0.002, exchange="backend"),
}


def _raise_in(seconds: float, how: str) -> None:
    def handler(*_: Any) -> None:
        raise HOWS[how]

    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def _one_is_interrupted(rank: int, world_size: int, place: str, how: str, first: str, second: str, near: bool) -> Any:
    """Rank 0 is interrupted in a call that the others make later, and makes another one."""
    if not near:
        process_identity.host_if_known = lambda: f"host {rank}"  # type: ignore[attr-defined]
    params, optimizer = make_stepped(2, reduction=PLACES[place])
    store: Any = dist.distributed_c10d._get_default_store()
    if place != "agreement" and rank:  # wait in the agreement no longer, but in the exchange
        report: Any = optimizer._engine.reduction  # type: ignore[union-attr]
        collect = report.collect
        report.collect = lambda agreed: (store.wait(["interrupted"]), collect(agreed))[1]
    elif rank:
        store.wait(["interrupted"])
    if rank:
        return lost_in(lambda: CALLS[first](params, optimizer)), lost_in(lambda: take_step(params, optimizer))
    _raise_in(0.5, how)
    with pytest.raises(HOWS[how]):
        CALLS[first](params, optimizer)
    said = lost_in(lambda: CALLS[second](params, optimizer)), lost_in(lambda: take_step(params, optimizer))
    store.set("interrupted", "")
    return said


def _require(found: list[Any], how: str) -> None:
    for name, text in found[0]:
        assert name == "PeerSilent", text
        assert text.startswith(f"this rank has left training, because {HOWS[how].__name__} has ended its wait"), text
    for said in found[1:]:
        for name, text in said:
            assert name == "PeerLost", text
            assert text.startswith("rank 0 has left training after 2 steps, because an exception there"), text


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize(("first", "second"), [("load", "step"), ("step", "load"), ("clip", "step"), ("add", "clip")])
def test_a_wait_that_is_left_is_the_last(first: str, second: str, how: str) -> None:
    """gloo ends a process in which messages of two calls meet whose sizes differ."""
    _require(run_processes(2, _one_is_interrupted, "agreement", how, first, second, True), how)


@pytest.mark.parametrize("near", [True, False])
@pytest.mark.parametrize("place", ["shared memory", "messages", "background"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_so_is_one_in_an_exchange(world_size: int, place: str, near: bool) -> None:
    arguments = (place, "Ctrl-C", "step", "step", near)
    _require(run_processes(world_size, _one_is_interrupted, *arguments), "Ctrl-C")


def _interrupted_between_calls(rank: int, world_size: int) -> None:
    """An exception in the user's own code, or in a closure, is the user's alone."""
    params, optimizer = make_stepped(2)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step(_interrupt)
    optimizer.zero_grad()
    take_step(params, optimizer)
    assert optimizer.state_dict()["state"][0]["step"] == 3
    dist.barrier()


def _interrupt() -> float:
    os.kill(os.getpid(), signal.SIGINT)
    threading.Event().wait(PATIENCE_S)
    return 0.0


def test_outside_of_waits_nothing_is_given_up() -> None:
    run_processes(2, _interrupted_between_calls)


# -- between the waits of one call ------------------------------------------------------------------------------------


def _strike(*_: Any, **__: Any) -> bool:
    signal.raise_signal(signal.SIGALRM)
    return True


def _begins(group: Group, begin: Callable[[], Any], *given: Any) -> None:
    """Stands for ``Group._run``: the signal falls while gloo begins, before there is anything to wait for."""
    assert group.watch is not None
    group.watch.wait(lambda: (_strike(), begin())[1])


_step_buckets = ShardedEngine._step_buckets


def _takes(engine: ShardedEngine, *given: Any) -> Any:
    """Stands for ``ShardedEngine._step_buckets``: the signal falls as it has noted that a bucket goes out."""

    def fall(frame: FrameType, event: str, called: Any) -> None:
        if event == "c_return" and frame.f_code is _step_buckets.__code__ and called.__name__ == "pop":
            sys.setprofile(None)
            _strike()

    sys.setprofile(fall)
    return _step_buckets(engine, *given)


# What the signal falls into; only :func:`_begins` is in a wait.
MOMENTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "report sent": (ShardedEngine, "_accept_edits", _strike),
    "norm": (ShardedEngine, "share", _strike),
    "gather": (ParamGather, "begin", _strike),
    "bucket": (ParamGather, "start", _strike),
    "bucket taken": (ShardedEngine, "_step_buckets", _takes),
    "begin": (Group, "_run", _begins),
    "own part": (FullState, "own_part", _strike),
    "plan": (Planner, "add_groups", _strike),
    "pull": (FullState, "consolidate", _strike),
    "rows": (FullState, "rows", _strike),
    "bring in": (Agreement, "any", _strike),
}
IN_STEPS = ("report sent", "norm", "gather", "bucket", "bucket taken", "begin")
# By call: how messages name it, and moments in it after its first message.
STRUCK = {
    "step": ("opt.step()", IN_STEPS),
    "clip": ("opt.clip_grad_norm_()", ("norm", "report sent")),
    "load": ("opt.load_state_dict()", ("own part", "begin")),
    "add": ("opt.add_param_group()", ("plan",)),
    "consolidate": ("opt.consolidate_state_dict()", ("pull",)),
    "sharded": ("sharded_state_dict()", ("rows",)),
    "flush": ("opt.flush()", ("bring in",)),
}


def _is_struck(rank: int, world_size: int, moment: str, how: str, first: str) -> Any:
    options = {"offload": zero_opt.CPUOffload()} if first == "flush" else {"max_grad_norm": 0.1}
    params, optimizer = make_stepped(2, reduction=zero_opt.AtStep(0.002), **options)
    if rank:
        return lost_in(lambda: CALLS[first](params, optimizer)), lost_in(lambda: take_step(params, optimizer))
    signal.signal(signal.SIGALRM, lambda *_: _raise(how))
    with pytest.MonkeyPatch.context() as patch:
        owner, name, stand_in = MOMENTS[moment]
        patch.setattr(owner, name, stand_in)
        with pytest.raises(HOWS[how]):
            CALLS[first](params, optimizer)
    return lost_in(lambda: take_step(params, optimizer)), lost_in(lambda: CALLS["load"](params, optimizer))


def _raise(how: str) -> None:
    raise HOWS[how]


def _is_struck_at_the_end(rank: int, world_size: int) -> Any:
    params, optimizer = make_stepped(2, reduction=zero_opt.AtStep(0.002))
    end_step = ShardedEngine._end_step

    def end_and_strike(engine: ShardedEngine, *given: Any) -> None:
        end_step(engine, *given)
        raise SystemExit

    if rank == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ShardedEngine, "_end_step", end_and_strike)
            with pytest.raises(SystemExit):
                take_step(params, optimizer)
        return lost_in(lambda: take_step(params, optimizer))
    for _ in range(2):
        with contextlib.suppress(zero_opt.PeerLost):
            take_step(params, optimizer)
    return None


def test_a_call_that_is_ended_once_it_has_counted_its_step_is_named_by_that_step() -> None:
    name, text = run_processes(2, _is_struck_at_the_end)[0]
    assert name == "PeerSilent", text
    assert text.startswith("this rank has left training, because SystemExit has ended opt.step() in step 2; "), text


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize(
    ("first", "moment"), [(call, moment) for call, (_, moments) in STRUCK.items() for moment in moments]
)
def test_so_is_a_call_that_ends_between_its_messages(first: str, moment: str, how: str) -> None:
    """Later messages would meet those that the other ranks have sent in that call."""
    found = run_processes(2, _is_struck, moment, how, first)
    for name, text in found[0]:
        assert name == "PeerSilent", text
        call = "load_state_dict() before " if first == "load" else ""
        what = f"its wait for the other ranks in {call}" if moment == "begin" else f"{STRUCK[first][0]} in "
        assert text.startswith(f"this rank has left training, because {HOWS[how].__name__} has ended {what}step "), text
    _require([[], *found[1:]], how)


def _is_struck_before_the_report(rank: int, world_size: int, how: str) -> Any:
    """In the look at the user's edits; the step is repeated there, and goes well."""
    params, optimizer = make_stepped(2)
    optimizer.zero_grad()
    torch.autograd.backward(params, [torch.full_like(param, 0.5) for param in params])
    if rank == 0:
        optimizer._engine.parts.visible._adopted.forget()  # so that every slice is looked at
        adopt_slice, moments = VisibleState._adopt_slice, iter(range(1000))
        signal.signal(signal.SIGALRM, lambda *_: _raise(how))
        with pytest.MonkeyPatch.context() as patch:
            struck: Any = lambda *given: (next(moments) or _strike(), adopt_slice(*given))[1]  # noqa: E731
            patch.setattr(VisibleState, "_adopt_slice", struck)
            with pytest.raises(HOWS[how]):
                optimizer.step()
    optimizer.step()
    return float(optimizer.state_dict()["state"][0]["step"])


@pytest.mark.parametrize("how", HOWS)
def test_a_step_that_ends_before_its_first_message_can_be_repeated(how: str) -> None:
    """The error is the handler's own, and none about the user's edits."""
    assert run_processes(2, _is_struck_before_the_report, how) == [3.0, 3.0]
