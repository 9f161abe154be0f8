"""Parameters that ``fully_shard`` makes anew once the optimizer has them, as accelerate's prepare() does."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import zero_opt
from test.support.fsdp_models import Net, backward, locals_of, mesh_of, sharded_net
from test.support.harness import assert_bitwise, run_processes

STEPS = 3
OFFLOADS = {
    "none": None,
    "host": zero_opt.CPUOffload(),
    "worker": zero_opt.WorkerOffload(),
    "speculating": zero_opt.WorkerOffload(speculate=True),
}


def _shard_later(net: Net, mesh: Any, opt: torch.optim.Optimizer) -> Net:
    """What accelerate's prepare() does with FSDP2: the new parameters are found by the addresses of the old ones."""
    old = {name: param.data_ptr() for name, param in net.named_parameters()}
    for group in opt.param_groups:
        for position, param in enumerate(group["params"]):
            stand_in: Any = torch.empty(1, dtype=param.dtype)
            stand_in.data_ptr = param.data_ptr()
            group["params"][position] = stand_in
    for block in (net.down, net.up):
        fully_shard(block, mesh=mesh)
    net = fully_shard(net, mesh=mesh)  # type: ignore[assignment]
    new = dict(net.named_parameters())
    mapping = {address: new[name] for name, address in old.items()}
    for group in opt.param_groups:
        group["params"] = [mapping[param.data_ptr] for param in group["params"]]
    return net


def _fsdp(rank: int, world_size: int, offload: Any, fused: bool) -> None:
    mesh = mesh_of((world_size,))
    options: Any = {"lr": 0.02, "fused": fused}
    net = sharded_net(mesh)
    plain = torch.optim.AdamW(net.parameters(), **options)
    wanted, norms = [], []
    for step in range(STEPS):
        plain.zero_grad()
        backward(net, step, rank)
        norms.append(torch.nn.utils.clip_grad_norm_(net.parameters(), 0.05))
        plain.step()
        wanted.append(locals_of(net.parameters()))

    net = Net()
    opt = zero_opt.ShardedOptimizer(net.parameters(), torch.optim.AdamW, offload=offload, **options)
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda _: 1.0)
    net = _shard_later(net, mesh, opt)
    for step in range(STEPS):
        opt.zero_grad()
        backward(net, step, rank)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.05)
        opt.step()
        scheduler.step()
        assert_bitwise(locals_of(net.parameters()), wanted[step], f"step {step}")
    assert all(isinstance(opt.state[param]["exp_avg"], DTensor) for param in net.parameters() if param in opt.state)
    assert opt.clip_grad_norm_(1e9).dtype is torch.float32
    opt.close()


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "foreach"])
def test_fully_shard_after_the_optimizer(fused: bool) -> None:
    run_processes(2, _fsdp, None, fused)


@pytest.mark.parametrize("offload", ["host", "worker"])
def test_fully_shard_after_an_optimizer_with_an_offload(offload: str) -> None:
    run_processes(2, _fsdp, OFFLOADS[offload], True)


