"""Compact state saved by three ranks goes on to the bit at other world sizes: in torch's form, and as it is."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import zero_opt
from test.support.compact_training import FORMS, Form, backward, groups_of, make_optimizer, make_params, plain_steps
from test.support.harness import assert_bitwise, run_processes
from test.support.scenario import BUCKET_MB
from test.support.scenario import values as numbers
from zero_opt.state.row_sharded import full_of

BEFORE, AFTER = 5, 4
REDUCTION = zero_opt.Overlapped(BUCKET_MB)
OFFLOADS: dict[str, Callable[[Path], Any]] = {
    "device": lambda _: None,
    "cpu": lambda _: zero_opt.CPUOffload(),
    "worker": lambda _: zero_opt.WorkerOffload(threads=1),
    "nvme": lambda folder: zero_opt.NVMeOffload(folder),
}


def _steps(params: list[nn.Parameter], form: Form, optimizer: Any, steps: range, rank: int, world_size: int) -> None:
    for step in steps:
        optimizer.zero_grad()
        backward(params, form, REDUCTION, step, rank, world_size)
        optimizer.step()


def _save(rank: int, world_size: int, forms: dict[str, Form], folder: Path, offload: Any) -> dict[str, Any]:
    found = {}
    for name, form in forms.items():
        params = make_params(form)
        optimizer = make_optimizer(params, form, REDUCTION, offload=offload)
        _steps(params, form, optimizer, range(BEFORE), rank, world_size)
        dcp.save(zero_opt.sharded_state_dict(optimizer, compact=True), checkpoint_id=folder / name)
        optimizer.consolidate_state_dict()
        state = optimizer.state_dict() if rank == 0 else None
        optimizer.close()
        found[name] = [param.detach() for param in params], state
    return found


def _resume(rank: int, world_size: int, saved: dict[str, Any], folder: Path, offload: Any) -> list[Any]:
    """Go on from full state dicts, and from folders of compact ones."""
    found = []
    for (name, (values, state_dict)), compact in ((item, how) for item in saved.items() for how in (False, True)):
        form, params = FORMS[name], [nn.Parameter(value.clone()) for value in values]
        alone = world_size == 1 and offload is None and form.state.master is None
        optimizer = make_optimizer(
            params, form, REDUCTION, offload=offload, **({"max_grad_norm": None} if alone else {})
        )
        if compact:
            into = zero_opt.sharded_state_dict(optimizer, compact=True)
            dcp.load(into, checkpoint_id=folder / name)
            zero_opt.load_sharded_state_dict(optimizer, into)
        else:
            optimizer.load_state_dict(state_dict)
        _steps(params, form, optimizer, range(BEFORE, BEFORE + AFTER), rank, world_size)
        optimizer.consolidate_state_dict()
        state = optimizer.state_dict()["state"] if rank == 0 else None
        optimizer.close()
        found.append((name, [param.detach() for param in params], state))
    return found


@pytest.mark.parametrize(
    ("first", "then", "world_size"),
    [("device", "worker", 2), ("worker", "nvme", 5), ("nvme", "device", 2), ("cpu", "cpu", 2), ("cpu", "device", 1)],
)
def test_saved_at_three_ranks_and_resumed_at_others(first: str, then: str, world_size: int, tmp_path: Path) -> None:
    saved = run_processes(3, _save, FORMS, tmp_path, OFFLOADS[first](tmp_path))[0]
    runs = run_processes(world_size, _resume, saved, tmp_path, OFFLOADS[then](tmp_path))
    for number, (name, _, state) in enumerate(runs[0]):
        form = FORMS[name]
        params = make_params(form)
        plain = zero_opt.CPUAdamW(groups_of(params), lr=0.02, state=form.state)
        list(islice(plain_steps(form, 3, REDUCTION, params, plain), BEFORE))
        assert_bitwise(saved[name][0], [param.detach() for param in params], f"{name}, saved")
        clip = world_size > 1 or then != "device" or form.state.master is not None
        list(islice(plain_steps(form, world_size, REDUCTION, params, plain, clip=clip, step=BEFORE), AFTER))
        for run in runs:
            assert_bitwise(run[number][1], [param.detach() for param in params], f"{name}, {number}")
        assert_bitwise(state, plain.state_dict()["state"], f"{name}, {number}, state")


def _in_layouts(dtype: torch.dtype) -> list[nn.Parameter]:
    made = [
        numbers(1, 0, 0, 0, (20, 33)),
        numbers(1, 0, 0, 1, (33, 20)).t(),
        numbers(1, 0, 0, 2, (2, 64, 4, 5)).to(memory_format=torch.channels_last),
        numbers(1, 0, 0, 3, (8, 64, 1, 1)).to(memory_format=torch.channels_last),
        numbers(1, 0, 0, 4, (33, 40))[:, ::2].t(),
        numbers(1, 0, 0, 5, (1, 130)).t(),
        numbers(1, 0, 0, 6, ()),
    ]
    return [nn.Parameter(value.to(dtype)) for value in made]


def _made_full(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """Save parameters of any layout, and load full tensors in the ways there are to make them."""
    states = {}
    for name, form in FORMS.items():
        params = _in_layouts(form.dtype)
        optimizer = zero_opt.ShardedOptimizer(params, zero_opt.CPUAdamW, state=form.state)
        torch.autograd.backward(params, [torch.sin(9 * param.detach()) for param in params])
        optimizer.step()
        before = copy.deepcopy(optimizer.state_dict()["state"])
        saved = zero_opt.sharded_state_dict(optimizer, compact=True)
        dcp.save({"opt": saved}, checkpoint_id=folder / name)
        if rank == 0:
            dcp_to_torch_save(folder / name, folder / f"{name}.pt")
        dist.barrier()
        full = {
            i: {k: full_of(v) if isinstance(v, Tensor) else v for k, v in e.items()} for i, e in saved["state"].items()
        }
        row_major = {
            i: {k: v.contiguous() if isinstance(v, Tensor) else v for k, v in e.items()} for i, e in full.items()
        }
        file = torch.load(folder / f"{name}.pt", weights_only=True)["opt"]
        for made in ({**saved, "state": full}, {**saved, "state": row_major}, file, saved):
            zero_opt.load_sharded_state_dict(optimizer, made)
            assert_bitwise(optimizer.state_dict()["state"], before, name)
        states[name] = before, [param.detach() for param in params]
        optimizer.close()
    return states


def _load_file(rank: int, world_size: int, saved: dict[str, Any], folder: Path) -> None:
    for name, (state, values) in saved.items():
        params = _in_layouts(FORMS[name].dtype)
        with torch.no_grad():
            for param, value in zip(params, values, strict=True):
                param.copy_(value)
        optimizer = zero_opt.ShardedOptimizer(params, zero_opt.CPUAdamW, state=FORMS[name].state)
        zero_opt.load_sharded_state_dict(optimizer, torch.load(folder / f"{name}.pt", weights_only=True)["opt"])
        assert_bitwise(optimizer.state_dict()["state"], state, name)
        optimizer.close()


@pytest.mark.parametrize(("first", "then"), [(1, 2), (2, 3), (3, 1)])
def test_full_tensors_of_parameters_in_any_layout(first: int, then: int, tmp_path: Path) -> None:
    saved = run_processes(first, _made_full, tmp_path)[0]
    run_processes(then, _load_file, saved, tmp_path)


def test_a_compact_checkpoint_is_as_small_as_the_state() -> None:
    form = FORMS["block8, split"]
    params = make_params(form)
    optimizer = make_optimizer(params, form, zero_opt.AtStep(), offload=zero_opt.CPUOffload())
    _steps(params, form, optimizer, range(4), 0, 1)
    saved, plain = zero_opt.sharded_state_dict(optimizer, compact=True), zero_opt.sharded_state_dict(optimizer)
    states = {index: saved["state"][index] for index in saved["state"] if params[index] in optimizer.state}
    sizes = [sum(value.nbytes for state in states.values() for value in state.values())]
    sizes += [sum(value.nbytes for state in plain["state"].values() for value in state.values())]
    assert sizes[0] == optimizer.memory_report()["state"] < 0.5 * sizes[1]  # of some, amsgrad's state too
    assert all("exp_avg" not in state for state in saved["state"].values())
    with pytest.raises(zero_opt.StateDictError, match=r"load it with zero_opt.load_sharded_state_dict"):
        optimizer.load_state_dict(saved)
    other = torch.optim.AdamW(groups_of([nn.Parameter(param.detach().clone()) for param in params]))
    other.load_state_dict({key: saved[key] for key in ("state", "param_groups")})
    for group in other.param_groups:
        for param in group["params"]:
            param.grad = torch.ones_like(param)
    with pytest.raises(KeyError, match="exp_avg"):  # torch has no values to go on from
        other.step()
    optimizer.close()


def test_what_does_not_fit_is_refused() -> None:
    options: dict[str, Any] = {"lr": 0.1, "offload": zero_opt.CPUOffload(), "state": zero_opt.AdamState("block8")}
    param = nn.Parameter(torch.ones(40, 30))
    optimizer = zero_opt.ShardedOptimizer([param], zero_opt.CPUAdamW, **options)
    param.sum().backward()
    optimizer.step()
    saved = zero_opt.sharded_state_dict(optimizer, compact=True)
    turned = zero_opt.ShardedOptimizer([nn.Parameter(torch.ones(30, 40).t())], zero_opt.CPUAdamW, **options)
    with pytest.raises(zero_opt.StateDictError, match="another order of elements in memory"):
        zero_opt.load_sharded_state_dict(turned, saved)
    saved["state"][0]["exp_avg_base"] = torch.zeros(3, dtype=torch.int16)
    with pytest.raises(
        zero_opt.StateDictError, match=r"'exp_avg_base' of parameter 0 must be torch.int16 of shape \(19"
    ):
        zero_opt.load_sharded_state_dict(optimizer, saved)
    optimizer.close()
    turned.close()


def _differ(rank: int, world_size: int, values: Tensor) -> str:
    param = nn.Parameter(values.clone())
    optimizer = zero_opt.ShardedOptimizer([param], zero_opt.CPUAdamW, lr=0.1, state=zero_opt.AdamState("block8"))
    param.sum().backward()
    optimizer.step()
    with pytest.raises(zero_opt.RankMismatch) as caught:
        zero_opt.sharded_state_dict(optimizer, compact=rank == 1)
    optimizer.close()
    return str(caught.value)


def test_ranks_that_save_in_different_forms_are_told() -> None:
    for said in run_processes(2, _differ, torch.ones(300)):
        assert "sharded_state_dict(compact=True)" in said


def _load_cut_apart(rank: int, world_size: int, key: str) -> list[str]:
    """On both ranks one tensor is whole where the others are cut; then on rank 0 alone."""
    param = nn.Parameter(numbers(1, 0, 0, 0, (200, 50)).bfloat16())
    state = zero_opt.AdamState("block8", "split")
    optimizer = zero_opt.ShardedOptimizer([param], zero_opt.CPUAdamW, lr=0.1, state=state)
    param.backward(numbers(2, 0, rank, 0, (200, 50)).bfloat16())
    optimizer.step()
    said = []
    for ranks in ((0, 1), (0,)):
        saved = zero_opt.sharded_state_dict(optimizer, compact=True)
        whole = saved["state"][0][key].full_tensor()
        if rank in ranks:
            saved["state"][0][key] = whole
        with pytest.raises(zero_opt.StateDictError) as caught:
            zero_opt.load_sharded_state_dict(optimizer, saved)
        said.append(str(caught.value))
    optimizer.close()
    return said


@pytest.mark.parametrize("key", ["exp_avg_codes", "exp_avg_sq_codes"])
def test_tensors_that_are_cut_in_different_ways_are_refused(key: str) -> None:
    for said in run_processes(2, _load_cut_apart, key):
        assert all("elements that are not the same" in text for text in said)


def _set(key: str, made: Callable[[Tensor], Any]) -> Callable[[dict[str, Any]], None]:
    """Return what puts another value into the entry of parameter 0, made of the one there, or of zeros if it is cut."""

    def tamper(state: dict[str, Any]) -> None:
        entry = state[0]
        value = entry.get(key, torch.zeros(3))
        entry[key] = made(torch.zeros(value.shape, dtype=value.dtype) if hasattr(value, "to_local") else value)

    return tamper


def _first(value: int) -> Callable[[Tensor], Tensor]:
    return lambda tensor: torch.cat([tensor.new_tensor([value]), tensor[1:]])


def _lower(state: dict[str, Any]) -> None:
    base = state[0]["exp_avg_sq_base"]
    (base.to_local() if hasattr(base, "to_local") else base)[-1] = -1


def _move_to_another(state: dict[str, Any]) -> None:
    state[7] = state.pop(0)


TWICE: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "twice": (_set("exp_avg", lambda _: torch.ones(200, 50)), r"parameter 0 has state 'exp_avg' twice"),
    "master twice": (_set("master", lambda _: torch.ones(200, 50)), r"parameter 0 has state 'master' twice"),
}
TAMPERED: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "base too high": (_set("exp_avg_base", _first(1918)), r"'exp_avg_base' of parameter 0 must be from 0 to 1917"),
    "sq's too high": (
        _set("exp_avg_sq_base", _first(1790)),
        r"'exp_avg_sq_base' of parameter 0 must be from 0 to 1789",
    ),
    "base below 0": (_lower, r"'exp_avg_sq_base' of parameter 0 must be from 0 to 1789, and has -1"),
    **TWICE,
    "unknown": (_set("other", lambda _: torch.ones(3)), r"parameter 0 has 'other', which was not saved"),
    "missing": (lambda state: state[0].pop("exp_avg_sq_codes"), r"has state 'exp_avg_sq_codes' of parameter 0, but"),
    "elsewhere": (_move_to_another, r"of parameter 0, but the state dict"),
    **{
        f"{key}, {how}": (_set(key, made), rf"'{key}' of parameter 0")
        for key in ("step", "exp_avg_codes", "exp_avg_sq_base", "remainder")
        for how, made in {"meta": lambda value: value.to("meta"), "sparse": Tensor.to_sparse}.items()
    },
}
# In state dicts that do not say which state is real.
UNSAID: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    **TWICE,
    "codes apart": (lambda state: state[0].pop("exp_avg_codes"), r"'exp_avg_codes' of parameter 0 must be"),
    "no codes": (lambda state: [state[0].pop(f"{key}_codes") for key in ("exp_avg", "exp_avg_sq")], r"_codes' of"),
    "elsewhere": (_move_to_another, r"state for parameter 7, which is in no param group"),
    "below 0": (lambda state: state.update({-1: state.pop(0)}), r"state for parameter -1, which is in no param group"),
    "no number": (lambda state: state.update({"first": state.pop(0)}), r"parameter 'first', which is no number"),
}


def _load_tampered(rank: int, world_size: int) -> None:
    """Only the last rank's is another."""
    param = nn.Parameter(numbers(1, 0, 0, 0, (200, 50)).bfloat16())
    state = zero_opt.AdamState("block8", "split")
    optimizer = zero_opt.ShardedOptimizer(
        [param], zero_opt.CPUAdamW, lr=0.1, state=state, offload=zero_opt.CPUOffload()
    )
    param.backward(numbers(2, 0, rank, 0, (200, 50)).bfloat16())
    optimizer.step()
    before = optimizer.state_dict()
    for said, unsaid in ((True, TAMPERED), (False, UNSAID)):
        for name, (tamper, text) in unsaid.items():
            saved = zero_opt.sharded_state_dict(optimizer, compact=True)
            if not said:
                del saved["with_state"]
            if rank == world_size - 1:
                tamper(saved["state"])
            with pytest.raises(zero_opt.StateDictError) as caught:
                zero_opt.load_sharded_state_dict(optimizer, saved)
            assert re.search(text, str(caught.value)), (name, str(caught.value))
    assert_bitwise(optimizer.state_dict()["state"], before["state"])
    optimizer.close()


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_was_tampered_with_is_refused_on_every_rank(world_size: int) -> None:
    run_processes(world_size, _load_tampered)


