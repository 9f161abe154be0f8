"""Options that are switched on later, of groups that lie on one rank alone: torch's bits, or one error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_opt
from test.support.harness import assert_bitwise, run_processes
from test.support.scenario import BUCKET_MB, values
from zero_opt.placement.worker.banked_shard import BankedShard

SELECTIVE = zero_opt.Selective(topk_ratio=0.5, update_interval=1)
PLACES: dict[str, Callable[[Path], Any]] = {
    "worker": lambda _: zero_opt.WorkerOffload(),
    "delayed": lambda _: zero_opt.WorkerOffload(delay=1),
    "speculating": lambda _: zero_opt.WorkerOffload(speculate=True),
    "file": zero_opt.NVMeOffload,
}
PLACED = pytest.mark.parametrize("place", PLACES)
SHAPES = ((16,), (16,), (6, 8))
STEPS = 5


def _grads(step: int) -> list[Tensor]:
    return [values(step, 1, 0, index, shape) for index, shape in enumerate(SHAPES)]


def _groups() -> list[dict[str, Any]]:
    """A group each, so that each has a bucket of its own: one rank has no part of some groups."""
    return [{"params": [nn.Parameter(torch.ones(shape))]} for shape in SHAPES]


def _backward(groups: list[dict[str, Any]], step: int) -> None:
    params = [group["params"][0] for group in groups]
    torch.autograd.backward(params, _grads(step))


def _params(optimizer: Any) -> list[Tensor]:
    return [param.detach() for group in optimizer.param_groups for param in group["params"]]


def _sharded(groups: Any, cls: Any, offload: Any, **options: Any) -> Any:
    """One rank has no part of the last two groups."""
    reduction = zero_opt.Overlapped(BUCKET_MB)
    return zero_opt.ShardedOptimizer(groups, cls, offload=offload, reduction=reduction, fused=True, **options)


def _momentum_steps(groups: Any, optimizer: Any, at: int, flush: bool) -> None:
    """Momentum comes before step ``at``, goes for a step, and comes back."""
    optimizer.add_param_group(groups[2])
    for step in range(STEPS):
        if step >= at:
            optimizer.param_groups[1]["momentum"] = optimizer.param_groups[2]["momentum"] = 0.9 * (step != at + 1)
        optimizer.zero_grad()
        _backward(groups, step)
        optimizer.step()
        if flush and step % 2:
            optimizer.flush()


def _momentum(rank: int, world_size: int, at: int, offload: Any, flush: bool) -> Any:
    groups = _groups()
    optimizer = _sharded(groups[:2], torch.optim.SGD, offload, lr=0.1)
    _momentum_steps(groups, optimizer, at, flush)
    optimizer.consolidate_state_dict()
    state = optimizer.state_dict()["state"] if rank == 0 else {}
    found = _params(optimizer)
    optimizer.close()
    return found, state


def _check_momentum(at: int, offload: Any, flush: bool) -> None:
    groups = _groups()
    plain = torch.optim.SGD(groups[:2], lr=0.1, fused=True)
    _momentum_steps(groups, plain, at, False)
    found = run_processes(2, _momentum, at, offload, flush)
    for params, _ in found:
        assert_bitwise(params, _params(plain))
    state = {index: entry for index, entry in found[0][1].items() if entry}
    assert_bitwise(state, {index: entry for index, entry in plain.state_dict()["state"].items() if entry})
    assert len(state) == 2


@pytest.mark.parametrize(("at", "flush"), [(0, False), (2, False), (2, True)])
@PLACED
def test_a_momentum_that_comes_later_begins_with_the_next_gradient(
    place: str, at: int, flush: bool, tmp_path: Path
) -> None:
    _check_momentum(at, PLACES[place](tmp_path), flush)


@pytest.mark.parametrize("at", [0, 2])
def test_a_momentum_that_stays_in_one_bank_is_noticed(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step without momentum writes the other bank, from which the step after it would read an older one."""
    monkeypatch.setattr(BankedShard, "_carry_over", lambda *_: None)
    with pytest.raises(AssertionError, match="elements differ"):
        _check_momentum(at, zero_opt.WorkerOffload(speculate=True), False)


