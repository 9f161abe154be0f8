"""Copies of memory: every byte of every run, and no other."""

from __future__ import annotations

import pytest
import torch

from zero_opt import _native

ISAS = _native.isas()
# Short ones; ones that threads share; ones that go past the caches, in lines and not.
SIZES = ([1, 0, 63, 64, 65], [70_000, 3, 300_001], [5 << 20, 17, (1 << 20) + 1])


@pytest.mark.parametrize("offset", [0, 2, 63])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("isa", ISAS)
def test_every_byte_and_no_other(isa: str, sizes: list[int], offset: int) -> None:
    total = sum(sizes) + 128 * len(sizes) + offset
    source = torch.randint(1, 256, (total,), dtype=torch.uint8, generator=torch.Generator().manual_seed(total))
    for other in (0, 5):
        target = torch.zeros(total + other, dtype=torch.uint8)
        expected, runs, start = target.clone(), [], offset
        for size in sizes:
            expected[start + other : start + other + size] = source[start : start + size]
            runs.append((target.data_ptr() + start + other, source.data_ptr() + start, size))
            start += -(-size // 64) * 64 + 64
        _native.copy_runs(runs, threads=2, isa=isa)
        assert torch.equal(target, expected)


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        _native.copy_runs([(0, 0, -1)])
