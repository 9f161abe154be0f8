"""State as DTensors cut by rows: what ranks hold, what torch.distributed.checkpoint makes of it, what is refused."""

from __future__ import annotations

import copy
import json
import re
import resource
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

import zero_opt
from test.support.harness import assert_bitwise, run_processes, run_threads
from test.support.scenario import NEVER_USED, OVERLAPPED, SHAPES, Case, case, expected, local_backwards

ADAM = case(torch.optim.Adam, {"lr": 0.02, "weight_decay": 0.1}, lr=0.01, amsgrad=True)
SGD = case(torch.optim.SGD, {"lr": 0.02, "nesterov": True}, lr=0.01, momentum=0.9)
PLAIN_SGD = case(torch.optim.SGD, {"lr": 0.02}, lr=0.01)
ADAGRAD = case(torch.optim.Adagrad, {"lr": 0.02}, lr=0.01)  # has state from the beginning
NADAM = case(torch.optim.NAdam, {"lr": 0.02}, lr=0.01)  # two numbers per parameter
# Whole parameters, and state of other shapes; it divides by the number of elements.
ADAFACTOR = Case(torch.optim.Adafactor, (("lr", 0.01),), (("lr", 0.02),), tuple(s for s in SHAPES if 0 not in s))
FUSED = case(torch.optim.AdamW, {"lr": 0.02}, lr=0.01, fused=True)

STEPS = 3


def _trained(case: Case, rank: int, steps: int = STEPS, **options: Any) -> zero_opt.ShardedOptimizer:
    params = case.params()
    optimizer = case.sharded(params, OVERLAPPED, **options)
    for step in range(steps):
        optimizer.zero_grad()
        for used, grads in local_backwards(case, params, step, rank):
            torch.autograd.backward(used, grads)
        optimizer.step()
    return optimizer


def _full(optimizer: zero_opt.ShardedOptimizer) -> Any:
    """The full state on rank 0."""
    optimizer.consolidate_state_dict(to=0)
    state = optimizer.state_dict() if torch.distributed.get_rank() == 0 else None
    optimizer.close()
    return state


def _whole(state_dict: Any) -> Any:
    """A sharded state dict with its DTensors put together, and only state that is real."""
    known = dict(_known(state_dict))
    return {
        index: {
            key: value.full_tensor() if hasattr(value, "full_tensor") else value
            for key, value in entry.items()
            if key in known.get(index, ())
        }
        for index, entry in state_dict["state"].items()
        if index in known
    }


def _known(state_dict: Any) -> Any:
    return json.loads(state_dict["with_state"])


# -- what it is -------------------------------------------------------------------------------------------------------


def _show(rank: int, world_size: int, case: Case) -> Any:
    optimizer = _trained(case, rank)
    state_dict = zero_opt.sharded_state_dict(optimizer)
    nbytes = sum(
        value.to_local().numel() * value.element_size()
        for entry in state_dict["state"].values()
        for value in entry.values()
        if hasattr(value, "to_local")
    )
    return _whole(state_dict), nbytes, _full(optimizer)


@pytest.mark.parametrize("case", [ADAM, SGD, ADAGRAD, NADAM, ADAFACTOR], ids=lambda case: case.cls.__name__)
def test_it_is_the_state_cut_by_rows(case: Case) -> None:
    shown = run_processes(3, _show, case)
    for whole, _, _ in shown:
        assert_bitwise(whole, shown[0][2]["state"])
    held = [nbytes for _, nbytes, _ in shown]
    assert max(held) - min(held) < 0.2 * sum(held)


def _show_layouts(rank: int, world_size: int) -> Any:
    generator = torch.Generator().manual_seed(0)
    conv, wide, row, gaps, few = (
        torch.randn(shape, generator=generator) for shape in ((6, 4, 3, 3), (40, 30), (1, 500), (9, 20), (2, 3, 4))
    )
    weights = [conv.to(memory_format=torch.channels_last), wide.t(), row, gaps[:, ::2], few]
    params = [nn.Parameter(weight) for weight in weights]
    optimizer = zero_opt.ShardedOptimizer(params, torch.optim.Adam, lr=0.1, reduction=OVERLAPPED)
    for _ in range(2):
        sum((param * param).sum() for param in params).backward()
        optimizer.step()
        optimizer.zero_grad()
    before = zero_opt.sharded_state_dict(optimizer)
    whole = _whole(before)
    dims = {index: entry["exp_avg"].placements[0].dim for index, entry in before["state"].items()}
    moved = copy.deepcopy(before)
    for entry in optimizer.state.values():
        entry["exp_avg"].fill_(7)
    zero_opt.load_sharded_state_dict(optimizer, moved)
    return whole, dims, _full(optimizer)


