"""What is saved after parameters were re-pointed: the state as it was if the data does not fit, else masters follow."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_opt
from test.support.harness import assert_bitwise, run_processes
from test.support.late_params import as_they_are

SHAPES = ((5, 9), (3, 9), (40,), (8, 6))
ALIASED, MIRRORED = 1, 3  # the parameters that are re-pointed
MASTERS = zero_opt.MixedPrecision(torch.float32)
SELECTIVE = zero_opt.CPUOffload(selective=zero_opt.Selective(topk_ratio=0.5, update_interval=3))


Maker = Callable[[Path], tuple[list[nn.Parameter], Any]]


def _maker(dtype: torch.dtype, cls: Any = torch.optim.AdamW, **options: Any) -> Maker:
    def make(folder: Path) -> tuple[list[nn.Parameter], Any]:
        params = [nn.Parameter(torch.arange(torch.Size(shape).numel()).to(dtype).view(shape)) for shape in SHAPES]
        params[MIRRORED] = nn.Parameter(torch.zeros(8, 8, dtype=dtype)[:, :6])
        given = {"reduction": zero_opt.AtStep(), **options}
        if given.get("offload") is zero_opt.NVMeOffload:
            given["offload"] = zero_opt.NVMeOffload(folder)
        return params, zero_opt.ShardedOptimizer(params, cls, lr=0.1, **given)

    return make


PLACES = {
    "device": _maker(torch.float32),
    "whole": _maker(torch.float32, cls=torch.optim.Adafactor),
    "overlapped": _maker(torch.float32, reduction=zero_opt.Overlapped()),
    "masters": _maker(torch.bfloat16, precision=MASTERS),
    "split": _maker(torch.bfloat16, precision=zero_opt.MixedPrecision("split"), fused=True),
    "cpu": _maker(torch.bfloat16, offload=zero_opt.CPUOffload(), fused=True),
    "worker": _maker(torch.bfloat16, offload=zero_opt.WorkerOffload(), fused=True),
    "worker, fp32": _maker(torch.float32, offload=zero_opt.WorkerOffload(), fused=True),
    "nvme": _maker(torch.bfloat16, offload=zero_opt.NVMeOffload, fused=True),
    "worker, delayed": _maker(torch.bfloat16, offload=zero_opt.WorkerOffload(delay=1), fused=True),
    "selective": _maker(torch.bfloat16, offload=SELECTIVE, fused=True),
}
DATA: dict[str, Callable[[Tensor], Tensor]] = {
    "larger": lambda data: data.new_ones(4, 9),
    "smaller": lambda data: data.new_ones(2, 9),
    "empty": lambda data: data.new_ones(0),
    "another shape": lambda data: data.new_ones(9, 3),
    "another order": lambda data: data.t().contiguous().t(),
    "another dtype": lambda data: data.double(),
}


def _step(params: list[nn.Parameter], optimizer: Any, number: int) -> None:
    torch.autograd.backward(params, [torch.full_like(param, 1.0 + number) for param in params])
    optimizer.step()
    optimizer.zero_grad()


def _entries(state_dict: Any) -> Any:
    """State without places that are not real."""
    state = {}
    for index, entry in state_dict["state"].items():
        full = {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in entry.items()}
        state[index] = {key: value for key, value in full.items() if isinstance(value, Tensor)}
    return state


def _consolidated(optimizer: Any, world_size: int) -> list[Any]:
    found = []
    for to in range(world_size):
        optimizer.consolidate_state_dict(to)
        if torch.distributed.get_rank() == to:
            found.append(_entries(optimizer.state_dict()))
    return found


def _equal(found: Any, expected: Any, label: str) -> None:
    assert found.keys() == expected.keys(), label
    for index, entry in expected.items():
        assert found[index].keys() == entry.keys(), label
        for key, value in entry.items():
            assert found[index][key].stride() == value.stride(), (label, index, key)
            assert_bitwise(found[index][key], value, f"{label}: {key} of {index}")


def _refused(call: Callable[[], Any]) -> None:
    with pytest.raises(zero_opt.UnsupportedParam, match=r"parameter .* when the optimizer was made and is"):
        call()


@as_they_are
def _save_and_load(rank: int, world_size: int, name: str, folder: Path) -> None:
    params, optimizer = PLACES[name](folder)
    for number in range(2):
        _step(params, optimizer, number)
    (expected,) = _consolidated(optimizer, world_size)
    by_rows, saved = _entries(zero_opt.sharded_state_dict(optimizer)), copy.deepcopy(optimizer.state_dict())
    for at in (ALIASED, MIRRORED):
        for kind, data in DATA.items():
            for ranks in (range(world_size), range(1)):
                label = f"parameter {at}, {kind}, on {ranks}"
                torch.distributed.barrier()
                old = params[at].data
                if rank in ranks:
                    params[at].data = data(old)
                _refused(optimizer.step)
                _equal(_entries(optimizer.state_dict()), expected, f"state_dict(), {label}")
                torch.distributed.barrier()
                for found in _consolidated(optimizer, world_size):
                    _equal(found, expected, f"consolidate_state_dict(), {label}")
                _equal(_entries(zero_opt.sharded_state_dict(optimizer)), by_rows, f"sharded_state_dict(), {label}")
                optimizer.flush()
                _refused(lambda: optimizer.load_state_dict(saved))
                torch.distributed.barrier()
                params[at].data = old
    optimizer.load_state_dict(saved)
    _step(params, optimizer, 2)
    if rank == 0:
        params[ALIASED].data = params[ALIASED].data.new_ones(4, 9)
    optimizer.close()


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("world_size", "name"),
    [(size, name) for name in PLACES for size in (1, 2) if size == 2 or name not in ("device", "whole", "overlapped")],
)
def test_the_state_that_is_saved_is_what_it_was(world_size: int, name: str, tmp_path: Path) -> None:
    run_processes(world_size, _save_and_load, name, tmp_path)


def _first_step(rank: int, world_size: int, folder: Path) -> None:
    """Parameters that have no state yet have places in the shape of the plan, the same on every rank."""
    params, optimizer = PLACES["selective"](folder)
    before = zero_opt.sharded_state_dict(optimizer)["state"]
    if rank == 0:
        params[ALIASED].data = params[ALIASED].data.new_ones(36)
    after = zero_opt.sharded_state_dict(optimizer)["state"]
    for index, entry in before.items():
        assert {k: v.shape for k, v in after[index].items()} == {k: v.shape for k, v in entry.items()}, index
    optimizer.close()


def test_places_to_load_into_have_the_planned_shape(tmp_path: Path) -> None:
    run_processes(2, _first_step, tmp_path)


@as_they_are
def _pending(rank: int, world_size: int, folder: Path) -> None:
    """A pending step is in the state that is saved, and in the data that the parameter had."""
    found = []
    for repointed in (False, True):
        params, optimizer = PLACES["worker, delayed"](folder)
        for number in range(2):
            _step(params, optimizer, number)
        if repointed:
            old = [param.data for param in params]
            params[ALIASED].data = params[ALIASED].data.new_ones(4, 9)
            _refused(optimizer.step)
        full = _consolidated(optimizer, world_size)
        by_rows = _entries(zero_opt.sharded_state_dict(optimizer))
        if repointed:
            _refused(optimizer.step)
            params[ALIASED].data = old[ALIASED]
        _step(params, optimizer, 2)
        optimizer.flush()
        found.append((full, by_rows, [param.detach().clone() for param in params]))
        optimizer.close()
    (full, by_rows, values), (same_full, same_by_rows, same_values) = found
    _equal(*same_full, *full, "consolidate_state_dict()")
    _equal(same_by_rows, by_rows, "sharded_state_dict()")
    assert_bitwise(same_values, values)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_pending_step_is_in_the_state(world_size: int, tmp_path: Path) -> None:
    run_processes(world_size, _pending, tmp_path)


COMPACT = {"cls": zero_opt.CPUAdamW, "state": zero_opt.AdamState("block8", "split")}
FOLLOWING = {
    **{name: PLACES[name] for name in ("masters", "split", "cpu", "worker", "nvme", "worker, delayed", "selective")},
    "compact": _maker(torch.bfloat16, **COMPACT),
    "compact, cpu": _maker(torch.bfloat16, offload=zero_opt.CPUOffload(), **COMPACT),
    "compact, worker": _maker(torch.bfloat16, offload=zero_opt.WorkerOffload(), **COMPACT),
    "compact, nvme": _maker(torch.bfloat16, offload=zero_opt.NVMeOffload, **COMPACT),
}


def _write(param: nn.Parameter, values: Tensor) -> None:
    with torch.no_grad():
        param.copy_(values)


def _repoint(param: nn.Parameter, values: Tensor) -> None:
    param.data = values.clone()


def _repoint_with_gaps(param: nn.Parameter, values: Tensor) -> None:
    param.data = torch.stack([values, values], -1)[..., 0]


@as_they_are
def _follow(rank: int, world_size: int, name: str, folder: Path) -> None:
    found = []
    for change in (_write, _repoint, _repoint_with_gaps):
        params, optimizer = FOLLOWING[name](folder / change.__name__)
        for number in range(2):
            _step(params, optimizer, number)
        optimizer.flush()
        for at in (ALIASED, MIRRORED):
            change(params[at], params[at].detach() * 1.25)
        torch.distributed.barrier()
        states = [_entries(optimizer.state_dict())]
        torch.distributed.barrier()
        states += [*_consolidated(optimizer, world_size), _entries(zero_opt.sharded_state_dict(optimizer))]
        found.append(states)
        optimizer.close()
    written, *repointed = found
    for states in repointed:
        for state, expected in zip(states, written, strict=True):
            _equal(state, expected, f"{name} on rank {rank}")


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", FOLLOWING)
def test_masters_that_are_saved_follow_a_parameter_that_was_re_pointed(
    name: str, world_size: int, tmp_path: Path
) -> None:
    for change in (_write, _repoint, _repoint_with_gaps):
        (tmp_path / change.__name__).mkdir()
    run_processes(world_size, _follow, name, tmp_path)
