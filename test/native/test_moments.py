"""Compact moments lose what their format says, and nothing by drift."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from test.native.kernels import BLOCK, arrays, packed, same_bits, step, unpacked
from zero_opt import _native

ISAS = _native.isas()
COMPACT = (torch.bfloat16, torch.uint8)
# Elements of an array of 8-bit moments by the end of its name, and dtypes.
_EIGHT_BIT, _DTYPE = {"": (64,), "_base": (1,)}, (torch.uint8, torch.int16)


def moments(numel: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Signed and non-negative numbers over a few magnitudes, as in training."""
    generator = torch.Generator().manual_seed(seed)
    scale = 10.0 ** (torch.rand(numel, generator=generator) * 3 - 8)
    return torch.randn(numel, generator=generator) * scale, (torch.randn(numel, generator=generator) * scale).square()


@given(st.integers(0, 1000), st.integers(0, 5), st.sampled_from(COMPACT), st.sampled_from(ISAS))
def test_what_the_format_holds_is_kept_whatever_the_step(n: int, seed: int, dtype: torch.dtype, isa: str) -> None:
    once = unpacked(packed(moments(n, seed), dtype, isa=isa), isa)
    for number in (1.0, 2.0, 77.0):
        assert all(same_bits(a, b) for a, b in zip(once, unpacked(packed(once, dtype, number=number), isa)))


def _after_infinity(isa: str) -> list[dict[str, Tensor]]:
    """The state after each of three steps with beta2 = 0, of which the first gradient's square becomes infinite."""
    codes = {f"{role}{part}": torch.zeros(*of) for role in ("exp_avg", "exp_avg_sq") for part, of in _EIGHT_BIT.items()}
    state = {"param": torch.ones(64), **{role: codes[role].to(_DTYPE[role[-4:] == "base"]) for role in codes}}
    hypers = _native.Hypers("adam", lr=1e-3, beta1=0.9, beta2=0.0, eps=1e-8, weight_decay=0.0, decoupled=1.0)
    seen = []
    for number, value in ((1.0, 1.84e19), (2.0, 1.0), (3.0, 1.0)):
        places, grad = {role: array.data_ptr() for role, array in state.items()}, torch.full((64,), value)
        run = _native.UpdateRun(64, places, grad_dtype="float32", moment_dtype="uint8", step=number)
        _native.update_step([(hypers, [run], [grad.data_ptr()])], isa=isa)
        seen.append({role: array.clone() for role, array in state.items()})
    return seen


def test_a_nan_with_a_sign_is_the_same_on_every_isa() -> None:
    reference = _after_infinity(ISAS[0])
    assert reference[1]["param"].isnan().all()
    for isa in ISAS:
        for expected, found in zip(reference, _after_infinity(isa), strict=True):
            assert all(same_bits(expected[role], found[role]) for role in expected)


@given(st.integers(0, 1000), st.integers(0, 5), st.sampled_from(COMPACT))
def test_same_bits_on_every_isa(n: int, seed: int, dtype: torch.dtype) -> None:
    _, _, exp_avg, exp_avg_sq, _ = arrays(n, seed)
    reference = packed((exp_avg, exp_avg_sq), dtype, isa=ISAS[-1])
    for isa in ISAS:
        other = packed((exp_avg, exp_avg_sq), dtype, isa=isa)
        assert all(same_bits(reference[role], other[role]) for role in reference)
        assert all(same_bits(a, b) for a, b in zip(unpacked(reference, ISAS[-1]), unpacked(other, isa)))


def test_bf16_goes_to_one_of_its_two_neighbours() -> None:
    for plain, kept in zip(moments(1 << 16), unpacked(packed(moments(1 << 16), torch.bfloat16))):
        below = (plain.view(torch.int32) & ~0xFFFF).view(torch.float32)
        above = ((plain.view(torch.int32) & ~0xFFFF) + 0x10000).view(torch.float32)
        assert bool(((kept == below) | (kept == above)).all())