def _scheduled(rank: int, world_size: int, offload: Any) -> list[Tensor]:
    groups = _groups()
    return _one_cycle(groups, _sharded(groups, torch.optim.SGD, offload, lr=0.1))


def _one_cycle(groups: Any, optimizer: Any) -> list[Tensor]:
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=STEPS)
    for step in range(STEPS - 1):
        optimizer.zero_grad()
        _backward(groups, step)
        optimizer.step()
        scheduler.step()
    if isinstance(optimizer, zero_opt.ShardedOptimizer):
        optimizer.flush()
    return _params(optimizer)


@PLACED
def test_a_scheduler_that_brings_the_momentum(place: str, tmp_path: Path) -> None:
    groups = _groups()
    wanted = _one_cycle(groups, torch.optim.SGD(groups, lr=0.1, fused=True))
    for found in run_processes(2, _scheduled, PLACES[place](tmp_path)):
        assert_bitwise(found, wanted)


def _amsgrad(rank: int, world_size: int, late: bool, offload: Any) -> Any:
    groups = _groups()
    optimizer = _sharded(groups, torch.optim.AdamW, offload, lr=0.1, amsgrad=not late)
    for group in optimizer.param_groups:
        group["amsgrad"] = True
    for step in range(STEPS):
        optimizer.zero_grad()
        _backward(groups, step)
        optimizer.step()
    optimizer.consolidate_state_dict()
    found = _params(optimizer), optimizer.state_dict()["state"] if rank == 0 else {}
    optimizer.close()
    return found


@pytest.mark.parametrize("selective", [None, SELECTIVE], ids=["all", "selective"])
@pytest.mark.parametrize("place", ["worker", "delayed", "file"])
def test_amsgrad_before_the_first_step(place: str, selective: Any, tmp_path: Path) -> None:
    offload = PLACES[place](tmp_path)
    options = {key: value for key, value in vars(offload).items() if key != "selective"}
    made = type(offload)(**options, selective=selective)
    wanted, found = (run_processes(2, _amsgrad, late, made) for late in (False, True))
    assert_bitwise(found, wanted)
    assert "max_exp_avg_sq" in found[0][1][2]


IN_PROCESS: dict[str, Callable[[Path], Any]] = {"device": lambda _: None, "host": lambda _: zero_opt.CPUOffload()}


