"""Where slices are stepped: by the native kernel where it has torch's bits, by the wrapped class everywhere else."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_opt
from test.support.harness import assert_bitwise, run_processes
from test.support.scenario import values
from zero_opt.kernels import adam_state

SHAPES = ((130, 7), (65,), (1000,))
STEPS = 4
HYPERS = ({}, {"fused": False, "lr": 0.02}, {"fused": None, "amsgrad": True})
NATIVE = {torch.optim.Adam: zero_opt.CPUAdam, torch.optim.AdamW: zero_opt.CPUAdamW}
EACH = pytest.mark.parametrize("cls", NATIVE)


def _params(group: int, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(values(31, group, 0, index, shape).to(dtype).clone()) for index, shape in enumerate(SHAPES)]


def _grads(step: int, group: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [values(step, 1 + group, 0, index, shape).to(dtype) for index, shape in enumerate(SHAPES)]


def _train(optimizer: torch.optim.Optimizer, groups: dict[int, list[nn.Parameter]], steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        for number, params in groups.items():
            torch.autograd.backward(params, _grads(step, number, params[0].dtype))
        optimizer.step()


def _train_mixed(rank: int, world_size: int, cls: Any, bucket_mb: float) -> tuple[list[list[Tensor]], Any]:
    """Groups that differ in ``fused``, then one of another dtype; every rank has the same gradients."""
    groups = {number: _params(number) for number in range(3)}
    entries = [{"params": groups[number], **hypers} for number, hypers in enumerate(HYPERS)]
    optimizer = zero_opt.ShardedOptimizer(entries, cls, reduction=zero_opt.Overlapped(bucket_mb), fused=True)
    _train(optimizer, groups, range(2))
    assert len(optimizer._engine.partition.buckets) == (1 if bucket_mb == 1 else 9)
    for number, dtype in ((3, torch.float64), (4, torch.bfloat16)):
        groups[number] = _params(number, dtype)
        optimizer.add_param_group({"params": groups[number]})
    _train(optimizer, groups, range(2, STEPS))
    assert [group["fused"] for group in optimizer.param_groups] == [True, False, None, True, True]
    optimizer.consolidate_state_dict()
    state = optimizer.state_dict()["state"] if rank == 0 else None
    optimizer.close()
    return [[param.detach() for param in params] for params in groups.values()], state


@EACH
@pytest.mark.parametrize("bucket_mb", [0.002, 1], ids=["apart", "in one bucket"])
def test_each_group_is_stepped_as_it_says(cls: Any, bucket_mb: float) -> None:
    """Fused fp32 groups as the native kernel steps them, which is how torch does but for its ragged tail."""
    steppers: list[Any] = [NATIVE[cls], cls, cls, cls, cls]
    steppers_options: list[dict[str, Any]] = [*HYPERS, {"fused": True}, {"fused": True}]
    runs = run_processes(2, _train_mixed, cls, bucket_mb)
    assert_bitwise(runs[0][0], runs[1][0])
    for number, (stepper, options) in enumerate(zip(steppers, steppers_options, strict=True)):
        dtype = {3: torch.float64, 4: torch.bfloat16}.get(number, torch.float32)
        params = _params(number, dtype)
        optimizer = stepper(params, **options)
        _train(optimizer, {number: params}, range(0 if number < 3 else 2, STEPS))
        found = runs[0][0][number]
        if number < 3:
            assert_bitwise(found, [param.detach() for param in params])
            saved = [runs[0][1][3 * number + index] for index in range(3)]
            assert_bitwise(saved, list(optimizer.state_dict()["state"].values()))
        for one, other in zip(found, params, strict=True):
            torch.testing.assert_close(one, other.detach())


class Mine(zero_opt.CPUAdamW):
    """A user's subclass, which steps by itself."""


def _train_subclass(rank: int, world_size: int) -> list[Tensor]:
    groups = {0: _params(0, torch.bfloat16)}
    state = zero_opt.AdamState(master="float32")
    with pytest.raises(zero_opt.UnsupportedParam, match=r"got torch\.bfloat16; state=.*master='float32'"):
        zero_opt.ShardedOptimizer(groups[0], Mine, lr=0.02)
    optimizer = zero_opt.ShardedOptimizer(groups[0], Mine, state=state, lr=0.02)
    _train(optimizer, groups, range(STEPS))
    optimizer.close()
    return [param.detach() for param in groups[0]]


