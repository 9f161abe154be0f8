"""Workers of two ranks in training, killed and stopped at random: the bits stay those of a run in peace."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zero_opt
from test.crash.programs import LONG
from test.support.harness import assert_bitwise, run_processes
from test.support.scenario import values
from test.support.worker_training import assert_as_simulated, simulate, train_ranks, worker_of

SECONDS = 1200 if LONG else 60  # nothing hangs
# On each of two ranks, whatever the offload.
KILLS = 520 if LONG else 30
STOPPED_STEPS = 90 if LONG else 8
NUMEL = 300_000
# Classes that are killed while they step, with options that differ from their defaults.
UPDATES: dict[str, tuple[Any, dict[str, Any]]] = {
    "fp32": (zero_opt.CPUAdamW, {}),
    "8-bit": (zero_opt.CPUAdamW, {"state": zero_opt.AdamState("block8", "split")}),
    "sgd": (zero_opt.CPUSGD, {"lr": 0.01, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "adagrad": (zero_opt.CPUAdagrad, {"initial_accumulator_value": 0.1}),
    "lion": (zero_opt.CPULion, {"weight_decay": 0.1, "state": zero_opt.AdamState(master="float32")}),
}
WAYS = pytest.mark.parametrize("way", [{}, {"delay": 1}, {"speculate": True}], ids=["at once", "delay", "speculate"])


def _killer(signals: tuple[int, ...]) -> Callable[[zero_opt.ShardedOptimizer, int, int], None]:
    def strike(optimizer: zero_opt.ShardedOptimizer, step: int, rank: int) -> None:
        child = worker_of(optimizer)._handles.child
        if random.Random(f"{step} {rank}").random() < 0.5 and child is not None:
            os.kill(child.pid, signals[step % len(signals)])

    return strike


@pytest.mark.parametrize("update", [update for update in UPDATES if update != "8-bit"])
@WAYS
def test_workers_die_and_stop_in_training(way: dict[str, Any], update: str) -> None:
    offload = zero_opt.WorkerOffload(**way, hang_timeout=0.3, max_deaths=50)
    cls, options = UPDATES[update]
    options = {key: value for key, value in options.items() if key != "state"}

    def run(rank: int, world_size: int) -> Any:
        strike = _killer((signal.SIGKILL, signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP))
        return train_ranks(rank, world_size, 12, meanwhile=strike, cls=cls, offload=offload, **options)

    found = run_processes(2, run)
    assert_as_simulated(found, simulate(2, 12, way.get("delay", 0), cls=cls, **options))
    assert all(deaths for _, _, deaths in found)


@WAYS
def test_workers_are_stopped_between_steps(way: dict[str, Any]) -> None:
    offload, begin = zero_opt.WorkerOffload(**way, hang_timeout=0.2, max_deaths=50), time.monotonic()

    def run(rank: int, world_size: int) -> Any:
        return train_ranks(rank, world_size, STOPPED_STEPS, meanwhile=_killer((signal.SIGSTOP,)), offload=offload)

    found = run_processes(2, run)
    assert_as_simulated(found, simulate(2, STOPPED_STEPS, way.get("delay", 0)))
    stops = [deaths for _, _, deaths in found]
    assert sum(stops) >= (50 if LONG else 2)
    print(f"\nSIGSTOP, {way}: {stops} workers by rank, 0 divergences, {time.monotonic() - begin:.0f} s")


def _train_under_fire(rank: int, world_size: int, offload: Any, kills: int, update: str) -> Any:
    """Steps of a few milliseconds, and a thread that kills whatever worker there is at random times."""
    cls, options = UPDATES[update]
    generator, dtype = torch.Generator().manual_seed(5), torch.bfloat16 if "state" in options else torch.float32
    params = [nn.Parameter(torch.randn(NUMEL, generator=generator).to(dtype)) for _ in range(2)]
    optimizer = zero_opt.ShardedOptimizer(params, cls, offload=offload, reduction=zero_opt.Overlapped(1), **options)
    worker, over = worker_of(optimizer), threading.Event()

    def fire() -> None:
        chance = random.Random(rank)
        while not over.wait(chance.random() * 0.01):
            child = worker._handles.child
            if child is not None and worker.deaths < kills:
                with contextlib.suppress(OSError):  # it is being replaced already
                    signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)

    gun = threading.Thread(target=fire)
    if kills:
        gun.start()
    for step in range(2 * KILLS):
        optimizer.zero_grad()
        torch.autograd.backward(params, [values(step % 7, 1, rank, i, (NUMEL,)).to(dtype) for i in range(2)])
        optimizer.step()
    over.set()
    if kills:
        gun.join(SECONDS)
    optimizer.flush()
    optimizer.close()
    return [param.detach() for param in params], worker.deaths


@pytest.mark.parametrize("update", UPDATES)
@WAYS
def test_workers_are_killed_at_any_time(way: dict[str, Any], update: str) -> None:
    offload, begin = zero_opt.WorkerOffload(**way, max_deaths=1000), time.monotonic()
    calm, fired = (run_processes(2, _train_under_fire, offload, kills, update) for kills in (0, KILLS))
    for (one, _), (other, deaths) in zip(calm, fired, strict=True):
        assert_bitwise(one, other)
        assert deaths > (0.95 * KILLS if LONG else 0)
    kills = [deaths for _, deaths in fired]
    print(f"\nSIGKILL, {way}, {update}: {kills} workers by rank, 0 divergences, {time.monotonic() - begin:.0f} s")
