"""Short and long forms of the tests: some of a test's cases, or all of them."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest


def long_form(of: str) -> bool:
    """Return whether ``ZERO_OPT_{of}`` asks for a long form: of all tests ("TESTS"), or of a folder's."""
    return os.environ.get(f"ZERO_OPT_{of}") == "long"


EVERY_CASE = any(map(long_form, ("TESTS", "CRASH", "ACCELERATOR", "HOSTS")))
# Folders whose tests start ranks: each case takes seconds.
OF_RANKS = ("distributed", "accelerator", "crash", "hosts")


def left_out(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Return the cases that the short form leaves out.

    Of a test marked ``sampled(count)``, it runs `count` cases, of other tests in folders :data:`OF_RANKS` one. With
    ``sampled(count, always=text)``, cases with that text in their name are no part of the sample: they always run.
    What is left out depends on the tree that is checked out, so it is the same in every process, and a case that fails
    is not left out for long.
    """
    cases: dict[tuple[str, int], list[pytest.Item]] = defaultdict(list)
    for item in () if EVERY_CASE else items:
        folder = item.path.relative_to(item.config.rootpath / "test").parts[0]
        marker = item.get_closest_marker("sampled") or (pytest.mark.sampled(1) if folder in OF_RANKS else None)
        if marker is not None and not ("always" in marker.kwargs and marker.kwargs["always"] in item.name):
            cases[item.nodeid.partition("[")[0], marker.args[0]].append(item)
    left, turn = set[pytest.Item](), _tree() if cases else ""
    for (name, count), of_test in cases.items():
        left.update(random.Random(turn + name).sample(of_test, len(of_test))[count:])
    return left


def _tree() -> str:
    """Return the hash of what is checked out; "" where that is no repository."""
    git, here = shutil.which("git"), Path(__file__).parent
    if git is None:
        return ""
    return subprocess.run([git, "rev-parse", "HEAD^{tree}"], cwd=here, capture_output=True, text=True).stdout
