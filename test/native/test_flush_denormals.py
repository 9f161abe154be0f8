"""Subnormal numbers: IEEE by default; zero inside the step if asked for, and nowhere else."""

from __future__ import annotations

import pytest
import torch

from test.native.kernels import same_bits, step
from zero_opt import _native

ISAS = _native.isas()
TINY = 2.0**-130
BIG = 200_000  # enough for every thread of the pool to take part


def subnormal_state(numel: int) -> dict[str, torch.Tensor]:
    return {"param": torch.ones(numel), "exp_avg": torch.full((numel,), TINY), "exp_avg_sq": torch.full((numel,), TINY)}


@pytest.mark.parametrize("isa", ISAS)
def test_default_keeps_them(isa: str) -> None:
    written = subnormal_state(100)
    step(written, torch.zeros(100), isa=isa)
    expected = torch.lerp(torch.tensor(TINY, dtype=torch.float64), torch.zeros((), dtype=torch.float64), 0.1)
    assert written["exp_avg"].unique().item() == pytest.approx(expected.item(), abs=2.0**-149)
    assert 0 < written["exp_avg_sq"].unique().item() <= TINY


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("threads", [1, 2])
def test_flushed_to_zero_if_asked_for(isa: str, threads: int) -> None:
    written = subnormal_state(BIG)
    step(written, torch.zeros(BIG), isa=isa, threads=threads, flush_denormals=True)
    assert not written["exp_avg"].any() and not written["exp_avg_sq"].any()


@pytest.mark.parametrize("threads", [1, 2])
def test_the_mode_ends_with_the_step(threads: int) -> None:
    step(subnormal_state(BIG), torch.zeros(BIG), threads=threads, flush_denormals=True)
    assert (torch.full((BIG,), TINY) * 0.5).min().item() == TINY / 2  # on this thread, and on torch's
    flushed, kept = subnormal_state(BIG), subnormal_state(BIG)
    step(flushed, torch.zeros(BIG), threads=threads)  # on the pool's
    step(kept, torch.zeros(BIG), threads=1)
    assert all(same_bits(flushed[role], kept[role]) and kept[role].all() for role in kept)


def test_without_subnormal_numbers_it_changes_no_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    states = []
    for flush in (False, True):
        generator.manual_seed(0)
        written = {role: torch.rand(1000, generator=generator) for role in ("param", "exp_avg", "exp_avg_sq")}
        step(written, torch.randn(1000, generator=generator), flush_denormals=flush)
        states.append(written)
    assert all(same_bits(states[0][role], states[1][role]) for role in states[0])
