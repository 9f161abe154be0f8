"""CPUOffload: fp32 bits of the device tier, and sub-groups beside parameters that are made to look out of reach."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_opt
from test.support.half_params import HALVES, backward, make_params
from test.support.half_params import train as train_halves
from test.support.harness import assert_bitwise, run_processes
from test.support.scenario import BUCKET_MB, OVERLAPPED, case, expected, train
from zero_opt.placement.in_process import host_offload
from zero_opt.placement.in_process.host_offload import InHost
from zero_opt.placement.in_process.units import InPlace, Mastered

OFFLOAD = zero_opt.CPUOffload()
# Cuts buckets of 2 KiB into sub-groups, and leaves the first parameters where they are.
PARTLY = zero_opt.CPUOffload(ratio=0.6, subgroup_mb=1024 / 2**20)
SECOND: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.3}


class OneByOne(torch.optim.RMSprop):
    """Of others, so all of its parameters are stepped at once."""


zero_opt.register_elementwise(OneByOne)

CASES = {
    "adamw, fused": (case(torch.optim.AdamW, SECOND, fused=True), case(zero_opt.CPUAdamW, SECOND)),
    "adam, loop": (case(torch.optim.Adam, SECOND, foreach=False, fused=False),) * 2,
    "sgd": (
        case(torch.optim.SGD, SECOND, momentum=0.9, lr=0.1),
        case(zero_opt.CPUSGD, SECOND, momentum=0.9, lr=0.1),
    ),
    "sgd, no momentum": (case(torch.optim.SGD, SECOND, fused=True), case(zero_opt.CPUSGD, SECOND)),
    "adagrad": (
        case(torch.optim.Adagrad, SECOND, initial_accumulator_value=0.1),
        case(zero_opt.CPUAdagrad, SECOND, initial_accumulator_value=0.1),
    ),
    "adagrad, loop": (case(torch.optim.Adagrad, SECOND, foreach=False, fused=False),) * 2,
    "lion": (case(zero_opt.CPULion, SECOND),) * 2,
    "other's": (case(OneByOne, SECOND),) * 2,
}


def _train(rank: int, world_size: int, name: str, reduction: Any, options: dict[str, Any]) -> Any:
    return train(CASES[name][0], rank, world_size, reduction, 6, **options)


def _as_if_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the way that parameters on an accelerator take."""
    monkeypatch.setattr(host_offload, "is_host", lambda device: False)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("elsewhere", ["here", "elsewhere"])