def _load_into_another_model(rank: int, world_size: int, moments: str, by: str) -> None:
    form, saved, params = zero_opt.AdamState(moments, "split"), dict[str, Any](), list[list[nn.Parameter]]()
    for start in (0.5, 0.25):
        params.append([nn.Parameter(torch.full((3, 2048), start, dtype=torch.bfloat16)) for _ in range(2)])
        optimizer = zero_opt.ShardedOptimizer(params[-1], zero_opt.CPUAdamW, lr=0.02, state=form)
        if not saved:
            params[0][0].sum().backward()  # the second has no state
            optimizer.step()
            for param in params[0] if by == "data" else ():
                param.data = param.detach() * 2
            saved = zero_opt.sharded_state_dict(optimizer, compact=True)
    with pytest.raises(zero_opt.StateDictError, match=r"remainder.* of parameter 0 .* load the model first"):
        zero_opt.load_sharded_state_dict(optimizer, saved)
    assert not any(optimizer.state.values())
    with torch.no_grad():
        for ours, theirs in zip(params[1], params[0], strict=True):
            if by == "data":
                ours.data = theirs.detach().clone()
            else:
                ours.copy_(theirs)
    zero_opt.load_sharded_state_dict(optimizer, saved)
    optimizer.close()


@pytest.mark.parametrize("moments", ["float32", "block8"])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("by", ["copy", "data"])
def test_half_of_a_master_is_refused_by_a_model_that_was_not_loaded(by: str, world_size: int, moments: str) -> None:
    """``by``: how the model is loaded: in place, or by ``p.data``, which is set before the save too."""
    run_processes(world_size, _load_into_another_model, moments, by)


