"""State that not all ranks of a mesh hold alike: refused on every rank, before any of it travels or is saved."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

import zero_opt
from test.support.fsdp_models import backward, mesh_of, sharded_net, sharded_optimizer
from test.support.harness import run_processes

OFFLOADS = {"device": None, "host": zero_opt.CPUOffload(pin_memory=False), "worker": zero_opt.WorkerOffload()}
CALLS: dict[str, Callable[[Any], Any]] = {
    "consolidate": lambda optimizer: optimizer.consolidate_state_dict(0),
    "sharded": zero_opt.sharded_state_dict,
}


def _one_clears(rank: int, params: Any, state: Any) -> None:
    if rank == 1:
        state.clear()


def _each_drops_another(rank: int, params: Any, state: Any) -> None:
    del state[params[rank]]


def _one_adds_a_key(rank: int, params: Any, state: Any) -> None:
    if rank == 0:
        state[params[1]]["mine"] = 3.0


def _one_lacks_a_key(rank: int, params: Any, state: Any) -> None:
    if rank == 1:
        del state[params[1]]["exp_avg"]


def _unlike(rank: int, world_size: int, offload: str, edit: Any, call: str) -> str:
    net = sharded_net(mesh_of((world_size,)))
    optimizer = sharded_optimizer(net, offload=OFFLOADS[offload])
    backward(net, 0, rank)
    optimizer.step()
    CALLS[call](optimizer)
    edit(rank, [net.up.weight, net.head.weight], optimizer.state)
    with pytest.raises(zero_opt.StateDictError) as caught:
        CALLS[call](optimizer)
    optimizer.state.clear()  # on every rank
    CALLS[call](optimizer)
    return re.sub(r"rank \d: ", "", str(caught.value))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("edit", [_one_clears, _each_drops_another, _one_adds_a_key, _one_lacks_a_key])
@pytest.mark.parametrize("offload", OFFLOADS)
def test_every_rank_is_told_of_state_that_is_not_on_all(offload: str, edit: Any, call: str) -> None:
    first, second = run_processes(2, _unlike, offload, edit, call)
    assert first == second
    assert re.search(r"the state of parameter \d is not the same on all ranks of its mesh: |'exp_avg'|'mine'", first)


def test_the_order_of_keys_may_differ() -> None:
    run_processes(2, _other_order)


def _other_order(rank: int, world_size: int) -> None:
    net = sharded_net(mesh_of((world_size,)))
    optimizer = sharded_optimizer(net)
    backward(net, 0, rank)
    optimizer.step()
    optimizer.consolidate_state_dict(0)
    before = optimizer.state_dict()
    if rank == 1:
        for param in [*optimizer.state]:
            optimizer.state[param] = dict(reversed(optimizer.state[param].items()))
    optimizer.consolidate_state_dict(0)
    if rank == 0:
        after = optimizer.state_dict()
        assert all(
            bool((after["state"][i][key] == value).all())
            for i, e in before["state"].items()
            for key, value in e.items()
        )
