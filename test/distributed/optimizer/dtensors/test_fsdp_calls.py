"""Calls over DTensors that not every rank of the mesh makes: typed errors that name them, and no aborted process."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.tensor import Replicate

import zero_opt
from test.support.fsdp_models import backward, local_state, locals_of, mesh_of, sharded_net, sharded_optimizer
from test.support.harness import assert_bitwise, run_processes
from zero_opt.comm import process_identity
from zero_opt.errors import ConfigError, PeerLost, PeerSilent, RankMismatch
from zero_opt.optimizer.dtensors import mesh_params

OFFLOADS = {"none": None, "worker": zero_opt.WorkerOffload()}
CONSOLIDATE, CLIP, STEP = "consolidate_state_dict()", "clip_grad_norm_()", "step()"


def _made(rank: int, world_size: int, offload: Any, **options: Any) -> tuple[Any, zero_opt.ShardedOptimizer]:
    """A model after one step, with gradients of the next."""
    net = sharded_net(mesh_of((world_size,)))
    optimizer = sharded_optimizer(net, offload=offload, **options)
    backward(net, 0, rank)
    optimizer.step()
    optimizer.zero_grad()
    backward(net, 1, rank)
    return net, optimizer


def _calls(optimizer: zero_opt.ShardedOptimizer) -> dict[str, Callable[[], Any]]:
    return {
        CONSOLIDATE: lambda: optimizer.consolidate_state_dict(0),
        CLIP: lambda: optimizer.clip_grad_norm_(1.0),
        STEP: optimizer.step,
    }


def _apart(rank: int, world_size: int, offload: Any, pairs: Any) -> list[str]:
    net, optimizer = _made(rank, world_size, offload, max_grad_norm=1.0)
    before, said = [locals_of(net.parameters()), local_state(optimizer)], []
    for pair in pairs:
        with pytest.raises(RankMismatch) as caught:
            _calls(optimizer)[pair[rank % 2]]()
        said.append(str(caught.value))
    assert_bitwise([locals_of(net.parameters()), local_state(optimizer)], before)
    optimizer.clip_grad_norm_(1.0)  # the ranks are still at one point
    optimizer.step()
    optimizer.consolidate_state_dict(1)
    optimizer.close()
    return said


@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_different_calls_are_named_on_every_rank(world_size: int, offload: str) -> None:
    pairs = [(CONSOLIDATE, CLIP), (STEP, CLIP), (STEP, CONSOLIDATE)]
    for said in run_processes(world_size, _apart, OFFLOADS[offload], pairs):
        assert len(said) == len(pairs)
        for message, (first, second) in zip(said, pairs, strict=True):
            assert f"rank 0 called {first} where rank 1 called {second}" in message


def _load_apart(rank: int, world_size: int, offload: Any) -> str:
    """A load in which DTensors travel, since they are cut otherwise than the parameter."""
    _, optimizer = _made(rank, world_size, offload)
    saved = optimizer.state_dict()
    saved["state"][0]["exp_avg"] = saved["state"][0]["exp_avg"].redistribute(placements=[Replicate()])
    with pytest.raises(RankMismatch) as caught:
        optimizer.consolidate_state_dict(0) if rank else optimizer.load_state_dict(saved)
    optimizer.close()
    return str(caught.value)


@pytest.mark.parametrize("offload", OFFLOADS)
def test_a_load_that_travels_is_compared_too(offload: str) -> None:
    for message in run_processes(2, _load_apart, OFFLOADS[offload]):
        assert message.startswith("rank 0 called load_state_dict() where rank 1 called consolidate_state_dict()")


def _argument_apart(rank: int, world_size: int) -> list[str]:
    _, optimizer = _made(rank, world_size, None)
    with pytest.raises(ConfigError) as refused:
        optimizer.consolidate_state_dict(5 if rank else 0)
    with pytest.raises(RankMismatch) as apart:
        optimizer.consolidate_state_dict(rank)
    return [str(refused.value), str(apart.value)]


def test_arguments_of_one_rank_alone_are_refused_on_every_rank() -> None:
    words = "to must be one of the ranks that the parameters are on, [0, 1], got 5"
    apart = "to: 0 on rank 0, 1 on rank 1; say the same on every rank"
    assert run_processes(2, _argument_apart) == [[f"rank 1: {words}", apart], [words, apart]]


def _alone(rank: int, world_size: int, call: str, offload: Any) -> str:
    net, optimizer = _made(rank, world_size, offload, max_grad_norm=1.0, checks=zero_opt.Checks(timeout=2.0))
    if rank:
        with pytest.raises(RuntimeError):  # of torch, in the forward's gather
            backward(net, 2, rank)
        return ""
    with pytest.raises(PeerSilent) as caught:
        _calls(optimizer)[call]()
    with pytest.raises(PeerSilent, match="this rank has left training"):
        _calls(optimizer)[call]()
    return str(caught.value)


@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("call", [CONSOLIDATE, CLIP, STEP])
def test_a_call_while_others_are_in_the_forward_is_named(call: str, offload: str) -> None:
    """As messages of one process group, the call's and the forward's would meet, and gloo would abort a process."""
    message, _ = run_processes(2, _alone, call, OFFLOADS[offload])
    words = rf"in \d+\.\d s, and every rank of the mesh must make that call: rank 0 waits in {re.escape(call)}"
    assert re.match(rf"rank 1 \(pid \d+\) has not come to {re.escape(call)} {words}", message), message
    assert "checks=Checks(timeout=...)" in message


def _killed_as_state_travels(rank: int, world_size: int, near: bool) -> str:
    if not near:
        process_identity.host_if_known = lambda: f"host {rank}"  # type: ignore[attr-defined]
    _, optimizer = _made(rank, world_size, None)
    if rank == 1:
        mesh_params.full_copy = lambda _: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[attr-defined]
    with pytest.raises(PeerLost) as caught:
        optimizer.consolidate_state_dict(0)
    return str(caught.value)


@pytest.mark.parametrize("near", [True, False])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_that_is_killed_as_state_travels_is_named(world_size: int, near: bool) -> None:
    found = run_processes(world_size, _killed_as_state_travels, near, expect_errors=True)
    ended = r"rank 1 \(pid \d+\) has ended" if near else "rank 1 has ended, or its host does not answer,"
    for text in found[:1] + found[2:]:
        assert re.match(f"{ended} while {re.escape(CONSOLIDATE)} waits for it", text), text


def _interrupted(rank: int, world_size: int) -> str:
    _, optimizer = _made(rank, world_size, None)
    store: Any = dist.distributed_c10d._get_default_store()
    if rank:
        store.wait(["interrupted"])
        with pytest.raises(PeerLost) as caught:
            optimizer.clip_grad_norm_(1.0)
        return str(caught.value)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    with pytest.raises(KeyboardInterrupt):
        optimizer.clip_grad_norm_(1.0)
    store.set("interrupted", "")
    with pytest.raises(PeerSilent) as caught:
        optimizer.clip_grad_norm_(1.0)
    return str(caught.value)


def test_a_wait_that_is_interrupted_is_the_last() -> None:
    own, others = run_processes(2, _interrupted)
    assert own.startswith("this rank has left training, because KeyboardInterrupt has ended its wait"), own
    assert others.startswith("rank 0 has left training after 1 step, because an exception there"), others


def _on_a_mesh(rank: int, world_size: int) -> str:
    """HSDP: the ranks of a mesh of two dimensions, one of which is in another call."""
    net = sharded_net(mesh_of((2, 2)))
    optimizer = sharded_optimizer(net)
    backward(net, 0, rank)
    with pytest.raises(RankMismatch) as caught:
        optimizer.consolidate_state_dict(0) if rank == 3 else optimizer.clip_grad_norm_(1.0)
    return str(caught.value)


def test_calls_are_compared_over_all_dimensions() -> None:
    assert len({*run_processes(4, _on_a_mesh)}) == 1
