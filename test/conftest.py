"""Settings every test starts from, and what must be so after each of them and at the end."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings

from test.support.audit import AUDIT
from test.support.leftovers import left
from test.support.sampling import left_out

# Collecting makes millions of objects that stay.
gc.disable()

# Tests fork, and OpenMP's worker threads do not survive a fork: the parent must have none. The variable is for programs
# that tests start: OpenMP's threads spin while they wait, on the cores that other tests need.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"

# Ranks meet on the loopback interface, whatever the host's name resolves to.
os.environ["GLOO_SOCKET_IFNAME"] = "lo"

# What a shell runs in the background begins with SIGINT ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A slow machine is no failure, and the same examples run everywhere.
settings.register_profile("zero_opt", deadline=None, derandomize=True)
settings.load_profile("zero_opt")

sys.addaudithook(AUDIT)
# A folder of their own for temporary files, to see whether it is empty in the end: others use the common one too.
_FOLDER = Path(tempfile.mkdtemp(prefix="zero_opt_tests_"))
tempfile.tempdir = os.environ["TMPDIR"] = str(_FOLDER)


@pytest.fixture(autouse=True)
def nothing_is_unpickled() -> Iterator[None]:
    """The package unpickles nothing, whether or not the test would notice."""
    yield
    events, AUDIT.events = AUDIT.events, []
    assert events == []


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Unset what a launcher has set that runs the tests; the process has no group before the test or after it."""
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert not dist.is_initialized()
    yield
    assert not dist.is_initialized()


@pytest.fixture
def alarm() -> Iterator[None]:
    """SIGALRM raises a TimeoutError, "no more time"."""

    def end_of_time(*_: object) -> None:
        raise TimeoutError("no more time")

    before = signal.signal(signal.SIGALRM, end_of_time)
    yield
    signal.signal(signal.SIGALRM, before)


@pytest.hookimpl(trylast=True)  # what is chosen by name comes first: no more than a sample is kept whole
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the cases that the short form does without."""
    out = left_out(items)
    config.hook.pytest_deselected(items=[item for item in items if item in out])
    items[:] = [item for item in items if item not in out]


def pytest_collection_finish() -> None:
    """What is imported stays: no collection looks at it, or writes to memory that forked ranks share."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the whole run if it leaves anything behind."""
    gc.collect()
    found = left(_FOLDER)
    shutil.rmtree(_FOLDER, ignore_errors=True)
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if found and worker:  # its exit status is not asked for, but what it leaves behind is found
        (_FOLDER.parent / f"left_by_{worker}_{found}"[:250].replace(os.sep, "_")).touch()
    elif found:
        print("\nleft behind after all tests:", *found, sep="\n  ", file=sys.stderr)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
