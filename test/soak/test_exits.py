"""Ranks that have finished exit with 0: interpreters that are started and finalized, without a fork and ``os._exit``.

``ZERO_OPT_SOAK_EXITS`` is how many exits there are, ``ZERO_OPT_SOAK_LOAD`` how many other processes keep the cores busy
meanwhile; ``make soak`` sets both.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from test.soak.exits import ENDINGS

EXITS = int(os.environ.get("ZERO_OPT_SOAK_EXITS", "6"))
LOAD = int(os.environ.get("ZERO_OPT_SOAK_LOAD", "0"))
PATIENCE_S = 900  # until ranks that hang fail the test
ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def _busy(count: int) -> Iterator[None]:
    """Keep the cores busy with this many processes."""
    loops = [subprocess.Popen(["nice", sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait(PATIENCE_S)


def _exits(world_size: int, store: Path, *how: str) -> Iterator[tuple[int, str]]:
    """Exit code of each rank, and what it said."""
    command = [sys.executable, "-m", "test.soak.exits"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(world_size), str(store), *how],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        for rank in ranks:
            said = rank.communicate(timeout=PATIENCE_S)[1]
            yield rank.returncode, said
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait(PATIENCE_S)


def test_finished_ranks_exit_with_0(tmp_path: Path) -> None:
    done, failed = Counter[tuple[int, str, str]](), list[object]()
    programs = itertools.cycle(itertools.product((2, 4), ENDINGS, ("auto", "backend")))
    with _busy(LOAD):
        while done.total() < EXITS:
            world_size, ending, exchange = how = next(programs)
            for code, said in _exits(world_size, tmp_path / f"store_{done.total()}", ending, exchange):
                if (code, said) != (0, ""):
                    failed.append((*how, code, said))
                    print(failed[-1], flush=True)
            done[how] += world_size
            if EXITS > 100:
                print(f"{done.total()} exits, {len(failed)} failed", flush=True)
    assert not failed
