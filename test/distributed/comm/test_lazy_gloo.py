"""How many connections an optimizer makes, and that what needs others makes them."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import zero_opt
from test.support.descriptors import open_files
from test.support.failures import PATIENCE_S
from test.support.harness import run_processes
from zero_opt.comm import store
from zero_opt.comm.lazy_gloo import partners

# Each group listens for connections.
_GROUPS, _RING = 2, 2


def _sockets() -> int:
    return sum(target.startswith("socket:") for _, target in open_files())


def _counts(rank: int, world_size: int, exchange: str) -> tuple[list[int], Any]:
    """Return the sockets that training takes, and then those that saving takes besides; and the state."""
    before = _sockets()
    params = [torch.nn.Parameter(torch.ones(500))]
    reduction = zero_opt.Overlapped(exchange=exchange)
    optimizer = zero_opt.ShardedOptimizer(params, torch.optim.SGD, lr=0.5, momentum=0.9, reduction=reduction)
    for step in range(3):
        ((rank + step) * params[0]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    trained = _sockets()
    # Rank 1 must not ask a rank that has yet to count.
    torch.distributed.barrier()
    states = [optimizer.state_dict()] if rank == 1 else []
    optimizer.consolidate_state_dict(to=1)
    states += [optimizer.state_dict()] if rank == 1 else []
    counts = [trained - before, _sockets() - trained]
    optimizer.close()
    return counts, [state["state"][0]["momentum_buffer"] for state in states]


@pytest.mark.parametrize("world_size", [6, 9])
def test_training_on_one_host_connects_to_partners_and_saving_to_the_rank_that_saves(world_size: int) -> None:
    found = run_processes(world_size, _counts, "auto")
    expected = sum(range(world_size)) / world_size
    sums = [0.0, 0.0, 0.0]
    for step in range(3):
        mean = expected + step
        sums[step] = mean + 0.9 * sums[step - 1] if step else mean
    for rank, ((trained, saved), buffers) in enumerate(found):
        assert trained == len(partners(rank, world_size)) + _RING + _GROUPS
        assert saved <= (_GROUPS * world_size if rank == 1 else _GROUPS)
        assert len(buffers) == (2 if rank == 1 else 0)
        for buffer in buffers:
            torch.testing.assert_close(buffer, torch.full((500,), sums[-1]))


def test_an_exchange_by_messages_connects_to_all_when_it_is_made() -> None:
    for (trained, _), _ in run_processes(6, _counts, "backend"):
        assert trained == 5 + _RING + _GROUPS


def _store_is_gone(rank: int, world_size: int) -> tuple[str, bool]:
    """The store's host falls silent while two ranks connect on first use."""
    optimizer = zero_opt.ShardedOptimizer([torch.nn.Parameter(torch.ones(500))], torch.optim.SGD, lr=0.5)
    addresses, answered, errors = optimizer._group._addresses, threading.Event(), list[BaseException]()

    class Silent:
        def check(self, keys: list[str]) -> bool:
            return answered.wait(PATIENCE_S)

    addresses._store = Silent()
    store._ANSWER_S = 0.5

    def connect() -> None:
        try:
            addresses.get("asked for the first time/1")
        except zero_opt.PeerLost as error:
            errors.append(error)

    connecting = threading.Thread(target=connect, daemon=True)
    connecting.start()
    connecting.join(PATIENCE_S / 4)
    ended = not connecting.is_alive()
    answered.set()
    optimizer.close()
    return str(*errors), ended


def test_a_rank_that_connects_on_first_use_does_not_wait_for_a_silent_store() -> None:
    for message, ended in run_processes(2, _store_is_gone):
        assert ended and message.startswith("the process group's store has not answered")
