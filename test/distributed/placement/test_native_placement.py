"""The updates that are not Adam's over a worker and in a file: the bits, state and checkpoints of the device tier."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_opt
from test.support.harness import assert_bitwise, run_processes
from test.support.nvme_training import in_file, placement_of, step_copies_of_params
from test.support.scenario import BUCKET_MB, OVERLAPPED, case, expected, train, values
from test.support.worker_training import LATER, NOW, SHAPES, make_params

SPECULATING = zero_opt.WorkerOffload(speculate=True)
PLACES: dict[str, Callable[[Path], Any]] = {
    "worker": lambda _: NOW,
    "later": lambda _: LATER,
    "speculating": lambda _: SPECULATING,
    "file": in_file,
}
SECOND: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.3}
MOMENTUM: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "dampening": 0.1}
NESTEROV: dict[str, Any] = {"momentum": 0.8, "nesterov": True, "maximize": True}
ADAGRAD: dict[str, Any] = {"initial_accumulator_value": 0.1, "lr_decay": 0.05}
LION: dict[str, Any] = {"betas": (0.8, 0.95)}
CASES = {
    "sgd": (case(torch.optim.SGD, SECOND, **MOMENTUM), case(zero_opt.CPUSGD, SECOND, **MOMENTUM)),
    "sgd, nesterov": (
        case(torch.optim.SGD, SECOND, fused=True, **NESTEROV),
        case(zero_opt.CPUSGD, SECOND, **NESTEROV),
    ),
    "sgd, in part without momentum": (case(zero_opt.CPUSGD, {**SECOND, "momentum": 0.0}, **MOMENTUM),) * 2,
    "sgd, without momentum": (case(torch.optim.SGD, SECOND), case(zero_opt.CPUSGD, SECOND)),
    "adagrad": (case(torch.optim.Adagrad, SECOND, **ADAGRAD), case(zero_opt.CPUAdagrad, SECOND, **ADAGRAD)),
    "adagrad, from zero": (case(zero_opt.CPUAdagrad, SECOND),) * 2,
    "lion": (case(zero_opt.CPULion, SECOND, **LION),) * 2,
}
CLASSES: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (zero_opt.CPUSGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    "adagrad": (zero_opt.CPUAdagrad, {"lr": 0.1, **ADAGRAD}),
    "lion": (zero_opt.CPULion, {"lr": 0.01, "weight_decay": 0.1}),
}
PLACED = pytest.mark.parametrize("place", PLACES)
NAMED = pytest.mark.parametrize("name", CLASSES)
MASTERS = zero_opt.AdamState(master="float32")


def _train_case(rank: int, world_size: int, name: str, reduction: Any, offload: Any) -> Any:
    return train(CASES[name][0], rank, world_size, reduction, 6, offload=offload)


@pytest.mark.parametrize("name", CASES)
@PLACED
def test_bits_of_the_class(name: str, place: str, tmp_path: Path) -> None:
    """Three groups, several backwards, parameters that are unused on some ranks or on all."""
    for world_size in (1, 2):
        reduction = OVERLAPPED if place == "speculating" or world_size > 1 else zero_opt.AtStep(BUCKET_MB)
        params, state = expected(CASES[name][1], world_size, reduction, 6)
        for found, found_state in run_processes(world_size, _train_case, name, reduction, PLACES[place](tmp_path)):
            assert_bitwise(found, params, f"{world_size} ranks")
            if found_state is not None:
                assert_bitwise(found_state["state"], state["state"], f"{world_size} ranks, state")


def _dict_of(optimizer: Any, rank: int) -> Any:
    optimizer.consolidate_state_dict()
    return optimizer.state_dict() if rank == 0 else None


def _make(params: Any, name: str, offload: Any, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    cls, kwargs = CLASSES[name]
    form = {} if dtype is torch.float32 else {"state": MASTERS}
    return zero_opt.ShardedOptimizer(
        params, cls, offload=offload, reduction=OVERLAPPED, **{**kwargs, **form, **options}
    )


def _step(params: Any, optimizer: Any, step: int, rank: int = 0) -> None:
    """By gradients that do not depend on parameters, so that a late update is the same; parameter 0 skips steps."""
    optimizer.zero_grad()
    used = [i for i in range(len(params)) if params[i].requires_grad and (i or step % 3 != 1)]
    grads = [values(step, 1, rank, i, tuple(params[i].shape)).to(params[i].dtype) for i in used]
    torch.autograd.backward([params[i] for i in used], grads)
    optimizer.step()


def _scheduled(rank: int, world_size: int, name: str, dtype: torch.dtype, offload: Any) -> Any:
    """Frozen parameters, a group that is added, and hyperparameters that change; momentum is off now and then."""
    params = make_params(dtype)
    frozen = nn.Parameter(torch.ones(5, dtype=dtype), requires_grad=False)
    optimizer = _make([*params[:2], frozen], name, offload, dtype)
    keys = []
    for step in range(9):
        if step == 3:
            optimizer.add_param_group({"params": params[2:], "lr": 0.05})
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1 + step)
            group["weight_decay"] = 0.1 * (step % 2)
            group["maximize"] = step == 5
            if name == "sgd":
                group["momentum"] = 0.0 if step in (0, 3, 6) else 0.9
                group["dampening"] = 0.1 * (step % 3)
        _step(params if step >= 3 else params[:2], optimizer, step, rank)
        if step == 4:
            optimizer.flush()
            keys.append({i: sorted(optimizer.state[param]) for i, param in enumerate(params)})
    state = _dict_of(optimizer, rank)
    if rank == 0:
        state["state"].pop(2, None)  # Adagrad has state of a frozen parameter, where it steps by itself
    optimizer.close()
    return [param.detach() for param in params], state, keys


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@NAMED
@PLACED
def test_hyperparameters_that_change(place: str, name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    for world_size in (1, 2):
        here = run_processes(world_size, _scheduled, name, dtype, None)
        away = run_processes(world_size, _scheduled, name, dtype, PLACES[place](tmp_path))
        for rank, (found, wanted) in enumerate(zip(away, here, strict=True)):
            assert_bitwise(found[0], wanted[0], f"rank {rank} of {world_size}")
            assert found[2] == wanted[2]
            if rank == 0:
                assert_bitwise(found[1]["state"], wanted[1]["state"], f"state, {world_size} ranks")


def _handed_over(rank: int, world_size: int, name: str, dtype: torch.dtype, offloads: Any, begun: int) -> Any:
    """Each offload in turn goes on from the checkpoint of the one before."""
    params, state, step = make_params(dtype), None, 0
    for number, offload in enumerate(offloads):
        optimizer = _make(params, name, offload, dtype)
        if number:
            optimizer.load_state_dict(state)
        for _ in range(3 if number else begun):
            _step(params, optimizer, step, rank)
            step += 1
        optimizer.flush()
        state = optimizer.state_dict()
        optimizer.close()
    return [param.detach() for param in params], state


@pytest.mark.parametrize("begun", [0, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@NAMED
@PLACED
def test_checkpoints_in_each_direction(place: str, name: str, dtype: torch.dtype, begun: int, tmp_path: Path) -> None:
    """From before the first step too, when SGD and Lion have no state and Adagrad has."""
    away = PLACES[place](tmp_path)
    for world_size in (1, 2) if begun else (1,):
        wanted = run_processes(world_size, _handed_over, name, dtype, (None, None, None), begun)
        for offloads in ((None, away, None), (away, None, away), (away, away, None)):
            found = run_processes(world_size, _handed_over, name, dtype, offloads, begun)
            assert_bitwise(found, wanted, f"{offloads} at {world_size} ranks")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@NAMED
@PLACED
def test_state_that_users_see_and_edit(place: str, name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    def run(offload: Any) -> Any:
        params = make_params(dtype)
        optimizer, seen = _make(params, name, offload, dtype), []

        def show() -> None:
            optimizer.flush()
            seen.append([{k: v.clone() for k, v in optimizer.state.get(p, {}).items()} for p in params])

        show()
        for step in range(6):
            array = {"sgd": "momentum_buffer", "adagrad": "sum", "lion": "exp_avg"}[name]
            if step == 3:
                optimizer.state[params[1]][array] = torch.full_like(params[1], 0.25, dtype=torch.float32)
                optimizer.state[params[2]][array].mul_(0.5)
                del optimizer.state[params[3]]
            if step == 5:
                own = {key: value.clone() for key, value in optimizer.state[params[1]].items()}
                optimizer.state[params[1]] = {**own, array: torch.ones(SHAPES[1])}
                if dtype is not torch.float32:
                    optimizer.state[params[1]]["master"] = params[1].detach().float()
            _step(params, optimizer, step)
            show()
        optimizer.close()
        return [param.detach() for param in params], seen

    assert_bitwise(run(PLACES[place](tmp_path)), run(None))


def test_copies_of_parameters_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those on an accelerator are stepped."""
    step_copies_of_params(monkeypatch)
    for name in CLASSES:
        found, wanted = (
            run_processes(2, _scheduled, name, torch.float32, offload) for offload in (in_file(tmp_path), None)
        )
        assert_bitwise(found[0][:2], wanted[0][:2], name)


