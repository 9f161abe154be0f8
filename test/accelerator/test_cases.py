"""Every case on the simulated accelerator: the bits of the CPU, and no race, whatever the streams' timing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from test.accelerator import unavailable
from test.accelerator.runner import Plan, wrong_lines
from test.support.device_cases.cases import GROUPS
from test.support.sampling import long_form

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))

LONG = long_form("ACCELERATOR")
SEEDS = tuple(range(20 if LONG else 1))
# How many cases share forked ranks.
CHUNK = 8
SECONDS = 3600 if LONG else 900  # nothing hangs


@dataclass(frozen=True)
class Chunk:
    """Cases of one group that the same ranks run."""

    world_size: int
    names: tuple[str, ...]

    def __str__(self) -> str:
        """Return what the test is called."""
        return f"{self.world_size} ranks: {self.names[0]} ..."


def chunks() -> Iterator[Chunk]:
    """Cut the groups of cases."""
    for cases in GROUPS.values():
        for world_size in (1, 2):
            names = [case.name for case in cases if world_size in case.world_sizes]
            for start in range(0, len(names), CHUNK):
                yield Chunk(world_size, tuple(names[start : start + CHUNK]))


@pytest.mark.sampled(12)
@pytest.mark.parametrize("chunk", list(chunks()), ids=str)
def test_the_bits_of_the_cpu_and_no_race(chunk: Chunk, subtests: pytest.Subtests) -> None:
    wrong = wrong_lines(chunk.world_size, Plan(chunk.names, SEEDS, in_turn=True), timeout=SECONDS)
    for name, lines in wrong.items():
        with subtests.test(msg=name):
            assert not lines, "\n".join(lines[:12])
