"""A worker killed after every instruction of a step, and its successors likewise: nothing is ever lost."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import pytest

from test.crash.mutants import MUTANTS, Mutant
from test.crash.programs import LONG, NATIVE, Counts, built, built_mutant, sweep
from zero_opt import _native

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ptrace and memfd are Linux's")

# Every form of AdamState, and several formats of gradients and results.
SCENARIOS = ("plain", "predicted", "bf16", "amsgrad", "split", "compact", "blocks", "halves", "blocks-amsgrad")
SCENARIOS += tuple(f"{moments}-{masters}" for moments in ("blocks", "halves") for masters in ("fp32", "master"))
SCENARIOS += ("adagrad", "lion", "sgd", "adagrad-bf16", "lion-split", "sgd-predicted")
# The first step of all, which makes SGD's momentum.
SCENARIOS += ("plain-first", "sgd-first")
# Without state there is little to write, and so there are few images.
STATELESS = "sgd-plain"
SCENARIOS += (STATELESS,)
# Of each scenario and instruction set, at the least; in the long form 500,000 in all.
POINTS = 500_000 / len(SCENARIOS) / len(_native.isas()) if LONG else 2000
# Shape, lanes, and of how many images the recovery from one is swept too.
FORMS = [(shape, lanes, 41) for shape in ("short", "cut") for lanes in (1, 2)] if LONG else [("cut", 2, 170)]
NONE = Counts(0, 0, 0)


class Totals:
    def __init__(self) -> None:
        self.first, self.nested, self.begin = NONE, NONE, time.monotonic()


@pytest.fixture(scope="module")
def totals() -> Iterator[Totals]:
    found = Totals()
    yield found
    print(
        f"\nsweep: {found.first.points} points, {found.first.images} images, {found.first.divergent} divergent; "
        f"nested: {found.nested.points} points, {found.nested.images} images, {found.nested.divergent} divergent; "
        f"{time.monotonic() - found.begin:.0f} s"
    )


@pytest.mark.sampled(24, always="sgd-first")
@pytest.mark.parametrize("isa", _native.isas())
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_successor_finishes_what_a_kill_at_any_instruction_leaves(totals: Totals, isa: str, scenario: str) -> None:
    first, nested = NONE, NONE
    for shape, lanes, nested_every in FORMS:
        every = min(nested_every, 42) if scenario == STATELESS else nested_every
        swept = sweep(built("sweep"), isa, scenario, shape, lanes, 1, every)
        assert swept.right, swept.said
        first, nested = first + swept.first, nested + swept.nested
    assert first.points > POINTS
    assert nested.points > (10_000 if LONG else 500)
    totals.first, totals.nested = totals.first + first, totals.nested + nested
    print(f"\nsweep {isa} {scenario}: {first}; nested {nested}")


@pytest.mark.sampled(8, always="sgd-first")
@pytest.mark.parametrize("isa", _native.isas())
@pytest.mark.parametrize(
    "scenario", SCENARIOS if LONG else ("plain", "compact", "blocks", "halves", "sgd", "sgd-first")
)
def test_a_successor_makes_a_draft_again_from_what_a_kill_leaves(totals: Totals, isa: str, scenario: str) -> None:
    """The bank that counts is never touched."""
    for lanes in (1, 2) if LONG else (2,):
        swept = sweep(built("sweep"), isa, scenario, "drafted", lanes, 1, 41 if LONG else 0)
        assert swept.right, swept.said
        assert swept.first.points > 2000
        totals.first, totals.nested = totals.first + swept.first, totals.nested + swept.nested


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutants_apply(mutant: Mutant) -> None:
    source = (NATIVE / mutant.file).read_text()
    assert mutant.applied(source) != source


def test_a_mutant_that_does_not_apply_is_noticed() -> None:
    with pytest.raises(ValueError, match="does not apply: 0 times"):
        MUTANTS[0].applied("")


@pytest.mark.sampled(5)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutants_are_caught(mutant: Mutant) -> None:
    isa = _native.isas()[-1]
    program = built_mutant(mutant, isa)
    nested_every = 3 if mutant.deaths > 1 else 0
    lanes = 2 if mutant.shape == "drafted" else 1
    swept = sweep(program, isa, mutant.scenario, mutant.shape, lanes, 1, nested_every, "first")
    assert swept.undisturbed == (mutant.deaths > 0)
    assert not swept.right
    assert bool(swept.first.divergent) == (mutant.deaths < 2)
    where = f"{swept.first.points} points and {swept.nested.points} nested"
    print(f"\nmutant caught after {where}: {mutant.name}")