def test_a_subclass_of_a_native_class_keeps_the_masters_that_it_is_told_to() -> None:
    plain = {0: _params(0, torch.bfloat16)}
    state = zero_opt.AdamState(master="float32")
    _train(zero_opt.CPUAdamW(plain[0], state=state, lr=0.02), plain, range(STEPS))
    for params in run_processes(2, _train_subclass):
        assert_bitwise(params, plain[0])


COMPACT = [zero_opt.AdamState(moments="block8"), zero_opt.AdamState("bfloat16"), zero_opt.AdamState(master="split")]


def _constructs_a_subclass(rank: int, world_size: int, state: Any, offload: Any) -> None:
    with pytest.raises(zero_opt.UnsupportedOptimizer, match=r"Mine keeps AdamState\(.* neither sharded nor offloaded"):
        zero_opt.ShardedOptimizer(_params(0, torch.bfloat16), Mine, state=state, offload=offload)


@pytest.mark.parametrize("state", COMPACT)
@pytest.mark.parametrize(("world_size", "offload"), [(2, None), (1, zero_opt.CPUOffload())])
def test_compact_state_of_a_subclass_is_neither_sharded_nor_offloaded(
    state: Any, world_size: int, offload: Any
) -> None:
    run_processes(world_size, _constructs_a_subclass, state, offload)


@pytest.mark.parametrize("state", COMPACT[:2])
def test_compact_state_of_a_subclass_is_its_own_at_one_rank(state: Any) -> None:
    found = []
    for make in (Mine, partial(zero_opt.ShardedOptimizer, optimizer_class=Mine)):
        groups = {0: _params(0)}
        optimizer = make(groups[0], state=state, lr=0.02)
        _train(optimizer, groups, range(2))
        optimizer.load_state_dict(optimizer.state_dict())
        _train(optimizer, groups, range(2, STEPS))
        found.append([param.detach() for param in groups[0]])
    assert_bitwise(*found)


def _train_loaded(rank: int, world_size: int, saved: Any) -> list[Tensor]:
    params = _params(0)
    optimizer = zero_opt.ShardedOptimizer(params, torch.optim.Adam, reduction=zero_opt.Overlapped(0.002), fused=True)
    optimizer.load_state_dict(saved)
    _train(optimizer, {0: params}, range(2, STEPS))
    optimizer.close()
    return [param.detach() for param in params]


@pytest.mark.parametrize("fused", [True, False])
def test_what_is_loaded_decides_anew(fused: bool) -> None:
    """torch too takes ``fused`` from the dict."""
    before = _params(0)
    saver = torch.optim.Adam(before, fused=fused, foreach=None if fused else False)
    _train(saver, {0: before}, range(2))
    saved = copy.deepcopy(saver.state_dict())
    params = _params(0)
    plain: Any = zero_opt.CPUAdam(params) if fused else torch.optim.Adam(params, fused=True)
    plain.load_state_dict(copy.deepcopy(saved))
    _train(plain, {0: params}, range(2, STEPS))
    for found in run_processes(2, _train_loaded, saved):
        assert_bitwise(found, [param.detach() for param in params])


def _edit_unused(rank: int, world_size: int, path: Path | None) -> list[list[Tensor]]:
    """Per placement, or for the plain class alone: parameters with gaps, in one bucket, edited where a step has one."""
    offloads: list[Any] = [None]
    if path is not None:
        workers = (zero_opt.WorkerOffload(), zero_opt.WorkerOffload(delay=1), zero_opt.WorkerOffload(speculate=True))
        offloads = [None, zero_opt.CPUOffload(), *workers, zero_opt.NVMeOffload(path)]
    found = []
    for offload in offloads:
        params = [nn.Parameter(values(37, 0, 0, index, (20, 30)).clone()[:, ::2]) for index in range(5)]
        options: dict[str, Any] = {"offload": offload, "reduction": zero_opt.Overlapped(), "fused": True}
        optimizer: Any = zero_opt.CPUAdamW(params)
        if path is not None:
            optimizer = zero_opt.ShardedOptimizer(params, torch.optim.AdamW, **options)
        for step, used in enumerate((params, params[1:2], params)):
            optimizer.zero_grad()
            torch.autograd.backward(used, [values(step, 1, 0, 0, tuple(param.shape)) for param in used])
            with torch.no_grad():
                for number, param in enumerate(params if step == 1 else ()):
                    if number != 1:
                        param[number : number + 3] = 7.0 + number
            optimizer.step()
            if path is not None:
                optimizer.flush()
        if path is not None:
            optimizer.close()
        found.append([param.detach().clone() for param in params])
    return found


