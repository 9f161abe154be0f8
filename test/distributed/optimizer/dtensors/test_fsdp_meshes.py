"""DTensors on several meshes, and plain parameters beside them: one norm for all ranks, or an error on all."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import zero_opt
from test.support.fsdp_models import locals_of
from test.support.harness import run_processes

WIDTH = 6
OFFLOADS = {"none": None, "host": zero_opt.CPUOffload(), "worker": zero_opt.WorkerOffload()}


def _net(world_size: int) -> nn.Module:
    """Two layers; the first on the last dimension of a mesh of two, the other on all ranks."""
    halves = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("experts", "shards"))
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 1, bias=False))
    for layer in net:
        nn.init.constant_(layer.weight, 0.5)
    fully_shard(net[0], mesh=halves["shards"])
    return fully_shard(net, mesh=init_device_mesh("cpu", (world_size,)))


def _give_gradients(net: nn.Module, inner: float) -> None:
    for layer, value in zip(net, (inner, 1.0), strict=True):
        layer.weight.grad = torch.full_like(layer.weight, value)


def _of_smaller_meshes(rank: int, world_size: int, offload: str, differ: bool) -> str:
    net = _net(world_size)
    opt = zero_opt.ShardedOptimizer(
        net.parameters(), torch.optim.AdamW, lr=0.1, fused=True, offload=OFFLOADS[offload], max_grad_norm=0.1
    )
    _give_gradients(net, 3.0 if differ and rank >= world_size // 2 else 2.0)
    before = locals_of(net.parameters())
    if not differ:
        assert float(opt.clip_grad_norm_(0.1)) == pytest.approx(math.sqrt(WIDTH * WIDTH * 4 + WIDTH), rel=1e-6)
        opt.step()
        assert not torch.equal(locals_of(net.parameters())[0], before[0])
        opt.close()
        return ""
    with pytest.raises(zero_opt.RankMismatch) as caught:
        opt.step()
    assert all(map(torch.equal, locals_of(net.parameters()), before))
    opt.close()
    return str(caught.value)


@pytest.mark.parametrize("offload", ["none", "host", "worker"])
def test_gradients_that_differ_between_smaller_meshes_have_no_norm(offload: str) -> None:
    for message in run_processes(4, _of_smaller_meshes, offload, True):
        assert "the norm of the gradients is 12.2474 on rank 0 and 18.1659 on rank 2" in message


@pytest.mark.parametrize("offload", ["none", "host", "worker"])
def test_replicas_on_smaller_meshes_count_once(offload: str) -> None:
    run_processes(4, _of_smaller_meshes, offload, False)


def _not_finite(rank: int, world_size: int) -> str:
    net = _net(world_size)
    checks = zero_opt.Checks(nonfinite="skip")
    opt = zero_opt.ShardedOptimizer(net.parameters(), torch.optim.AdamW, lr=0.1, fused=True, checks=checks)
    _give_gradients(net, 3.0 + rank // (world_size // 2))
    opt.step()  # nothing is clipped, so gradients may differ
    _give_gradients(net, math.nan if rank >= world_size // 2 else 1.0)
    with pytest.raises(zero_opt.RankMismatch) as caught:
        opt.step()
    opt.close()
    return str(caught.value)


def test_no_rank_skips_a_step_that_another_takes() -> None:
    for message in run_processes(4, _not_finite):
        assert "on rank 0 and nan on rank 2" in message


def _plain(rank: int, world_size: int) -> str:
    net = fully_shard(nn.Linear(WIDTH, 1), mesh=init_device_mesh("cpu", (world_size,)))
    plain = nn.Parameter(torch.ones(WIDTH))
    opt = zero_opt.ShardedOptimizer(
        [*net.parameters(), plain],
        torch.optim.AdamW,
        reduction=zero_opt.AlreadyReduced(),
        foreach=False,
        max_grad_norm=0.1,
    )
    for param in net.parameters():
        param.grad = torch.ones_like(param)
    plain.grad = torch.full_like(plain, 1.0 + rank)
    with pytest.raises(zero_opt.RankMismatch) as caught:
        opt.step()
    plain.grad = torch.full_like(plain, 1.0 + 1e-6 * rank)  # as kernels round
    opt.step()
    opt.close()
    return str(caught.value)


def test_plain_parameters_that_nobody_averages_have_no_norm() -> None:
    for message in run_processes(2, _plain):
        assert "average the gradients of plain ones" in message


def _of_one_rank(rank: int, world_size: int, more: str) -> str:
    """Rank 0 has one parameter more than the others."""
    ranks = init_device_mesh("cpu", (world_size,))
    net = fully_shard(nn.Linear(WIDTH, 1), mesh=ranks)
    params = list(net.parameters())
    if rank == 0 and more == "plain":
        params.append(nn.Parameter(torch.ones(WIDTH)))
    opt = zero_opt.ShardedOptimizer(
        params, torch.optim.AdamW, reduction=zero_opt.AlreadyReduced(), foreach=False, max_grad_norm=0.1
    )
    said = ""
    for value in (0.0, 3.0):  # of the one parameter
        for param in params:
            param.grad = torch.ones_like(param) if param is not params[-1] or rank else torch.full_like(param, value)
        try:
            opt.step()
        except zero_opt.RankMismatch as error:
            said = str(error)
            assert value
    opt.close()
    return said


def test_a_parameter_of_one_rank_alone_has_no_part_in_a_norm_of_all() -> None:
    for message in run_processes(2, _of_one_rank, "plain"):
        assert "the norm of the gradients is" in message
    assert run_processes(2, _of_one_rank, "none") == [""] * 2


def _in_the_first_of_three(rank: int, world_size: int) -> str:
    """Ranks 0 and 1 differ on their smaller mesh; ranks 2 and 3, on another, do not."""
    net = _net(world_size)
    plain = nn.Parameter(torch.ones(WIDTH))
    opt = zero_opt.ShardedOptimizer(
        [*net[0].parameters(), plain, *net[1].parameters()],
        torch.optim.AdamW,
        reduction=zero_opt.AlreadyReduced(),
        foreach=False,
        max_grad_norm=0.1,
    )
    said = []
    for value in (9.0, 1.0):
        _give_gradients(net, 2.0)
        plain.grad = torch.full_like(plain, value if rank == 0 else 1.0)
        try:
            opt.step()
        except zero_opt.RankMismatch as error:
            said.append(str(error))
    opt.close()
    return "|".join(said)


def test_ranks_that_differ_in_one_mesh_leave_no_rank_in_another() -> None:
    for message in run_processes(4, _in_the_first_of_three):
        assert message.count("the norm of the gradients is") == 1 and "|" not in message