# Switched on in step 2 for what gets its first gradient then: torch makes its state with the options of that step.
SWITCHES: dict[str, tuple[Any, dict[str, Any]]] = {
    "amsgrad": (torch.optim.AdamW, {"amsgrad": True}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "RMSprop's momentum": (torch.optim.RMSprop, {"momentum": 0.9}),
    "centered": (torch.optim.RMSprop, {"centered": True}),
}


def _begin_later(groups: list[dict[str, Any]], optimizer: Any, edit: dict[str, Any]) -> None:
    for step in range(STEPS):
        if step == 2:
            optimizer.param_groups[2].update(edit)
        optimizer.zero_grad()
        _backward(groups[: 2 if step < 2 else 3], step)
        optimizer.step()


def _begun_later(rank: int, world_size: int, switch: str, offload: Any) -> Any:
    (cls, edit), groups = SWITCHES[switch], _groups()
    fused = {} if cls is torch.optim.RMSprop else {"fused": True}
    reduction = zero_opt.Overlapped(BUCKET_MB)
    optimizer = zero_opt.ShardedOptimizer(groups, cls, offload=offload, reduction=reduction, lr=0.1, **fused)
    _begin_later(groups, optimizer, edit)
    optimizer.consolidate_state_dict()
    state = optimizer.state_dict()["state"] if rank == 0 else {}
    found = _params(optimizer), state, {*optimizer.state[groups[2]["params"][0]]}
    optimizer.close()
    return found


@pytest.mark.parametrize(
    ("place", "switch"),
    [
        *((place, switch) for place in IN_PROCESS for switch in SWITCHES),
        *((place, switch) for place in PLACES for switch in ("amsgrad", "momentum")),
    ],
)
def test_an_option_that_comes_before_the_first_gradient_of_its_group(place: str, switch: str, tmp_path: Path) -> None:
    (cls, edit), groups = SWITCHES[switch], _groups()
    plain = cls(groups, lr=0.1, **({} if cls is torch.optim.RMSprop else {"fused": True}))
    _begin_later(groups, plain, edit)
    found = run_processes(2, _begun_later, switch, {**IN_PROCESS, **PLACES}[place](tmp_path))
    wanted = plain.state_dict()["state"]
    for params, _, shown in found:
        assert_bitwise(params, _params(plain))
        assert shown == {*wanted[2]}
    state = {at: {key: value for key, value in found[0][1][at].items() if value is not None} for at in found[0][1]}
    assert_bitwise(state[2], wanted[2])


def _saved_with(switch: str) -> dict[str, Any]:
    """A state dict of a plain optimizer that has made two steps with an option, which is off in it."""
    (cls, edit), groups = SWITCHES[switch], _groups()
    plain = cls(groups, lr=0.1, fused=True, **edit)
    for step in range(2):
        plain.zero_grad()
        _backward(groups, step)
        plain.step()
    saved = plain.state_dict()
    for group in saved["param_groups"]:
        group.update({key: type(value)() for key, value in edit.items()})
    return saved


def _back_on(groups: list[dict[str, Any]], optimizer: Any, edit: dict[str, Any], saved: Any) -> None:
    """An option is off in what is loaded, and comes back two steps later."""
    optimizer.load_state_dict(saved)
    for step in range(STEPS):
        for group in optimizer.param_groups if step == 2 else ():
            group.update(edit)
        optimizer.zero_grad()
        _backward(groups, step)
        optimizer.step()


def _loaded_off(rank: int, world_size: int, switch: str, offload: Any) -> Any:
    (cls, edit), groups = SWITCHES[switch], _groups()
    optimizer = _sharded(groups, cls, offload, lr=0.1)
    saved = _saved_with(switch)
    optimizer.load_state_dict(saved)
    optimizer.consolidate_state_dict()
    again = optimizer.state_dict()["state"] if rank == 0 else saved["state"]
    _back_on(groups, optimizer, edit, saved)
    optimizer.consolidate_state_dict()
    found = _params(optimizer), optimizer.state_dict()["state"] if rank == 0 else {}, again
    optimizer.close()
    return found


@pytest.mark.parametrize("switch", ["amsgrad", "momentum"])
@PLACED
def test_an_option_that_is_off_in_a_loaded_state_and_comes_back(place: str, switch: str, tmp_path: Path) -> None:
    _check_comes_back(PLACES[place](tmp_path), switch)


@pytest.mark.parametrize("policy", [zero_opt.CPUOffload, zero_opt.WorkerOffload])
def test_amsgrad_that_is_off_in_a_loaded_state_and_comes_back_to_columns(policy: Any) -> None:
    _check_comes_back(policy(selective=SELECTIVE), "amsgrad")


def _check_comes_back(offload: Any, switch: str) -> None:
    """The state that an option has left is kept meanwhile, and saved."""
    (cls, edit), groups = SWITCHES[switch], _groups()
    plain = cls(groups, lr=0.1, fused=True)
    _back_on(groups, plain, edit, _saved_with(switch))
    found = run_processes(2, _loaded_off, switch, offload)
    for params, _, again in found:
        assert_bitwise(params, _params(plain))
        _assert_has(again, _saved_with(switch)["state"])
    _assert_has(found[0][1], plain.state_dict()["state"])


def _assert_has(states: Any, wanted: Any) -> None:
    """Those of columns have more keys."""
    assert_bitwise({index: {key: states[index][key] for key in wanted[index]} for index in states}, wanted)


def _put_in(groups: list[dict[str, Any]], optimizer: Any, edit: dict[str, Any], key: str) -> None:
    """In step 2 an option is switched on, and what it needs is put into the state by hand."""
    for step in range(STEPS):
        for group in optimizer.param_groups if step == 2 else ():
            group.update(edit)
            entry = optimizer.state[group["params"][0]]
            if entry or not edit.get("amsgrad"):  # a rank may have no part of a matrix that is stepped by columns
                entry[key] = torch.full_like(group["params"][0].detach(), 0.25)
        optimizer.zero_grad()
        _backward(groups, step)
        optimizer.step()


def _put_in_by_hand(rank: int, world_size: int, cls: Any, edit: dict[str, Any], key: str, offload: Any) -> Any:
    groups = _groups()
    optimizer = _sharded(groups, cls, offload, lr=0.1)
    _put_in(groups, optimizer, edit, key)
    optimizer.consolidate_state_dict()
    found = _params(optimizer), optimizer.state_dict()["state"] if rank == 0 else {}
    optimizer.close()
    return found


ALL_COLUMNS = zero_opt.Selective(topk_ratio=1.0, update_interval=1)
KEPT = {"amsgrad": (*SWITCHES["amsgrad"], "max_exp_avg_sq"), "momentum": (*SWITCHES["momentum"], "momentum_buffer")}


@pytest.mark.parametrize("switch", KEPT)
@pytest.mark.parametrize("place", ["host", "worker", "speculating", "file"])
def test_state_that_the_user_puts_in_for_an_option(place: str, switch: str, tmp_path: Path) -> None:
    _check_put_in({**IN_PROCESS, **PLACES}[place](tmp_path), *KEPT[switch])


@pytest.mark.parametrize("policy", [zero_opt.CPUOffload, zero_opt.WorkerOffload])
def test_state_that_the_user_puts_in_for_columns(policy: Any) -> None:
    _check_put_in(policy(selective=ALL_COLUMNS), *KEPT["amsgrad"])


def _check_put_in(offload: Any, cls: Any, edit: dict[str, Any], key: str) -> None:
    groups = _groups()
    plain = cls(groups, lr=0.1, fused=True)
    _put_in(groups, plain, edit, key)
    found = run_processes(2, _put_in_by_hand, cls, edit, key, offload)
    for params, _ in found:
        assert_bitwise(params, _params(plain))
    for index, entry in plain.state_dict()["state"].items():
        assert_bitwise({name: found[0][1][index][name] for name in entry}, entry)


def _without_the_option(rank: int, world_size: int, offload: Any) -> str:
    groups = _groups()
    optimizer = _sharded(groups, torch.optim.AdamW, offload, lr=0.1)
    _backward(groups, 0)
    optimizer.step()
    entry = optimizer.state[groups[0]["params"][0]]
    entry["max_exp_avg_sq"] = torch.ones_like(entry["exp_avg_sq"])
    optimizer.zero_grad()
    _backward(groups, 1)
    with pytest.raises(zero_opt.StateDictError) as caught:
        optimizer.step()
    del entry["max_exp_avg_sq"]
    optimizer.step()
    optimizer.close()
    return str(caught.value)


@pytest.mark.parametrize("selective", [None, ALL_COLUMNS], ids=["all", "selective"])
def test_an_array_that_no_option_asks_for_is_refused_where_it_has_no_place(selective: Any) -> None:
    for said in run_processes(2, _without_the_option, zero_opt.WorkerOffload(selective=selective)):
        assert "has 'max_exp_avg_sq', but amsgrad is off in its param group" in said


def _refused(rank: int, world_size: int, cls: Any, edit: dict[str, Any], offload: Any) -> tuple[str, str]:
    """A step after the edit, and what it changed; then one without it."""
    groups = _groups()
    optimizer = _sharded(groups, cls, offload, lr=0.1)
    group = optimizer.param_groups[2]
    kept = {key: group[key] for key in edit}
    _backward(groups, 0)
    optimizer.step()
    optimizer.zero_grad()
    with torch._C.DisableTorchFunction():  # a step may be pending
        before = [param.clone() for param in _params(optimizer)]
    group.update(edit)
    _backward(groups, 1)
    with pytest.raises(zero_opt.ZeroOptError) as caught:
        optimizer.step()
    with torch._C.DisableTorchFunction():
        assert all(map(torch.equal, _params(optimizer), before))
    group.update(kept)
    optimizer.step()
    optimizer.flush()
    assert all(not torch.equal(param, old) for param, old in zip(_params(optimizer), before, strict=True))
    optimizer.close()
    return type(caught.value).__name__, str(caught.value)


@PLACED
def test_unsupported_step_forms_are_refused_on_every_rank(place: str, tmp_path: Path) -> None:
    edit = {"fused": None, "foreach": True}
    for name, text in run_processes(2, _refused, torch.optim.SGD, edit, PLACES[place](tmp_path)):
        assert name == "UnsupportedOptimizer" and "group 2 has fused=None, foreach=True, and " in text


def test_amsgrad_while_the_first_step_is_pending_is_refused_on_every_rank() -> None:
    offload = zero_opt.WorkerOffload(delay=1)
    for name, text in run_processes(2, _refused, torch.optim.AdamW, {"amsgrad": True}, offload):
        assert name == "ConfigConflict" and "param group 2: amsgrad cannot be switched on after the first step" in text


def _second_group_later(rank: int, world_size: int, late: bool) -> list[Tensor]:
    groups = _groups()
    groups[0] = {"params": [nn.Parameter(torch.ones(6, 8))]}  # a matrix, whose step is pending
    offload = zero_opt.WorkerOffload(delay=1, selective=SELECTIVE)
    for group in groups[:2]:
        group["amsgrad"] = False
    optimizer = _sharded([groups[0], {**groups[2], "amsgrad": not late}], torch.optim.AdamW, offload, lr=0.1)
    params = [groups[0]["params"][0], groups[2]["params"][0]]
    for step in range(STEPS):
        optimizer.zero_grad()
        used = params[: 1 if step < 2 else 2]
        torch.autograd.backward(used, [values(step, 1, 0, at, tuple(param.shape)) for at, param in enumerate(used)])
        if step == 2 and late:
            optimizer.param_groups[1]["amsgrad"] = True
            with pytest.raises(zero_opt.ConfigConflict, match=r"while a step is pending; call opt\.flush"):
                optimizer.step()
        if step == 2:
            optimizer.flush()
        optimizer.step()
    optimizer.flush()
    found = _params(optimizer)
    optimizer.close()
    return found


def test_amsgrad_of_columns_while_another_group_s_step_is_pending_needs_a_flush() -> None:
    wanted, found = (run_processes(2, _second_group_later, late) for late in (False, True))
    assert_bitwise(found, wanted)


def _foreach_of_columns(rank: int, world_size: int) -> str:
    groups = _groups()
    optimizer = _sharded(groups, torch.optim.AdamW, zero_opt.CPUOffload(selective=SELECTIVE), lr=0.1)
    _backward(groups, 0)
    optimizer.step()
    optimizer.param_groups[2].update(fused=False, foreach=True)
    with pytest.raises(zero_opt.UnsupportedOptimizer) as caught:
        optimizer.step()
    optimizer.close()
    return str(caught.value)


def test_columns_are_not_stepped_otherwise_than_the_rest() -> None:
    for said in run_processes(2, _foreach_of_columns):
        assert "group 2 has fused=False, foreach=True" in said


def _partly_with_a_buffer(rank: int, world_size: int, offload: Any, resumes: bool) -> Any:
    """Momentum is off when state is saved, of which one parameter has none, and comes back two steps later."""

    def make(momentum: float, values: Sequence[Tensor]) -> tuple[list[nn.Parameter], Any]:
        params = [nn.Parameter(value.clone()) for value in values]
        return params, _sharded(params, torch.optim.SGD, offload, lr=0.1, momentum=momentum, dampening=0.5)

    params, optimizer = make(0.9, [torch.ones(shape, dtype=torch.bfloat16) for shape in SHAPES])
    for step in range(STEPS):
        if step == 1:
            optimizer.param_groups[0]["momentum"] = 0.0
        if step == 2 and resumes:
            before, saved = optimizer, optimizer.state_dict()
            params, optimizer = make(0.0, [param.detach() for param in params])
            optimizer.load_state_dict(saved)
            before.close()
        if step == 4:
            optimizer.param_groups[0]["momentum"] = 0.9
        used = range(len(params)) if step else [0, 2]
        optimizer.zero_grad()
        torch.autograd.backward([params[i] for i in used], [_grads(step)[i].bfloat16() for i in used])
        optimizer.step()
    found = [param.detach() for param in params], optimizer.state_dict()["state"]
    optimizer.close()
    return found


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("place", ["worker", "file"])
def test_a_momentum_that_some_parameters_of_a_group_have_in_a_loaded_state(
    place: str, world_size: int, tmp_path: Path
) -> None:
    offload = PLACES[place](tmp_path)
    whole, resumed = (run_processes(world_size, _partly_with_a_buffer, offload, again) for again in (False, True))
    assert_bitwise(resumed, whole)
