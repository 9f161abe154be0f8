"""The Adam kernel gives the same bits on every instruction set and under any cut."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from test.native.kernels import HYPERS, adam, arrays, run_of, same_bits
from test.native.kernels import moments as zero_moments
from test.native.kernels import step as update_step
from zero_opt import _native

ISAS = _native.isas()
VARIANTS = [
    {},
    {"amsgrad": False},
    {"decoupled": False},
    {"maximize": True, "weight_decay": 0.0},
    {"beta1": 0.3, "decoupled": False, "amsgrad": False},
]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("numel", [0, 1, 15, 64, 1003])
def test_same_bits_on_every_isa(isa: str, variant: dict[str, object], numel: int) -> None:
    ours, reference = arrays(numel), arrays(numel)
    for step in (1.0, 2.0, 3.0):
        adam(ours, isa=isa, **{**variant, "step": step})
        adam(reference, isa=ISAS[-1], **{**variant, "step": step})
    assert all(same_bits(a, b) for a, b in zip(ours, reference))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("moments", ["float32", "bfloat16", "uint8"])
def test_a_prediction_takes_the_gradient_once_more(isa: str, variant: dict[str, Any], moments: str) -> None:
    numel = 1003
    options = {"isa": isa, **variant}
    amsgrad = options.pop("amsgrad", True)
    generator = torch.Generator().manual_seed(4)
    param, grad = torch.randn(numel, generator=generator), torch.randn(numel, generator=generator)
    written = {"param": param, **zero_moments(numel, getattr(torch, moments))}
    if amsgrad:
        written["max_exp_avg_sq"] = torch.full((numel,), 0.5)
    update_step(written, grad.flip(0), step=1.0, **options)
    out = torch.empty(numel)
    update_step({**written, "out": out}, grad, step=2.0, prediction=1.7, **options)
    ahead = {role: tensor.clone() for role, tensor in written.items()}
    update_step(ahead, grad, step=3.0, **options)
    assert not same_bits(out, param)
    assert same_bits(out, param + 1.7 * (ahead["param"] - param))


@given(
    cuts=st.lists(st.integers(0, 700), max_size=6),
    isa=st.sampled_from(ISAS),
    variant=st.sampled_from(VARIANTS),
    seed=st.integers(0, 5),
)
def test_any_cut_gives_the_bits_of_the_whole(cuts: list[int], isa: str, variant: dict[str, object], seed: int) -> None:
    whole, parts = arrays(700, seed), arrays(700, seed)
    adam(whole, isa=isa, **variant)
    edges = [0, *sorted(cuts), 700]
    for begin, end in itertools.pairwise(edges):
        adam([t[begin:end] for t in parts], isa=isa, **variant)
    assert all(same_bits(a, b) for a, b in zip(whole, parts))


@pytest.mark.parametrize("isa", ISAS)
def test_one_array_in_two_roles_is_read_before_it_is_written(isa: str) -> None:
    param, _grad, *moments = arrays(100)
    apart = [param.clone(), param.clone(), *(t.clone() for t in moments)]
    adam([param, param, *moments], isa=isa)
    adam(apart, isa=isa)
    assert same_bits(param, apart[0])


@pytest.mark.parametrize("isa", ISAS)
def test_nan_and_infinity_stay_where_they_are(isa: str) -> None:
    tensors = arrays(64)
    for t in tensors:
        t.normal_().abs_()
    tensors[1][5], tensors[1][6] = float("nan"), float("inf")
    adam(tensors, isa=isa)
    bad = [i for i, value in enumerate(tensors[0].isfinite().tolist()) if not value]
    assert bad == [5, 6]
    assert tensors[4][5].isnan()


def run_with_isa(isa: str) -> subprocess.CompletedProcess[str]:
    code = "from zero_opt import _native; print(_native.isa())"
    environment = {**os.environ, "ZERO_OPT_ISA": isa}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("isa", ISAS)
def test_environment_forces_an_isa(isa: str) -> None:
    assert run_with_isa(isa).stdout.strip() == isa


def test_unknown_isa_is_an_error_that_names_the_known() -> None:
    done = run_with_isa("v9")
    assert done.returncode != 0
    assert "RuntimeError: no kernels for the instruction set 'v9'" in done.stderr
    assert "baseline" in done.stderr
    with pytest.raises(RuntimeError, match="'v9'"):
        adam(arrays(1), isa="v9")


@pytest.mark.parametrize("count", [-1.0, -7.0, torch.nan, torch.inf, -torch.inf])
def test_any_kept_count_of_steps_has_the_hyperparameters_of_its_own_group(count: float) -> None:
    """A count of -1 makes the next step number 0. No count may make native code read what there is not."""

    def after(lr_before: float) -> list[Tensor]:
        runs = []
        for seed, kept in enumerate((3.0, count, count)):
            param, grad, *moments, _ = arrays(100, seed)
            runs.append(({**dict(zip(("param", "exp_avg", "exp_avg_sq"), (param, *moments))), "step": kept}, grad))
        steps = [torch.tensor(run.pop("step")) for run, _ in runs]
        bound = [run_of({**run, "step": step}, grad, 0.0) for (run, grad), step in zip(runs, steps)]
        lrs, grads = (lr_before, 1e-3, 1e-3), [grad.data_ptr() for _, grad in runs]
        hypers = [_native.Hypers("adam", **{**HYPERS, "lr": lr}) for lr in lrs]
        _native.update_step([(hypers[0], bound[:1], grads[:1]), (hypers[1], bound[1:], grads[1:])])
        return [*(tensor for run, _ in runs[1:] for tensor in run.values()), *steps]

    with_one, with_other = after(0.5), after(0.01)
    assert all(map(same_bits, with_one, with_other))
    assert same_bits(with_one[-1], torch.tensor(count) + 1)


def test_arguments_are_checked() -> None:
    param, *_ = arrays(64)
    written = {"param": param, "exp_avg": param, "exp_avg_sq": param}
    with pytest.raises(ValueError, match="step counts from 1"):
        run_of(written, param, 0.0)
    with pytest.raises(ValueError, match="negative"):
        _native.UpdateRun(-1, {})
    with pytest.raises(ValueError, match="needs the address of param"):
        _native.UpdateRun(1, {})
    with pytest.raises(ValueError, match="needs the address of exp_avg_base"):
        _native.UpdateRun(64, {role: t.data_ptr() for role, t in written.items()}, moment_dtype="uint8")
    with pytest.raises(ValueError, match="no array of a run is called 'master'"):
        _native.UpdateRun(1, {"master": 8})
    with pytest.raises(ValueError, match="no kernel for dtype 'float64'"):
        _native.UpdateRun(0, {}, grad_dtype="float64")
    with pytest.raises(ValueError, match="does not fit the range of float16"):
        _native.UpdateRun(0, {}, moment_dtype="float16")
    hypers, run = _native.Hypers("adam", **HYPERS), run_of(written, param, 1.0)
    for grads in ([], [0]):
        with pytest.raises(ValueError, match="gradient"):
            _native.update_step([(hypers, [run], grads)])
