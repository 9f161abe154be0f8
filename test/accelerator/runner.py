"""Cases on the simulated accelerator, in forked ranks: what differs from the CPU, and the races."""

from __future__ import annotations

import gc
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from test.accelerator import C, enable
from test.support.device_cases.cases import CASES
from test.support.device_cases.places import Place
from test.support.device_cases.training import Case, run
from test.support.harness import bitwise_difference, run_processes
from zero_opt.placement.in_process import placement

DEVICE = "sim"
# Elements that a device steps by one call, in this process: one bucket or a few, of all of a case's.
TOGETHER_NUMEL = 400
BACKEND = "cpu:gloo,sim:simcomm"
# At most, in microseconds, before a kernel of a default stream, of another stream, and of a communicator.
DELAYS = ((0, 100, 300), (100, 0, 0), (0, 300, 0), (100, 100, 100))


@dataclass(frozen=True)
class Plan:
    """Which cases run where.

    Attributes:
        names: of the cases.
        seeds: of the streams' delays; ``None``: no stream is delayed.
        in_turn: whether a case runs at one place with each seed, at the next place with the next seed, instead of at
            all places with all seeds; cases begin at different places.
        places: a pattern that the names of places match.
        until_wrong: whether a case that shows something ends there.
    """

    names: tuple[str, ...]
    seeds: tuple[int | None, ...] = (0,)
    in_turn: bool = False
    places: str = ""
    until_wrong: bool = False

    def runs(self, case: Case, among: Sequence[Place]) -> list[tuple[Place, int | None]]:
        """Return where a case runs, with which seed."""
        able = [place for place in among if case.runs_at(place) and re.fullmatch(self.places or ".*", place.name)]
        if not (self.in_turn and able):
            return [(place, seed) for place in able for seed in self.seeds]
        first, count = list(CASES).index(case.name), len(able)
        # Each round of places begins one later: a place meets all patterns of delays, which recur with the seeds.
        turns = (first + turn + turn // count for turn in range(len(self.seeds)))
        return [(able[turn % count], seed) for turn, seed in zip(turns, self.seeds, strict=True)]


def places(rank: int, world_size: int) -> list[Place]:
    """Make the places of a rank, the CPU first. Collective."""
    mine, both = (torch.device(DEVICE, rank % 2),), (torch.device(DEVICE, 0), torch.device(DEVICE, 1))
    host = (torch.device("cpu"),)
    if world_size == 1:
        return [
            Place("the CPU", host, None, exchange="backend"),
            Place("alone", mine, None),
            Place("alone, a stream of its own", mine, None, own_stream=True),
            Place("alone, two devices", both, None),
            Place("alone, two devices, streams of their own", both, None, own_stream=True),
        ]
    if world_size == 4:
        hosts = init_device_mesh("cpu", (2, 2))
        return [
            Place("the CPU", host, dist.group.WORLD, exchange="backend"),
            Place("hosts", mine, dist.group.WORLD, mesh=hosts),
            Place("hosts, a stream of its own", mine, dist.group.WORLD, mesh=hosts, own_stream=True),
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


def differences(case: Case, reference: Any, place: Place, seed: int | None) -> list[str]:
    """Run a case at a place; return what is not as it should be."""
    C.delays(*((0, 0, 0, 0) if seed is None else (*DELAYS[seed % len(DELAYS)], seed)))
    torch.accelerator.set_device_index(place.devices[0].index)
    found = run(case, place)
    C.synchronize()
    gc.collect()
    bits = [f"bits: {line}" for line in bitwise_difference(found, reference)]
    races = [str(race) for race in C.races()]
    return [f"at {place.name}, seed {seed}: {line}" for line in (*races, *bits)]


def _any_rank(place: Place, mine: bool) -> bool:
    """Return whether something is so on any rank. Collective."""
    answers: list[Any] = [mine]
    if place.group is not None:
        answers *= place.world_size
        dist.all_gather_object(answers, mine, dist.new_group(backend="gloo"))
    return any(answers)


def run_cases(rank: int, world_size: int, plan: Plan) -> dict[str, list[str]]:
    """Run a plan on this rank; return what is wrong by case."""
    enable()
    placement._TOGETHER_NUMEL = TOGETHER_NUMEL
    cpu, *devices = places(rank, world_size)
    wrong: dict[str, list[str]] = {}
    for name in plan.names:
        case, at = CASES[name], cpu
        try:
            reference = run(case, cpu)
            wrong[name] = []
            for at, seed in plan.runs(case, devices):
                wrong[name] += differences(case, reference, at, seed)
                if plan.until_wrong and _any_rank(at, bool(wrong[name])):
                    break
        except BaseException as error:
            error.add_note(f"in the case {name!r}, at {at.name}")
            raise
    return wrong


def wrong_lines(world_size: int, plan: Plan, *, timeout: float) -> dict[str, list[str]]:
    """Run a plan on forked ranks; return, by case, what is wrong on any rank."""
    backend = BACKEND if world_size > 1 else None
    ranks = run_processes(world_size, run_cases, plan, backend=backend, timeout=timeout)
    return {
        name: [f"rank {rank} {line}" for rank, found in enumerate(ranks) for line in found[name]] for name in plan.names
    }
