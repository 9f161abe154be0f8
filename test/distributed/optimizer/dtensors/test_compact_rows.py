"""Compact state of DTensors, saved as it is and loaded at other world sizes."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import zero_opt
from test.support.compact_training import FORMS, Form
from test.support.fsdp_models import local_state, locals_of, mesh_of
from test.support.harness import assert_bitwise, run_processes
from test.support.scenario import values

SHAPES = ((21, 128), (40, 3, 64), (7, 33), (130,), (1, 64))  # the middle ones are cut within blocks
BEFORE, AFTER = 3, 3


def _make(
    world_size: int, form: Form, offload: Any, start: list[torch.Tensor] | None = None, mesh: Any = None
) -> tuple[nn.Module, Any]:
    model = nn.ParameterList(
        nn.Parameter(values(51, 0, 0, at, shape).to(form.dtype, copy=True) if start is None else start[at].clone())
        for at, shape in enumerate(SHAPES)
    )
    fully_shard(model, mesh=mesh_of((world_size,)) if mesh is None else mesh)
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
            param.grad = distribute_tensor(full, param.device_mesh, param.placements)
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


def _save_halves(rank: int, world_size: int, folder: Path, shape: tuple[int, ...]) -> list[torch.Tensor]:
    """The optimizer has parameters with state, and one without."""
    form = FORMS["bfloat16, split"]
    model, optimizer = _make(world_size, form, None, mesh=mesh_of(shape))
    _train(model, optimizer, form, range(1))
    dcp.save(zero_opt.sharded_state_dict(optimizer, compact=True), checkpoint_id=folder / "saved")
    values = [param.full_tensor().detach() for param in model.parameters()]  # type: ignore[attr-defined]
    if rank == 0:
        dcp_to_torch_save(folder / "saved", folder / "saved.pt")
    optimizer.close()
    return values


def _fill(model: nn.Module, values: list[torch.Tensor]) -> None:
    for value, param in zip(values, model.parameters(), strict=True):
        assert isinstance(param, DTensor)
        param.data.copy_(distribute_tensor(value, param.device_mesh, param.placements))


def _load_before_the_model(
    rank: int, world_size: int, folder: Path, shape: tuple[int, ...], values: list[torch.Tensor]
) -> None:
    form = FORMS["bfloat16, split"]
    model, optimizer = _make(world_size, form, None, mesh=mesh_of(shape))
    into = zero_opt.sharded_state_dict(optimizer, compact=True)
    dcp.load(into, checkpoint_id=folder / "saved")
    full = torch.load(folder / "saved.pt", weights_only=True)
    others = [value.clone() for value in values]
    others[2].view(-1)[-1] += 1  # in one rank's part alone
    for wrong in ([torch.zeros_like(value) for value in values], others):
        _fill(model, wrong)
        for saved in (into, full):
            with pytest.raises(zero_opt.StateDictError, match=r"'remainder' of parameter \d .* load the model first"):
                zero_opt.load_sharded_state_dict(optimizer, saved)
    _fill(model, values)
    for saved in (into, full):
        zero_opt.load_sharded_state_dict(optimizer, saved)
    optimizer.close()


@pytest.mark.parametrize(("first", "then"), [((2,), (1,)), ((2,), (3,)), ((3,), (2,)), ((2, 2), (2,)), ((2,), (2, 2))])
def test_half_of_a_master_is_refused_by_a_model_that_was_not_loaded(
    first: tuple[int, ...], then: tuple[int, ...], tmp_path: Path
) -> None:
    """Meshes of two dimensions have replicas (HSDP)."""
    values = run_processes(math.prod(first), _save_halves, tmp_path, first)[0]
    run_processes(math.prod(then), _load_before_the_model, tmp_path, then, values)


MISTAKES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "an entry too few": lambda entry: entry.pop("exp_avg_sq"),
    "no number of steps": lambda entry: entry.update(step=torch.tensor(float("nan"))),
    "a flat value": lambda entry: entry.update(exp_avg=torch.zeros(7)),
}


def _load_with_a_mistake(rank: int, world_size: int, offload: Any, mistaken: int) -> list[str]:
    form, said = FORMS["split"], list[str]()
    model, optimizer = _make(world_size, form, offload)
    _train(model, optimizer, form, range(1))
    older = zero_opt.sharded_state_dict(optimizer)
    _train(model, optimizer, form, range(1, 2))
    before = local_state(optimizer)
    for mistake in MISTAKES.values():
        saved = {**older, "state": {index: dict(entry) for index, entry in older["state"].items()}}
        if rank == mistaken:
            mistake(saved["state"][0])
        with pytest.raises(zero_opt.StateDictError) as caught:
            zero_opt.load_sharded_state_dict(optimizer, saved)
        said.append(str(caught.value).removeprefix(f"rank {mistaken}: "))
        assert_bitwise(local_state(optimizer), before)
    zero_opt.load_sharded_state_dict(optimizer, older)
    optimizer.close()
    return said


@pytest.mark.parametrize("offload", [None, zero_opt.WorkerOffload(threads=1)], ids=["device", "worker"])
@pytest.mark.parametrize("mistaken", [0, 1])
def test_a_mistake_on_one_rank_is_refused_on_every_rank(offload: Any, mistaken: int) -> None:
    first, second = run_processes(2, _load_with_a_mistake, offload, mistaken)
    assert first == second