def test_fp32_bits_of_the_device_tier(name: str, elsewhere: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three groups, several backwards, parameters that are unused on some ranks or on all."""
    if elsewhere == "elsewhere":
        _as_if_elsewhere(monkeypatch)
    for world_size, reduction in ((1, zero_opt.AlreadyReduced()), (2, zero_opt.Overlapped(BUCKET_MB))):
        params, state = expected(CASES[name][1], world_size, reduction, 6)
        for offload in (OFFLOAD, PARTLY) if elsewhere == "elsewhere" else (OFFLOAD,):
            runs = run_processes(world_size, _train, name, reduction, {"offload": offload})
            for found, found_state in runs:
                assert_bitwise(found, params, f"{offload}")
                if found_state is not None:
                    assert_bitwise(found_state["state"], state["state"], f"{offload}, state")


@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("dtype", HALVES)
def test_halves_have_the_bits_of_masters_on_the_device(
    cls: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With gradients in two dtypes, and an edit of a parameter."""
    kwargs: dict[str, Any] = {"fused": True, **({} if cls is torch.optim.AdamW else {"momentum": 0.9})}
    for reduce_dtype in (None, torch.float32):
        precision = zero_opt.MixedPrecision(torch.float32, reduce_dtype)
        found = []
        for offload in (None, OFFLOAD, PARTLY):
            with monkeypatch.context() as patch:
                _as_if_elsewhere(patch)
                run = partial(train_halves, cls=cls, dtype=dtype, offload=offload, precision=precision, **kwargs)
                found.append(run_processes(2, run))
        assert_bitwise(found[1], found[0])
        assert_bitwise(found[2], found[0])


def test_a_split_master_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    run = partial(
        train_halves,
        cls=torch.optim.AdamW,
        dtype=torch.bfloat16,
        fused=True,
        precision=zero_opt.MixedPrecision("split"),
    )
    here = run_processes(2, run)
    _as_if_elsewhere(monkeypatch)
    assert_bitwise(run_processes(2, partial(run, offload=OFFLOAD)), here)


def _units(offload: zero_opt.CPUOffload, dtype: torch.dtype) -> list[tuple[type, list[int]]]:
    params = [nn.Parameter(torch.zeros(numel, dtype=dtype)) for numel in (400, 100, 300, 100, 100)]
    groups = [{"params": params[:2]}, {"params": params[2:]}]
    optimizer = zero_opt.ShardedOptimizer(groups, torch.optim.AdamW, fused=True, offload=offload)
    placement: Any = optimizer._engine.placement  # type: ignore[union-attr]
    made = [
        (type(unit), [piece.param for piece in unit.pieces]) for units in placement._units.values() for unit in units
    ]
    optimizer.close()
    return made


def test_what_stays_and_what_is_stepped_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """First-registered parameters stay; sub-groups have neighbours in the bucket, up to their size."""
    assert _units(PARTLY, torch.float32) == [(InPlace, [4, 3, 2, 1, 0])]
    assert _units(OFFLOAD, torch.bfloat16) == [(Mastered, [4, 3, 2, 1, 0])]
    _as_if_elsewhere(monkeypatch)
    kib = zero_opt.CPUOffload(ratio=0.6, subgroup_mb=1000 / 2**20)
    assert _units(kib, torch.float32) == [(InPlace, [0]), (InHost, [4, 3]), (InHost, [2]), (InHost, [1])]
    assert _units(kib, torch.bfloat16) == [(Mastered, [0]), (InHost, [4, 3, 2]), (InHost, [1])]


def test_two_gradient_buffers_serve_all_sub_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    _as_if_elsewhere(monkeypatch)
    params = make_params(torch.optim.AdamW, torch.bfloat16)
    optimizer = zero_opt.ShardedOptimizer(
        params, torch.optim.AdamW, fused=True, reduction=OVERLAPPED, offload=zero_opt.CPUOffload(subgroup_mb=1e-3)
    )
    for step in range(3):
        backward(params, step, 0)
        optimizer.step()
        optimizer.zero_grad()
    placement: Any = optimizer._engine.placement  # type: ignore[union-attr]
    (link,) = placement._make_units._links.values()
    assert len(link._free) == 2
    optimizer.close()


def test_parameters_are_not_copied_where_they_can_be_stepped() -> None:
    params = [nn.Parameter(torch.ones(64)), nn.Parameter(torch.ones(8, 8))]
    optimizer = zero_opt.ShardedOptimizer(params, torch.optim.SGD, lr=0.1, offload=OFFLOAD)
    placement: Any = optimizer._engine.placement  # type: ignore[union-attr]
    assert [placement.param_of(at).data_ptr() for at in range(2)] == [param.data_ptr() for param in params]
    optimizer.close()


@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_views_of_one_tensor_are_not_taken_for_edited(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They share a version counter, which a step of any of them raises."""
    if where == "elsewhere":
        _as_if_elsewhere(monkeypatch)
    results: list[list[Tensor]] = []
    for shared in (True, False):
        flat = torch.linspace(-1, 1, 3000).to(torch.bfloat16)
        runs = [flat[start : start + 750] for start in range(0, 3000, 750)]
        params = [nn.Parameter(run if shared else run.clone()) for run in runs]
        optimizer = zero_opt.ShardedOptimizer(
            params, torch.optim.AdamW, fused=True, reduction=OVERLAPPED, offload=OFFLOAD
        )
        for step in range(4):
            torch.autograd.backward(params[step % 2 :], [torch.full((750,), 0.1, dtype=flat.dtype)] * (4 - step % 2))
            optimizer.step()
            optimizer.zero_grad()
        results.append([optimizer.state[param]["master"].clone() for param in params])
        optimizer.close()
    assert_bitwise(results[0], results[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_whose_data_the_user_re_points(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    _as_if_elsewhere(monkeypatch)
    found = []
    for moves in (False, True):
        params = make_params(torch.optim.AdamW, dtype)
        optimizer = zero_opt.ShardedOptimizer(params, torch.optim.AdamW, fused=True, offload=OFFLOAD)
        for step in range(3):
            backward(params, step, 0)
            if moves and step:
                for param in params:
                    param.data = param.data.clone()
            optimizer.step()
            optimizer.zero_grad()
        found.append(([param.detach().clone() for param in params], optimizer.state_dict()))
        optimizer.close()
    assert_bitwise(found[1], found[0])
