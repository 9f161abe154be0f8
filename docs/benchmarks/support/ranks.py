"""Runs one system on forked gloo ranks, of one host or of several: times, bytes sent, peak memory, final loss."""

from __future__ import annotations

import multiprocessing
import os
import socket
import statistics
import struct
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # every optimizer would import it, on every rank: here it is shared, like torch itself
import torch.distributed as dist
from support.model import Batch, make_data, make_model
from support.systems import SYSTEMS, System, Trainer

# Of the kernel's struct tcp_info.
_BYTES_ACKED_AT, _TCP_INFO_BYTES = 120, 256
_RUN_LIMIT_S = 600.0
LOOPBACK = "lo"


@dataclass(frozen=True)
class Run:
    """What to run.

    Attributes:
        sampled: take memory samples, which slow the run down, instead of being timed.
        systems: where ``system`` is found.
        join: called with its number on each rank, first of all: joins a host, and returns the interface to others.
    """

    system: str
    world_size: int
    batch: Batch
    warmup: int
    steps: int
    sampled: bool = False
    systems: Mapping[str, System] = field(default_factory=lambda: SYSTEMS)
    join: Callable[[int], str] | None = None


@dataclass
class Outcome:
    """What came of it: times are of one step, in ms, the mean over ranks of each rank's median.

    Attributes:
        cpu: processor time, all threads of a rank.
        wire: bytes a rank sent per step, the most of all ranks; between hosts, bytes its host sent to others.
        pss: peak memory of a rank in bytes, pages that ranks share counted once in all; 0 unless sampled.
        loss: of the last step, mean over ranks.
        began, ended: of the timed steps, in seconds of the system's monotonic clock.
    """

    forward: float
    backward: float
    step: float
    total: float
    cpu: float
    wire: float
    loss: float
    began: float
    ended: float
    pss: float = 0.0


def sent_bytes() -> int:
    """Payload bytes that the TCP connections of this process have delivered, as the kernel counts them."""
    total = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if not os.readlink(entry).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as connection:
                if connection.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        except OSError:  # gone meanwhile, or not TCP
            continue
        total += struct.unpack_from("Q", info, _BYTES_ACKED_AT)[0]
    return total


def interface_bytes(interface: str) -> int:
    """Bytes that a network interface has sent, with packet headers, as the kernel counts them."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    return next(int(line.split()[9]) for line in lines if line.split()[0] == f"{interface}:")


def settled_sent_bytes(interface: str) -> int:
    """What this rank has sent, or through an interface to other hosts its host, once nothing is in flight."""
    dist.barrier()
    before, sent = None, -1
    while sent != before:
        time.sleep(0.1)
        before, sent = sent, sent_bytes() if interface == LOOPBACK else interface_bytes(interface)
    return sent


def train(trainer: Trainer, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[list[list[float]], float]:
    """One step per pair: ms of forward, backward, step and total; and the last loss."""
    times: list[list[float]] = []
    loss = torch.zeros(())
    for inputs, targets in pairs:
        marks = [time.perf_counter()]
        loss = trainer.forward(inputs, targets)
        marks.append(time.perf_counter())
        trainer.backward(loss)
        marks.append(time.perf_counter())
        trainer.step()
        marks.append(time.perf_counter())
        times.append([1e3 * (b - a) for a, b in pairwise(marks)] + [1e3 * (marks[-1] - marks[0])])
    return times, loss.item()


def measured(run: Run, rank: int, interface: str) -> dict[str, float]:
    """Build the system, train, and measure what comes after the warm-up."""
    pairs = make_data(rank, run.warmup + run.steps, run.batch)
    trainer = run.systems[run.system].build(make_model(run.batch.tokens), run.batch)
    train(trainer, pairs[: run.warmup])
    trainer.settle()
    sent = settled_sent_bytes(interface)
    before, began = os.times(), time.monotonic()
    times, loss = train(trainer, pairs[run.warmup :])
    after, ended = os.times(), time.monotonic()
    cpu = 1e3 * (after.user + after.system - before.user - before.system) / run.steps
    trainer.settle()
    wire = (settled_sent_bytes(interface) - sent) / run.steps
    forward, backward, step, total = map(statistics.median, zip(*times))
    return {
        "forward": forward,
        "backward": backward,
        "step": step,
        "total": total,
        "cpu": cpu,
        "wire": wire,
        "loss": loss,
        "began": began,
        "ended": ended,
    }


def rank_main(run: Run, rank: int, store: str, answer: Connection) -> None:
    """One rank: sends what it measured, or a traceback."""
    warnings.simplefilter("ignore")  # the peers' own deprecations
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(run.world_size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    try:
        interface = os.environ["GLOO_SOCKET_IFNAME"] = run.join(rank) if run.join else LOOPBACK
        shared = dist.FileStore(store, run.world_size)
        dist.init_process_group("gloo", store=shared, rank=rank, world_size=run.world_size)
        answer.send(measured(run, rank, interface))
        dist.barrier()
    except BaseException:
        answer.send(traceback.format_exc())
        raise


def pss_bytes(pid: int) -> int:
    """Memory of a process, each shared page divided by how many share it."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (OSError, ProcessLookupError):
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)


def collect(answers: list[Connection], pids: list[int], *, sampled: bool) -> tuple[list[Any], float]:
    """Every rank's answer, and the peak of their memory if it is to be sampled."""
    peak, waiting, deadline = 0.0, dict(enumerate(answers)), time.monotonic() + _RUN_LIMIT_S
    found: list[Any] = [None] * len(answers)
    while waiting and time.monotonic() < deadline:
        if sampled:
            peak = max(peak, sum(map(pss_bytes, pids)) / len(pids))
        for connection in multiprocessing.connection.wait(list(waiting.values()), 0.005 if sampled else 1.0):
            rank = answers.index(connection)  # type: ignore[arg-type]
            found[rank] = waiting.pop(rank).recv()
            if isinstance(found[rank], str):
                return found, peak
    return found, peak


def execute(run: Run) -> Outcome:
    """Fork fresh ranks for one run.

    Raises:
        RuntimeError: a rank failed; the message is its traceback.
    """
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(run.world_size)]
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=rank_main, args=(run, rank, f"{folder}/store", pipe[1]))
            for rank, pipe in enumerate(pipes)
        ]
        for process in ranks:
            process.start()
        found, peak = collect([pipe[0] for pipe in pipes], [p.pid or 0 for p in ranks], sampled=run.sampled)
        failed = [answer for answer in found if not isinstance(answer, dict)]
        for process in ranks:
            process.join(0 if failed else 30)
            process.kill()
            process.join()
        for pipe in pipes:
            pipe[0].close()
            pipe[1].close()
    if failed:
        raise RuntimeError(f"{run.system}: {next((f for f in failed if f), 'no answer in time')}")
    means = {key: sum(answer[key] for answer in found) / len(found) for key in found[0]}
    return Outcome(**{**means, "wire": max(answer["wire"] for answer in found)}, pss=peak)
