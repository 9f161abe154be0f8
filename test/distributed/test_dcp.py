"""The functions of ``torch.distributed.checkpoint.state_dict`` with a sharded optimizer, as with a plain one."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

import zero_opt
from test.distributed.harness import assert_bitwise, run_processes
from test.distributed.scenario import BUCKET_MB

SECONDS = 40
STEPS = 3

OPTIONS = {
    "default": StateDictOptions(),
    "full": StateDictOptions(full_state_dict=True, cpu_offload=True),
    "flat": StateDictOptions(flatten_optimizer_state_dict=True),
}


def _model() -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 20), nn.Tanh(), nn.Linear(20, 3))
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) / 8)
    return model


def _groups(model: Any) -> list[dict[str, Any]]:
    return [{"params": model[0].parameters(), "lr": 0.02}, {"params": model[2].parameters()}]


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """The same gradients on every rank, so that the mean of two is that of one."""
    data = torch.randn(4, 30, generator=torch.Generator().manual_seed(seed))
    model(data).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _sharded(model: nn.Module) -> zero_opt.ShardedOptimizer:
    return zero_opt.ShardedOptimizer(_groups(model), torch.optim.AdamW, reduction=zero_opt.Overlapped(BUCKET_MB))


def _counted(optimizer: torch.optim.Optimizer) -> list[int]:
    steps: list[int] = []
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    return steps


def _plain(trained: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = _model()
    optimizer = torch.optim.AdamW(_groups(model))
    for seed in range(trained):
        _step(model, optimizer, seed)
    return model, optimizer


def _get(rank: int, world_size: int, options: str, consolidated: bool) -> Any:
    model = _model()
    optimizer = _sharded(model)
    for seed in range(STEPS):
        _step(model, optimizer, seed)
    if consolidated:
        optimizer.consolidate_state_dict(to=1)
    steps = _counted(optimizer)
    got = get_optimizer_state_dict(model, optimizer, options=OPTIONS[options])
    both = get_state_dict(model, optimizer, options=OPTIONS[options])[1]
    assert not steps
    optimizer.close()
    return copy.deepcopy((got, both))


@pytest.mark.parametrize("consolidated", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
def test_what_every_rank_gets_is_what_a_plain_optimizer_gives(options: str, consolidated: bool) -> None:
    plain_model, plain = _plain(STEPS)
    same_on_one = StateDictOptions(flatten_optimizer_state_dict=options == "flat")
    wanted = get_optimizer_state_dict(plain_model, plain, options=same_on_one)
    found = run_processes(2, _get, options, consolidated, timeout=SECONDS)
    for rank in (0, 1) if options != "full" else (0,):  # with cpu_offload, full state is on rank 0 alone
        assert_bitwise(found[rank], (wanted, wanted), f"rank {rank}")


def _get_of_one_param(rank: int, world_size: int) -> Any:
    model = nn.Linear(8, 4, bias=False)
    with torch.no_grad():
        model.weight.fill_(0.5)
    optimizer = zero_opt.ShardedOptimizer(model.parameters(), torch.optim.AdamW)
    model(torch.ones(2, 8)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    steps = _counted(optimizer)
    got = get_optimizer_state_dict(model, optimizer)
    assert not steps
    optimizer.close()
    return copy.deepcopy(got)


def test_ranks_that_own_nothing_are_not_stepped() -> None:
    found = run_processes(3, _get_of_one_param, timeout=SECONDS)
    assert found[0]["state"]["weight"]["exp_avg"].shape == (4, 8)
    assert_bitwise(found[1], found[0])
    assert_bitwise(found[2], found[0])


def _resume(rank: int, world_size: int, folder: str, fresh: bool) -> Any:
    """Save, load into an optimizer, go on."""
    model = _model()
    optimizer = _sharded(model)
    for seed in range(STEPS):
        _step(model, optimizer, seed)
    model_state, state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "opt": state}, checkpoint_id=folder)
    if fresh:
        optimizer.close()
        model = _model()
        optimizer = _sharded(model)
    else:
        _step(model, optimizer, 99)
    model_state, state = get_state_dict(model, optimizer)
    loaded = {"model": model_state, "opt": state}
    dcp.load(loaded, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["opt"])
    for seed in range(STEPS, 2 * STEPS):
        _step(model, optimizer, seed)
    optimizer.consolidate_state_dict(to=0)
    full = optimizer.state_dict() if rank == 0 else None
    optimizer.close()
    return [param.detach().clone() for param in model.parameters()], full


@pytest.mark.parametrize("fresh", [True, False])
def test_training_goes_on_from_what_was_set(fresh: bool, tmp_path: Path) -> None:
    model, plain = _plain(2 * STEPS)
    found = run_processes(2, _resume, str(tmp_path), fresh, timeout=SECONDS)
    for params, _ in found:
        assert_bitwise(params, [param.detach() for param in model.parameters()])
    assert_bitwise(found[0][1]["state"], plain.state_dict()["state"])


def _set_full(rank: int, world_size: int, given: Any, broadcast: bool) -> Any:
    model = _model()
    optimizer = _sharded(model)
    _step(model, optimizer, 99)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
    set_optimizer_state_dict(model, optimizer, {} if broadcast and rank else given, options=options)
    optimizer.consolidate_state_dict(to=0)
    full = optimizer.state_dict() if rank == 0 else None
    optimizer.close()
    return full


@pytest.mark.parametrize("broadcast", [False, True])
def test_full_state_of_a_plain_optimizer_can_be_set(broadcast: bool) -> None:
    model, plain = _plain(STEPS)
    given: dict[str, Any] = get_optimizer_state_dict(model, plain)  # type: ignore[assignment]
    found = run_processes(2, _set_full, given, broadcast, timeout=SECONDS)[0]
    state: dict[int, dict[str, Tensor]] = found["state"]
    assert_bitwise(state, plain.state_dict()["state"])
