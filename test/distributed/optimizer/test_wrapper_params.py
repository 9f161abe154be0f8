"""Parameters and gradients that wrap other tensors, and have no memory of their own: none is read at its address."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.two_tensor import TwoTensor

import zero_opt
from test.support.fsdp_models import mesh_of
from test.support.harness import assert_bitwise, run_processes
from test.support.wrapper_tensor import wrapped

REDUCTIONS = {"AtStep": zero_opt.AtStep(), "Overlapped": zero_opt.Overlapped()}
OFFLOADS = {
    "CPUOffload": zero_opt.CPUOffload(),
    "WorkerOffload": zero_opt.WorkerOffload(threads=1),
    "NVMeOffload": zero_opt.NVMeOffload(tempfile.gettempdir(), threads=1),
}
MASTERS = {"precision": zero_opt.MixedPrecision(master_dtype=torch.float32)}
# Of places where parameters are sharded or offloaded: how many ranks, and what the optimizer is given.
PLACES: dict[str, tuple[int, dict[str, Any]]] = {
    **{name: (2, {"reduction": reduction}) for name, reduction in REDUCTIONS.items()},
    **{name: (1, {"offload": offload}) for name, offload in OFFLOADS.items()},
    "masters": (1, MASTERS),
}


def _two(*shape: int) -> Tensor:
    return TwoTensor(torch.ones(shape), torch.ones(shape))


def _trainable(rank: int, world_size: int, options: dict[str, Any]) -> None:
    for shape in ((3,), (4, 2)):  # of 12 bytes, and of a multiple of 8
        param, odd = nn.Parameter(torch.ones(4)), nn.Parameter(_two(*shape))
        with pytest.raises(zero_opt.UnsupportedParam, match=r"parameter 1 .* is a TwoTensor without memory of its own"):
            zero_opt.ShardedOptimizer([param, odd], torch.optim.AdamW, lr=0.1, **options)
        optimizer = zero_opt.ShardedOptimizer([param], torch.optim.AdamW, lr=0.1, **options)
        with pytest.raises(zero_opt.UnsupportedParam, match=r"parameter 1 .* is a TwoTensor without memory of its own"):
            optimizer.add_param_group({"params": [odd]})
        param.sum().backward()
        optimizer.step()
        optimizer.close()


@pytest.mark.parametrize("place", PLACES)
def test_one_that_trains_is_refused_by_name_on_every_rank(place: str) -> None:
    world_size, options = PLACES[place]
    run_processes(world_size, _trainable, options)


def _alone(rank: int, world_size: int) -> None:
    """Without an offload the wrapped class steps it, as in torch."""
    params, plain = ([nn.Parameter(_two(3)), nn.Parameter(torch.ones(4))] for _ in range(2))
    ours = zero_opt.ShardedOptimizer(params, torch.optim.AdamW, lr=0.1)
    torchs = torch.optim.AdamW(plain, lr=0.1)
    for optimizer, given in ((ours, params), (torchs, plain)):
        (2 * given[0].sum() + given[1].sum()).backward()
        optimizer.step()
    assert_bitwise([params[0].a, params[1]], [plain[0].a, plain[1]])


def test_one_rank_alone_steps_it_as_torch_does() -> None:
    run_processes(1, _alone)


def _step(optimizer: zero_opt.ShardedOptimizer, param: nn.Parameter, rank: int) -> None:
    (param.square().sum() * (1 + rank)).backward()
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()


def _frozen(rank: int, world_size: int, options: dict[str, Any], wrappers: int) -> Any:
    """Train with frozen wrappers before and after the parameter that trains, and in a group of their own."""
    frozen = [nn.Parameter(wrapped(3, 5), requires_grad=False) for _ in range(wrappers)]
    param = nn.Parameter(torch.ones(4))
    named = [*((f"base{number}", base) for number, base in enumerate(frozen)), ("lora", param)]
    optimizer = zero_opt.ShardedOptimizer(named, torch.optim.AdamW, lr=0.1, **options)
    if frozen:
        optimizer.add_param_group({"params": [("late", nn.Parameter(wrapped(7), requires_grad=False))]})
    _step(optimizer, param, rank)
    optimizer.consolidate_state_dict()
    saved = optimizer.state_dict() if rank == 0 else None
    rows = zero_opt.sharded_state_dict(optimizer)
    _step(optimizer, param, rank)
    zero_opt.load_sharded_state_dict(optimizer, rows)
    whole = optimizer.state_dict()
    _step(optimizer, param, rank)
    optimizer.load_state_dict(whole)
    _step(optimizer, param, rank)
    optimizer.flush()
    assert [*whole["state"]] == [wrappers]
    found = [param.detach().clone()], None if saved is None else saved["state"][wrappers]
    optimizer.close()
    return found


@pytest.mark.parametrize("place", PLACES)
def test_a_frozen_one_may_stay_among_the_parameters(place: str) -> None:
    world_size, options = PLACES[place]
    with_wrappers, without = (run_processes(world_size, _frozen, options, wrappers) for wrappers in (2, 0))
    assert_bitwise(with_wrappers, without)


def _thawed(rank: int, world_size: int, options: dict[str, Any]) -> None:
    frozen, param = nn.Parameter(_two(4), requires_grad=False), nn.Parameter(torch.ones(4))
    optimizer = zero_opt.ShardedOptimizer([frozen, param], torch.optim.AdamW, lr=0.1, **options)
    _step(optimizer, param, rank)
    frozen.requires_grad_()
    (frozen.sum() + param.sum()).backward()
    before = param.detach().clone()
    with pytest.raises(zero_opt.UnsupportedParam, match=r"parameter 0 .* is a TwoTensor .*freeze it"):
        optimizer.step()
    assert_bitwise(param.detach(), before)
    frozen.requires_grad_(False)
    optimizer.zero_grad()
    _step(optimizer, param, rank)
    assert not torch.equal(param.detach(), before)
    optimizer.close()


@pytest.mark.parametrize("place", [place for place in PLACES if place != "masters"])
def test_a_frozen_one_is_refused_on_every_rank_once_it_is_thawed(place: str) -> None:
    world_size, options = PLACES[place]
    run_processes(world_size, _thawed, options)


def _of_one_rank(rank: int, world_size: int, reduction: Any) -> str:
    frozen = nn.Parameter(wrapped(4) if rank else torch.ones(4), requires_grad=False)
    params = [nn.Parameter(torch.ones(4)), frozen]
    with pytest.raises(zero_opt.RankMismatch) as caught:
        zero_opt.ShardedOptimizer(params, torch.optim.AdamW, lr=0.1, reduction=reduction)
    return str(caught.value)


@pytest.mark.parametrize("reduction", [zero_opt.Overlapped(), zero_opt.AlreadyReduced()], ids=repr)
def test_one_that_only_some_ranks_have_is_named(reduction: Any) -> None:
    for said in run_processes(2, _of_one_rank, reduction):
        assert "parameter 1 (group 0, position 1) has memory of its own: True on rank 0, False on rank 1" in said


def _swapped(rank: int, world_size: int) -> None:
    param = nn.Parameter(torch.ones(3))
    optimizer = zero_opt.ShardedOptimizer([param], torch.optim.AdamW, lr=0.1, reduction=zero_opt.AtStep())
    torch.utils.swap_tensors(param, nn.Parameter(_two(3)))
    param.sum().backward()
    with pytest.raises(zero_opt.UnsupportedParam, match=r"parameter 0 .* is a TwoTensor without memory of its own"):
        optimizer.step()
    optimizer.close()


def test_a_parameter_that_becomes_one_is_refused_on_every_rank() -> None:
    run_processes(2, _swapped)


def _odd_gradients(rank: int, world_size: int, options: dict[str, Any], wraps: bool) -> Tensor:
    params = [nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(3, 2))]
    optimizer = zero_opt.ShardedOptimizer(params, torch.optim.AdamW, lr=0.1, **options)
    ones = _two(8)[3:] if wraps else torch.ones(5)
    factor = 1 if isinstance(options["reduction"], zero_opt.AlreadyReduced) else 1 + rank
    for _ in range(2):
        ((params[0].square() * ones).sum() * factor + params[1].square().sum()).backward()
        assert optimizer.clip_grad_norm_(1.0) > 1
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    return torch.cat([param.detach().flatten() for param in params])


@pytest.mark.parametrize("offload", [None, *OFFLOADS])
@pytest.mark.parametrize("reduction", [*REDUCTIONS.values(), zero_opt.AlreadyReduced()], ids=repr)
def test_gradients_that_are_such_are_taken_by_their_values(reduction: Any, offload: str | None) -> None:
    options = {"reduction": reduction, "offload": offload and OFFLOADS[offload]}
    wrapping, plain = (run_processes(2, _odd_gradients, options, wraps) for wraps in (True, False))
    assert_bitwise(wrapping, plain)


def _part_of_dtensor(rank: int, world_size: int, offload: Any) -> None:
    mesh = mesh_of((2,))

    def cut(part: Tensor) -> Any:
        return DTensor.from_local(part, mesh, [Shard(0)], run_check=False)

    param = nn.Parameter(cut(torch.ones(4, 3)))
    odd = nn.Parameter(cut(_two(4, 3)), requires_grad=False)
    optimizer = zero_opt.ShardedOptimizer([param, odd], torch.optim.AdamW, lr=0.1, offload=offload)
    param.grad = cut(torch.ones(4, 3))
    optimizer.step()
    optimizer.flush()
    assert (param.to_local() < 1).all()
    optimizer.close()
    odd.requires_grad_()
    with pytest.raises(zero_opt.UnsupportedParam, match=r"parameter 1 .* is a TwoTensor without memory of its own"):
        zero_opt.ShardedOptimizer([param, odd], torch.optim.AdamW, lr=0.1, offload=offload)


@pytest.mark.parametrize("offload", OFFLOADS)
def test_so_is_the_part_of_a_dtensor_that_is_here(offload: str) -> None:
    run_processes(2, _part_of_dtensor, OFFLOADS[offload])
