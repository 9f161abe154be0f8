"""Ranks that have finished exit with 0: interpreters that are started and finalized, without a fork and ``os._exit``.

``ZERO_OPT_SOAK_EXITS`` is how many exits there are, ``ZERO_OPT_SOAK_PROGRAMS`` how many programs run side by side, each
of two or four ranks, so that they keep each other from the cores; ``make soak`` sets both.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from test.soak.exits import ENDINGS

EXITS = int(os.environ.get("ZERO_OPT_SOAK_EXITS", "6"))
PROGRAMS = int(os.environ.get("ZERO_OPT_SOAK_PROGRAMS", "1"))
PATIENCE_S = 900  # until ranks that hang fail the test
ROOT = Path(__file__).parents[2]


def _programs() -> Iterator[tuple[int, str, str]]:
    """World size, ending and exchange of each program, until there are as many exits as asked for."""
    every = itertools.cycle(itertools.product((2, 4), ENDINGS, ("auto", "backend")))
    exits = 0
    while exits < EXITS:
        yield (program := next(every))
        exits += program[0]


def _exits(world_size: int, store: Path, *how: str) -> list[tuple[int, str]]:
    """Exit code of each rank, and what it said."""
    with contextlib.ExitStack() as ranks:
        started = []
        for rank in range(world_size):
            command = [sys.executable, "-m", "test.soak.exits", str(rank), str(world_size), str(store), *how]
            started.append(
                subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            )
            ranks.callback(started[-1].wait, PATIENCE_S)
            ranks.callback(started[-1].kill)
        said = [rank.communicate(timeout=PATIENCE_S)[1] for rank in started]
        return [(rank.returncode, text) for rank, text in zip(started, said, strict=True)]


def test_finished_ranks_exit_with_0(tmp_path: Path) -> None:
    done, failed = 0, list[object]()
    with ThreadPoolExecutor(PROGRAMS) as side_by_side:
        running = [
            (how, side_by_side.submit(_exits, how[0], tmp_path / f"store_{number}", *how[1:]))
            for number, how in enumerate(_programs())
        ]
        for how, program in running:
            exits = program.result()
            done += len(exits)
            failed += [(*how, code, said) for code, said in exits if (code, said) != (0, "")]
            if EXITS > 100:
                load = os.getloadavg()[0]
                print(f"{done} exits, {len(failed)} failed, load {load:.1f}", *failed[-1:], flush=True)
    assert done >= EXITS
    assert not failed
