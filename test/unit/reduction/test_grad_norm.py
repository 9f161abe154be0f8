"""The global norm is accumulated in fp64 and rounded once; the clip coefficient is torch's."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from zero_opt.errors import ConfigError, ConfigTypeError
from zero_opt.reduction.grad_norm import all_finite, alone, check_max_norm, clip_factor, share_of, square_sum

UNIT_64 = 2.0**-53
UNIT_32 = 2.0**-24


def exact_square_sum(grads: list[Tensor]) -> float:
    """Products of two fp32 numbers are exact in fp64, and fsum rounds once."""
    return math.fsum(x * x for grad in grads for x in grad.double().flatten().tolist())


def norm_of(grads: list[Tensor] | list[Tensor | None]) -> Tensor:
    return alone(share_of(grads, range(len(grads)), None)).norm


def random_grads(seed: int, count: int, size: int, spread: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator) * 10.0 ** (i % (2 * spread + 1) - spread) for i in range(count)]


@given(st.integers(0, 2**31), st.integers(1, 6), st.integers(1, 5000), st.integers(0, 12))
def test_the_norm_is_within_its_bound_of_the_exact_one(seed: int, count: int, size: int, spread: int) -> None:
    """n squares (exact) and n additions of positive terms, a root per tensor and its square again, one more root, each
    within a relative 2^-53; then one rounding to fp32. First order, with 2 % over for the higher ones.
    """
    grads = random_grads(seed, count, size, spread)
    exact = math.sqrt(exact_square_sum(grads))
    bound = 1.02 * ((size / 2 + 4) * UNIT_64 + UNIT_32)
    norm = norm_of(grads)
    assert norm.dtype is torch.float32
    assert norm.shape == ()
    assert abs(norm.item() - exact) <= bound * exact


@given(st.integers(0, 2**31), st.integers(1, 6), st.integers(1, 3000))
def test_it_differs_from_torchs_by_torchs_own_rounding_at_most(seed: int, count: int, size: int) -> None:
    """torch adds up in fp32: a relative (size + count) / 2 + 2 roundings of 2^-24 at the very most, of either."""
    grads = random_grads(seed, count, size, 1)
    theirs = torch.nn.utils.get_total_norm(grads)
    bound = ((size + count) / 2 + 3) * UNIT_32
    assert abs(norm_of(grads).item() - theirs.item()) <= bound * theirs.item()


def test_fp32_sums_that_would_overflow_or_vanish_do_not() -> None:
    assert norm_of([torch.full((4,), 1e30)]).item() == pytest.approx(2e30, rel=UNIT_32)
    assert norm_of([torch.full((4,), 1e-30)]).item() == pytest.approx(2e-30, rel=UNIT_32)


def test_nothing_has_norm_zero() -> None:
    assert norm_of([]).item() == 0
    assert norm_of([None, torch.zeros(0), torch.zeros(3)]).item() == 0


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_non_finite_gradients_show(bad: float) -> None:
    norm = norm_of([torch.ones(5), torch.tensor([1.0, bad])]).item()
    assert math.isnan(norm) if math.isnan(bad) else norm == math.inf


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_the_first_parameter_with_a_non_finite_element_is_named(dtype: torch.dtype, bad: float) -> None:
    grads: list[Tensor | None] = [None, *(torch.ones(70_000, dtype=dtype) for _ in range(3))]
    assert share_of(grads, [4, 5, 6, 7], None).nonfinite is None
    for index in (3, 2):
        grad = grads[index]
        assert grad is not None
        grad[-1] = bad
        assert share_of(grads, [4, 5, 6, 7], None).nonfinite == (0, 4 + index)


def test_what_is_finite_but_too_large_to_square_is_not_named() -> None:
    assert share_of([torch.full((3,), 1e200, dtype=torch.float64)], [0], None).nonfinite is None


def test_fp64_gradients_too_large_to_square_are_infinite_and_no_error() -> None:
    huge = [torch.full((1,), 1.2e154, dtype=torch.float64)] * 4
    assert square_sum(huge) == math.inf
    assert norm_of(huge).item() == math.inf


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_all_dtypes_count(dtype: torch.dtype) -> None:
    value = torch.tensor([3, 4j] if dtype.is_complex else [3, 4], dtype=dtype)
    assert norm_of([value, torch.tensor([12.0])]).item() == 13


def test_sparse_gradients_count_once_per_element() -> None:
    twice = torch.sparse_coo_tensor([[1, 1]], [1.0, 2.0], (3,), check_invariants=True)
    assert norm_of([twice, torch.tensor([4.0])]).item() == 5


@pytest.mark.parametrize("norm", [0.0, 1e-9, 0.5, 1.0, 1.0 + 2**-20, 3.7, 1e30, math.inf, math.nan])
@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 4.0, math.inf])
def test_the_clip_coefficient_is_torchs_to_the_bit(norm: float, max_norm: float) -> None:
    grad = torch.ones(3)
    param = torch.nn.Parameter(torch.zeros(3))
    param.grad = grad.clone()
    total = torch.tensor(norm)
    torch.nn.utils.clip_grads_with_norm_([param], max_norm, total)
    assert torch.equal(grad * clip_factor(total, max_norm), param.grad) or (
        math.isnan(clip_factor(total, max_norm).item()) and bool(param.grad.isnan().all())
    )


@pytest.mark.parametrize("value", [1, 0.5, math.inf, torch.tensor(2.0)])
def test_max_norms_that_work(value: object) -> None:
    assert check_max_norm(value, "max_norm") == float(value)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [0, -1.0, math.nan])
def test_max_norms_that_are_not_positive_are_quoted(value: float) -> None:
    with pytest.raises(ConfigError, match=f"max_grad_norm must be positive, got {value}"):
        check_max_norm(value, "max_grad_norm")


@pytest.mark.parametrize("exponent", [400, 5000])
def test_max_norms_that_no_float_holds_are_refused(exponent: int) -> None:
    with pytest.raises(ConfigError, match="max_norm is an integer that no float can hold"):
        check_max_norm(10**exponent, "max_norm")


@pytest.mark.parametrize("value", ["1", None, True, torch.ones(2)])
def test_max_norms_of_a_wrong_type_are_quoted(value: object) -> None:
    with pytest.raises(ConfigTypeError, match="max_norm must be a number, got"):
        check_max_norm(value, "max_norm")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_whether_all_are_finite(dtype: torch.dtype, bad: float) -> None:
    grads = [torch.full((5,), 1e30, dtype=dtype), torch.zeros(0, dtype=dtype), torch.ones((), dtype=dtype)]
    assert all_finite([]) and all_finite(grads)
    grads[2].fill_(bad)
    assert not all_finite(grads)
    assert not all_finite(torch.tensor([[1.0, bad]]).to(dtype).to_sparse() for _ in range(2))
