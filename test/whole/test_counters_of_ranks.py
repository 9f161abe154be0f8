"""Counters that ranks send each other, each started just below where it had an end, or wraps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import zero_opt
from test.support.harness import assert_bitwise, run_processes
from test.support.stepped import make_stepped, service_of, take_step
from zero_opt.comm import groups, headed_messages, pairwise_exchange, side_group
from zero_opt.state import messages


def _make(exchange: str) -> tuple[Any, list[torch.nn.Parameter]]:
    generator = torch.Generator().manual_seed(1)
    params = [torch.nn.Parameter(torch.randn(size, generator=generator)) for size in ((33, 9), (65,), (1000,))]
    reduction = zero_opt.Overlapped(bucket_mb=0.001, exchange=exchange)
    return zero_opt.ShardedOptimizer(params, torch.optim.AdamW, lr=0.1, reduction=reduction), params


def _backward(params: list[torch.nn.Parameter], rank: int, step: int) -> None:
    torch.stack([(p * (rank + step + 1) ** 0.5).sin().sum() for p in params]).sum().backward()


def _train(rank: int, world_size: int, exchange: str, counter: str, start: int) -> list[torch.Tensor]:
    """A few steps, of two windows that are given up, two backwards, and one step; ``counter`` begins at ``start``."""
    opt, params = _make(exchange)
    engine = opt._engine
    if counter == "step":
        engine.count.step = start
    if counter == "tags":
        headed = engine.parts.exchanges["cpu"].headed
        headed._sent = dict.fromkeys(headed._sent, start)
        for inbox in headed._inbox.values():
            inbox._count = start
    for step in range(5):
        if counter == "epoch":
            engine.count.epoch = start
        if counter == "sequence":
            engine.reduction._sequence = start
        for _ in range(2):
            _backward(params, rank, 100 + step)
            opt.zero_grad()
        for part in range(2):
            _backward(params, rank, 2 * step + part)
        opt.step()
    opt.close()
    return [p.detach().clone() for p in params]


STARTS = [
    *(("step", start) for start in (2**24 - 3, 2**32 - 2, 2**48)),
    *(("epoch", start) for start in (2**20 - 3, 2**32 - 2, 2**48)),
    *(("sequence", start) for start in (2**20 - 2, 2**32 - 2, 2**48)),
]


@pytest.mark.parametrize("exchange", ["auto", "backend"])
def test_exchanges_go_on_past_any_number(exchange: str) -> None:
    expected = run_processes(2, _train, exchange, "", 0)
    for counter, start in STARTS:
        found = run_processes(2, _train, exchange, counter, start)
        for ours, theirs in zip(found, expected, strict=True):
            assert_bitwise(ours, theirs)


def _tags(rank: int, world_size: int) -> tuple[list[int], list[torch.Tensor]]:
    tags: list[int] = []
    send = groups.Group.send_to

    def recorded(self: Any, tensor: torch.Tensor, dst: int, tag: int) -> Any:
        if not isinstance(self, side_group.SideGroup):
            tags.append(tag)
        return send(self, tensor, dst, tag)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups.Group, "send_to", recorded)
        params = _train(rank, world_size, "backend", "tags", headed_messages.TAG_MODULUS - 3)
    return sorted(set(tags)), params


def test_tags_of_messages_come_back_and_none_is_that_which_nobody_sends() -> None:
    expected = run_processes(2, _train, "backend", "", 0)
    for (tags, params), theirs in zip(run_processes(2, _tags), expected, strict=True):
        assert_bitwise(params, theirs)
        assert 0 in tags
        *_, last, elements, failures = tags
        assert last == 2 * headed_messages.TAG_MODULUS - 1
        # Of other messages over the same connections, which no reduction has.
        assert (elements, failures) == (pairwise_exchange._ELEMENTS, pairwise_exchange._FAILURES)
        assert failures < groups._GREETINGS < groups._ROUNDS < groups._MOVED < groups.NEVER_SENT < 2**31
        # An interrupt receives it, in order that this takes too long.
        assert groups.NEVER_SENT not in tags


def _given_up(rank: int, world_size: int) -> Any:
    """Rank 2 is ahead for two pulls, which leave answers of rank 1, and words for rank 2, behind."""
    patch = pytest.MonkeyPatch()
    patch.setattr(messages, "_PULL_TAGS", 2)
    params, optimizer = make_stepped(2)
    guard = service_of(optimizer)._guard
    guard.changes += rank == 2
    dist.barrier()
    if rank == 0:
        for _ in range(2):
            with pytest.raises(zero_opt.StepDesync, match="rank 2, in step"):
                optimizer.state_dict()
    dist.barrier()
    guard.changes -= rank == 2
    found = []
    for _ in range(4):
        take_step(params, optimizer)
        dist.barrier()
        if rank == 0:
            found.append(optimizer.state_dict()["state"][0]["step"].item())
        dist.barrier()
    optimizer.close()
    patch.undo()
    return found


def test_what_a_pull_leaves_behind_is_not_taken_for_a_later_ones() -> None:
    assert run_processes(3, _given_up)[0] == [3.0, 4.0, 5.0, 6.0]