@pytest.mark.parametrize("cls", [zero_opt.CPUAdagrad, torch.optim.Adagrad])
@PLACED
def test_adagrad_begins_dropped_state_with_the_value_of_its_class(cls: Any, place: str, tmp_path: Path) -> None:
    def run(offload: Any) -> Any:
        params = make_params()
        optimizer = zero_opt.ShardedOptimizer(params, cls, offload=offload, reduction=OVERLAPPED)
        for step in (0, 2):
            if step:
                for param in params:
                    del optimizer.state[param]
            _step(params, optimizer, step)
            optimizer.flush()
        state = optimizer.state_dict()["state"]
        optimizer.close()
        return [param.detach() for param in params], state

    assert_bitwise(run(PLACES[place](tmp_path)), run(zero_opt.CPUOffload()))


@PLACED
def test_a_load_brings_a_momentum(place: str, tmp_path: Path) -> None:
    params = make_params()
    optimizer = _make(params, "sgd", PLACES[place](tmp_path), momentum=0.0)
    _step(params, optimizer, 0)
    optimizer.flush()
    assert not optimizer.state_dict()["state"]
    saved = zero_opt.CPUSGD(make_params(), lr=0.1, momentum=0.9)
    for param in saved.param_groups[0]["params"]:
        param.grad = torch.ones_like(param)
    saved.step()
    optimizer.load_state_dict(saved.state_dict())
    assert_bitwise(optimizer.state_dict()["state"], saved.state_dict()["state"])
    _step(params, optimizer, 2)
    optimizer.close()