def test_8_bit_codes_are_an_eighth_apart_down_to_the_lowest() -> None:
    plain, plain_sq = moments(1 << 16)
    kept, kept_sq = unpacked(packed((plain, plain_sq), torch.uint8))
    for values, found, reach in ((plain, kept, -15.7), (plain_sq, kept_sq, -31.7)):
        largest = values.abs().view(-1, BLOCK).amax(1, keepdim=True).expand(-1, BLOCK).flatten()
        held = values.abs() >= largest * 2.0 ** (reach + 0.2)  # the largest itself may have gone up by an eighth
        assert bool(held.any()) and bool(((found - values).abs() < values.abs() / 8)[held].all())
        assert bool((found.sign() == values.sign())[held].all())
    assert bool((kept_sq > 0).all()), "an exp_avg_sq of zero would divide by eps alone"


def test_8_bit_zero_is_exact_and_what_is_tiny_ends_as_zero_or_the_lowest_code() -> None:
    plain, plain_sq = torch.zeros(BLOCK), torch.zeros(BLOCK)
    assert all(same_bits(values, torch.zeros(BLOCK)) for values in unpacked(packed((plain, plain_sq), torch.uint8)))
    plain[3], plain_sq[3] = 1.0, 1.0
    plain[5], plain_sq[5] = -(2.0**-17), 2.0**-33
    kept, kept_sq = unpacked(packed((plain, plain_sq), torch.uint8))
    assert kept[3] == kept_sq[3] == 1.0
    assert kept[5] == 0.0 and 2.0**-32 < kept_sq[5] < 2.0**-31
    assert kept_sq.count_nonzero() == 2


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_8_bit_blocks_with_a_number_that_is_not_finite_become_nan(bad: float) -> None:
    plain, plain_sq = moments(3 * BLOCK)
    plain[BLOCK + 7], plain_sq[BLOCK + 9] = bad, abs(bad)
    for values in unpacked(packed((plain, plain_sq), torch.uint8)):
        assert values.isnan().tolist() == [False] * BLOCK + [True] * BLOCK + [False] * BLOCK


@pytest.mark.parametrize("dtype", COMPACT)
def test_rounding_is_unbiased_over_steps_and_over_elements(dtype: torch.dtype) -> None:
    # 2^14 elements, 64 steps: N = 2^20 draws of an error that is at most one spacing u, of standard deviation at most
    # u / 2. Their mean is within 6 * u / 2 / sqrt(N) of zero but once in 10^9 for independent draws.
    plain, plain_sq = (1.0 + torch.rand(1 << 14, generator=torch.Generator().manual_seed(i)) * 0.9 for i in range(2))
    spacing = 2.0**-7 if dtype is torch.bfloat16 else 2.0**-3
    error = torch.zeros(2, dtype=torch.float64)
    for number in range(64):
        kept = unpacked(packed((plain, plain_sq), dtype, number=number + 1.0))
        error += torch.stack([(k.double() - p.double()).mean() for k, p in zip(kept, (plain, plain_sq))])
    assert bool((error.abs() / 64 <= 6 * spacing / 2 / 2**10).all()), error


@pytest.mark.parametrize("dtype", COMPACT)
def test_small_changes_of_exp_avg_sq_are_not_lost(dtype: torch.dtype) -> None:
    # The fixed point of v = 0.999 v + 0.001 g^2 is g^2. Rounded to nearest, v would never leave 1: 0.001 * 3 is less
    # than half of the last place. Rounding adds a variance of at most u^2 / 4 per step, u being the spacing at g^2;
    # the sum over all steps, each damped by 0.999, stays below u^2 / 4 / (1 - 0.999^2) = (11.2 u)^2, and the mean of
    # 2^12 elements that differ below (0.18 u)^2. After 6000 steps 0.25 % of the start is left.
    numel = 1 << 12
    grad = torch.linspace(1.9, 2.1, numel)
    written = {"param": torch.zeros(numel), **packed((grad * 0.01, torch.ones(numel)), dtype)}
    for number in range(6000):
        step(written, grad, step=number + 1.0, lr=0.0)
    spacing = 4 * (2.0**-8 if dtype is torch.bfloat16 else 2.0**-3)
    difference = unpacked(written)[1].mean() - grad.square().mean()
    assert abs(difference.item()) <= 3 * 0.0025 + 6 * 0.18 * spacing
