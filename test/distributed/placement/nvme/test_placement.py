"""NVMeOffload: the bits of a step in memory, from a file, whatever the disk does in between."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_opt
from test.support.harness import assert_bitwise, run_processes
from test.support.nvme_training import in_file, make, placement_of, step_copies_of_params
from test.support.scenario import BUCKET_MB, OVERLAPPED, Case, case, expected, train, values
from test.support.worker_training import DTYPES, LRS, NATIVE, SHAPES, backward, make_params, simulate
from zero_opt.placement.nvme.extents import Segment
from zero_opt.placement.nvme.step import FileStep

# -- bits -------------------------------------------------------------------------------------------------------------


def _train_case(rank: int, world_size: int, adam: Case, reduction: Any, path: Path) -> Any:
    return train(adam, rank, world_size, reduction, offload=in_file(path))


@pytest.mark.parametrize("reduction", [OVERLAPPED, zero_opt.AtStep(BUCKET_MB), zero_opt.AlreadyReduced()])
@pytest.mark.parametrize("world_size", [1, 2])
def test_same_bits_as_a_plain_optimizer(world_size: int, reduction: Any, tmp_path: Path) -> None:
    """Three groups, one with amsgrad, parameters that no rank uses, several backwards."""
    second = {"lr": 0.02, "amsgrad": True, "weight_decay": 0.3}
    adam = case(torch.optim.AdamW, second, fused=True, lr=0.01)
    params, state = expected(case(zero_opt.CPUAdamW, second, lr=0.01), world_size, reduction)
    for rank, (found, found_state) in enumerate(run_processes(world_size, _train_case, adam, reduction, tmp_path)):
        assert_bitwise(found, params, f"rank {rank}")
        if found_state is not None:
            assert_bitwise(found_state["state"], state["state"], "state")


def train_ranks(rank: int, world_size: int, path: Path, steps: int, dtype: torch.dtype, **options: Any) -> Any:
    """One rank's parameters after every step and at the end, and the state then, which each rank gets by itself."""
    params = make_params(dtype)
    optimizer = make(params, path, **options)
    seen = []
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = LRS[step % len(LRS)]
        optimizer.zero_grad()
        backward(params, step, rank)
        optimizer.step()
        seen.append([param.detach().clone() for param in params])
    state = optimizer.state_dict()["state"]
    optimizer.close()
    return [*seen, seen[-1]], state


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world_size", [1, 2])
def test_every_dtype(world_size: int, dtype: torch.dtype, tmp_path: Path) -> None:
    seen, state = simulate(world_size, 6, 0, dtype)
    for rank, found in enumerate(run_processes(world_size, train_ranks, tmp_path, 6, dtype)):
        assert_bitwise(found[0], seen, f"rank {rank}")
        assert_bitwise(found[1], state, f"state on rank {rank}")


def _train_on(cls: Any, offload: Any, **options: Any) -> Any:
    """What a scheduler, clipping and an added group make of it."""
    params = make_params()
    optimizer = zero_opt.ShardedOptimizer(
        params[:2], cls, offload=offload, reduction=OVERLAPPED, fused=True, max_grad_norm=2.0, **options
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for step in range(6):
        if step == 3:
            optimizer.add_param_group({"params": params[2:], "lr": 0.05, "amsgrad": True})
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        optimizer.zero_grad()
        used = params[: 2 if step < 3 else None]
        torch.autograd.backward(used, [values(step, 1, 0, i, SHAPES[i]) for i in range(len(used))])
        optimizer.step()
        scheduler.step()
    state = optimizer.state_dict()["state"]
    optimizer.close()
    return [param.detach() for param in params], state


@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.AdamW, zero_opt.CPUAdam, zero_opt.CPUAdamW])
def test_same_bits_as_on_the_device(cls: Any, tmp_path: Path) -> None:
    options = {"lr": 0.03, "weight_decay": 0.1, "maximize": True}
    found = _train_on(cls, in_file(tmp_path), **options)
    # torch's own kernel has other bits in the last elements of a tensor.
    assert_bitwise(found, _train_on(NATIVE.get(cls, cls), None, **options))


@pytest.mark.parametrize("window_mb", [4096 / 2**20, 3 * 8192 / 2**20, 64])
def test_bits_do_not_depend_on_the_window(window_mb: float, tmp_path: Path) -> None:
    found = train_ranks(0, 1, tmp_path, 4, torch.bfloat16, offload=in_file(tmp_path, window_mb=window_mb, threads=2))
    assert_bitwise(list(found), list(simulate(1, 4, 0, torch.bfloat16)))


def test_masters_of_fp32_parameters_are_in_the_file_where_those_are_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step_copies_of_params(monkeypatch)
    assert_bitwise(list(train_ranks(0, 1, tmp_path, 4, torch.float32)), list(simulate(1, 4, 0)))
    assert_bitwise(_edited(tmp_path, torch.float32), _edited(None, torch.float32))