def test_what_is_edited_and_not_stepped_is_gathered(tmp_path: Path) -> None:
    """Parameters with gaps are gathered through copies: of the five, one is cut, and the others are whole on a rank."""
    plain = _edit_unused(0, 1, None)[0]
    for rank, found in enumerate(run_processes(2, _edit_unused, tmp_path)):
        for number, params in enumerate(found):
            assert_bitwise(params, plain, f"rank {rank}, placement {number}")


@pytest.mark.parametrize("option", [{"fused": False}, {"foreach": True}], ids=str)
@pytest.mark.parametrize("where", ["worker", "file"])
def test_bits_that_the_kernel_has_not_are_refused_when_asked_for_later_too(
    where: str, option: dict[str, bool], tmp_path: Path
) -> None:
    params = _params(0)
    offload = zero_opt.WorkerOffload() if where == "worker" else zero_opt.NVMeOffload(tmp_path)
    optimizer = zero_opt.ShardedOptimizer(params, torch.optim.Adam, fused=True, offload=offload)
    torch.autograd.backward(params, _grads(0, 0))
    optimizer.param_groups[0].update(option)
    with pytest.raises(zero_opt.UnsupportedOptimizer, match="bits of fused=True alone"):
        optimizer.step()
    assert_bitwise([param.detach() for param in params], [param.detach() for param in _params(0)])
    optimizer.close()


@pytest.mark.parametrize("due", range(4))
def test_ctrl_c_while_state_is_made_leaves_no_part_of_one(due: int, monkeypatch: pytest.MonkeyPatch) -> None:
    params, plain = _params(0), _params(0)
    optimizer = zero_opt.ShardedOptimizer(params, torch.optim.Adam, fused=True, offload=zero_opt.CPUOffload())
    made, like = iter(range(100)), adam_state._like

    def interrupted(*given: Any) -> Tensor:
        if next(made) == due:
            raise KeyboardInterrupt
        return like(*given)

    torch.autograd.backward(params, _grads(0, 0))
    with monkeypatch.context() as patch:
        patch.setattr(adam_state, "_like", interrupted)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    optimizer.zero_grad()
    _train(optimizer, {0: params}, range(STEPS))
    _train(zero_opt.CPUAdam(plain), {0: plain}, range(STEPS))
    assert_bitwise([param.detach() for param in params], [param.detach() for param in plain])
    optimizer.close()


# -- writes of the user's ---------------------------------------------------------------------------------------------

MASTERS = zero_opt.MixedPrecision(master_dtype=torch.float32)
OFFLOADS: dict[str, Any] = {
    "none": {},
    "masters": {"precision": MASTERS},
    "split": {"precision": zero_opt.MixedPrecision(master_dtype="split")},
    "CPUOffload": {"offload": zero_opt.CPUOffload()},
    "WorkerOffload": {"offload": zero_opt.WorkerOffload()},
}


def _written(rank: int, world_size: int, options: dict[str, Any], dtype: torch.dtype) -> Any:
    """What a step of size 0 leaves of three ways to write to a parameter."""
    params = [nn.Parameter(torch.ones(300, dtype=dtype)) for _ in range(3)]
    optimizer = zero_opt.ShardedOptimizer(params, torch.optim.AdamW, fused=True, lr=0.0, weight_decay=0.0, **options)
    for turn in range(2):
        torch.autograd.backward(params, [torch.ones_like(param) for param in params])
        optimizer.step()
        optimizer.zero_grad()
        if turn == 0:
            params[0].data.fill_(3.0)
            params[1].data = torch.full((300,), 3.0, dtype=dtype)
            with torch.no_grad():
                params[2].fill_(3.0)
    optimizer.close()
    return [param.unique().tolist() for param in params]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("where", [*OFFLOADS, "NVMeOffload"])
def test_which_writes_a_step_sees_is_what_the_page_of_limits_says(
    where: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    options = {**OFFLOADS, "NVMeOffload": {"offload": zero_opt.NVMeOffload(tmp_path)}}[where]
    lost = where == "WorkerOffload" or (dtype is torch.bfloat16 and where not in ("none", "split"))
    for found in run_processes(2, _written, options, dtype):
        assert found == [[1.0] if lost else [3.0], [3.0], [3.0]]
