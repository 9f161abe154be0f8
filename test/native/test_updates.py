"""Updates other than Adam: the same bits on every instruction set, under any cut, in every format and place."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from test.native.kernels import ADAGRAD, LION, SGD, arrays, converted, same_bits, step_of
from zero_opt import _native

ISAS = _native.isas()
# Name, hyperparameters, and the array of state, if there is one.
CASES = {
    "sgd": ("sgd", SGD, "momentum_buffer"),
    "nesterov": ("sgd", {**SGD, "dampening": 0, "nesterov": 1, "weight_decay": 0}, "momentum_buffer"),
    "without momentum": ("sgd", {**SGD, "momentum": 0}, None),
    "adagrad": ("adagrad", ADAGRAD, "sum"),
    "adagrad without decay": ("adagrad", {**ADAGRAD, "weight_decay": 0, "maximize": True}, "sum"),
    "lion": ("lion", LION, "exp_avg"),
}
cases = pytest.mark.parametrize("case", CASES)
isas = pytest.mark.parametrize("isa", ISAS)


def a_run(case: str, numel: int, seed: int = 0) -> tuple[dict[str, Tensor], Tensor]:
    """Arrays by role over many magnitudes, and a gradient with infinities and NaN."""
    param, grad, *_, positive = arrays(numel, seed)
    grad[3::101], grad[5::101] = float("inf"), float("nan")
    role = CASES[case][2]
    return {"param": param, **({} if role is None else {role: positive})}, grad


def make(case: str, run: dict[str, Tensor], grad: Tensor, **options: Any) -> int:
    name, hypers, _ = CASES[case]
    return step_of(name, {**hypers, **options}, run, grad)


def alike(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(same_bits(one[role], other[role]) for role in one)


@isas
@cases
@pytest.mark.parametrize("numel", [0, 1, 15, 64, 1003])
def test_same_bits_on_every_isa(isa: str, case: str, numel: int) -> None:
    (ours, grad), (reference, _) = a_run(case, numel), a_run(case, numel)
    for step in (1.0, 2.0, 3.0):
        found = make(case, ours, grad, isa=isa, step=step)
        assert found == make(case, reference, grad, isa=ISAS[-1], step=step) == (~grad.isfinite()).sum()
    assert alike(ours, reference)


@cases
@given(cuts=st.lists(st.integers(0, 700), max_size=6), isa=st.sampled_from(ISAS), threads=st.sampled_from([1, 2]))
def test_any_cut_gives_the_bits_of_the_whole(case: str, cuts: list[int], isa: str, threads: int) -> None:
    (whole, grad), (parts, _) = a_run(case, 700), a_run(case, 700)
    make(case, whole, grad, isa=isa, threads=threads)
    for begin, end in itertools.pairwise([0, *sorted(cuts), 700]):
        make(case, {role: t[begin:end] for role, t in parts.items()}, grad[begin:end], isa=isa)
    assert alike(whole, parts)


@isas
@cases
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16])
def test_formats_of_gradients_and_results(isa: str, case: str, grad_dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    (ours, grad), (plain, _) = a_run(case, 1003), a_run(case, 1003)
    narrow, out = grad.to(grad_dtype), torch.empty(1003, dtype=out_dtype)
    make(case, {**ours, "out": out}, narrow, isa=isa, grad_scale=0.5)
    make(case, plain, narrow.float(), isa=isa, grad_scale=0.5)
    assert alike(ours, plain)
    assert same_bits(out, converted(plain["param"], out_dtype, isa))


@isas
@cases
def test_a_split_master_is_the_fp32_one(isa: str, case: str) -> None:
    (ours, grad), (plain, _) = a_run(case, 1003), a_run(case, 1003)
    plain["param"] = plain["param"].bfloat16().float()
    split = {**ours, "param": plain["param"].bfloat16(), "remainder": torch.zeros(1003, dtype=torch.int16)}
    for step in (1.0, 2.0):
        make(case, split, grad.bfloat16(), isa=isa, step=step)
        make(case, plain, grad.bfloat16().float(), isa=isa, step=step)
    joined = ((split["param"].view(torch.int16).int() << 16) + split["remainder"].int()).view(torch.float32)
    finite = plain["param"].isfinite()
    assert same_bits(joined[finite], plain["param"][finite])


@isas
@cases
def test_a_prediction_takes_the_gradient_once_more(isa: str, case: str) -> None:
    role, generator = CASES[case][2], torch.Generator().manual_seed(4)
    param, grad = torch.randn(1003, generator=generator), torch.randn(1003, generator=generator)
    run = {"param": param, **({} if role is None else {role: torch.full((1003,), 0.5)})}
    out = torch.empty(1003)
    make(case, {**run, "out": out}, grad, step=1.0, prediction=1.7, isa=isa)
    ahead = {key: tensor.clone() for key, tensor in run.items()}
    make(case, ahead, grad, step=2.0, isa=isa)
    assert not same_bits(out, param)
    assert same_bits(out, param + 1.7 * (ahead["param"] - param))


@cases
def test_other_arrays_than_the_updates_are_refused(case: str) -> None:
    run, grad = a_run(case, 64)
    before = {role: tensor.clone() for role, tensor in run.items()}
    with pytest.raises(ValueError, match="arrays of state"):
        make(case, {"param": run["param"], "exp_avg_sq": grad}, grad)
    with pytest.raises(ValueError, match="another update than Adam"):
        make(case, {**run, "max_exp_avg_sq": grad}, grad)
    if CASES[case][2] is not None:
        with pytest.raises(ValueError, match="arrays of state"):
            make(case, {"param": run["param"]}, grad)
    assert alike(run, before)


def test_names_are_checked() -> None:
    with pytest.raises(ValueError, match="there is no update 'lions'"):
        _native.Hypers("lions", **LION)
    with pytest.raises(ValueError, match="lion needs beta2"):
        _native.Hypers("lion", lr=0.1, beta1=0.9, weight_decay=0.0)
    with pytest.raises(ValueError, match="no more than 4"):
        _native.Hypers("lion", **LION, eps=1.0)
