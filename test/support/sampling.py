"""Short and long forms of the tests: some of a test's cases, or all of them."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest


def long_form(of: str) -> bool:
    """Return whether ``ZERO_OPT_{of}`` asks for a long form: of all tests ("TESTS"), or of a folder's."""
    return os.environ.get(f"ZERO_OPT_{of}") == "long"


EVERY_CASE = any(map(long_form, ("TESTS", "CRASH", "ACCELERATOR", "HOSTS")))
# Folders whose tests start ranks: each case takes seconds.
OF_RANKS = ("distributed", "whole", "accelerator", "crash", "hosts")


def left_out(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Return the cases that the short form leaves out.

    Of a test marked ``sampled(count)``, it runs `count` cases; with ``sampled(count, always=text)``, cases with that
    text in their name are no part of the sample: they always run. Of other tests in folders :data:`OF_RANKS` whose
    parameters are crossed, it runs as many cases as have each value of each parameter at least once ("each choice").
    What is left out depends on the tree that is checked out, so it is the same in every process, and a case that fails
    is not left out for long.
    """
    cases: dict[tuple[str, int | None], list[Any]] = defaultdict(list)
    for item in () if EVERY_CASE else items:
        marker = item.get_closest_marker("sampled")
        if marker is None:
            folder = item.path.relative_to(item.config.rootpath / "test").parts[0]
            if folder in OF_RANKS and hasattr(item, "callspec"):  # it has parameters
                cases[item.nodeid.partition("[")[0], None].append(item)
        elif "always" not in marker.kwargs or marker.kwargs["always"] not in item.name:
            cases[item.nodeid.partition("[")[0], marker.args[0]].append(item)
    left, turn = set[pytest.Item](), _tree() if cases else ""
    for (name, count), of_test in cases.items():
        mixed = random.Random(turn + name).sample(of_test, len(of_test))
        left.update(redundant(mixed) if count is None else mixed[count:])
    return left


def _tree() -> str:
    """Return the hash of what is checked out; "" where that is no repository."""
    git, here = shutil.which("git"), Path(__file__).parent
    if git is None:
        return ""
    return subprocess.run([git, "rev-parse", "HEAD^{tree}"], cwd=here, capture_output=True, text=True).stdout


def redundant(cases: Sequence[pytest.Function]) -> list[pytest.Function]:
    """Return the cases of a test that can be left out: the others have each value of each parameter."""
    chosen: set[tuple[Any, ...]] = set()
    waiting = {case: _values(case) for case in cases}
    while waiting:
        best = max(waiting, key=lambda case: len(waiting[case] - chosen))
        if waiting[best] <= chosen:
            break
        chosen |= waiting.pop(best)
    return list(waiting)


def _values(case: pytest.Function) -> set[tuple[Any, ...]]:
    """Return what a case was given: by each ``parametrize`` one value, of one name or several, and by each fixture.

    A test's values are the same objects in all of its cases.
    """
    given = case.callspec.params
    joint = [_names(marker.args[0]) for marker in case.iter_markers("parametrize")]
    single = [[name] for name in given if all(name not in names for names in joint)]
    return {tuple((name, id(given[name])) for name in names) for names in joint + single}


def _names(given: str | Sequence[str]) -> list[str]:
    return [name.strip() for name in given.split(",")] if isinstance(given, str) else list(given)
