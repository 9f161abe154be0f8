"""Compact state of DTensors, saved as it is and loaded at other world sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import zero_opt
from test.support.compact_training import FORMS, Form
from test.support.fsdp_models import local_state, locals_of, mesh_of
from test.support.harness import assert_bitwise, run_processes
from test.support.scenario import values

SHAPES = ((21, 128), (40, 3, 64), (7, 33), (130,), (1, 64))  # the middle ones are cut within blocks
BEFORE, AFTER = 3, 3


def _make(world_size: int, form: Form, offload: Any, start: list[torch.Tensor] | None = None) -> tuple[nn.Module, Any]:
    model = nn.ParameterList(
        nn.Parameter(values(51, 0, 0, at, shape).to(form.dtype, copy=True) if start is None else start[at].clone())
        for at, shape in enumerate(SHAPES)
    )
    fully_shard(model, mesh=mesh_of((world_size,)))
    optimizer = zero_opt.ShardedOptimizer(
        model.parameters(), zero_opt.CPUAdamW, lr=0.02, state=form.state, offload=offload
    )
    return model, optimizer


def _train(model: nn.Module, optimizer: Any, form: Form, steps: range) -> None:
    """With the same gradients on every rank."""
    for step in steps:
        for at, param in enumerate(model.parameters()):
            assert isinstance(param, DTensor)
            full = values(step, 1, 0, at, SHAPES[at]).to(form.dtype)
            if at == 4 and step < BEFORE:
                continue  # it has no state when that is saved
            param.grad = torch.distributed.tensor.distribute_tensor(full, param.device_mesh, param.placements)
        optimizer.step()


def _save(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    found = {}
    for name, form in FORMS.items():
        model, optimizer = _make(world_size, form, zero_opt.CPUOffload())
        _train(model, optimizer, form, range(BEFORE))
        saved = {how: zero_opt.sharded_state_dict(optimizer, compact=how == "compact") for how in ("compact", "plain")}
        for how, state in saved.items():
            dcp.save(state, checkpoint_id=folder / name / how)
        first, third = (saved["compact"]["state"][at] for at in (0, 2))
        cuts_blocks = form.state.moments == "block8"
        assert ("exp_avg_codes" in first, "exp_avg_codes" in third) == (cuts_blocks, False)
        full = [param.full_tensor() for param in model.parameters()]  # type: ignore[attr-defined]
        _train(model, optimizer, form, range(BEFORE, BEFORE + AFTER))
        found[name] = full, locals_of(model.parameters()), local_state(optimizer)
        optimizer.close()
    if rank == 0:
        for name in FORMS:
            dcp_to_torch_save(folder / name / "compact", folder / name / "full.pt")
    return found


def _resume(rank: int, world_size: int, folder: Path, start: dict[str, Any], offload: Any, how: str) -> dict[str, Any]:
    found = {}
    for name, form in FORMS.items():
        model, optimizer = _make(world_size, form, offload, start[name])
        if how == "full":
            into = torch.load(folder / name / "full.pt", weights_only=True)
        else:
            into = zero_opt.sharded_state_dict(optimizer, compact=how == "compact")
            dcp.load(into, checkpoint_id=folder / name / how)
        zero_opt.load_sharded_state_dict(optimizer, into)
        _train(model, optimizer, form, range(BEFORE, BEFORE + AFTER))
        found[name] = locals_of(model.parameters()), local_state(optimizer)
        optimizer.close()
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("world_size", "offload"),
    [(1, zero_opt.CPUOffload()), (2, zero_opt.WorkerOffload(threads=1)), (3, None)],
    ids=["1, cpu", "2, worker", "3, device"],
)
def test_saved_at_two_ranks_and_resumed(world_size: int, offload: Any, tmp_path: Path) -> None:
    """From codes as from values; without another cut, as if nothing had happened."""
    saved = run_processes(2, _save, tmp_path)
    start = {name: found[0] for name, found in saved[0].items()}
    plain, compact, full = (
        run_processes(world_size, _resume, tmp_path, start, offload, how) for how in ("plain", "compact", "full")
    )
    assert_bitwise(compact, plain)
    assert_bitwise(full, plain)
    if world_size == 2:
        assert_bitwise(compact, [{name: found[1:] for name, found in rank.items()} for rank in saved])
