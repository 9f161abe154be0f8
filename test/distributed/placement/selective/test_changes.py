"""Selective where training changes under it: windows by themselves, matrices that come later, state dicts, ends."""

from __future__ import annotations

import copy
import errno
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zero_opt
from test.support.harness import assert_bitwise, run_processes
from test.support.nvme_training import Faults, in_file
from test.support.scenario import values
from test.support.selective_reference import Reference
from zero_opt import CPUOffload, NVMeOffload, Selective, WorkerOffload
from zero_opt.placement.selective.column_slice import ColumnSlice

SIDE = 24


def _square(seed: int) -> nn.Linear:
    layer = nn.Linear(SIDE, SIDE, bias=False)
    with torch.no_grad():
        layer.weight.copy_(values(seed, 0, 0, 0, (SIDE, SIDE)) * 0.2)
    return layer


def _optimizer(params: Any, offload: Any) -> zero_opt.ShardedOptimizer:
    return zero_opt.ShardedOptimizer(params, torch.optim.AdamW, lr=0.05, fused=True, offload=offload)


def _step(optimizer: Any, layers: list[nn.Linear], step: int, rank: int) -> None:
    x = values(step, 1, rank, 0, (3, SIDE))
    for layer in layers:
        x = layer(x)
    x.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _automatic(rank: int, world_size: int, offload: Any) -> list[bool]:
    layer = _square(0)
    optimizer, same = _optimizer(layer.parameters(), offload), []
    for step in range(12):
        _step(optimizer, [layer], step, rank)
        everywhere = [torch.empty_like(layer.weight) for _ in range(world_size)]
        dist.all_gather(everywhere, layer.weight.detach())
        same.append(all(torch.equal(there, everywhere[0]) for there in everywhere))
    optimizer.close()
    return same


@pytest.mark.parametrize("ratio", [0.0, 0.1])
@pytest.mark.parametrize("kind", [CPUOffload, WorkerOffload])
def test_ranks_agree_when_a_selection_ends_the_window(kind: Any, ratio: float) -> None:
    """With nothing selected all of the norm is left, so that the window is halved, to one step."""
    offload = kind(selective=Selective(ratio, select_interval=2, update_interval="auto"))
    assert all(all(same) for same in run_processes(2, _automatic, offload))


def _grown(rank: int, world_size: int, how: str, selective: Selective | None) -> tuple[list[Tensor], list[Tensor]]:
    """Weights of two layers, the second of which comes when columns have been selected; trained on, and resumed."""
    layers, seen = [_square(0), _square(1)], []
    later = {"params": [layers[1].weight]}
    layers[1].weight.requires_grad_(how == "added")
    groups = [{"params": [layers[0].weight]}]
    optimizer = _optimizer(groups if how == "added" else [*groups, later], CPUOffload(selective=selective))
    for step in range(3):
        _step(optimizer, layers[:1], step, rank)
    if how == "added":
        optimizer.add_param_group(later)
    layers[1].weight.requires_grad_(True)
    _step(optimizer, layers[:1], 3, rank)
    state_dict, resumed = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(layers)
    for step in range(4, 10):
        _step(optimizer, layers, step, rank)
        seen += [layer.weight.detach().clone() for layer in layers]
    optimizer.close()
    again = []
    optimizer = _optimizer([{"params": [layer.weight]} for layer in resumed], CPUOffload(selective=selective))
    optimizer.load_state_dict(state_dict)
    for step in range(4, 10):
        _step(optimizer, resumed, step, rank)
        again += [layer.weight.detach().clone() for layer in resumed]
    optimizer.close()
    return seen, again