def test_where_no_transfer_goes_past_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = fcntl.fcntl

    def refusing(fd: int, command: int, value: int = 0) -> int:
        if command == fcntl.F_SETFL and value & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct transfers here")
        return flags(fd, command, value)

    monkeypatch.setattr(fcntl, "fcntl", refusing)
    params = make_params()
    optimizer = make(params, tmp_path)
    assert not placement_of(optimizer)._disk.file.direct
    optimizer.close()
    assert_bitwise(list(train_ranks(0, 1, tmp_path, 4, torch.float32)), list(simulate(1, 4, 0)))


# -- what the user does -----------------------------------------------------------------------------------------------


def _edited(path: Path | None, dtype: torch.dtype) -> Any:
    """Parameters and moments written to between steps: one with gaps, a part, re-pointed data, moments in place."""
    gaps = nn.Parameter(values(1, 2, 3, 4, (20, 30)).to(dtype, copy=True)[:, ::2])
    params = [*make_params(dtype), gaps]
    plain = zero_opt.AdamState(master="float32")
    optimizer: Any = zero_opt.CPUAdamW(params, lr=0.01, state=plain) if path is None else make(params, path, lr=0.01)
    for step in range(6):
        optimizer.zero_grad()
        used = params if step != 4 else params[:3]
        torch.autograd.backward(used, [values(step, 1, 0, i, tuple(p.shape)).to(dtype) for i, p in enumerate(used)])
        optimizer.step()
        if step == 2:
            with torch.no_grad():
                params[0].fill_(0.25)
                params[1][3:40] *= 2
                params[2].data = params[2].detach().clone() + 1
                gaps[3:5] = 7.0
                for param in params if path is None and dtype is not torch.float32 else ():
                    master, at = optimizer.state[param]["master"], param.detach()
                    torch.where(master.to(dtype) == at, master, at.float(), out=master)
            optimizer.state[params[0]]["exp_avg"].mul_(0.5)
            optimizer.state[params[2]]["exp_avg_sq"] = torch.full_like(params[2], 0.25, dtype=torch.float32)
            del optimizer.state[params[3]]
    state = optimizer.state_dict()["state"]
    return [param.detach().clone() for param in params], state


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_edits_are_followed(dtype: torch.dtype, tmp_path: Path) -> None:
    assert_bitwise(_edited(tmp_path, dtype), _edited(None, dtype))


def test_state_is_shown_as_it_is_in_the_file(tmp_path: Path) -> None:
    params = make_params()
    optimizer = make(params, tmp_path)
    held = []
    for step in (1, 2):
        backward(params, step, 0)
        optimizer.step()
        held.append(optimizer.state[params[0]]["exp_avg"])
        assert_bitwise(held[-1], optimizer.state_dict()["state"][0]["exp_avg"])
    assert held[0] is held[1]
    state = optimizer.memory_report()
    assert state["staging"] >= placement_of(optimizer).staging_nbytes > 0
    optimizer.close()
    assert held[0].isfinite().all()  # still readable


