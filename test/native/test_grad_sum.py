"""The sum of squares: fp64, the same bits whatever computes it, and a count of what is not finite."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from test.native.kernels import GRAD_DTYPES, arrays, name_of
from test.native.workers import ALIGN, Arena
from zero_opt import _native

ISAS = _native.isas()
SUM_NUMEL, LANES = 4096, 32


def total(grads: list[Tensor], isa: str = "", threads: int = 1) -> tuple[float, int]:
    return _native.grad_sum([(g.data_ptr(), name_of(g.dtype), g.numel()) for g in grads], isa=isa, threads=threads)


@given(st.lists(st.integers(0, 9000), max_size=4), st.sampled_from(GRAD_DTYPES), st.integers(0, 3))
def test_within_its_bound_of_the_exact_sum(numels: list[int], dtype: torch.dtype, seed: int) -> None:
    grads = [torch.randn(n, generator=torch.Generator().manual_seed(seed)).to(dtype) for n in numels]
    exact = sum((Fraction(x) ** 2 for grad in grads for x in grad.tolist()), Fraction())
    sums = sum(-(-n // SUM_NUMEL) for n in numels)
    depth = SUM_NUMEL // LANES + int(math.log2(LANES)) + math.ceil(math.log2(max(sums, 1)))
    found, bad = total(grads)
    assert bad == 0
    assert abs(Fraction(found) - exact) <= exact * depth * Fraction(1, 2**53) * 2


@settings(max_examples=30)
@given(st.integers(0, 300_000), st.integers(1, 4), st.sampled_from(GRAD_DTYPES), st.sampled_from(ISAS))
def test_same_bits_whatever_the_threads_and_isa(n: int, threads: int, dtype: torch.dtype, isa: str) -> None:
    grads = [arrays(n)[1].nan_to_num().to(dtype), arrays(100)[1].to(dtype)]
    assert total(grads, isa, threads) == total(grads, ISAS[-1], 1)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", GRAD_DTYPES)
def test_every_element_that_is_not_finite_counts(isa: str, dtype: torch.dtype) -> None:
    grad = torch.ones(1000, dtype=dtype)
    grad[[0, 31, 500, 999]] = torch.tensor([math.inf, -math.inf, math.nan, math.inf], dtype=dtype)
    squares, bad = total([grad, torch.ones(5)], isa)
    assert bad == 4 and math.isnan(squares)
    grad[500] = 1.0
    assert total([grad], isa) == (math.inf, 3)


def test_squares_of_huge_and_tiny_numbers_neither_overflow_nor_vanish() -> None:
    assert total([torch.full((2,), 3.0e38)])[0] == 2 * float(torch.tensor(3.0e38)) ** 2
    assert total([torch.full((2,), 1.0e-45)])[0] == 2 * float(torch.tensor(1.0e-45)) ** 2


def test_nothing_sums_to_zero() -> None:
    assert total([]) == (0.0, 0) == total([torch.empty(0)])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", GRAD_DTYPES)
def test_sums_that_a_worker_has_found_make_the_same_bits(isa: str, dtype: torch.dtype) -> None:
    """Of some arrays, cut over lanes and drafts; the others are summed here."""
    numels = [3 * SUM_NUMEL + 5, 0, 70_001, 1 << 20, 31]
    grads = [arrays(n)[1].nan_to_num().to(dtype) for n in numels]
    grads[2][4097] = math.inf
    tensors = [*grads, *(torch.zeros(-(-n // SUM_NUMEL), dtype=torch.float64) for n in numels)]
    arena = Arena(3, sum(tensor.numel() * tensor.element_size() + ALIGN for tensor in tensors))
    try:
        placed = [arena.place(tensor) for tensor in tensors]
        found, sums = placed[: len(grads)], placed[len(grads) :]
        listed = [(g.data_ptr(), name_of(dtype), g.numel()) for g in found]
        places = [tensor.data_ptr() for tensor in sums]
        assert arena.control.draft_sums(listed, places, arena.wake, isa=isa) == 4
        arena.control.finish(arena.lanes)
        known = [address * (number != 3) for number, address in enumerate(places)]
        for part in (slice(None), slice(2), slice(3, None)):
            expected = total(grads[part])
            assert _native.grad_sum(listed[part], known[part], isa=isa, threads=2) == expected
        sums[0].fill_(1.0)
        assert _native.grad_sum(listed[:1], known[:1])[0] == 4.0, "they are not found again"
    finally:
        arena.close()


def test_sums_that_cannot_be_drafted_are_refused_and_nothing_is() -> None:
    arena = Arena(1, 4096)
    try:
        grad, sums = arena.place(torch.ones(100)), arena.place(torch.zeros(1, dtype=torch.float64))
        listed = [(grad.data_ptr(), "float32", 100)]
        with pytest.raises(ValueError, match="would overwrite the gradient"):
            arena.control.draft_sums(listed, [grad.data_ptr()], arena.wake)
        with pytest.raises(ValueError, match="does not lie in the arena"):
            arena.control.draft_sums(listed, [torch.zeros(1, dtype=torch.float64).data_ptr()], arena.wake)
        with pytest.raises(ValueError, match="without an address"):
            arena.control.draft_sums(listed, [0], arena.wake)
        with pytest.raises(ValueError, match="all gradients or none"):
            arena.control.draft_sums(listed, [sums.data_ptr()] * 2, arena.wake)
        assert arena.control.drafted == 0
    finally:
        arena.close()
