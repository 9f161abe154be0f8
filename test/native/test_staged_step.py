"""One pass gives the bits of conversions before and after an fp32 step, under any cut, thread count and address."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from test.native.kernels import (
    BLOCK,
    GRAD_DTYPES,
    HALVES,
    HYPERS,
    arrays,
    blocks,
    converted,
    packed,
    same_bits,
    step,
    unpacked,
)
from zero_opt import _native

ISAS = _native.isas()
MOMENTS = (torch.float32, torch.bfloat16, torch.uint8)
BASES = ("exp_avg_base", "exp_avg_sq_base")


def joined(param: Tensor, remainder: Tensor) -> Tensor:
    """The fp32 master of a split one."""
    return ((param.view(torch.int16).int() << 16) + remainder.int()).view(torch.float32)


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """An fp32 master as a bf16 param and a remainder, by the definition: to nearest, ties away from zero."""
    bits = master.view(torch.int32)
    high = ((bits + 0x8000) >> 16).to(torch.int16)
    return high.view(torch.bfloat16), (bits - (high.int() << 16)).to(torch.int16)


def state(numel: int, form: dict[str, Any], seed: int = 0) -> tuple[dict[str, Tensor], Tensor]:
    """What a step writes, and its gradient, of the dtypes in ``form``: grad, moments, out, split, amsgrad."""
    param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq = arrays(numel, seed)
    written = {"param": param, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    if form["moments"] is not torch.float32:
        written |= packed((exp_avg, exp_avg_sq), form["moments"])
    if form["split"]:
        written["param"], written["remainder"] = split(param)
    if form["amsgrad"]:
        written["max_exp_avg_sq"] = max_exp_avg_sq
    if form["out"] is not None:
        written["out"] = torch.zeros(numel, dtype=form["out"])
    return written, grad.to(form["grad"])


forms = st.fixed_dictionaries(
    {
        "grad": st.sampled_from(GRAD_DTYPES),
        "moments": st.sampled_from(MOMENTS),
        "out": st.sampled_from([None, *GRAD_DTYPES]),
        "split": st.booleans(),
        "amsgrad": st.booleans(),
    }
)
hypers = st.fixed_dictionaries(
    {
        "decoupled": st.booleans(),
        "maximize": st.booleans(),
        "weight_decay": st.sampled_from([0.0, 0.1]),
        "beta1": st.sampled_from([0.3, 0.9]),
        "grad_scale": st.sampled_from([1.0, 2.0**-16, 0.37]),
        "step": st.sampled_from([1.0, 7.0, 5000.0]),
    }
)


@given(forms, hypers, st.sampled_from(ISAS), st.integers(0, 700), st.integers(0, 3))
def test_one_pass_is_the_same_as_many(
    form: dict[str, Any], options: dict[str, Any], isa: str, n: int, seed: int
) -> None:
    written, grad = state(n, form, seed)
    plain = dict(written)
    if form["split"]:
        plain["param"] = joined(plain["param"], plain.pop("remainder"))
    plain["param"] = plain["param"].clone()
    plain.pop("out", None)
    for role in BASES:
        plain.pop(role, None)
    plain |= dict(zip(("exp_avg", "exp_avg_sq"), unpacked(written) if form["moments"] is not torch.float32 else ()))
    plain = {role: tensor.clone() for role, tensor in plain.items()}
    bad = step(written, grad, isa=isa, **options)
    scaled = grad.float() * options.pop("grad_scale")
    assert bad == (~scaled.isfinite()).sum()
    step(plain, scaled, isa=isa, **options)
    master = plain["param"]
    if form["split"]:
        param, remainder = split(torch.where(master.isnan(), torch.nan, master))
        assert same_bits(written["param"], param) and torch.equal(written["remainder"], remainder)
    else:
        assert same_bits(written["param"], master)
    if form["out"] is not None:
        assert same_bits(written["out"], master.to(form["out"]))
    moments = {"exp_avg": plain["exp_avg"], "exp_avg_sq": plain["exp_avg_sq"]}
    if form["moments"] is not torch.float32:
        moments = packed(tuple(moments.values()), form["moments"], number=options["step"], isa=isa)
    assert all(same_bits(written[role], moments[role]) for role in moments)


def part(written: dict[str, Tensor], begin: int, end: int) -> dict[str, Tensor]:
    """The same memory, of elements ``begin`` to ``end`` only."""
    return {
        role: tensor[begin // BLOCK : blocks(end)] if role in BASES else tensor[begin:end]
        for role, tensor in written.items()
    }


@given(forms, hypers, st.sampled_from(ISAS), st.lists(st.integers(0, 40 * BLOCK), max_size=6), st.integers(0, 3))
def test_any_cut_gives_the_bits_of_the_whole(
    form: dict[str, Any], options: dict[str, Any], isa: str, cuts: list[int], seed: int
) -> None:
    numel = 40 * BLOCK
    (whole, grad), (parts, _) = state(numel, form, seed), state(numel, form, seed)
    if form["moments"] is torch.uint8:
        cuts = [cut // BLOCK * BLOCK for cut in cuts]
    step(whole, grad, isa=ISAS[-1], **options)
    for begin, end in itertools.pairwise([0, *sorted(cuts), numel]):
        step(part(parts, begin, end), grad[begin:end], isa=isa, **options)
    assert all(same_bits(whole[role], parts[role]) for role in whole)


@settings(max_examples=40)
@given(forms, hypers, st.sampled_from(ISAS), st.integers(1, 4), st.integers(60_000, 260_000))
def test_any_number_of_threads_gives_the_same_bits(
    form: dict[str, Any], options: dict[str, Any], isa: str, threads: int, n: int
) -> None:
    (one, grad), (many, _) = state(n, form), state(n, form)
    bad = step(one, grad, isa=isa, threads=1, **options)
    assert step(many, grad, isa=isa, threads=threads, **options) == bad
    assert all(same_bits(one[role], many[role]) for role in one)


def shifted(tensor: Tensor, shift: int) -> Tensor:
    """A copy whose address is ``shift`` bytes past a multiple of 64."""
    room = torch.empty(tensor.nbytes + 128, dtype=torch.uint8)
    begin = -room.data_ptr() % 64 + shift
    memory = room.numpy()[begin : begin + tensor.nbytes]
    memory[:] = tensor.contiguous().view(torch.uint8).numpy()
    return torch.from_numpy(memory)


@given(forms, st.sampled_from(ISAS), st.lists(st.integers(0, 63), min_size=9, max_size=9), st.integers(1, 300))
def test_pointers_of_any_alignment(form: dict[str, Any], isa: str, shifts: list[int], n: int) -> None:
    (aligned, grad), (crooked, _) = state(n, form), state(n, form)
    step(aligned, grad, isa=isa)
    bytes_of = {role: shifted(tensor, shift) for (role, tensor), shift in zip(crooked.items(), shifts)}
    moved = shifted(grad, shifts[-1])
    run = _native.UpdateRun(
        n,
        {role: memory.data_ptr() for role, memory in bytes_of.items()},
        grad_dtype=str(grad.dtype)[6:],
        moment_dtype=str(form["moments"])[6:],
        out_dtype="float32" if form["out"] is None else str(form["out"])[6:],
        step=3.0,
    )
    _native.update_step([(default_hypers(), [run], [moved.data_ptr()])], isa=isa)
    assert all(torch.equal(bytes_of[role], aligned[role].view(torch.uint8)) for role in aligned)


def default_hypers() -> _native.Hypers:
    return _native.Hypers("adam", **HYPERS)


def test_runs_of_several_batches_step_as_each_alone() -> None:
    numels = [0, 1, 64, 70_000, 0, 40_000, 3]
    together, alone = ([arrays(n, seed) for seed, n in enumerate(numels)] for _ in range(2))
    roles = ("param", "exp_avg", "exp_avg_sq")
    kept = [torch.tensor(float(i % 3)) for i in range(len(numels))]
    runs = []
    for (param, _, exp_avg, exp_avg_sq, _), count in zip(together, kept):
        addresses = {role: t.data_ptr() for role, t in zip(roles, (param, exp_avg, exp_avg_sq))}
        runs.append(_native.UpdateRun(param.numel(), {**addresses, "step": count.data_ptr()}))
    grads = [tensors[1].data_ptr() for tensors in together]
    lr = _native.Hypers("adam", **{**HYPERS, "lr": 0.5})
    _native.update_step([(default_hypers(), runs[:4], grads[:4]), (lr, runs[4:], grads[4:])], threads=2)
    for i, (param, grad, exp_avg, exp_avg_sq, _) in enumerate(alone):
        written = dict(zip(roles, (param, exp_avg, exp_avg_sq)))
        step(written, grad, step=i % 3 + 1.0, **({"lr": 0.5} if i >= 4 else {}))
    for ours, theirs in zip(together, alone):
        assert all(same_bits(a, b) for a, b in zip(ours, theirs))
    assert [count.item() for count in kept] == [i % 3 + 1.0 for i in range(len(numels))]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", HALVES)
def test_every_number_of_a_narrow_dtype_widens_as_in_torch(isa: str, dtype: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    assert same_bits(converted(every, torch.float32, isa), every.float())


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", HALVES)
def test_narrowing_rounds_as_in_torch(isa: str, dtype: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).float()
    near = every.view(torch.int32)[:, None] + torch.tensor([-1, 0, 1, 0xFFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001])
    random = torch.randint(-(2**31), 2**31, (1 << 18,), generator=torch.Generator().manual_seed(2)).int()
    values = torch.cat([near.flatten().int(), random]).view(torch.float32)
    assert same_bits(converted(values, dtype, isa), values.to(dtype))
