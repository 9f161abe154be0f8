"""Mutants of the library: the races notice each that lacks a wait, without luck; bits, races or errors, each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from test.accelerator import unavailable
from test.accelerator.mutants import MUTANTS, PACKAGE, ROOT, Mutant, noticed
from test.accelerator.runner import Plan, wrong_lines
from test.support.failures import PATIENCE_S

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))


def test_all_mutants_apply() -> None:
    for mutant in MUTANTS:
        source = (ROOT / PACKAGE / mutant.file).read_text()
        assert mutant.applied(source) != source, mutant.name


@pytest.mark.sampled(7)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_it_is_noticed(mutant: Mutant, tmp_path: Path) -> None:
    mutant.copied_to(tmp_path)
    lines = noticed(mutant, tmp_path)
    assert lines
    assert mutant.hidden or any("race: " in line for line in lines), "\n".join(lines[:12])


@pytest.mark.parametrize("plan", sorted({(m.world_size, m.case, m.place) for m in MUTANTS}), ids=str)
def test_the_library_itself_shows_nothing(plan: tuple[int, str, str]) -> None:
    world_size, case, place = plan
    assert wrong_lines(world_size, Plan((case,), (None,), places=place), timeout=PATIENCE_S) == {case: []}
