"""The multiply-add rounds once on every instruction set, also where there is no instruction for it."""

from __future__ import annotations

import itertools
import math
import struct
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from test.native.kernels import fma, same_bits
from zero_opt import _native

ISAS = _native.isas()
EDGES = [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 2.0**-149, -(2.0**-126), 3.4028234663852886e38]


def round_once(value: Fraction) -> float:
    """The fp32 number nearest to an exact value, ties to even."""
    if value == 0:
        return 0.0
    magnitude = abs(value)
    exponent = max(magnitude.numerator.bit_length() - magnitude.denominator.bit_length() - 1, -126)
    while magnitude >= Fraction(2) ** (exponent + 1):
        exponent += 1
    unit = Fraction(2) ** (exponent - 23)
    rounded = round(magnitude / unit) * unit  # round() of a Fraction is ties to even
    if rounded >= Fraction(2) ** 128:
        return math.copysign(math.inf, value)
    return math.copysign(float(rounded), value)


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(st.lists(st.tuples(floats, floats, floats), min_size=1, max_size=40))
def test_rounds_once(triples: list[tuple[float, float, float]]) -> None:
    exact = [round_once(Fraction(a) * Fraction(b) + Fraction(c)) for a, b, c in triples]
    a, b, c = (tensor(*column) for column in zip(*triples))
    for isa in ISAS:
        got = fma(a, b, c, isa)
        assert all(x == y for x, y in zip(got.tolist(), exact)), (isa, triples, exact)


@given(st.integers(0, 2**23 - 1), st.integers(1, 2**23 - 1), st.integers(24, 80), st.sampled_from([1, -1]))
def test_ties_decided_far_below(mantissa: int, tail: int, shift: int, sign: int) -> None:
    # c + a * b, where a * b is half a unit of c plus or minus a remainder that a double cannot keep beside c:
    # rounding to double first makes it a tie, and rounding that tie gives the wrong neighbour half of the time.
    c = struct.unpack("f", struct.pack("I", 0x3F800000 | mantissa))[0]
    half = 2.0**-24
    a = 1.0 + 2.0**-23 * (tail & 0xFF)
    for product in (Fraction(half) * (1 + sign * Fraction(1, 2**23)), Fraction(half) + sign * Fraction(1, 2**shift)):
        b = round_once(product / Fraction(a))
        exact = round_once(Fraction(a) * Fraction(b) + Fraction(c))
        for isa in ISAS:
            assert fma(tensor(a), tensor(b), tensor(c), isa).item() == exact


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_rounding_by_way_of_double_would_fail_here(sign: float) -> None:
    # The product is 2^-24 - 2^-70. Beside 1 + 2^-23 a double loses the last term, sees a tie, and goes up to even.
    a, b, c = tensor(sign * (1.0 + 2.0**-23)), tensor(2.0**-24 * (1.0 - 2.0**-23)), tensor(sign * (1.0 + 2.0**-23))
    assert (a.double() * b.double() + c.double()).float().item() == sign * (1.0 + 2.0**-22)
    for isa in ISAS:
        assert fma(a, b, c, isa).item() == c.item()


@pytest.mark.parametrize("isa", ISAS)
def test_edges_agree_with_the_first_isa(isa: str) -> None:
    a, b, c = (tensor(*column) for column in zip(*itertools.product(EDGES, repeat=3)))
    assert same_bits(fma(a, b, c, isa), fma(a, b, c, ISAS[-1]))


@pytest.mark.parametrize("isa", ISAS)
def test_random_bits_agree_with_the_fastest(isa: str) -> None:
    bits = torch.randint(-(2**31), 2**31, (3, 1 << 20), generator=torch.Generator().manual_seed(1)).int()
    a, b, c = bits.view(torch.float32)
    near = -(a * b) * (1 + 2.0**-22)  # the addend cancels most of the product
    for addend in (c, near):
        assert same_bits(fma(a, b, addend, isa), fma(a, b, addend, ISAS[-1]))
