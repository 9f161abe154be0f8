"""A worker process with the same steps taken beside it, and whether a process has ended."""

from __future__ import annotations

import os
import select
from typing import Any

import torch
from torch import Tensor

from test.support.failures import PATIENCE_S
from test.support.harness import assert_bitwise
from zero_opt import WorkerOffload
from zero_opt.kernels import AdamHypers, AdamUpdate, adam_update_
from zero_opt.kernels.runs import BoundRun
from zero_opt.placement.worker.process import WorkerProcess

HYPERS = AdamHypers(lr=0.01, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, decoupled=True)
ROLES = ("param", "exp_avg", "exp_avg_sq", "grad")
NUMEL = 5000


class Trainer:
    """A worker, one run in its arena, and the same steps taken in this process."""

    def __init__(self, numel: int = NUMEL, lanes: int = 2, **options: Any) -> None:
        cores = sorted(os.sched_getaffinity(0))
        self.worker = WorkerProcess(WorkerOffload(**options), cores, lanes)
        self.start = self.worker.extend(4 * numel * len(ROLES))
        self.worker.start()
        self.numel, self.steps = numel, 0
        generator = torch.Generator().manual_seed(3)
        self.own = {role: torch.rand(numel, generator=generator) for role in ROLES}
        for role, tensor in self.arrays().items():
            tensor.copy_(self.own[role])

    def arrays(self) -> dict[str, Tensor]:
        place = self.start
        found = {}
        for role in ROLES:
            found[role] = self.worker.arena.view(place, self.numel, torch.float32)
            place += 4 * self.numel
        return found

    @property
    def pid(self) -> int:
        child = self.worker._handles.child
        assert child is not None
        return child.pid

    def submit(self) -> int:
        self.steps += 1
        arrays = self.arrays()
        grad = arrays.pop("grad")
        bound = BoundRun(arrays, torch.float32, step=self.steps)
        adam_update_([AdamUpdate(name="p", hypers=HYPERS, step=self.steps, **self.own)])
        return self.worker.submit([(HYPERS.for_kernel(), [bound.run], [grad.data_ptr()])])

    def step(self) -> None:
        self.worker.wait(self.submit())
        self.check()

    def check(self) -> None:
        assert_bitwise(self.arrays(), self.own)


def gone(pid: int) -> bool:
    """Whether a process ends soon; one that is no more has ended."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([pidfd], [], [], PATIENCE_S)[0])
    finally:
        os.close(pidfd)