def test_rows_are_those_of_the_outermost_dimension_in_memory() -> None:
    shown = run_threads(3, _show_layouts)
    for whole, dims, _ in shown:
        assert_bitwise(whole, shown[0][2]["state"])
        assert dims == {0: 0, 1: 1, 2: 1, 3: 0, 4: 0}


def test_a_rank_alone_aliases_no_live_list() -> None:
    param = nn.Parameter(torch.ones(3))
    optimizer = zero_opt.ShardedOptimizer([param], torch.optim.LBFGS)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    live, saved = optimizer.state[param]["old_dirs"], zero_opt.sharded_state_dict(optimizer)["state"][0]["old_dirs"]
    before = copy.deepcopy(saved)
    assert live and saved is not live
    live[0].zero_()
    assert_bitwise(saved, before)


def test_a_rank_alone_has_plain_tensors() -> None:
    params = ADAM.params()
    optimizer = ADAM.sharded(params, OVERLAPPED)
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    state_dict = zero_opt.sharded_state_dict(optimizer)
    assert _known(state_dict) == [[0, ["exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"]]]
    assert type(state_dict["state"][0]["exp_avg"]) is Tensor
    assert state_dict["state"][0]["exp_avg"].data_ptr() != optimizer.state[params[0]]["exp_avg"].data_ptr()
    assert state_dict["state"][1]["exp_avg"].shape == params[1].shape  # a place to load into
    before = copy.deepcopy(optimizer.state_dict())
    optimizer.state[params[0]]["exp_avg"].fill_(3)
    zero_opt.load_sharded_state_dict(optimizer, state_dict)
    assert_bitwise(optimizer.state_dict(), before)


# -- through torch.distributed.checkpoint -----------------------------------------------------------------------------


def _save(rank: int, world_size: int, folder: str, case: Case, options: dict[str, Any]) -> Any:
    optimizer = _trained(case, rank, **options)
    dcp.save({"optimizer": zero_opt.sharded_state_dict(optimizer)}, checkpoint_id=folder)
    return _full(optimizer)


def _load(rank: int, world_size: int, folder: str, case: Case, options: dict[str, Any]) -> Any:
    optimizer = case.sharded(case.params(), OVERLAPPED, **options)
    for group in optimizer.param_groups:
        group["lr"] = 123.0
    state_dict = {"optimizer": zero_opt.sharded_state_dict(optimizer)}
    dcp.load(state_dict, checkpoint_id=folder)
    zero_opt.load_sharded_state_dict(optimizer, state_dict["optimizer"])
    assert all(len(optimizer.state[param]) for param in optimizer.state)
    return _full(optimizer)


def _load_alone(folder: str, case: Case) -> Any:
    optimizer = case.sharded(case.params(), OVERLAPPED)
    state_dict = {"optimizer": zero_opt.sharded_state_dict(optimizer)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        dcp.load(state_dict, checkpoint_id=folder)
    zero_opt.load_sharded_state_dict(optimizer, state_dict["optimizer"])
    return optimizer.state_dict()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "case",
    [ADAM, SGD, PLAIN_SGD, ADAGRAD, NADAM, ADAFACTOR],
    ids=["Adam", "SGD", "plain SGD", "Adagrad", "NAdam", "Adafactor"],
)
def test_saved_by_four_ranks_it_loads_on_three_five_and_one(case: Case, tmp_path: Path) -> None:
    _, plain = expected(case, 4, OVERLAPPED, STEPS)
    saved = run_processes(4, _save, str(tmp_path), case, {})[0]
    assert_bitwise(saved, plain)
    assert NEVER_USED not in saved["state"] or case is ADAGRAD
    for world_size in (3, 5):
        assert_bitwise(run_processes(world_size, _load, str(tmp_path), case, {})[0], saved, f"{world_size} ranks")
    assert_bitwise(_load_alone(str(tmp_path), case), saved, "alone")


@pytest.mark.parametrize("delay", [0, 1])
def test_a_worker_s_state_is_resharded(delay: int, tmp_path: Path) -> None:
    options = {"offload": zero_opt.WorkerOffload(delay=delay, threads=1)}
    saved = run_processes(2, _save, str(tmp_path), FUSED, options)[0]
    assert_bitwise(run_processes(3, _load, str(tmp_path), FUSED, options)[0], saved)
    assert_bitwise(_load_alone(str(tmp_path), FUSED), saved)


