"""When a worker's step leaves the caches to the trainer."""

from __future__ import annotations

import pytest

from zero_opt.placement.worker.pace import Pace


def _after(pace: Pace, waited: float, took: float) -> bool:
    pace.begin(10.0)
    pace.end(10.0 + waited, took)
    return pace.past_caches


def test_a_step_that_is_waited_for_hurries() -> None:
    pace = Pace()
    assert not pace.past_caches
    assert not _after(pace, 0.0, 1.0)
    assert not _after(pace, 1.9, 1.0)


def test_a_worker_with_time_leaves_the_caches_until_it_is_short_of_it() -> None:
    pace = Pace()
    assert _after(pace, 2.1, 1.0)
    assert _after(pace, 2.1, 1.5), "it takes longer now, which is no reason to hurry"
    assert not _after(pace, 1.6, 1.5)
    assert not _after(pace, 1.9, 1.0)


def test_only_the_first_wait_for_a_step_counts() -> None:
    pace = Pace()
    pace.begin(0.0)
    pace.end(3.0, 1.0)
    pace.end(3.0, 100.0)
    assert pace.past_caches


@pytest.mark.parametrize("took", [0.0, 1e-12])
def test_a_step_of_no_time(took: float) -> None:
    assert _after(Pace(), 1.0, took)
