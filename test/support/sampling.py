"""Short and long forms of the tests: a sample of a test's cases, or all of them."""

from __future__ import annotations

import os
import random
from collections import defaultdict
from collections.abc import Sequence

import pytest

# ``make test-long``; the long forms of some folders have switches of their own.
LONG = "long" in (os.environ.get(f"ZERO_OPT_{what}") for what in ("TESTS", "CRASH", "ACCELERATOR", "HOSTS"))


def left_out(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Return the cases that the short form leaves out: all but `count` of each test marked ``sampled(count)``.

    With ``sampled(count, always=text)``, cases with that text in their name are no part of the sample: they always run.
    The sample depends on the test's name and on the number of its cases alone, so every process draws the same one.
    """
    cases: dict[tuple[str, int], list[pytest.Item]] = defaultdict(list)
    for item in () if LONG else items:
        for marker in item.iter_markers("sampled"):
            if "always" not in marker.kwargs or marker.kwargs["always"] not in item.name:
                cases[item.nodeid.partition("[")[0], *marker.args].append(item)
    left: set[pytest.Item] = set()
    for (name, count), of_test in cases.items():
        left.update(random.Random(name).sample(of_test, max(0, len(of_test) - count)))
    return left
