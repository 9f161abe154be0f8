"""What the short form leaves out: cases of tests that start ranks, and nothing of any other test."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_CONFTEST = """
from test.support.sampling import left_out

def pytest_collection_modifyitems(items):
    out = left_out(items)
    items[:] = [item for item in items if item not in out]
"""
_SOURCE = """
import pytest

def test_alone(): ...

@pytest.mark.parametrize(("of", "two"), [(1, 1), (1, 2), (2, 1)])
def test_joint(of, two): ...

@pytest.mark.parametrize("one", "ab")
def test_single(one): ...

@pytest.mark.parametrize("one", "abc")
@pytest.mark.parametrize("other", [1, 2])
def test_crossed(one, other): ...

@pytest.fixture(params=[1, 2])
def made(request): return request.param

def test_made(made): ...

@pytest.mark.parametrize("one", "abc")
def test_crossed_with_made(one, made): ...

@pytest.mark.sampled(2, always="c")
@pytest.mark.parametrize("one", "abcde")
def test_sampled(one): ...
"""


@pytest.mark.parametrize("folder", ["distributed", "unit"])
def test_every_test_is_kept(folder: str, tmp_path: Path) -> None:
    (tmp_path / "test" / folder).mkdir(parents=True)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = sampled\naddopts = --import-mode=importlib")
    (tmp_path / "conftest.py").write_text(_CONFTEST)
    (tmp_path / "test" / folder / "test_some.py").write_text(_SOURCE)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("ZERO_OPT_", "PYTEST_"))}
    collected = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "test"],
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    kept = defaultdict(set)
    for line in collected.stdout.splitlines():
        name, _, case = line.partition("::")[2].partition("[")
        kept[name].add(case.rstrip("]"))
    assert kept["test_alone"] == {""}
    assert len(kept["test_sampled"]) == 3 and "c" in kept["test_sampled"]
    every = {"test_joint": 3, "test_single": 2, "test_crossed": 6, "test_made": 2, "test_crossed_with_made": 6}
    counts = {name: len(kept[name]) for name in every}
    assert counts == (dict.fromkeys(every, 1) if folder == "distributed" else every)
