"""Forked ranks of a benchmark, started by the harness of the tests, and what they measure together."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # before the standard library, which has a "test" too
from test.support.harness import run_processes

_LIMIT_S = 3600.0
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
Name, Contender = TypeVar("Name"), TypeVar("Contender")


def forked(program: Callable[..., Any], world_size: int, *arguments: Any, backend: str | None = "gloo") -> list[Any]:
    """Return what ``program(rank, world_size, *arguments)`` returns on each of fresh gloo ranks with one thread each.

    Raises what a rank raises.
    """

    def quietly(*given: Any) -> Any:
        warnings.simplefilter("ignore")  # the peers' own deprecations
        return program(*given)

    return run_processes(world_size, quietly, *arguments, backend=backend, timeout=_LIMIT_S)


def timed(call: Callable[[], Any]) -> float:
    """Return the seconds until the slowest rank has returned from ``call``. Collective."""
    dist.barrier()
    begin = time.perf_counter()
    call()
    seconds = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds.item()


def in_turn(contenders: Mapping[Name, Contender], number: int) -> list[tuple[Name, Contender]]:
    """Return the contenders in an order that changes from round to round: none always follows the same one."""
    pairs = list(contenders.items())
    first = number % len(pairs)
    return pairs[first:] + pairs[:first]
