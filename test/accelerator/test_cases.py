"""Every case on the simulated accelerator: the bits of the CPU, and no race, whatever the streams' timing."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from test.accelerator import C, enable, unavailable
from test.accelerator.cases import CASES, GROUPS
from test.accelerator.places import Place
from test.accelerator.training import Case, run
from test.distributed.harness import bitwise_difference, run_processes

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))

DEVICE = "sim"
BACKEND = "cpu:gloo,sim:simcomm"
LONG = os.environ.get("ZERO_OPT_ACCELERATOR") == "long"
SEEDS = range(20 if LONG else 1)
# At most, in microseconds, before a kernel of a default stream, of another stream, and of a communicator.
DELAYS = ((0, 300, 1000), (300, 0, 0), (0, 1000, 0), (300, 300, 300))
# Of the places that a case can run at, how many there are to each that it does run at.
EVERY = 3
# How many cases share a pair of forked ranks.
CHUNK = 8
SECONDS = 1800 if LONG else 240  # nothing hangs


@dataclass(frozen=True)
class Chunk:
    """Cases of one group that the same ranks run."""

    world_size: int
    names: tuple[str, ...]

    def __str__(self) -> str:
        """Return what the test is called."""
        return f"{self.world_size} ranks: {self.names[0]} ..."


def chunks() -> Iterator[Chunk]:
    """Cut the groups of cases."""
    for cases in GROUPS.values():
        for world_size in (1, 2):
            names = [case.name for case in cases if world_size in case.world_sizes]
            for start in range(0, len(names), CHUNK):
                yield Chunk(world_size, tuple(names[start : start + CHUNK]))


def places(rank: int, world_size: int) -> list[Place]:
    """Make the places of a rank, the CPU first. Collective."""
    mine, both = (torch.device(DEVICE, rank),), (torch.device(DEVICE, 0), torch.device(DEVICE, 1))
    host = (torch.device("cpu"),)
    if world_size == 1:
        return [
            Place("the CPU", host, None, exchange="backend"),
            Place("alone", mine, None),
            Place("alone, a stream of its own", mine, None, own_stream=True),
            Place("alone, two devices", both, None),
            Place("alone, two devices, streams of their own", both, None, own_stream=True),
        ]
    comm, relay = dist.group.WORLD, dist.new_group(backend="gloo")
    return [
        Place("the CPU", host, comm, exchange="backend"),
        Place("comm", mine, comm),
        Place("comm, a stream of its own", mine, comm, own_stream=True),
        Place("comm, two devices", both, comm),
        Place("comm, two devices, streams of their own", both, comm, own_stream=True),
        Place("relay", mine, relay, direct=False),
        Place("relay, a stream of its own", mine, relay, direct=False, own_stream=True),
        Place("relay, two devices", both, relay, direct=False),
    ]


def differences(case: Case, reference: Any, place: Place, seed: int) -> list[str]:
    """Run a case at a place; return what is not as it should be."""
    C.delays(*DELAYS[seed % len(DELAYS)], seed)
    torch.accelerator.set_device_index(place.devices[0].index)
    found = run(case, place)
    C.synchronize()
    gc.collect()
    lines = [*bitwise_difference(found, reference), *(str(race) for race in C.races())]
    return [f"at {place.name}, seed {seed}: {line}" for line in lines]


def run_chunk(rank: int, world_size: int, names: Sequence[str]) -> dict[str, list[str]]:
    """Run cases at every place on this rank; return what is wrong by case."""
    enable()
    cpu, *devices = places(rank, world_size)
    wrong: dict[str, list[str]] = {}
    for name in names:
        case, at = CASES[name], cpu
        try:
            reference = run(case, cpu)
            wrong[name] = []
            for turn, at in enumerate(at for at in devices if case.runs_at(at)):
                if LONG or (turn + list(CASES).index(name)) % EVERY == 0:
                    for seed in SEEDS:
                        wrong[name] += differences(case, reference, at, seed)
        except BaseException as error:
            error.add_note(f"in the case {name!r}, at {at.name}")
            raise
    return wrong


@pytest.mark.parametrize("chunk", list(chunks()), ids=str)
def test_the_bits_of_the_cpu_and_no_race(chunk: Chunk, subtests: pytest.Subtests) -> None:
    backend = BACKEND if chunk.world_size > 1 else None
    ranks = run_processes(chunk.world_size, run_chunk, chunk.names, backend=backend, timeout=SECONDS)
    for name in chunk.names:
        with subtests.test(msg=name):
            lines = [f"rank {rank} {line}" for rank, found in enumerate(ranks) for line in found[name]]
            assert not lines, "\n".join(lines[:12])
