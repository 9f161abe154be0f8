"""The pool takes no more than the process may have, survives a fork, and serves one caller at a time."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from test.native.kernels import adam, arrays, same_bits
from zero_opt import _native

BIG = 300_000
CPUS = sorted(os.sched_getaffinity(0))


def run(code: str) -> str:
    """What a fresh interpreter prints, which must end well, within a minute."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_at_least_one_and_no_more_than_asked_for() -> None:
    assert [_native.usable_threads(n) for n in (-1, 0, 1)] == [1, 1, 1]
    assert 1 <= _native.usable_threads(10_000) <= len(CPUS)


def test_affinity_of_the_caller_is_the_limit() -> None:
    code = "import os; from zero_opt import _native; os.sched_setaffinity(0, {%d}); print(_native.usable_threads(99))"
    assert run(code % CPUS[0]) == "1"


@pytest.mark.parametrize(
    ("listing", "files", "cpus"),
    [
        ("0::/a/b\n", {}, math.inf),
        ("0::/a/b\n", {"a/cpu.max": "150000 100000", "a/b/cpu.max": "max 100000"}, 1.5),
        ("0::/a/b\n", {"a/cpu.max": "400000 100000", "a/b/cpu.max": "250000 100000"}, 2.5),
        ("0::/not/seen/here\n", {"cpu.max": "300000 100000"}, 3.0),
        ("0::/\n", {"cpu.max": "50000 100000"}, 0.5),
        (
            "5:memory:/a\n4:cpu,cpuacct:/a\n0::/\n",
            {"cpu,cpuacct/a/cpu.cfs_quota_us": "120000", "cpu,cpuacct/a/cpu.cfs_period_us": "60000"},
            2.0,
        ),
        ("4:cpu:/a\n", {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"}, math.inf),
    ],
)
def test_cgroup_quota(tmp_path: Path, listing: str, files: dict[str, str], cpus: float) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    (tmp_path / "listing").write_text(listing)
    assert _native.cgroup_cpus(str(tmp_path / "listing"), str(tmp_path)) == cpus


# torch's own OpenMP threads do not survive a fork.
ALONE = "import torch; torch.set_num_threads(1)\n"
FORK = """
import os
from test.native.kernels import adam, arrays, same_bits
expected, before, after = (arrays(300_000) for _ in range(3))
adam(expected, threads=1)
adam(before, threads=2)
child = os.fork()
adam(after, threads=2)
same = all(same_bits(a, b) for a, b in zip(expected, after))
if child == 0:
    os._exit(0 if same else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), same)
"""


def test_a_forked_child_has_a_pool_of_its_own() -> None:
    assert run(ALONE + FORK) == "0 True"


FORK_IN_A_STEP = """
import os, threading
from test.native.kernels import adam, arrays
stop = threading.Event()
mine, theirs = arrays(300_000), arrays(300_000)
adam(mine, threads=1)  # torch is past its own first uses, during which one must not fork; the pool is not
def steps():
    while not stop.is_set():
        adam(theirs, threads=2)
busy = threading.Thread(target=steps)
busy.start()
codes = []
for _ in range(20):
    child = os.fork()
    if child == 0:
        adam(mine, threads=2)
        os._exit(0)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
stop.set()
busy.join()
print(sum(codes), len(codes))
"""


def test_forking_while_another_thread_steps() -> None:
    assert run(ALONE + FORK_IN_A_STEP) == "0 20"


def test_two_python_threads_may_step_at_once() -> None:
    expected, *others = (arrays(BIG) for _ in range(4))
    for _ in range(5):
        adam(expected, threads=1)

    def steps(tensors: list[torch.Tensor]) -> None:
        for _ in range(5):
            adam(tensors, threads=2)

    threads = [threading.Thread(target=steps, args=(tensors,)) for tensors in others]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for tensors in others:
        assert all(same_bits(a, b) for a, b in zip(expected, tensors))


THREADS = """
import os
from test.native.kernels import adam, arrays
def cpus():
    return sorted(sorted(os.sched_getaffinity(int(t))) for t in os.listdir("/proc/self/task") if t not in before)
tensors = arrays(300_000)
before = set(os.listdir("/proc/self/task"))
adam(tensors, threads=%d)
print(cpus())
"""


def test_one_thread_per_cpu_is_pinned_and_fewer_are_not() -> None:
    if _native.usable_threads(len(CPUS)) < len(CPUS):
        pytest.skip("the cgroup's quota is below the number of CPUs")
    expected = [[cpu] for cpu in CPUS] if len(CPUS) > 1 else []
    assert run(ALONE + THREADS % len(CPUS)) == str(expected)
    if len(CPUS) > 2:
        assert run(ALONE + THREADS % 2) == str([CPUS, CPUS])
