"""Codes that the user has replaced: alone they are refused, with what they belong to they are taken."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import zero_opt
from test.support.harness import assert_bitwise
from zero_opt import AdamState, CPUAdamW, StateDictError, StateDictTypeError
from zero_opt.kernels.code_watch import CodeWatch

Entry = dict[str, Any]
BLOCK8, SPLIT = AdamState("block8"), AdamState("bfloat16", "split")


def trained(form: AdamState, make: Any = CPUAdamW) -> tuple[list[Parameter], Any]:
    """Two params of one shape whose moments have the same codes, and other bases; stepped twice."""
    dtype = torch.bfloat16 if form.master else torch.float32
    params = [Parameter(torch.linspace(-1, 1, 100).to(dtype)) for _ in range(2)]
    optimizer = make(params, lr=0.1, state=form)
    for _ in range(2):
        step(params, optimizer)
    return params, optimizer


def step(params: list[Parameter], optimizer: Any) -> None:
    for number, param in enumerate(params):
        param.grad = torch.linspace(1, 2, 100).to(param.dtype) * 10.0**number
    optimizer.step()


def sharded(params: list[Parameter], **options: Any) -> zero_opt.ShardedOptimizer:
    return zero_opt.ShardedOptimizer(params, CPUAdamW, **options)


def data_of(one: Entry, other: Entry) -> None:
    one["exp_avg"].data = other["exp_avg"].clone()


# On the entries of both params.
ALONE: dict[str, tuple[AdamState, Callable[[Entry, Entry], Any], str]] = {
    "codes": (BLOCK8, lambda one, other: one.update(exp_avg=other["exp_avg"].clone()), "'exp_avg' was replaced"),
    "the other's": (BLOCK8, lambda one, other: one.update(exp_avg_sq=other["exp_avg_sq"]), "'exp_avg_sq' was replaced"),
    "base": (
        BLOCK8,
        lambda one, other: one.update(exp_avg_base=other["exp_avg_base"].clone()),
        "'exp_avg_base' was replaced without 'exp_avg'",
    ),
    "a base out of range": (
        BLOCK8,
        lambda one, other: one.update(exp_avg_base=torch.full((2,), 32000, dtype=torch.int16)),
        "'exp_avg_base' was replaced",
    ),
    "no base": (BLOCK8, lambda one, other: one.pop("exp_avg_sq_base"), "'exp_avg_sq_base' is missing"),
    "values": (BLOCK8, lambda one, other: one.update(exp_avg=torch.zeros(100)), "'exp_avg' was replaced"),
    "data": (BLOCK8, data_of, "'exp_avg' was written to"),
    "the other moment": (
        BLOCK8,
        lambda one, other: one.update(exp_avg=one["exp_avg_sq"], exp_avg_base=one["exp_avg_sq_base"]),
        "'exp_avg' is the value of another key",
    ),
    "written, then moved": (
        BLOCK8,
        lambda one, other: (other["exp_avg"].zero_(), one.update(other)),
        "'exp_avg' was written to in place",
    ),
    "a remainder": (
        SPLIT,
        lambda one, other: one.update(remainder=one["remainder"].clone()),
        "'remainder' was replaced without the rest of the entry",
    ),
    "the other's remainder": (
        SPLIT,
        lambda one, other: one.update(remainder=other["remainder"]),
        "'remainder' belongs to another parameter",
    ),
}


@pytest.mark.parametrize("case", ALONE)
def test_codes_that_were_replaced_alone_are_refused_and_may_be_put_back(case: str) -> None:
    form, edit, said = ALONE[case]
    params, optimizer = trained(form)
    entry = optimizer.state[params[0]]
    kept, before = dict(entry), [param.detach().clone() for param in params]
    edit(entry, optimizer.state[params[1]])
    for call in (lambda: step(params, optimizer), optimizer.state_dict):
        with pytest.raises(StateDictError, match=f"param 0 of group 0: state {said}"):
            call()
    assert_bitwise([param.detach() for param in params], before)
    if "written" not in said:
        entry.update(kept)
        step(params, optimizer)
        assert not torch.equal(params[0], before[0])


def test_codes_that_come_to_lie_where_those_before_lay_are_refused() -> None:
    memory = bytearray(64)
    state = {"exp_avg": torch.frombuffer(memory, dtype=torch.uint8), "exp_avg_base": torch.zeros(1, dtype=torch.int16)}
    watch = CodeWatch(BLOCK8)
    watch.note([state])
    watch.require_own([state], str)
    state["exp_avg"].data = torch.empty(0, dtype=torch.uint8)
    memory[:] = bytes(range(64))
    state["exp_avg"].data = torch.frombuffer(memory, dtype=torch.uint8)
    with pytest.raises(StateDictError, match="0: state 'exp_avg' was written to in place"):
        watch.require_own([state], str)


def swapped(params: list[Parameter], state: Any) -> None:
    state[params[0]], state[params[1]] = state[params[1]], state[params[0]]


def pair_of_the_other(params: list[Parameter], state: Any) -> None:
    for key in ("exp_avg", "exp_avg_base"):
        state[params[0]][key] = state[params[1]][key].clone()


def copied(params: list[Parameter], state: Any) -> None:
    state[params[0]] = copy.deepcopy(state[params[1]])


MOVES: dict[str, tuple[Callable[[list[Parameter], Any], None], tuple[str, ...]]] = {
    "entries exchanged": (swapped, ("step", "exp_avg", "exp_avg_sq")),
    "an entry copied": (copied, ("step", "exp_avg", "exp_avg_sq")),
    "a moment with its base": (pair_of_the_other, ("exp_avg",)),
}


@pytest.mark.parametrize("make", [CPUAdamW, sharded])
@pytest.mark.parametrize("move", MOVES)
def test_codes_that_come_with_all_they_belong_to_are_taken(move: str, make: Any) -> None:
    change, keys = MOVES[move]
    params, optimizer = trained(BLOCK8, make)
    values = optimizer.state_dict()["state"][1]
    expected = {key: values[key].clone() for key in keys}
    change(params, optimizer.state)
    moved = optimizer.state_dict()["state"][0]
    assert_bitwise({key: moved[key] for key in keys}, expected)
    step(params, optimizer)
    optimizer.state[params[0]]["exp_avg"] = optimizer.state[params[0]]["exp_avg"].clone()
    with pytest.raises(StateDictError, match="was replaced without"):
        step(params, optimizer)


def test_entries_with_remainders_may_be_copied_and_not_exchanged() -> None:
    params, optimizer = trained(AdamState("block8", "split"))
    plain, reference = trained(AdamState("block8", "split"))
    optimizer.state[params[0]] = copy.deepcopy(optimizer.state[params[0]])
    step(params, optimizer)
    step(plain, reference)
    assert all(map(torch.equal, params, plain))
    swapped(params, optimizer.state)
    for call in (lambda: step(params, optimizer), optimizer.state_dict):
        with pytest.raises(StateDictError, match="'remainder' belongs to another parameter"):
            call()


@pytest.mark.parametrize("wrong", [-5, 32000])
def test_a_base_out_of_range_is_refused_beside_its_codes_too(wrong: int) -> None:
    params, optimizer = trained(BLOCK8)
    entry = optimizer.state[params[0]]
    entry.update(exp_avg=entry["exp_avg"].clone(), exp_avg_base=torch.full((2,), wrong, dtype=torch.int16))
    for call in (lambda: step(params, optimizer), optimizer.state_dict):
        with pytest.raises(StateDictError, match=rf"state 'exp_avg_base' must be from 0 to \d+, and has {wrong}"):
            call()


def _without_bases(entry: Entry) -> None:
    entry.update(exp_avg=entry["exp_avg"].clone(), exp_avg_sq=entry["exp_avg_sq"].clone())
    del entry["exp_avg_base"], entry["exp_avg_sq_base"]


# State of the wrong kind raises a state error with advice, not an argument error, in every form.
WRONG: dict[str, tuple[AdamState, Callable[[Entry], Any], type[Exception], str]] = {
    "fp32 for bf16": (
        AdamState("bfloat16"),
        lambda entry: entry.update(exp_avg=torch.zeros(100)),
        StateDictTypeError,
        "must have one dtype",
    ),
    "no bases": (BLOCK8, _without_bases, StateDictTypeError, "has no exp_avg_base"),
    "a shape": (
        AdamState(),
        lambda entry: entry.update(exp_avg=torch.zeros(3)),
        StateDictError,
        "must have shape",
    ),
    "a moment that is gone": (AdamState(), lambda entry: entry.pop("exp_avg"), StateDictTypeError, "has no exp_avg"),
}


@pytest.mark.parametrize("make", [CPUAdamW, sharded])
@pytest.mark.parametrize("case", WRONG)
def test_what_is_of_the_wrong_kind_is_an_error_of_the_state_with_advice(case: str, make: Any) -> None:
    form, edit, kind, said = WRONG[case]
    params, optimizer = trained(form, make)
    saved = copy.deepcopy(optimizer.state_dict())
    before: list[Tensor] = [param.detach().clone() for param in params]
    edit(optimizer.state[params[0]])
    with pytest.raises(kind, match=rf"{said}.*\. Put back what was there, load a state dict"):
        step(params, optimizer)
    assert_bitwise([param.detach() for param in params], before)
    optimizer.load_state_dict(saved)
    step(params, optimizer)
