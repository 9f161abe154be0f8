"""Two ranks train with an offload while their workers are killed: the bits stay right, and nothing grows.

``ZERO_OPT_SOAK_S`` is for how many seconds, ``ZERO_OPT_SOAK_KILL_S`` how far apart kills are; ``make soak`` sets both.

What grows is told by what is allocated: after warm-up that is the same at every sample to a few KB. Resident memory is
what the allocator has got from the system, in places that it goes on finding better ones for. torch's flight recorder,
which fills a ring with the stacks of the first 2,000 collectives, is off: that looks like a leak as long as it lasts.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import zero_opt
from test.support.failures import PATIENCE_S
from test.support.harness import assert_bitwise, run_processes
from test.support.scenario import BUCKET_MB, values
from test.support.worker_training import worker_of

SECONDS = float(os.environ.get("ZERO_OPT_SOAK_S", "4"))
KILL_S = float(os.environ.get("ZERO_OPT_SOAK_KILL_S", "0.4"))
DEATHS = SECONDS / KILL_S / 4
SHAPES = ((300, 40), (65,), (129, 7))
# Later samples may have this much more than those before. Allocated: two steps' gradients (98 KB each), which a sample
# may or may not meet under way, and the samples themselves. Resident: what the allocator leaves unused of its arena.
ALLOCATED_SLACK_KB, RESIDENT_SLACK_KB = 256, 4096
_ARENA_MAX = -8  # of malloc.h


class Sample(NamedTuple):
    """What a process holds: open descriptors, allocated and resident memory, and pages of shared memory."""

    descriptors: int
    allocated_kb: int
    resident_kb: int
    shared_kb: int


class _MallInfo(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")),
        *((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")),
    ]


_libc = ctypes.CDLL(None)
_libc.mallinfo2.restype = _MallInfo


def sample() -> Sample:
    """Of this process, without what only waits for the garbage collector."""
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    kb = {key: int(status[key].split()[0]) for key in ("RssAnon", "RssShmem")}
    heap = _libc.mallinfo2()
    allocated_kb = (heap.uordblks + heap.hblkhd) // 1024
    return Sample(len(os.listdir("/proc/self/fd")), allocated_kb, kb["RssAnon"], kb["RssShmem"])


def _train(rank: int, world_size: int) -> tuple[list[Sample], int, int]:
    gc.freeze()  # what the parent had: collections look at what is made here alone
    _libc.mallopt(_ARENA_MAX, 1)  # else threads go on finding themselves arenas for a minute
    params = [nn.Parameter(values(5, 0, 0, i, shape).clone()) for i, shape in enumerate(SHAPES)]
    twins = [nn.Parameter(param.detach().clone()) for param in params]
    plain = zero_opt.CPUAdamW(twins, lr=0.01)
    offload = zero_opt.WorkerOffload(threads=1)
    opt = zero_opt.ShardedOptimizer(
        params, zero_opt.CPUAdamW, lr=0.01, reduction=zero_opt.Overlapped(BUCKET_MB), offload=offload
    )
    grads = [[values(6, 0, r, i, shape) for i, shape in enumerate(SHAPES)] for r in range(world_size)]
    over, samples, steps = threading.Event(), list[Sample](), 0

    def kill() -> None:
        before = -1
        while not over.wait(KILL_S):
            child = worker_of(opt)._handles.child
            if child is not None and before < steps:  # one that has got on: three in a row that do not are an error
                before = steps
                with contextlib.suppress(OSError):  # it is being replaced already
                    os.kill(child.pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    begin, due = time.monotonic(), 0.0

    def goes_on() -> bool:
        return time.monotonic() - begin < SECONDS or worker_of(opt).deaths < DEATHS

    try:
        while any(opt._engine.agreement.group.all_gather(torch.tensor([goes_on()]))):  # type: ignore[union-attr]
            torch.autograd.backward(params, [grad.clone() for grad in grads[rank]])
            opt.step()
            opt.zero_grad()
            for index, twin in enumerate(twins):
                twin.grad = (grads[0][index] + grads[1][index]) / world_size
            plain.step()
            steps += 1
            assert_bitwise([param.detach() for param in params], [twin.detach() for twin in twins])
            if time.monotonic() - begin > due:
                samples.append(sample())
                due += SECONDS / 40
    finally:
        over.set()
        killer.join(10)
    deaths = worker_of(opt).deaths
    opt.close()
    return samples, deaths, steps


def _most(samples: list[Sample]) -> Sample:
    return Sample(*(max(column) for column in zip(*samples, strict=True)))


def test_training_under_kills_keeps_its_bits_and_grows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "0")
    found: list[Any] = run_processes(2, _train, timeout=SECONDS + PATIENCE_S)
    for samples, deaths, steps in found:
        assert deaths >= DEATHS
        print(f"\n{steps} steps, {deaths} workers killed", *samples, sep="\n")
        early, late = _most(samples[len(samples) // 4 : len(samples) // 2]), _most(samples[len(samples) // 2 :])
        assert late.descriptors <= early.descriptors
        assert late.allocated_kb <= early.allocated_kb + ALLOCATED_SLACK_KB
        assert late.resident_kb <= early.resident_kb + RESIDENT_SLACK_KB
        assert late.shared_kb <= early.shared_kb
