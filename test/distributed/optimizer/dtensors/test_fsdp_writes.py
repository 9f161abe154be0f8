"""Writes to parameters sharded by ``fully_shard``, and their state, that torch does not count for the part here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import zero_opt
from test.support.failures import PATIENCE_S
from test.support.fsdp_models import Net, backward, locals_of, mesh_of, sharded_net, sharded_optimizer
from test.support.harness import assert_bitwise, run_processes
from zero_opt.system.waiting import until

FP32, BF16 = torch.float32, torch.bfloat16
Write = Callable[[Net, Path], None]


def _params(net: nn.Module) -> list[Any]:
    return [*net.parameters()]


def _by_other(net: Net, **options: Any) -> None:
    other = torch.optim.AdamW([param for param in _params(net) if param.requires_grad], lr=0.1, **options)
    for param in _params(net):
        param.grad = torch.ones_like(param)
    other.step()
    net.zero_grad()


def _loaded(net: Net, folder: Path) -> None:
    state = {name: value * 0.5 for name, value in net.state_dict().items()}
    dcp.save(state, checkpoint_id=folder)
    dcp.load(net.state_dict(), checkpoint_id=folder)


def _zeros(net: Net) -> list[Tensor]:
    return [*map(torch.zeros_like, _params(net))]


WRITES: dict[str, Write] = {
    "foreach_mul": lambda net, _: torch._foreach_mul_(_params(net), 0.5),
    "foreach_add": lambda net, _: torch._foreach_add_(_params(net), 0.125),
    "foreach_zero": lambda net, _: torch._foreach_zero_(_params(net)),
    "foreach_lerp": lambda net, _: torch._foreach_lerp_(_params(net), _zeros(net), 0.5),
    "foreach_clamp": lambda net, _: torch._foreach_clamp_min_(_params(net), 0.0),
    "other_foreach": lambda net, _: _by_other(net, foreach=True),
    "other_fused": lambda net, _: _by_other(net, fused=True),
    "detached_part": lambda net, _: [param.detach().to_local().mul_(0.5) for param in _params(net)] and None,
    "part_of_view": lambda net, _: [param.view_as(param).to_local().mul_(0.5) for param in _params(net)] and None,
    "checkpoint": _loaded,
}
OFFLOADS: dict[str, tuple[torch.dtype, Callable[[Path], Any]]] = {
    "worker": (FP32, lambda _: zero_opt.WorkerOffload()),
    "worker_bf16": (BF16, lambda _: zero_opt.WorkerOffload()),
    "speculating": (FP32, lambda _: zero_opt.WorkerOffload(speculate=True)),
    "delayed": (FP32, lambda _: zero_opt.WorkerOffload(delay=1)),
    "nvme_bf16": (BF16, zero_opt.NVMeOffload),
    "host_bf16": (BF16, lambda _: zero_opt.CPUOffload()),
}


def _trained(rank: int, folder: Path, name: str, write: Write, *, told: bool) -> list[Tensor]:
    """This rank's parts after a write, of which torch is told or is not, and a step."""
    dtype, offload = OFFLOADS[name]
    net = sharded_net(mesh_of((2,)), dtype=dtype)
    optimizer = sharded_optimizer(net, offload=offload(folder))
    for step in range(3):
        if step == 2:
            optimizer.flush()
            with torch.no_grad():
                write(net, folder / f"checkpoint {told}")
            if told:
                torch.autograd.graph.increment_version(_params(net))
        backward(net, step, rank)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.flush()
    optimizer.close()
    return locals_of(_params(net))


def _taken_over(rank: int, world_size: int, folder: Path, name: str) -> None:
    without = _trained(rank, folder, name, lambda *_: None, told=False)
    for called, write in WRITES.items():
        wanted = _trained(rank, folder, name, write, told=True)
        assert not all(map(torch.equal, wanted, without))
        assert_bitwise(_trained(rank, folder, name, write, told=False), wanted, f"{name}, {called}")


@pytest.mark.parametrize("name", OFFLOADS)
def test_writes_that_torch_does_not_count_are_taken_over(tmp_path: Path, name: str) -> None:
    run_processes(2, _taken_over, tmp_path, name)


def _before_the_first_step(rank: int, world_size: int, offload: Any, counted: bool) -> list[Tensor]:
    net = sharded_net(mesh_of((world_size,)), dtype=BF16)
    optimizer = sharded_optimizer(net, offload=offload)
    with torch.no_grad():
        torch._foreach_mul_([param for param in _params(net) if param.requires_grad], -0.5)
    if counted:
        torch.autograd.graph.increment_version(_params(net))
    for step in range(2):
        backward(net, step, rank)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    return locals_of(_params(net))


def _is_taken_over_before_the_first_step(rank: int, world_size: int, offload: Any) -> None:
    found, wanted = (_before_the_first_step(rank, world_size, offload, counted) for counted in (False, True))
    assert_bitwise(found, wanted)


