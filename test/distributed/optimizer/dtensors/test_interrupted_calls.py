"""Calls over DTensors that an exception ends on one rank, between two messages: no later call reads what they sent."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate

import zero_opt
from test.support.fsdp_models import backward, mesh_of, sharded_net, sharded_optimizer
from test.support.harness import run_processes
from zero_opt.errors import PeerLost, PeerSilent
from zero_opt.optimizer.dtensors import mesh_params
from zero_opt.optimizer.dtensors.mesh_group import MeshGroup

ENGINES: dict[str, dict[str, Any]] = {
    "wrapped": {},
    "parts": {"offload": zero_opt.CPUOffload()},
    "compact": {"cls": zero_opt.CPUAdamW, "state": zero_opt.AdamState("float32", "split")},
}


def _cut_otherwise(optimizer: zero_opt.ShardedOptimizer) -> Any:
    """State that travels as it is loaded."""
    saved = optimizer.state_dict()
    entries = {
        index: {**entry, "exp_avg": entry["exp_avg"].redistribute(placements=[Replicate()])}
        for index, entry in saved["state"].items()
    }
    return {**saved, "state": entries}


def _calls(optimizer: Any, other: Any, *, compact: bool) -> dict[str, Callable[[], Any]]:
    state, rows = _cut_otherwise(optimizer), zero_opt.sharded_state_dict(optimizer, compact=compact)
    return {
        "consolidate": lambda: optimizer.consolidate_state_dict(0),
        "clip": lambda: optimizer.clip_grad_norm_(1.0),
        "joint clip": lambda: zero_opt.clip_grad_norm_([optimizer, other], 1.0),
        "step": optimizer.step,
        "load": lambda: optimizer.load_state_dict(state),
        "rows": lambda: zero_opt.sharded_state_dict(optimizer, compact=compact),
        "load rows": lambda: zero_opt.load_sharded_state_dict(optimizer, rows),
    }


def _interrupt_after(messages: int) -> None:
    """Have a Ctrl-C fall on this rank just after so many messages."""
    left = itertools.count(messages - 1, -1)

    def counted(wait: Callable[..., Any]) -> Callable[..., Any]:
        def waited(*given: Any, **options: Any) -> Any:
            found = wait(*given, **options)
            if next(left) == 0:
                raise KeyboardInterrupt
            return found

        return waited

    MeshGroup.all_gather_bytes = counted(MeshGroup.all_gather_bytes)  # type: ignore[method-assign]
    mesh_params.full_copy = counted(mesh_params.full_copy)  # type: ignore[attr-defined]


def _lost(call: Callable[[], Any]) -> str:
    """What is raised on a rank that calls twice: the first call may have got all messages."""
    try:
        call()
        call()
    except PeerLost as lost:
        return str(lost)
    return "nothing"


def _interrupted(rank: int, world_size: int, call: str, messages: int, engine: str) -> str:
    dtype, options = torch.bfloat16 if engine == "compact" else torch.float32, {**ENGINES[engine], "max_grad_norm": 1.0}
    net, other_net = (sharded_net(mesh_of((world_size,)), dtype=dtype) for _ in range(2))
    optimizer, other = sharded_optimizer(net, **options), sharded_optimizer(other_net, **options)
    for model, own in ((net, optimizer), (other_net, other)):
        backward(model, 0, rank)
        own.step()
        backward(model, 1, rank)
    make = _calls(optimizer, other, compact=engine == "compact")[call]
    store: Any = dist.distributed_c10d._get_default_store()
    if rank == 0:
        lost = _lost(make)
        store.set("lost", "")
        return lost
    _interrupt_after(messages)
    with pytest.raises(KeyboardInterrupt):
        make()
    store.wait(["lost"])
    with pytest.raises(PeerSilent) as refused:
        make()
    return str(refused.value)


# After how many messages each call is interrupted; of those that compare bf16 parameters there are more.
MESSAGES = {"consolidate": 4, "clip": 1, "joint clip": 2, "step": 1, "load": 1, "rows": 1, "load rows": 2}
POINTS = [
    (engine, call, after)
    for engine in ENGINES
    for call, most in MESSAGES.items()
    for after in range(1, most + 1 + (engine == "compact" and "rows" in call))
]


@pytest.mark.parametrize(("engine", "call", "after"), POINTS)
def test_a_call_that_is_interrupted_between_two_messages_is_the_last(engine: str, call: str, after: int) -> None:
    lost, refused = run_processes(2, _interrupted, call, after, engine)
    assert lost.startswith("rank 1 has left training after 1 step, because an exception there"), lost
    assert refused.startswith("this rank has left training, because KeyboardInterrupt has ended "), refused


def _early(rank: int, world_size: int, options: Any) -> int:
    """Interrupt a call before its first message, then make it again."""
    net = sharded_net(mesh_of((world_size,)))
    optimizer = sharded_optimizer(net, max_grad_norm=1.0, **options)
    backward(net, 0, rank)
    original = MeshGroup.all_gather_bytes
    if rank:
        MeshGroup.all_gather_bytes = _raises  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            optimizer.clip_grad_norm_(1.0)
        MeshGroup.all_gather_bytes = original  # type: ignore[method-assign]
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.consolidate_state_dict(0)
    return int(optimizer.stats()["steps"])


def _raises(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt


@pytest.mark.parametrize("engine", ["wrapped", "parts"])
def test_before_the_first_message_a_call_can_be_repeated(engine: str) -> None:
    assert run_processes(2, _early, ENGINES[engine]) == [1, 1]


class _Failing(torch.optim.SGD):
    """Its second step fails on rank 1, its second ``state_dict()`` on all."""

    saved = 0

    def step(self, closure: Any = None) -> Any:
        if dist.get_rank() and self.state:
            raise ValueError("of the class")
        return super().step(closure)

    def state_dict(self) -> Any:
        self.saved += 1
        if self.saved == 2:
            raise ValueError("of the class")
        return super().state_dict()


def _class_fails(rank: int, world_size: int) -> str:
    net = sharded_net(mesh_of((world_size,)))
    optimizer = sharded_optimizer(net, _Failing, lr=0.1, momentum=0.9, max_grad_norm=1.0)
    said = ""
    for step in range(2):
        backward(net, step, rank)
        try:
            optimizer.step()
        except ValueError as error:
            said = str(error)
        optimizer.zero_grad()
    optimizer.consolidate_state_dict(0)
    return said


def test_what_the_class_raises_after_the_message_of_the_norm_is_its_own() -> None:
    assert run_processes(2, _class_fails) == ["", "of the class"]


def _state_fails(rank: int, world_size: int) -> tuple[str, int]:
    net = sharded_net(mesh_of((world_size,)))
    optimizer = sharded_optimizer(net, _Failing, lr=0.1, momentum=0.9)
    found, said = [zero_opt.sharded_state_dict(optimizer)], ""
    try:
        found.append(zero_opt.sharded_state_dict(optimizer))
    except (ValueError, zero_opt.ZeroOptError) as error:
        said = str(error)
    backward(net, 0, rank)
    found.append(zero_opt.sharded_state_dict(optimizer))
    return said, len(found)


def test_what_the_class_raises_as_it_gives_its_state_ends_no_training() -> None:
    assert run_processes(2, _state_fails) == [("of the class", 2), ("rank 0: of the class (ValueError)", 2)]


def _closure_is_interrupted(rank: int, world_size: int) -> int:
    """A clip within the closure is over on all ranks as Ctrl-C comes on one."""
    net = sharded_net(mesh_of((world_size,)))
    optimizer = sharded_optimizer(net)

    def closure() -> float:
        backward(net, 0, rank)
        optimizer.clip_grad_norm_(1.0)
        if rank:
            raise KeyboardInterrupt
        return 0.0

    with contextlib.suppress(KeyboardInterrupt):
        optimizer.step(closure)
    backward(net, 1, rank)
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    return int(optimizer.stats()["steps"])


def test_a_closure_that_is_interrupted_between_two_calls_leaves_the_others_alone() -> None:
    assert run_processes(2, _closure_is_interrupted) == [2, 1]


def _in_construction(rank: int, world_size: int) -> list[str]:
    """Interrupt the construction just after its first message, and construct again."""
    net = sharded_net(mesh_of((world_size,)))
    if rank:
        original = MeshGroup.all_gather

        def gathered(*given: Any) -> Any:
            original(*given)
            raise KeyboardInterrupt

        MeshGroup.all_gather = gathered  # type: ignore[assignment, method-assign]
        with pytest.raises(KeyboardInterrupt):
            sharded_optimizer(net)
        MeshGroup.all_gather = original  # type: ignore[method-assign]
    return [_lost(lambda: sharded_optimizer(net)) for _ in range(2)]


def test_after_the_first_message_of_a_construction_every_rank_loses_the_mesh() -> None:
    for lost in run_processes(2, _in_construction):
        assert all(text != "nothing" for text in lost), lost