@pytest.mark.parametrize("how", ["added", "unfrozen"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_matrix_that_comes_later_has_columns_selected_too(world_size: int, how: str) -> None:
    plain, _ = run_processes(world_size, _grown, how, None)[0]
    for policy, as_plain in ((Selective(1.0, 64, 2), True), (Selective(0.5, 64, 2), False)):
        seen, again = run_processes(world_size, _grown, how, policy)[0]
        assert_bitwise(again, seen)
        if as_plain:
            assert_bitwise(seen, plain)


def _closing(rank: int, world_size: int, rounds: int) -> int:
    """Every rank reads all state and closes at once, while the others may still be reading."""
    for _ in range(rounds):
        layers = [_square(seed) for seed in range(4)]
        params = [layer.weight for layer in layers]
        optimizer = _optimizer(params, CPUOffload(selective=Selective(0.5, 2, 3)))
        for step in range(2):
            _step(optimizer, layers, step, rank)
        assert len(optimizer.state_dict()["state"]) == len(layers)
        optimizer.close()
    return rounds


def test_state_can_be_read_from_a_rank_that_closes() -> None:
    assert run_processes(3, _closing, 8) == [8] * 3


BROKEN: dict[str, Any] = {
    "missing": None,
    "no tensor": "x",
    "short": torch.zeros(2),
    "not finite": torch.full((5,), float("nan")),
    "no position": torch.tensor([-3.0, 99.0, 99.0, 0.0, 7.0]),
}


def _refused(rank: int, world_size: int, broken: str) -> str:
    layer = _square(0)
    optimizer = _optimizer(layer.parameters(), CPUOffload(selective=Selective(0.5, 2, 2)))
    _step(optimizer, [layer], 0, rank)
    state_dict = copy.deepcopy(optimizer.state_dict())
    state_dict["state"][0]["window"] = BROKEN[broken]
    if broken == "missing":
        del state_dict["state"][0]["window"]
    with pytest.raises(zero_opt.StateDictError, match="'window'") as refused:
        optimizer.load_state_dict(state_dict)
    _step(optimizer, [layer], 1, rank)
    optimizer.close()
    return str(refused.value)


@pytest.mark.parametrize("broken", BROKEN)
def test_a_position_that_cannot_be_is_refused_on_every_rank(broken: str) -> None:
    assert len(run_processes(2, _refused, broken)) == 2


@pytest.mark.parametrize("file", [False, True], ids=["in memory", "in a file"])
def test_the_log_says_where_it_does_not_pay(file: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    layer = _square(0)
    offload: Any = NVMeOffload(tmp_path, selective=Selective()) if file else CPUOffload(selective=Selective())
    _optimizer(layer.parameters(), offload).close()
    zero_opt.estimate(layer, 2, torch.optim.AdamW, lr=0.1, offload=offload)
    said = [record for record in caplog.records if "leave selective out" in record.getMessage()]
    assert len(said) == (0 if file else 2)


def _failing(path: Path, faults: Faults | None) -> tuple[Tensor, Tensor]:
    """In step 2, which ends a window, a write may fail. The selected columns then, and the parameter in the end."""
    shape = (96, 64)
    param = nn.Parameter(values(0, 0, 0, 0, shape).clone())
    optimizer = _optimizer([param], in_file(path, selective=Selective(0.5, update_interval=3)))
    for step in range(4):
        optimizer.zero_grad()
        torch.autograd.backward([param], [values(step, 1, 0, 0, shape)])
        if step == 2 and faults is not None:
            with faults.at("pwritev", 0, errno.ENOSPC), pytest.raises(zero_opt.StorageFailed):
                optimizer.step()
        else:
            optimizer.step()
        if step == 2:
            then = param.detach().clone()
            optimizer.flush()
    which = optimizer.state_dict()["state"][0]["column_selected"]
    optimizer.close()
    return torch.where(which, then, 0), param.detach()


def test_selected_columns_are_right_where_the_step_of_the_others_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = _failing(tmp_path, None)
    assert_bitwise(_failing(tmp_path, Faults(monkeypatch)), reference)


EDITS: dict[str, Any] = {
    "'waiting' must be": ("waiting", torch.zeros(2)),
    "'column_selected' must be": ("column_selected", torch.ones(1, 9, dtype=torch.bool)),
    "'column_selected' must be .* got None": ("column_selected", None),
    "1 gradients wait, which 'waiting' or the steps do not have": ("column_steps", torch.zeros(1, 6)),
    "no position between selections": ("window", torch.tensor([1.0, 1.0, 1.0, 4.0, -2.0], dtype=torch.float64)),
}


@pytest.mark.parametrize("said", EDITS)
def test_column_keys_that_do_not_fit_are_refused_before_a_step(said: str) -> None:
    param = torch.nn.Parameter(torch.ones(5, 6))
    offload = zero_opt.CPUOffload(selective=zero_opt.Selective(topk_ratio=0.5))
    optimizer = zero_opt.ShardedOptimizer([("weight", param)], torch.optim.AdamW, lr=0.1, fused=True, offload=offload)
    param.sum().backward()
    optimizer.step()
    before, (key, value) = param.detach().clone(), EDITS[said]
    optimizer.state[param][key] = value
    with pytest.raises(zero_opt.StateDictError, match=rf"\(weight\).*: state .*{said}"):
        optimizer.step()
    assert torch.equal(param, before)
    optimizer.close()


COUNTED = Selective(0.5, 64, 3)


def _count_on(step: int, optimizer: Any, weight: nn.Parameter, count: float, how: str) -> None:
    """In a window, after two of its three gradients, let the step be another one, and all columns' as much more."""
    entry = optimizer.state[weight]
    if step == 4 and entry:  # a rank may have no part of the matrix
        columns = entry["column_steps"] + (count - entry["step"])
        if how == "in place":
            entry["step"].fill_(count)
            entry["column_steps"].copy_(columns)
        else:
            optimizer.state[weight] = {**entry, "step": torch.tensor(count), "column_steps": columns}


def _counted(rank: int, world_size: int, offload: Any, how: str) -> tuple[list[Tensor], list[Tensor]]:
    param = nn.Parameter(values(0, 0, 0, 0, (8, 6)).clone())
    optimizer, seen, counts = _optimizer([param], offload), [], []
    for step in range(8):
        optimizer.zero_grad()
        torch.autograd.backward([param], [values(step, 1, 0, 0, (8, 6))])
        optimizer.step()
        _count_on(step, optimizer, param, 12.0, how)
        optimizer.consolidate_state_dict()
        seen.append(param.detach().clone())
        counts += [optimizer.state_dict()["state"][0]["column_steps"]] if rank == 0 else []
    optimizer.close()
    return seen, counts


@pytest.mark.parametrize("how", ["in place", "in a copy"])
@pytest.mark.parametrize("kind", [CPUOffload, WorkerOffload])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_write_to_all_counts_in_a_window_leaves_the_gradients_that_wait(world_size: int, kind: Any, how: str) -> None:
    param = nn.Parameter(values(0, 0, 0, 0, (8, 6)).clone())
    plain = torch.optim.AdamW([param], lr=0.05)
    reference, wanted = Reference(plain.param_groups, COUNTED), list[Tensor]()
    for step in range(8):
        param.grad = values(step, 1, 0, 0, (8, 6)).clone()
        reference.step()
        if step == 4:
            reference.all[0][0].counts += 12.0 - reference.all[0][0].counts.max()
        wanted.append(param.detach().clone())
    found = run_processes(world_size, _counted, kind(selective=COUNTED), how)
    for seen, _ in found:
        assert_bitwise(seen, wanted)
    assert [found[0][1][step].unique().tolist() for step in (3, 4, 5, 7)] == [[3, 4], [10, 12], [13], [13, 15]]


def _miscounted(count: float, key: str) -> str:
    param = nn.Parameter(torch.ones(5, 6))
    optimizer = _optimizer([param], CPUOffload(selective=COUNTED))
    for _ in range(2):
        optimizer.zero_grad()
        param.sum().backward()
        optimizer.step()
    optimizer.state[param][key].fill_(count)
    with pytest.raises(zero_opt.StateDictError) as caught:
        optimizer.step()
    optimizer.close()
    return str(caught.value)


def test_counts_that_would_lose_what_waits_are_refused() -> None:
    assert "2 gradients wait, which 'waiting' or the steps do not have" in _miscounted(1, "column_steps")
    for count, key in ((1, "step"), (9, "step"), (5, "column_steps")):
        assert "state 'step' must be the largest of 'column_steps': write to both" in _miscounted(count, key)


def _resumed_early(rank: int, world_size: int) -> list[Tensor]:
    """Weights have gradients from step 6 on; training is saved then, and goes on here and in another optimizer."""

    def go_on(model: nn.Linear, optimizer: Any, steps: range) -> None:
        for step in steps:
            loss = (model.bias * values(step, 0, rank, 0, (SIDE,))).sum()
            if step >= 6:
                loss = loss + (model.weight * values(step, 1, rank, 0, (SIDE, SIDE))).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    model = nn.Linear(SIDE, SIDE)
    for param in model.parameters():
        nn.init.constant_(param, 0.5)
    offload = CPUOffload(selective=Selective(0.3))
    optimizer = _optimizer(model.parameters(), offload)
    go_on(model, optimizer, range(6))
    other = copy.deepcopy(model)
    resumed = _optimizer(other.parameters(), offload)
    optimizer.consolidate_state_dict()
    saved: list[Any] = [optimizer.state_dict() if rank == 0 else None]
    dist.broadcast_object_list(saved, src=0)
    resumed.load_state_dict(saved[0])
    go_on(model, optimizer, range(6, 15))
    go_on(other, resumed, range(6, 15))
    assert_bitwise(list(model.parameters()), list(other.parameters()))
    optimizer.close()
    resumed.close()
    return list(model.parameters())


@pytest.mark.parametrize("world_size", [1, 2])
def test_training_resumes_where_no_matrix_has_state_yet(world_size: int) -> None:
    run_processes(world_size, _resumed_early)


def test_what_was_stepped_is_in_the_parameters_where_the_window_s_step_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    params = [nn.Parameter(torch.ones(4, 4)) for _ in range(2)]
    groups = [{"params": [param]} for param in params]
    offload = CPUOffload(selective=Selective(0.5, 1, 1))
    optimizer = zero_opt.ShardedOptimizer(groups, torch.optim.AdamW, lr=0.1, offload=offload)
    gathered = list[ColumnSlice]()

    def gather(self: ColumnSlice, grad: Tensor, grad_scale: float) -> None:
        gathered.append(self)
        if len(gathered) == 2:
            raise MemoryError("no room for what waits")
        real(self, grad, grad_scale)

    real = ColumnSlice.gather
    monkeypatch.setattr(ColumnSlice, "gather", gather)
    sum(param.sum() for param in params).backward()  # type: ignore[union-attr]
    with pytest.raises(MemoryError):
        optimizer.step()
    for found, param in zip(gathered, params, strict=True):
        assert_bitwise(found.take(found.param_run(0)), found.selected["param"])
        assert not torch.equal(param.detach(), torch.ones(4, 4))
    optimizer.close()
