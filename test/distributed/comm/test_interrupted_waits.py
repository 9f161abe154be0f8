"""Waits that Ctrl-C, or the exception of a signal handler, ends: that rank is out of training, and the others know."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zero_opt
from test.support.failures import PATIENCE_S
from test.support.harness import run_processes
from test.support.stepped import make_stepped, take_step
from zero_opt.comm import process_identity


class _Alarm(RuntimeError):
    """Of a signal handler; a backend's errors are RuntimeErrors too."""


CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "step": take_step,
    "clip": lambda params, optimizer: optimizer.clip_grad_norm_(1.0),
    "load": lambda params, optimizer: optimizer.load_state_dict(torch.optim.AdamW(params, lr=1e-3).state_dict()),
    "add": lambda params, optimizer: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]}),
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


def _said(call: Callable[[], Any]) -> tuple[str, str]:
    with pytest.raises(zero_opt.PeerLost) as caught:
        call()
    return type(caught.value).__name__, str(caught.value)


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
        return _said(lambda: CALLS[first](params, optimizer)), _said(lambda: take_step(params, optimizer))
    _raise_in(0.5, how)
    with pytest.raises(HOWS[how]):
        CALLS[first](params, optimizer)
    said = _said(lambda: CALLS[second](params, optimizer)), _said(lambda: take_step(params, optimizer))
    store.set("interrupted", "")
    return said


def _require(found: list[Any], how: str) -> None:
    for name, text in found[0]:
        assert name == "PeerSilent", text
        assert text.startswith(f"this rank has left training, because {HOWS[how].__name__} has ended its wait"), text
    for said in found[1:]:
        for name, text in said:
            assert name == "PeerLost", text
            assert text.startswith("rank 0 has left training after step 1, because an exception there"), text


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
