"""Ranks that have called alone meet the others again at the next call of all, wherever their counts of calls are."""

from __future__ import annotations

import signal
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zero_opt
from test.support.failures import PATIENCE_S
from test.support.harness import run_processes
from zero_opt.comm import groups, rendezvous, short_lived
from zero_opt.comm.meeting_places import meeting_place


def _construct(group: Any = None) -> None:
    zero_opt.ShardedOptimizer([torch.nn.Parameter(torch.ones(3))], torch.optim.Adam, group).close()


def _broadcast() -> None:
    zero_opt.broadcast_params(torch.nn.Linear(3, 3))


CALLS: dict[str, Callable[[], None]] = {"ShardedOptimizer()": _construct, "broadcast_params()": _broadcast}


def _alone(call: str, absent: str) -> None:
    """Call where the ranks that are named do not, and give up soon."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (groups, short_lived):
            patch.setattr(module, "group_timeout_s", lambda _: 2.0 * rendezvous.LOOK_AFTER_S)
        with pytest.raises(zero_opt.PeerSilent, match=rf"{absent} did not come to "):
            CALLS[call]()


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def _await_at(number: int, ranks: list[int]) -> None:
    """Return once ranks have come to the meeting of that number."""
    group = dist.group.WORLD
    assert group is not None
    place = meeting_place((group.group_name, tuple(range(group.size()))), number)
    place.wait([f"came/{rank}" for rank in ranks], timedelta(seconds=PATIENCE_S))


def _called_alone(rank: int, world_size: int, call: str, times: int) -> None:
    """Rank 0 calls alone; then all do, and rank 0 comes first."""
    if rank == 0:
        for _ in range(times):
            _alone(call, "rank 1(, rank 2)?")
    else:
        _await_at(times, [0])
    for again in CALLS.values():
        again()


@pytest.mark.parametrize(
    ("world_size", "call", "times"),
    [(2, "ShardedOptimizer()", 1), (2, "broadcast_params()", 2), (3, "ShardedOptimizer()", 1)],
)
def test_the_others_come_to_where_a_rank_waits_that_has_given_them_up(world_size: int, call: str, times: int) -> None:
    run_processes(world_size, _called_alone, call, times)


def _some_call_without_the_rest(rank: int, world_size: int) -> None:
    """Ranks 0 and 1 call without rank 2, which comes then to the one of them that has called again."""
    if rank < 2:
        with pytest.raises(zero_opt.PeerSilent, match="rank 2 did not come to "):
            _alone_or_told(rank)
        _store().set(f"given up {rank}", "")
    if rank == 0:  # the one that has left the error comes last
        _await_at(1, [1, 2])
    elif rank == 1:
        _store().wait(["given up 0"], timedelta(seconds=PATIENCE_S))
    else:
        _await_at(1, [1])
    for call in CALLS.values():
        call()


def _alone_or_told(rank: int) -> None:
    """Rank 0 gives up first, and rank 1 hears of it."""
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(groups, "group_timeout_s", lambda _: 2.0 * rendezvous.LOOK_AFTER_S)
        _construct()


def test_a_rank_comes_to_any_of_several_that_wait_for_it() -> None:
    run_processes(3, _some_call_without_the_rest)


def _comes_when_nobody_waits(rank: int, world_size: int) -> None:
    """Rank 0 calls alone twice, and rank 1 once after that; then both do."""
    if rank == 0:
        _alone("ShardedOptimizer()", "rank 1")
        _alone("broadcast_params()", "rank 1")
        _store().set("given up", "")
        _store().wait(["told"], timedelta(seconds=PATIENCE_S))
    else:
        _store().wait(["given up"], timedelta(seconds=PATIENCE_S))
        with pytest.raises(zero_opt.PeerSilent, match="rank 0 has given up waiting for this one: rank 1 did not come"):
            _construct()
        _store().set("told", "")
    with pytest.MonkeyPatch.context() as patch:  # they meet at once, where neither hears of an error
        patch.setattr(rendezvous.Meeting, "_goes_on", lambda _: False)
        _construct()
    _broadcast()


def test_a_rank_that_is_given_up_where_nobody_waits_is_at_the_next_call_of_all() -> None:
    run_processes(2, _comes_when_nobody_waits)


def _comes_to_another_call(rank: int, world_size: int) -> str:
    """Rank 0 calls alone, and then another function than rank 1."""
    if rank == 0:
        _alone("ShardedOptimizer()", "rank 1")
    else:
        _await_at(1, [0])
    with pytest.raises(zero_opt.RankMismatch) as caught:
        _construct() if rank else _broadcast()
    for call in CALLS.values():
        call()
    return str(caught.value)


def test_a_rank_that_comes_to_another_call_is_a_mismatch_on_both() -> None:
    both = "rank 0 called broadcast_params() where rank 1 called ShardedOptimizer(); every rank must call both"
    assert all(said.startswith(both) for said in run_processes(2, _comes_to_another_call))


def _leaves_where_it_was_given_up(rank: int, world_size: int, by_handler: bool) -> str:
    """Rank 1 leaves its first call before it has looked whether it was given up there, while rank 0 waits again."""
    if rank == 0:
        _alone("ShardedOptimizer()", "rank 1")
        with pytest.raises(zero_opt.ZeroOptError) as caught:
            _construct()
        said = str(caught.value)
    else:
        _await_at(1, [0])
        signal.signal(signal.SIGALRM, _interrupt)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rendezvous.Meeting, "_look_around", lambda *_: signal.raise_signal(signal.SIGALRM))
            with pytest.raises(KeyboardInterrupt if by_handler else zero_opt.ConfigTypeError) as left:
                _construct(None if by_handler else "gloo")
        said = str(left.value)
    for call in CALLS.values():
        call()
    return said


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("by_handler", "text"),
    [(True, "an exception on rank 1 (KeyboardInterrupt) has ended"), (False, "rank 1: process_group must be")],
)
def test_what_ends_the_call_of_a_rank_that_was_given_up_is_told_where_the_others_wait(
    by_handler: bool, text: str
) -> None:
    said, _ = run_processes(2, _leaves_where_it_was_given_up, by_handler)
    assert said.startswith(text), said
