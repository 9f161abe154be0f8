"""Fresh ranks, forked, that answer through a queue."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable
from typing import Any


def forked(rank_program: Callable[..., None], world_size: int, *arguments: Any, answers: int) -> list[Any]:
    """Run ``rank_program(rank, store, *arguments, answer)`` on each rank; return what they put into ``answer``.

    Args:
        answers: how many are put there, by all ranks together.
    """
    context = multiprocessing.get_context("fork")
    answer = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=rank_program, args=(rank, f"{folder}/store", *arguments, answer))
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        found = [answer.get() for _ in range(answers)]
        for process in ranks:
            process.join()
    return found