def _half(rank: int, world_size: int, folder: str, load: bool) -> Any:
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator).bfloat16()) for shape in ((40, 6), (70,))]
    optimizer = zero_opt.ShardedOptimizer(
        params, torch.optim.AdamW, fused=True, offload=zero_opt.WorkerOffload(threads=1), reduction=OVERLAPPED
    )
    if load:
        state_dict = zero_opt.sharded_state_dict(optimizer)
        assert state_dict["state"][0]["master"].dtype is torch.float32
        dcp.load(state_dict, checkpoint_id=folder)
        zero_opt.load_sharded_state_dict(optimizer, state_dict)
    else:
        torch.autograd.backward(params, [torch.full_like(param, 0.1) for param in params])
        optimizer.step()
        dcp.save(zero_opt.sharded_state_dict(optimizer), checkpoint_id=folder)
    return _full(optimizer)


def test_masters_travel_in_fp32(tmp_path: Path) -> None:
    saved = run_processes(2, _half, str(tmp_path), False)[0]
    assert saved["state"][0]["master"].dtype is torch.float32
    assert_bitwise(run_processes(3, _half, str(tmp_path), True)[0], saved)


def _save_async(rank: int, world_size: int, folder: str) -> Any:
    optimizer = _trained(ADAM, rank)
    future = dcp.async_save({"optimizer": zero_opt.sharded_state_dict(optimizer)}, checkpoint_id=folder)
    before = copy.deepcopy(zero_opt.sharded_state_dict(optimizer))
    for param in optimizer.state:
        optimizer.state[param]["exp_avg"].fill_(3)  # training goes on
    future.result(timeout=30)
    zero_opt.load_sharded_state_dict(optimizer, before)
    return _full(optimizer)


def test_an_asynchronous_save_has_the_state_of_its_start(tmp_path: Path) -> None:
    saved = run_processes(2, _save_async, str(tmp_path))[0]
    assert_bitwise(run_processes(3, _load, str(tmp_path), ADAM, {})[0], saved)


@zero_opt.register_elementwise
class Counting(torch.optim.Optimizer):
    """Keeps a Python number, a float and a tensor per parameter."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state["count"] = state.get("count", 0) + 1
                    state["scale"] = group["lr"] * state["count"]
                    state.setdefault("sum", torch.zeros_like(param)).add_(param.grad)
                    param.data.add_(state["sum"], alpha=-state["scale"])


def test_numbers_travel_too(tmp_path: Path) -> None:
    counting = case(Counting, {"lr": 0.02}, lr=0.01)
    saved = run_processes(2, _save, str(tmp_path), counting, {})[0]
    assert saved["state"][0]["count"] == 3
    assert_bitwise(run_processes(3, _load, str(tmp_path), counting, {})[0], saved)
    assert_bitwise(_load_alone(str(tmp_path), counting), saved)


# -- what is refused --------------------------------------------------------------------------------------------------


class Halver(torch.optim.Optimizer):
    """Not torch's, and not known to be elementwise: nobody may guess its state."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.state[param].setdefault("sum", torch.zeros_like(param)).add_(param.grad)
                    param.data.mul_(0.5)


def _refusals(rank: int, world_size: int) -> list[str]:
    trained = _trained(case(Halver, {"lr": 0.2}, lr=0.1), rank)
    state_dict = zero_opt.sharded_state_dict(trained)
    fresh = _trained(case(Halver, {"lr": 0.2}, lr=0.1), rank, steps=0)
    messages = []
    broken = [
        {**zero_opt.sharded_state_dict(fresh), "with_state": state_dict["with_state"]},
        [] if rank == 1 else state_dict,
        {**state_dict, "with_state": "17" if rank == 0 else state_dict["with_state"]},
        {**state_dict, "param_groups": state_dict["param_groups"][:1]},
        {**state_dict, "state": {**state_dict["state"], 0: {"sum": torch.ones(130, 7) if rank else "1"}}},
    ]
    for given in broken:
        with pytest.raises(zero_opt.ZeroOptError) as caught:
            zero_opt.load_sharded_state_dict(fresh, given)  # type: ignore[arg-type]
        messages.append(f"{type(caught.value).__name__}: {caught.value}")
    zero_opt.load_sharded_state_dict(fresh, state_dict)  # and nothing was harmed
    first, second = _whole(zero_opt.sharded_state_dict(fresh)), _whole(state_dict)
    assert_bitwise(first, second)
    for optimizer in (trained, fresh):
        optimizer.close()
    with pytest.raises(zero_opt.OptimizerClosed):
        zero_opt.sharded_state_dict(fresh)
    with pytest.raises(zero_opt.OptimizerClosed):
        zero_opt.load_sharded_state_dict(fresh, state_dict)
    return messages


