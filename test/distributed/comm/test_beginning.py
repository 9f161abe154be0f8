"""Calls that an exception ends on a rank before it has met the others: they hear of it, and all can call again."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zero_opt
from test.support.harness import run_processes
from zero_opt.comm import rendezvous, short_lived
from zero_opt.comm.beginning import Beginning
from zero_opt.comm.rendezvous import meetings_counted
from zero_opt.optimizer import process_groups, sharded_optimizer
from zero_opt.sharding import broadcast

Params = Iterable[torch.nn.Parameter]


def _params() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(3))]


def _construct(params: Params | None = None) -> None:
    zero_opt.ShardedOptimizer(_params() if params is None else params, torch.optim.Adam).close()


def _broadcast() -> None:
    zero_opt.broadcast_params(torch.nn.Linear(3, 3))


CALLS: dict[str, Callable[[], None]] = {"ShardedOptimizer()": _construct, "broadcast_params()": _broadcast}
# What a rank calls, in each of these, before it meets the others, in order.
PLACES: dict[str, list[tuple[Any, str]]] = {
    "ShardedOptimizer()": [
        (sharded_optimizer, "run_once"),
        (sharded_optimizer, "resolve_group"),
        (sharded_optimizer, "Config"),
        (sharded_optimizer, "mesh_of"),
        (process_groups, "connect"),
        (rendezvous, "StoreCalls"),
    ],
    "broadcast_params()": [
        (broadcast, "resolve_group"),
        (short_lived, "HostLimits"),
        (rendezvous, "StoreCalls"),
    ],
}


def _at_each_place(rank: int, world_size: int, call: str, error: type[BaseException]) -> list[str]:
    """A signal falls on rank 0 as it begins a call; all make the call again, and the other one."""
    said: list[str] = []
    signal.signal(signal.SIGALRM, lambda *_: _raise(error))
    for owner, name in PLACES[call]:
        with pytest.MonkeyPatch.context() as patch:
            if rank == 0:
                patch.setattr(owner, name, _interrupted_once(getattr(owner, name)))
            with pytest.raises(zero_opt.PeerLost if rank else error) as caught:
                CALLS[call]()
        said.append(str(caught.value))
        for again in (call, *CALLS):  # the ranks have met equally often
            CALLS[again]()
    return said


def _interrupted_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that a signal ends when it is called first."""
    calls = iter([lambda: signal.raise_signal(signal.SIGALRM)])

    def interrupted(*given: Any, **named: Any) -> Any:
        next(calls, lambda: None)()
        return function(*given, **named)

    return interrupted


def _raise(error: type[BaseException]) -> None:
    raise error("by a signal handler")


@pytest.mark.parametrize(
    ("call", "error"), [("ShardedOptimizer()", KeyboardInterrupt), ("broadcast_params()", RuntimeError)]
)
def test_a_signal_before_the_ranks_meet_is_known_to_the_others(call: str, error: type[BaseException]) -> None:
    text = f"an exception on rank 0 ({error.__name__}: by a signal handler) has ended {call} there; call it again"
    for said in run_processes(2, _at_each_place, call, error)[1:]:
        assert [each.startswith(text) for each in said] == [True] * len(PLACES[call]), said


def _ends() -> Iterator[torch.nn.Parameter]:
    yield from _params()
    raise SystemExit("no such layer")


def _users_own_code_ends(rank: int, world_size: int) -> str:
    """On one rank of a group that is not the default one, whose third rank has no part in it."""
    pair = dist.new_group([0, 1])
    if rank == 2:
        return ""
    with pytest.raises(SystemExit if rank == 0 else zero_opt.PeerLost) as caught:
        zero_opt.ShardedOptimizer(_params() if rank else _ends(), torch.optim.Adam, pair)
    zero_opt.ShardedOptimizer(_params(), torch.optim.Adam, pair).close()
    return str(caught.value)


def test_so_is_what_ends_the_users_own_code() -> None:
    _, said, _ = run_processes(3, _users_own_code_ends)
    assert said.startswith("an exception on rank 0 (SystemExit: no such layer) has ended ShardedOptimizer() there")


def _begins(group: Any, elsewhere: bool, meets: bool) -> dict[Any, int]:
    """Begin a call of a group, maybe meet the others, and fail; returns what was counted before that."""
    counted: dict[Any, int] = {}
    with contextlib.suppress(LookupError), Beginning(group, "a call") as begun:
        begun.elsewhere = elsewhere
        if meets:
            _construct()
        counted = meetings_counted()
        raise LookupError
    return counted


def _where_nobody_comes(rank: int, world_size: int) -> None:
    """Where ranks meet in other groups, or have met already, and where a rank is no member."""
    pair = dist.new_group([0, 1])
    assert _begins(None, elsewhere=True, meets=False) == meetings_counted()
    assert _begins(None, elsewhere=False, meets=True) == meetings_counted()
    if rank == 2:
        assert _begins(pair, elsewhere=False, meets=False) == meetings_counted()
    _construct()


def test_nothing_is_told_where_nobody_comes() -> None:
    run_processes(3, _where_nobody_comes)