@PLACED
def test_what_is_not_taken(place: str, tmp_path: Path) -> None:
    params, offload = make_params(torch.bfloat16), PLACES[place](tmp_path)
    name = type(offload).__name__
    with pytest.raises(zero_opt.UnsupportedOptimizer, match=rf"{name} steps Adam, AdamW, .*Lion, not RMSprop"):
        zero_opt.ShardedOptimizer(params, torch.optim.RMSprop, offload=offload, reduction=OVERLAPPED)
    split = zero_opt.MixedPrecision("split")
    with pytest.raises(zero_opt.UnsupportedOptimizer, match=f"{name} keeps split masters of Adam and AdamW alone, not"):
        zero_opt.ShardedOptimizer(params, torch.optim.SGD, offload=offload, precision=split, reduction=OVERLAPPED)
    with pytest.raises(zero_opt.ConfigError, match="compact forms are of Adam's state"):
        _make(params, "lion", offload, state=zero_opt.AdamState("block8"))
    with pytest.raises(zero_opt.UnsupportedOptimizer, match="has fused=False"):
        zero_opt.ShardedOptimizer(params, torch.optim.SGD, fused=False, offload=offload, reduction=OVERLAPPED)


def test_selective_takes_adam_alone() -> None:
    offload = zero_opt.WorkerOffload(selective=zero_opt.Selective(0.25))
    with pytest.raises(zero_opt.UnsupportedOptimizer, match=r"Selective steps Adam, .*CPUAdamW, not CPUSGD"):
        _make(make_params(), "sgd", offload)


def test_a_file_without_any_state_is_stepped(tmp_path: Path) -> None:
    """SGD without momentum, of fp32 parameters in host memory."""
    optimizer = _make(make_params(), "sgd", in_file(tmp_path), momentum=0.0)
    assert not any(window.nbytes for window, _ in placement_of(optimizer)._windows)
    optimizer.close()


@NAMED
def test_speculation_keeps_drafts(name: str) -> None:
    params = make_params()
    optimizer = _make(params, name, SPECULATING)
    for step in range(0, 12, 3):  # all parameters are used
        _step(params, optimizer, step)
    stats = optimizer.stats()
    placement = placement_of(optimizer)
    assert placement.kept > 0 == placement.redone, stats
    optimizer.close()
