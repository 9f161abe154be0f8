"""What is looked at of a part, and which writes that shows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from zero_opt.optimizer.dtensors.part_samples import PartSamples, sampled


def _offsets(part: Tensor) -> Tensor:
    """Where the elements lie in memory that are looked at of a part over the numbers of its elements."""
    return sampled(part).flatten().long()


@pytest.mark.parametrize("numel", [0, 1, 511, 512])
def test_of_a_small_part_all_is_looked_at(numel: int) -> None:
    assert _offsets(torch.arange(numel)).equal(torch.arange(numel))


@pytest.mark.parametrize("numel", [513, 1024, 5000, 8192, 12_345, 1 << 20, (1 << 20) + 1])
def test_of_a_large_part_stretches_all_over_it_are_looked_at(numel: int) -> None:
    seen = _offsets(torch.arange(numel))
    assert 128 <= seen.numel() <= 512
    assert seen.unique().numel() == seen.numel()
    widest = (seen[1:] - seen[:-1]).max()
    assert seen[0] == 0
    assert numel - int(seen[-1]) <= int(widest) + 16  # which has no room for one more


def test_all_columns_have_their_turn() -> None:
    for columns in (64, 256, 512):
        seen = _offsets(torch.arange(columns * 4096).view(4096, columns))
        assert (seen % columns).unique().numel() == columns


def test_a_view_of_the_memory_in_any_order_and_with_gaps() -> None:
    base = torch.arange(1 << 16, dtype=torch.float64).view(256, 256)
    assert sampled(base.t()).equal(sampled(base))
    gaps = base[:, :100]
    assert sampled(gaps).data_ptr() == gaps.data_ptr()
    assert sampled(gaps).equal(gaps)
    assert sampled(base[1:]).data_ptr() == base[1:].data_ptr()


def test_nothing_of_what_has_no_values_here() -> None:
    for part in (torch.empty(9, device="meta"), torch.zeros(9).to_sparse(), torch.empty(9, dtype=torch.bits8)):
        assert sampled(part).numel() == 0


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128, torch.int8]


def test_changes_of_any_dtype_are_told_part_by_part() -> None:
    parts = [torch.ones(shape, dtype=dtype) for dtype in DTYPES for shape in ((), (3,), (100, 101))]
    views, samples = [*map(sampled, parts)], PartSamples()
    for at, part in enumerate(parts):
        assert samples.changed(views) == [False] * len(views)
        part.mul_(2)
        assert samples.changed(views) == [number == at for number in range(len(views))]
        assert samples.changed(views) == [number == at for number in range(len(views))]
        samples.note()


def test_bits_are_compared() -> None:
    part, samples = torch.tensor([float("nan"), 0.0]), PartSamples()
    views = [sampled(part)]
    assert samples.changed(views) == [False]
    assert samples.changed(views) == [False]
    part[1] = -0.0
    assert samples.changed(views) == [True]


def test_parts_come_and_go_and_what_is_known_of_the_others_stays() -> None:
    first, second, third = (torch.ones(5) for _ in range(3))
    one, two, three = map(sampled, (first, second, third))
    samples = PartSamples()
    assert samples.changed([one, two]) == [False, False]
    second.zero_()
    assert samples.changed([three, two]) == [False, True]
    assert samples.changed([two]) == [True]
    assert samples.changed([]) == []


def test_what_torch_has_made_in_inference_mode() -> None:
    with torch.inference_mode():
        part = torch.ones(5)
        samples, views = PartSamples(), [sampled(part)]
        assert samples.changed(views) == [False]
    assert samples.changed(views) == [False]
    with torch.inference_mode():
        part.zero_()
    assert samples.changed(views) == [True]
    samples.note()
    assert samples.changed(views) == [False]