@pytest.mark.parametrize("compact", [False, True])
def test_state_of_a_parameter_that_no_group_has_is_refused(compact: bool) -> None:
    optimizer = _of_one_parameter()
    saved = zero_opt.sharded_state_dict(optimizer, compact=compact)
    saved["state"][7] = saved["state"][0]
    with pytest.raises(zero_opt.StateDictError, match="state for parameter 7, which is in no param group"):
        zero_opt.load_sharded_state_dict(optimizer, saved)


@pytest.mark.parametrize("key", ["orders", "halves"])
def test_compact_state_without_what_belongs_to_it_is_refused(key: str) -> None:
    optimizer = _of_one_parameter()
    saved = zero_opt.sharded_state_dict(optimizer, compact=True)
    del saved[key]
    with pytest.raises(zero_opt.StateDictError, match=rf"no '{key}', which sharded_state_dict\(compact=True\) puts in"):
        zero_opt.load_sharded_state_dict(optimizer, saved)


def _of_one_parameter() -> zero_opt.ShardedOptimizer:
    param = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    optimizer = zero_opt.ShardedOptimizer([param], zero_opt.CPUAdamW, state=zero_opt.AdamState("block8", "split"))
    param.grad = torch.ones_like(param)
    optimizer.step()
    return optimizer