@pytest.mark.parametrize("offload", [zero_opt.CPUOffload(), zero_opt.WorkerOffload()], ids=["cpu", "worker"])
def test_such_a_write_before_the_first_step_is_taken_over(offload: Any) -> None:
    run_processes(2, _is_taken_over_before_the_first_step, offload)


def _while_pending(rank: int, world_size: int) -> None:
    net = sharded_net(mesh_of((world_size,)))
    optimizer = sharded_optimizer(net, offload=zero_opt.WorkerOffload(delay=1))
    backward(net, 0, rank)
    optimizer.step()
    optimizer.zero_grad()
    before = locals_of(_params(net))
    with torch.no_grad():
        torch._foreach_mul_([net.down.weight], 0.5)
    written = locals_of([net.down.weight])
    backward(net, 1, rank)
    with pytest.raises(zero_opt.StepPending, match=r"parameter 1 .* was changed while a step for it was pending"):
        optimizer.step()
    optimizer.flush()
    assert_bitwise(locals_of([net.down.weight]), written, "the write stays")
    assert not torch.equal(locals_of([net.up.weight])[0], before[_position(net, net.up.weight)])
    optimizer.zero_grad()
    backward(net, 2, rank)
    optimizer.step()
    optimizer.flush()
    assert not torch.equal(locals_of([net.down.weight])[0], written[0])
    optimizer.close()


def _position(net: Net, param: Tensor) -> int:
    return next(at for at, one in enumerate(net.parameters()) if one is param)


def test_such_a_write_while_a_step_is_pending_is_an_error_and_others_get_the_step() -> None:
    run_processes(2, _while_pending)


def _where_nobody_looks(rank: int, world_size: int, told: bool) -> list[Tensor]:
    net = nn.Linear(128, 128)
    with torch.no_grad():
        net.weight.copy_(torch.linspace(-1, 1, 128 * 128).view(128, 128))
        net.bias.zero_()
    fully_shard(net, mesh=mesh_of((world_size,)))
    offload = zero_opt.WorkerOffload()
    optimizer = zero_opt.ShardedOptimizer(net.parameters(), torch.optim.AdamW, lr=0.02, fused=True, offload=offload)
    for step in range(2):
        net(torch.ones(4, 128)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            for param, at in zip(_params(net), (100, 0), strict=True):
                param.detach().to_local().view(-1)[at] = 5.0
            if told:
                torch.autograd.graph.increment_version(_params(net))
    optimizer.close()
    return locals_of(_params(net))


def _all_taken_over(rank: int, world_size: int) -> None:
    found, wanted = (_where_nobody_looks(rank, world_size, told) for told in (False, True))
    assert wanted[0].view(-1)[100] > 4
    assert_bitwise(found, wanted, "an element that is not looked at")


def test_where_one_parameter_shows_a_write_all_are_taken_over() -> None:
    run_processes(1, _all_taken_over)


def _await_draft(optimizer: Any) -> None:
    """Return once the worker has drafted the next step."""
    placement = optimizer._engine.placement
    control = placement._worker.control
    assert until(lambda: placement._drafts and control.drafts_done >= control.drafted, PATIENCE_S)


def _state_written(rank: int, world_size: int, offload: zero_opt.WorkerOffload) -> list[Tensor]:
    """The parts after three steps and a write to moments before the last one."""
    net = sharded_net(mesh_of((world_size,)))
    optimizer = sharded_optimizer(net, offload=offload)
    for step in range(3):
        backward(net, step, rank)
        if step == 2:
            if offload.speculate:
                _await_draft(optimizer)
            for state in optimizer.state.values():
                state["exp_avg"].mul_(-5)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    return locals_of(_params(net))


def _state_of_drafts(rank: int, world_size: int) -> None:
    wanted = _state_written(rank, world_size, zero_opt.WorkerOffload())
    found = _state_written(rank, world_size, zero_opt.WorkerOffload(speculate=True))
    assert_bitwise(found, wanted, "with drafts")


def test_no_draft_of_before_a_write_to_state_counts() -> None:
    run_processes(2, _state_of_drafts)


def _state_while_pending(rank: int, world_size: int) -> None:
    net = sharded_net(mesh_of((world_size,)))
    optimizer = sharded_optimizer(net, offload=zero_opt.WorkerOffload(delay=1))
    for step in range(2):
        backward(net, step, rank)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.state[net.down.weight]["exp_avg"].mul_(-5)
    with pytest.raises(zero_opt.StepPending, match=r"opt\.state was written to while a step"):
        optimizer.flush()
    optimizer.flush()
    optimizer.state[net.down.weight]["exp_avg"].zero_()
    backward(net, 2, rank)
    optimizer.step()
    optimizer.close()


def test_a_write_to_state_while_a_step_is_pending_is_an_error() -> None:
    run_processes(2, _state_while_pending)