def _sharded_again(rank: int, world_size: int, offload: Any) -> None:
    """DTensors in the place of DTensors: what is known of the mesh, for the norm, is that of the new ones."""
    mesh, halves = mesh_of((world_size,)), mesh_of((2, world_size // 2))
    opt = zero_opt.ShardedOptimizer(
        sharded_net(mesh).parameters(), torch.optim.AdamW, lr=0.02, fused=True, offload=offload
    )
    net = sharded_net(halves)
    opt.param_groups[0]["params"] = list(net.parameters())
    backward(net, 0, rank)
    wanted = torch.nn.utils.get_total_norm([param.grad for param in net.parameters() if param.grad is not None])
    torch.testing.assert_close(opt.clip_grad_norm_(0.05), wanted.full_tensor())
    before = locals_of(net.parameters())
    opt.step()
    assert not torch.equal(locals_of(net.parameters())[0], before[0])
    opt.close()


@pytest.mark.parametrize("offload", ["none", "worker", "speculating"])
def test_dtensors_are_replaced_by_others(offload: str) -> None:
    run_processes(2, _sharded_again, OFFLOADS[offload])


def _refused_over_dtensors(rank: int, world_size: int) -> None:
    mesh = mesh_of((world_size,))
    net = Net()
    opt = zero_opt.ShardedOptimizer(
        net.parameters(), torch.optim.AdamW, process_group=dist.group.WORLD, lr=0.02, fused=True
    )
    net = _shard_later(net, mesh, opt)
    backward(net, 0, rank)
    with pytest.raises(zero_opt.ConfigConflict, match="leave process_group out"):
        opt.step()
    opt.close()

    opt = zero_opt.ShardedOptimizer(net.parameters(), torch.optim.AdamW, lr=0.02, offload=OFFLOADS["host"])
    opt.param_groups[0]["params"] = [nn.Parameter(param.full_tensor()) for param in net.parameters()]
    with pytest.raises(zero_opt.ConfigConflict, match=r"construct the optimizer after prepare\(\)"):
        opt.step()
    opt.close()

    half = Net().half()
    opt = zero_opt.ShardedOptimizer(half.parameters(), torch.optim.AdamW, lr=0.02)
    half = _shard_later(half, mesh, opt)
    backward(half, 0, rank)
    scaler: Any = opt
    scaler.grad_scale = torch.tensor(4.0)
    with pytest.raises(zero_opt.ConfigConflict, match=r"after fully_shard\(\)"):
        opt.step()
    opt.close()


def test_dtensors_that_cannot_be_followed() -> None:
    run_processes(2, _refused_over_dtensors)


def _left_behind(rank: int, world_size: int, offload: Any, before: int, way: str) -> list[list[str]]:
    """What is logged in two steps of an optimizer whose model has other parameters since, and of another one."""
    records: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zero_opt").addHandler(handler)
    found = []
    for replaced in (True, False):
        net = Net()
        opt = zero_opt.ShardedOptimizer(net.parameters(), torch.optim.SGD, lr=0.1, fused=False, offload=offload)
        for step in range(before + 2):
            if replaced and step == before and way == "fully_shard":
                fully_shard(net, mesh=mesh_of((world_size,)))
            elif replaced and step == before:
                net.load_state_dict({key: value.clone() for key, value in net.state_dict().items()}, assign=True)
            backward(net, step, rank)
            opt.step()
            opt.zero_grad()
        opt.close()
        found.append([*records])
        records.clear()
    return found


@pytest.mark.parametrize("way", ["fully_shard", "assign"])
@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize(("world_size", "offload"), [(1, None), (1, OFFLOADS["host"]), (2, None)])
def test_a_model_that_lost_its_optimizer_is_mentioned_once(
    world_size: int, offload: Any, before: int, way: str
) -> None:
    for replaced, usual in run_processes(world_size, _left_behind, offload, before, way):
        assert ["met no gradient on any rank" in said for said in replaced] == [True] and not usual


def _replaced_group(rank: int, world_size: int) -> None:
    """A dict in the place of another one, with the same parameters: its hyperparameters count."""
    found = []
    for edited in (False, True):
        net = sharded_net(mesh_of((world_size,)))
        lr = 0.02 if edited else 0.5
        opt = zero_opt.ShardedOptimizer(
            net.parameters(), torch.optim.AdamW, lr=lr, fused=True, offload=OFFLOADS["host"]
        )
        if edited:
            opt.param_groups[0] = {**opt.param_groups[0], "lr": 0.5}
        backward(net, 0, rank)
        opt.step()
        found.append(locals_of(net.parameters()))
        opt.close()
    assert_bitwise(found[1], found[0])


def test_a_group_in_the_place_of_another() -> None:
    run_processes(1, _replaced_group)
