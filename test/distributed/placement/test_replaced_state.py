"""State that the user puts in the place of another must fit, or all ranks raise an error before anything changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import zero_opt
from test.support.harness import assert_bitwise, run_processes

IN_PROCESS = "cpu"  # keeps entries that it has no place for
OFFLOADS: dict[str, Callable[[Path], Any]] = {
    "worker": lambda _: zero_opt.WorkerOffload(),
    "nvme": lambda folder: zero_opt.NVMeOffload(folder),
    "cpu": lambda _: zero_opt.CPUOffload(),
    "cpu, selective": lambda _: zero_opt.CPUOffload(selective=zero_opt.Selective(topk_ratio=1.0)),
}
EDITS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a row": (lambda state: state.update(exp_avg=torch.zeros(1, 32)), "'exp_avg' must be a floating-point tensor"),
    "one element": (lambda state: state.update(exp_avg=torch.zeros(1)), "'exp_avg' must be a floating-point tensor"),
    "a number": (lambda state: state.update(exp_avg_sq=0.5), "'exp_avg_sq' must be a floating-point tensor"),
    "integers": (
        lambda state: state.update(exp_avg=torch.zeros_like(state["exp_avg"], dtype=torch.int64)),
        "'exp_avg' must be a floating-point tensor",
    ),
    "three steps": (lambda state: state.update(step=torch.ones(3)), "'step' must be a number"),
    "no count": (lambda state: state.update(step=torch.ones((), device="meta")), "'step' must be a number"),
    "a key too few": (lambda state: state.pop("exp_avg_sq"), "has no 'exp_avg_sq'"),
    "a share of elements": (
        lambda state: state.update(exp_avg=torch.sparse_coo_tensor(size=state["exp_avg"].shape, check_invariants=True)),
        "'exp_avg' must be a floating-point tensor",
    ),
    "no values": (
        lambda state: state.update(exp_avg=torch.empty_like(state["exp_avg"], device="meta")),
        "'exp_avg' must be a floating-point tensor",
    ),
    "no memory": (
        lambda state: state.update(exp_avg=TwoTensor(*[torch.zeros_like(state["exp_avg"])] * 2)),
        "'exp_avg' must be a floating-point tensor",
    ),
    "a key too many": (lambda state: state.update(mine=torch.ones(3)), "has 'mine', which has no place"),
}


def _edits(name: str) -> list[tuple[Callable[[dict[str, Any]], Any], str]]:
    return [edit for key, edit in EDITS.items() if name != IN_PROCESS or key != "a key too many"]


def _replace(rank: int, world_size: int, name: str, dtype: torch.dtype, folder: Path) -> list[str]:
    param = nn.Parameter(torch.zeros(64, 32, dtype=dtype))
    optimizer = zero_opt.ShardedOptimizer(
        [param], torch.optim.AdamW, lr=0.1, offload=OFFLOADS[name](folder), reduction=zero_opt.AtStep(), fused=True
    )
    (param.sum() * (1 + rank)).backward()
    optimizer.step()
    before, said = param.detach().clone(), []
    for number, (edit, _) in enumerate(_edits(name) * 2):
        good = dict(optimizer.state[param].items())
        in_place = number >= len(_edits(name))
        entry: Any = optimizer.state[param] if in_place else dict(good)
        if rank == 0:
            edit(entry)
            optimizer.state[param] = entry
        with pytest.raises(zero_opt.StateDictError) as caught:
            optimizer.step()
        said.append(str(caught.value))
        assert_bitwise(param.detach(), before)
        if rank == 0 and not in_place:
            optimizer.state[param] = good
        elif rank == 0:
            for key in entry.keys() - good.keys():
                del entry[key]
            entry.update(good)
    optimizer.step()
    assert not torch.equal(param.detach(), before)
    optimizer.close()
    return said


@pytest.mark.parametrize("name", OFFLOADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world_size", [1, 2])
def test_state_that_does_not_fit_is_refused_on_every_rank(
    world_size: int, dtype: torch.dtype, name: str, tmp_path: Path
) -> None:
    for rank, said in enumerate(run_processes(world_size, _replace, name, dtype, tmp_path)):
        for text, (_, wanted) in zip(said, _edits(name) * 2, strict=True):
            assert text.startswith("rank 0: opt.state of" if rank else "opt.state of") and wanted in text, text


def _replaced_whole(rank: int, world_size: int, offload: Any) -> None:
    param = nn.Parameter(torch.zeros(64, 32))
    optimizer = zero_opt.ShardedOptimizer([param], torch.optim.AdamW, lr=0.1, fused=True, offload=offload)
    param.sum().backward()
    optimizer.step()
    before, live = param.detach().clone(), optimizer.state[param]
    for wrong in (3, "x", [1]):
        optimizer.state[param] = wrong if rank == world_size - 1 else live  # type: ignore[assignment]
        with pytest.raises(zero_opt.StateDictError, match=r"opt\.state of parameter 0.* is no dict"):
            optimizer.step()
        assert_bitwise(param.detach(), before)
        optimizer.state[param] = live
    optimizer.step()
    optimizer.close()


@pytest.mark.parametrize("offload", [None, zero_opt.CPUOffload(), zero_opt.WorkerOffload(threads=1)], ids=repr)
def test_an_entry_that_is_no_dict_is_named_on_every_rank(offload: Any) -> None:
    run_processes(2, _replaced_whole, offload)


def _entry_of_no_param(rank: int, world_size: int, offload: Any, key: Any) -> None:
    param = nn.Parameter(torch.zeros(64, 32))
    optimizer = zero_opt.ShardedOptimizer([param], torch.optim.AdamW, lr=0.1, fused=True, offload=offload)
    for _ in range(2):
        param.sum().backward()
        if rank == world_size - 1:
            optimizer.state[key] = {"count": 1}  # type: ignore[assignment]
        before = param.detach().clone()
        for call in (optimizer.step, optimizer.consolidate_state_dict):
            with pytest.raises(
                zero_opt.StateDictError, match=r"has an entry under .*, which is none of its parameters"
            ):
                call()
        assert_bitwise(param.detach(), before)
        optimizer.state.pop(key, None)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()


@pytest.mark.parametrize("key", ["mine", torch.zeros(2)], ids=["text", "tensor"])
@pytest.mark.parametrize("offload", [None, zero_opt.CPUOffload(), zero_opt.WorkerOffload(threads=1)], ids=repr)
def test_an_entry_of_no_parameter_is_refused_on_every_rank(offload: Any, key: Any) -> None:
    """It would be in no checkpoint."""
    run_processes(2, _entry_of_no_param, offload, key)


def _replace_split(rank: int, world_size: int) -> None:
    param = nn.Parameter(torch.zeros(64, 32, dtype=torch.bfloat16))
    optimizer = zero_opt.ShardedOptimizer(
        [param],
        torch.optim.AdamW,
        lr=0.1,
        precision=zero_opt.MixedPrecision("split"),
        reduction=zero_opt.AtStep(),
        fused=True,
    )
    (param.sum() * (1 + rank)).backward()
    optimizer.step()
    before, live = param.detach().clone(), optimizer.state[param]
    wide = {key: value.double() if key == "exp_avg" else value for key, value in live.items()}
    for key, wrong in (
        ("exp_avg", torch.zeros(1, 32)),
        ("exp_avg_sq", torch.zeros(64, 32, dtype=torch.int64)),
        ("remainder", torch.zeros(3, dtype=torch.int16)),
    ):
        for entry in (dict(live), {k: v for k, v in live.items() if k != "remainder"}):
            if key == "remainder" and key not in entry:
                continue
            entry[key] = wrong
            if rank == 0:
                optimizer.state[param] = entry
            with pytest.raises(zero_opt.StateDictError, match=r"opt\.state"):
                optimizer.step()
            assert_bitwise(param.detach(), before)
            optimizer.state[param] = live
    optimizer.state[param] = wide
    optimizer.step()
    assert optimizer.state[param]["exp_avg"].dtype is torch.float32
    optimizer.close()


@pytest.mark.parametrize("world_size", [1, 2])
def test_state_that_does_not_fit_a_split_master_is_refused_on_every_rank(world_size: int) -> None:
    run_processes(world_size, _replace_split)


DROPS: dict[str, Callable[[Any, nn.Parameter], Any]] = {
    "cleared": lambda state, param: state[param].clear(),
    "an empty dict": lambda state, param: state.update({param: {}}),
    "popped": lambda state, param: state.pop(param),
    "no momentum": lambda state, param: state[param].pop("momentum_buffer", None),
    "momentum of None": lambda state, param: state[param].update(momentum_buffer=None),
}
LATE = zero_opt.WorkerOffload(delay=1)
PLACES: dict[str, Callable[[Path], Any]] = {
    **{name: OFFLOADS[name] for name in ("worker", "nvme", "cpu")},
    "none": lambda _: None,
    "worker, late": lambda _: LATE,
    "worker, speculating": lambda _: zero_opt.WorkerOffload(speculate=True),
}


def _afresh(rank: int, world_size: int, name: str, folder: Path) -> list[str]:
    """Return the cases in which a dropped state has not begun anew, as it does under the class itself."""
    wrong = []
    momentum = {"lr": 0.1, "momentum": 0.9}
    for cls, options in ((torch.optim.AdamW, {"lr": 0.1}), (torch.optim.SGD, momentum)):
        for how, drop in DROPS.items():
            if cls is torch.optim.AdamW and "momentum" in how:
                continue
            ours, plain = ([nn.Parameter(torch.ones(numel)) for numel in (300, 64)] for _ in range(2))
            offload = PLACES[name](folder)
            optimizer = zero_opt.ShardedOptimizer(ours, cls, offload=offload, fused=True, **options)
            reference = cls(plain, fused=True, **options)
            for step in range(5):
                for params, stepped in ((ours, optimizer), (plain, reference)):
                    sum((param * (0.5, -1.0, 0.25, 2.0, -0.5)[step]).sum() for param in params).backward()
                    stepped.step()
                    stepped.zero_grad()
                if step == 1:
                    optimizer.flush()
                    for mine, its in zip(ours, plain, strict=True):
                        drop(optimizer.state, mine)
                        drop(reference.state, its)
            optimizer.flush()
            optimizer.consolidate_state_dict(to=0)
            same = all(map(torch.equal, ours, plain))
            if rank == 0:
                kept = optimizer.state_dict()["state"]
                same = same and kept.keys() == {0, 1} and _same_state(kept, reference)
            if not same:
                wrong.append(f"{cls.__name__}, {how}")
            optimizer.close()
    return wrong


def _same_state(kept: dict[int, dict[str, Any]], reference: torch.optim.Optimizer) -> bool:
    wanted = reference.state_dict()["state"]
    return all(torch.equal(kept[index][key], value) for index in wanted for key, value in wanted[index].items())


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("world_size", [1, 2])
def test_state_that_the_user_drops_begins_anew(world_size: int, name: str, tmp_path: Path) -> None:
    for wrong in run_processes(world_size, _afresh, name, tmp_path):
        assert not wrong


MOVES: dict[str, Callable[[Any, str], Any]] = {
    "assigned": lambda state, key: state.update({key: torch.zeros_like(state[key])}),
    "data": lambda state, key: setattr(state[key], "data", torch.zeros_like(state[key])),
    "set": lambda state, key: state[key].set_(torch.zeros_like(state[key])),
    "swapped": lambda state, key: torch.utils.swap_tensors(state[key], torch.zeros_like(state[key])),
}
UNTOUCHED = "untouched"
COMPACT = zero_opt.AdamState("bfloat16", None)


def _moved(rank: int, world_size: int, name: str, folder: Path) -> list[str]:
    """Return the ways to give a state tensor other memory that have not the effect of an assignment."""
    wrong = []
    kinds: list[tuple[Any, dict[str, Any]]] = [
        (torch.optim.AdamW, {"fused": True}),
        (zero_opt.CPUAdamW, {"state": COMPACT}),
    ]
    for cls, options in kinds:
        ends: dict[str, list[torch.Tensor]] = {}
        for way, move in {**MOVES, UNTOUCHED: lambda state, key: None}.items():
            params = [nn.Parameter(torch.ones(numel)) for numel in (300, 64)]
            optimizer = zero_opt.ShardedOptimizer(params, cls, lr=0.1, offload=PLACES[name](folder), **options)
            for step in range(4):
                sum((param * (0.5, -1.0, 0.25, 2.0)[step]).sum() for param in params).backward()
                optimizer.step()
                optimizer.zero_grad()
                optimizer.flush()
                state = optimizer.state[params[0]]
                if step == 1 and "exp_avg" in state:
                    with torch.no_grad():
                        move(state, "exp_avg")
            ends[way] = [param.detach().clone() for param in params]
            optimizer.close()
        wrong += [
            f"{cls.__name__}, {way}"
            for way, end in ends.items()
            if all(map(torch.equal, end, ends["assigned"])) == (way == UNTOUCHED)
        ]
    return wrong


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("world_size", [1, 2])
def test_state_that_the_user_gives_other_memory_is_followed(world_size: int, name: str, tmp_path: Path) -> None:
    for wrong in run_processes(world_size, _moved, name, tmp_path):
        assert not wrong


RESHAPED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "fewer elements": lambda state: state["exp_avg"].resize_(3),
    "a dimension more": lambda state: state["exp_avg_sq"].unsqueeze_(0),
    "dimensions exchanged": lambda state: state["exp_avg"].t_(),
    "three steps": lambda state: state["step"].resize_(3),
}
# What is left of the value that is edited in place, in another order or under another key, and the same as a new value.
MOVED: dict[str, tuple[Callable[[dict[str, Any]], Any], Callable[[dict[str, Any]], Any]]] = {
    "transposed": (
        lambda state: state["exp_avg"].t_(),
        lambda state: state.update(exp_avg=state["exp_avg"].t().clone()),
    ),
    "exchanged": (
        lambda state: state.update(exp_avg=state["exp_avg_sq"], exp_avg_sq=state["exp_avg"].abs_()),
        lambda state: state.update(exp_avg=state["exp_avg_sq"].clone(), exp_avg_sq=state["exp_avg"].abs()),
    ),
}


def _stepped_once(name: str, folder: Path, shape: tuple[int, int]) -> tuple[nn.Parameter, zero_opt.ShardedOptimizer]:
    param = nn.Parameter(torch.ones(shape))
    optimizer = zero_opt.ShardedOptimizer(
        [param], torch.optim.AdamW, lr=0.1, offload=OFFLOADS[name](folder), fused=True
    )
    _step(param, optimizer)
    return param, optimizer


def _step(param: nn.Parameter, optimizer: zero_opt.ShardedOptimizer) -> None:
    (param * torch.linspace(-1, 2, param.numel()).view_as(param)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.flush()


@pytest.mark.parametrize("edit", RESHAPED)
@pytest.mark.parametrize("name", OFFLOADS)
def test_a_value_with_another_shape_in_its_place_is_an_error(name: str, edit: str, tmp_path: Path) -> None:
    param, optimizer = _stepped_once(name, tmp_path, (8, 4))
    before = param.detach().clone()
    RESHAPED[edit](optimizer.state[param])
    with pytest.raises(zero_opt.StateDictError, match=r"parameter 0 .*must (be|have)"):
        _step(param, optimizer)
    assert_bitwise(param.detach(), before)
    optimizer.state.clear()
    _step(param, optimizer)
    assert optimizer.state_dict()["state"][0]["exp_avg"].shape == (8, 4)
    optimizer.close()


@pytest.mark.parametrize("edit", MOVED)
@pytest.mark.parametrize("name", OFFLOADS)
def test_a_value_in_its_memory_in_another_order_is_adopted(name: str, edit: str, tmp_path: Path) -> None:
    results = []
    for change in MOVED[edit]:
        param, optimizer = _stepped_once(name, tmp_path, (4, 4))
        change(optimizer.state[param])
        _step(param, optimizer)
        results.append((param.detach(), optimizer.state_dict()["state"]))
        optimizer.close()
    assert_bitwise(*results)


ODD = {
    "no values": (lambda: torch.empty(5, 3, device="meta"), r"'exp_avg' must be .*on the meta device"),
    "a share of elements": (lambda: torch.ones(5, 3).to_sparse(), r"'exp_avg' must be .*torch.sparse_coo"),
    "integers": (lambda: torch.ones(5, 3, dtype=torch.int32), r"'exp_avg' must be a floating.* and is torch.int32$"),
}


def _put_in_full_shape(rank: int, world_size: int, name: str, folder: Path) -> None:
    param, optimizer = _stepped_once(name, folder, (5, 3))
    good = optimizer.state[param]["exp_avg"]
    for value, message in ODD.values():
        optimizer.state[param]["exp_avg"] = value()
        with pytest.raises(zero_opt.StateDictError, match=rf"parameter 0 .*{message}"):
            _step(param, optimizer)
        optimizer.state[param]["exp_avg"] = good
    _step(param, optimizer)
    optimizer.close()


@pytest.mark.parametrize("name", ["worker", "cpu"])
def test_odd_values_in_a_parameters_full_shape_are_named(name: str, tmp_path: Path) -> None:
    run_processes(2, _put_in_full_shape, name, tmp_path)