def test_what_does_not_fit_is_refused_on_every_rank() -> None:
    wanted = (
        "StateDictError: .*has no place for it",
        "StateDictError: .*expected what zero_opt.sharded_state_dict",
        "StateDictError: .*is not what zero_opt has written: '17'",
        "StateDictError: .*1 param groups, the optimizer 3",
        "RankMismatch: state 'sum' of parameter 0",
    )
    for messages in run_processes(2, _refusals):
        for message, pattern in zip(messages, wanted, strict=True):
            assert re.match(pattern, message), message


def test_only_a_sharded_optimizer_has_one() -> None:
    plain = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    with pytest.raises(zero_opt.ConfigTypeError, match="must be a ShardedOptimizer, got SGD"):
        zero_opt.sharded_state_dict(plain)  # type: ignore[arg-type]
    with pytest.raises(zero_opt.ConfigTypeError, match="must be a ShardedOptimizer, got SGD"):
        zero_opt.load_sharded_state_dict(plain, {})  # type: ignore[arg-type]


def _with_hooks(rank: int, world_size: int) -> list[str]:
    optimizer = _trained(SGD, rank)
    seen: list[str] = []
    optimizer.register_state_dict_pre_hook(lambda _: seen.append("save"))
    optimizer.register_state_dict_post_hook(lambda _, given: {**given, "mine": 1})
    optimizer.register_load_state_dict_pre_hook(lambda _, given: seen.append("load"))
    optimizer.register_load_state_dict_post_hook(lambda _: seen.append("loaded"))
    state_dict = zero_opt.sharded_state_dict(optimizer)
    assert state_dict["mine"] == 1
    zero_opt.load_sharded_state_dict(optimizer, state_dict)
    optimizer.close()
    return seen


def test_state_dict_hooks_are_called_once() -> None:
    assert run_threads(2, _with_hooks) == [["save", "load", "loaded"]] * 2


def _cut_otherwise(rank: int, world_size: int) -> Any:
    optimizer = _trained(ADAM, rank)
    state_dict = zero_opt.sharded_state_dict(optimizer)
    for entry in state_dict["state"].values():
        for key, value in entry.items():
            if isinstance(value, DTensor):
                entry[key] = value.redistribute(placements=[Replicate()]) if key == "exp_avg" else value.full_tensor()
    for param in optimizer.state:
        optimizer.state[param]["exp_avg"].fill_(3)
    zero_opt.load_sharded_state_dict(optimizer, state_dict)
    return _full(optimizer)


def test_tensors_that_are_whole_or_cut_otherwise_load_too() -> None:
    _, plain = expected(ADAM, 2, OVERLAPPED, STEPS)
    assert_bitwise(run_processes(2, _cut_otherwise)[0], plain)


def _no_descriptors(rank: int, world_size: int, call: str) -> Any:
    """Rank 1 has none left when its first call needs a module that is not imported yet; later calls work."""
    optimizer = _trained(ADAM, rank)
    state_dict = zero_opt.sharded_state_dict(optimizer)
    calls = {
        "save": lambda: zero_opt.sharded_state_dict(optimizer),
        "load": lambda: zero_opt.load_sharded_state_dict(optimizer, state_dict),
    }
    limits, name = resource.getrlimit(resource.RLIMIT_NOFILE), "zero_opt.state.row_sharded"
    module = sys.modules.pop(name)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    with pytest.raises(zero_opt.OutOfResources, match=r"(?s)file descriptors.*ulimit -n") as caught:
        calls[call]()
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    sys.modules[name] = module
    calls[call]()
    return str(caught.value), _full(optimizer)


@pytest.mark.parametrize("call", ["save", "load"])
def test_a_rank_without_descriptors_is_an_error_on_all(call: str) -> None:
    (first, state), (second, _) = run_processes(2, _no_descriptors, call, group_timeout=600)
    assert first == f"rank 1: {second}"
    _, wanted = expected(ADAM, 2, OVERLAPPED, STEPS)
    assert_bitwise(state["state"], wanted["state"])