def test_its_memory_is_three_windows(tmp_path: Path) -> None:
    param = nn.Parameter(torch.zeros(1 << 16))
    optimizer = make([param], tmp_path, offload=in_file(tmp_path, window_mb=1 / 16))
    placement = placement_of(optimizer)
    assert placement.staging_nbytes == 3 * 65536
    assert len(placement._windows) == 8
    assert placement._disk.file.nbytes == 2 * 4 * param.numel()
    optimizer.close()


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_that_are_made_beside_windows_are_estimated(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a window are there until those of the next one are."""
    param, offload, made = nn.Parameter(torch.zeros(1 << 16, dtype=dtype)), in_file(tmp_path, window_mb=1 / 8), [0]
    land = FileStep._land

    def count(step: FileStep, parts: Sequence[Segment], results: Sequence[Tensor]) -> None:
        made.append(sum(result.nbytes for result in results))
        land(step, parts, results)

    monkeypatch.setattr(FileStep, "_land", count)
    optimizer = make([param], tmp_path, offload=offload)
    param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.close()
    meta = torch.empty_like(param, device="meta").requires_grad_()
    found = zero_opt.estimate([meta], 1, optimizer_class=torch.optim.AdamW, offload=offload, device="cpu")
    told = {row.name: row.nbytes for row in found.rows}
    assert told["results of windows"] == max(map(sum, pairwise(made)))


@pytest.mark.parametrize(("state_mb", "most_mb", "window_mb"), [(2, 64, 2), (12, 64, 4), (96, 64, 6), (96, 4, 4)])
def test_a_small_state_has_smaller_windows(state_mb: int, most_mb: int, window_mb: int, tmp_path: Path) -> None:
    """So that the first read and the last write, which nothing runs beside, are little of a step."""
    param = nn.Parameter(torch.zeros(state_mb * 2**20 // 8))
    optimizer = make([param], tmp_path, offload=in_file(tmp_path, window_mb=most_mb))
    placement = placement_of(optimizer)
    assert len(placement._windows) == state_mb // window_mb
    assert placement.staging_nbytes == 3 * window_mb * 2**20
    optimizer.close()


# -- checkpoints ------------------------------------------------------------------------------------------------------


def _resume(rank: int, world_size: int, path: Path, saved: Any, dtype: torch.dtype) -> Any:
    params = make_params(dtype)
    with torch.no_grad():
        for param, value in zip(params, saved[0], strict=True):
            param.copy_(value)
    optimizer = make(params, path)
    optimizer.load_state_dict(saved[1])
    for step in range(3, 6):
        optimizer.zero_grad()
        backward(params, step, rank)
        optimizer.step()
    optimizer.consolidate_state_dict()
    state = optimizer.state_dict() if rank == 0 else None
    sharded = zero_opt.sharded_state_dict(optimizer)
    optimizer.close()
    return [param.detach() for param in params], state, sorted(sharded)


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_a_checkpoint_of_a_plain_optimizer_goes_on_here_and_back(dtype: torch.dtype, tmp_path: Path) -> None:
    params = make_params(dtype)
    plain = zero_opt.CPUAdamW(params, state=zero_opt.AdamState(master="float32"))

    def take(optimizer: Any, params: Any, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            backward(params, step, 0)
            optimizer.step()

    take(plain, params, range(3))
    saved = ([param.detach().clone() for param in params], plain.state_dict())
    found, state, _ = run_processes(1, _resume, tmp_path, saved, dtype)[0]
    take(plain, params, range(3, 6))
    assert_bitwise(found, [param.detach() for param in params])
    assert_bitwise(state["state"], plain.state_dict()["state"])
    back = zero_opt.CPUAdamW(make_params(dtype), state=zero_opt.AdamState(master="float32"))
    back.load_state_dict(state)
    assert_bitwise(back.state_dict()["state"], state["state"])


def test_a_checkpoint_loads_at_another_world_size(tmp_path: Path) -> None:
    start = [param.detach().clone() for param in make_params()]
    of_two = run_processes(2, train_ranks, tmp_path, 3, torch.float32)[0]
    optimizer = make(make_params(), tmp_path)
    saved = (of_two[0][-1], {"state": of_two[1], "param_groups": optimizer.state_dict()["param_groups"]})
    optimizer.load_state_dict(saved[1])
    assert_bitwise(optimizer.state_dict()["state"], of_two[1])
    optimizer.close()
    results = [run_processes(size, _resume, tmp_path, saved, torch.float32) for size in (1, 2)]
    assert results[1][0][2] == results[0][0][2]
    assert not torch.equal(results[0][0][0][0], start[0])
    assert_bitwise(results[1][0][0], results[1][1][0])


def test_amsgrad_that_a_state_dict_brings(tmp_path: Path) -> None:
    params = make_params()
    other = zero_opt.CPUAdamW(params, amsgrad=True)
    mine = make_params()
    optimizer = make(mine, tmp_path)
    for step in range(4):
        if step == 2:
            with torch.no_grad():
                for param, value in zip(mine, params, strict=True):
                    param.copy_(value)
            optimizer.load_state_dict(other.state_dict())
        for stepper, theirs in ((other, params), (optimizer, mine)):
            stepper.zero_grad()
            backward(theirs, step, 0)
            stepper.step()
    assert_bitwise([param.detach() for param in mine], [param.detach() for param in params])
    assert_bitwise(optimizer.state_dict()["state"], other.state_dict()["state"])
    optimizer.close()


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"cls": torch.optim.RMSprop}, zero_opt.UnsupportedOptimizer, "NVMeOffload steps Adam"),
        ({"fused": False}, zero_opt.UnsupportedOptimizer, "NVMeOffload has the bits of fused=True alone"),
        ({"dtype": torch.float64}, zero_opt.UnsupportedParam, "NVMeOffload takes float32"),
        ({"offload": zero_opt.NVMeOffload}, zero_opt.ConfigTypeError, "write NVMeOffload"),
    ],
)
def test_what_is_refused(options: dict[str, Any], kind: Any, text: str, tmp_path: Path) -> None:
    params = [nn.Parameter(torch.ones(3, dtype=options.pop("dtype", torch.float32)))]
    cls, offload = options.pop("cls", torch.optim.AdamW), options.pop("offload", in_file(tmp_path))
    with pytest.raises(kind, match=text):
        zero_opt.ShardedOptimizer(params, cls, offload=offload, lr=0.1, **options)
