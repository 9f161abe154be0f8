"""How many threads step by default: a fair part of the cores, and not what launchers tell OpenMP."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
import torch

from zero_opt import _native
from zero_opt.kernels import threads
from zero_opt.kernels.threads import (
    allowed_threads,
    checked_threads,
    fair_threads,
    meet_sharers,
    torch_threads,
    torchrun_sharers,
)

ROOT = Path(__file__).resolve().parents[3]
CORES = _native.usable_threads(1024)
EIGHT = set(range(8))


@pytest.fixture(autouse=True)
def _eight_cores_of_an_own_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As a rank that torchrun has started on eight cores finds them."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: EIGHT)
    monkeypatch.setattr(threads, "allowed_threads", lambda count: min(count, 8))
    monkeypatch.setattr(threads, "_most_sharers", 1)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    threads._sharers_of.cache_clear()
    yield
    threads._sharers_of.cache_clear()


@pytest.mark.parametrize(("ranks", "expected"), [("1", 8), ("2", 4), ("3", 2), ("8", 1), ("20", 1), ("two", 8)])
def test_ranks_that_torchrun_has_started_share_the_cores(
    ranks: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert torch.get_num_threads() == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert checked_threads(None) == expected
    assert checked_threads(5) == checked_threads(numpy.int64(5)) == 5


@pytest.mark.parametrize(
    ("own", "there", "sharers"),
    [
        (8, 8, 4),  # nobody is bound: a container's cores are those of all its ranks
        (2, 8, 1),  # each has cores of its own
        (4, 8, 2),  # two ranks per NUMA node
        (3, 64, 1),
        (8, 4, 4),  # it has let itself run on more
    ],
)
def test_a_rank_that_is_bound_to_cores_shares_those(
    own: int, there: int, sharers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(there if pid else own)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert torchrun_sharers() == sharers


def test_a_launcher_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def affinity(pid: int) -> set[int]:
        if pid:
            raise ProcessLookupError(3, "No such process")
        return EIGHT

    monkeypatch.setattr(os, "sched_getaffinity", affinity)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert torchrun_sharers() == 4


def test_ranks_that_have_met_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    assert meet_sharers(4) == 4 and checked_threads(None) == 2
    assert meet_sharers(2) == 2 and checked_threads(None) == 2  # a smaller group of the same ranks
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert meet_sharers(4) == 8 and checked_threads(None) == 1


@pytest.mark.parametrize(
    ("environment", "own", "expected"),
    [
        ("1", 1, 8),
        ("1,1", 1, 8),  # nested
        ("1", 3, 3),  # by torch.set_num_threads()
        ("4", 4, 4),
        ("4", 1, 1),
        (None, 1, 1),
        (None, 3, 3),
        (None, 100, 8),
    ],
)
def test_what_the_user_has_set_is_the_most(
    environment: str | None, own: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if environment is None:
        monkeypatch.delenv("OMP_NUM_THREADS")
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", environment)
    monkeypatch.setattr(torch, "get_num_threads", lambda: own)
    assert checked_threads(None) == expected


def test_at_least_one() -> None:
    assert fair_threads(1, 4) == fair_threads(0, 1) == 1


@pytest.mark.parametrize("wrong", [0, -1, True, 1.5, "2"])
def test_what_is_no_count_is_quoted(wrong: object) -> None:
    with pytest.raises((TypeError, ValueError), match=f"threads must be a positive integer or None, got {wrong!r}"):
        checked_threads(wrong)  # type: ignore[arg-type]


def test_without_the_extension_affinity_is_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "native_available", lambda: False)
    assert (allowed_threads(3), allowed_threads(100)) == (3, 8)


def test_torch_has_other_threads_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = [1]
    monkeypatch.setattr(torch, "get_num_threads", lambda: counts[-1])
    monkeypatch.setattr(torch, "set_num_threads", counts.append)
    with torch_threads(1):
        pass
    assert counts == [1]
    with pytest.raises(ZeroDivisionError), torch_threads(4):
        raise ZeroDivisionError
    assert counts == [1, 4, 1]


STEP = """
import logging, os, sys, torch, zero_opt
logging.basicConfig(level=logging.INFO, format="%(message)s")
param = torch.nn.Parameter(torch.ones(1 << 20))
param.grad = torch.ones_like(param)
optimizer = zero_opt.CPUAdamW([param], **eval(sys.argv[1]))
before = len(os.listdir("/proc/self/task"))
for _ in range(2):
    optimizer.step()
print(len(os.listdir("/proc/self/task")) - before)
"""


def _stepped(environment: dict[str, str], options: str = "{}") -> tuple[str, str]:
    """How many threads began with the first steps of a program, and what was logged."""
    kept = {key: value for key, value in os.environ.items() if key not in ("OMP_NUM_THREADS", "LOCAL_WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, "-c", STEP, options],
        cwd=ROOT,
        env={**kept, "PYTHONPATH": str(ROOT), **environment},
        check=True,
        timeout=600,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip(), done.stderr.strip()


@pytest.mark.skipif(CORES < 2, reason="one core")
def test_a_rank_of_torchrun_steps_on_its_cores() -> None:
    """With one thread of its pool per core; a single one would be the caller itself."""
    assert _stepped({"OMP_NUM_THREADS": "1"}) == (str(CORES), f"CPUAdamW steps with {CORES} threads")
    alone = ("0", "CPUAdamW steps with 1 threads")
    assert _stepped({"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": str(CORES)}) == alone
    assert _stepped({"OMP_NUM_THREADS": "1"}, "{'threads': 1}") == alone
