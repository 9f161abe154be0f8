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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("isa", ISAS)
def test_squares_are_those_of_a_sum_by_itself(isa: str, dtype: torch.dtype) -> None:
    """Per run, or of none of its elements; whatever threads there are, and past the caches or not."""
    name = str(dtype).removeprefix("torch.")
    for sizes in ([1, 4095, 0, 4096, 4097], [300_001, 65_537, (1 << 21) + 3]):
        sources = [torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype) for size in sizes]
        targets = [torch.zeros_like(source) for source in sources]
        sums = [torch.full((-(-size // 4096) + 1,), -1.0, dtype=torch.float64) for size in sizes]
        width = dtype.itemsize
        runs = [(t.data_ptr(), s.data_ptr(), s.numel() * width) for t, s in zip(targets, sources, strict=True)]
        places = [(0 if number == 1 else place.data_ptr(), name) for number, place in enumerate(sums)]
        for threads in (1, 2):
            _native.copy_runs(runs, places, threads=threads, isa=isa)
            for number, (target, source, found) in enumerate(zip(targets, sources, sums, strict=True)):
                assert torch.equal(target, source)
                blocks = [] if number == 1 else source.split(4096)
                by_itself = [
                    _native.grad_sum([(block.data_ptr(), name, block.numel())], isa=isa)[0]
                    for block in blocks
                    if block.numel()
                ]
                assert found.tolist() == [*by_itself, *[-1.0] * (len(found) - len(by_itself))]
                target.zero_()
                found.fill_(-1.0)


def test_places_for_some_of_the_runs_alone_are_refused() -> None:
    with pytest.raises(ValueError, match="all runs or none"):
        _native.copy_runs([(0, 0, 0)], [(0, "float32"), (0, "float32")])
