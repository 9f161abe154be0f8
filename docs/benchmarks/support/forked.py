"""Fresh ranks, forked, that answer through a queue, and what they measure together."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


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


def slower(seconds: float) -> float:
    """Seconds of the slower rank."""
    found = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.item()
