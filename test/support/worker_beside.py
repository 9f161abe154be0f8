"""A worker process with the same steps taken beside it, and whether a process has ended."""

from __future__ import annotations

import os
import select
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from test.support.failures import PATIENCE_S
from test.support.harness import assert_bitwise
from zero_opt import WorkerOffload
from zero_opt.kernels import AdamHypers
from zero_opt.kernels.runs import BoundRun, step_runs
from zero_opt.kernels.updates import PlainHypers, StepHypers
from zero_opt.placement.worker.process import WorkerProcess

ADAM = AdamHypers(lr=0.01, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, decoupled=True)
_SGD = {"lr": 0.01, "dampening": 0.1, "weight_decay": 0.1, "nesterov": 0.0}
_ADAGRAD = {"lr": 0.01, "lr_decay": 0.1, "weight_decay": 0.1, "eps": 1e-10}
_LION = {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1}
# Hyperparameters, and arrays of state.
UPDATES: Mapping[str, tuple[StepHypers, tuple[str, ...]]] = {
    "adam": (ADAM, ("exp_avg", "exp_avg_sq")),
    "sgd": (PlainHypers("sgd", {**_SGD, "momentum": 0.9}, maximize=False), ("momentum_buffer",)),
    "sgd, no momentum": (PlainHypers("sgd", {**_SGD, "momentum": 0.0}, maximize=True), ()),
    "adagrad": (PlainHypers("adagrad", _ADAGRAD, maximize=False), ("sum",)),
    "lion": (PlainHypers("lion", _LION, maximize=False), ("exp_avg",)),
}
NUMEL = 5000
Arrays = dict[str, dict[str, Tensor]]  # of a run, by update and role


class Trainer:
    """A worker, a run of each of some updates in its arena, and the same steps taken in this process."""

    def __init__(self, numel: int = NUMEL, lanes: int = 2, updates: Sequence[str] = ("adam",), **options: Any) -> None:
        cores = sorted(os.sched_getaffinity(0))
        self.worker = WorkerProcess(WorkerOffload(**options), cores, lanes)
        self.roles = {update: ("param", *UPDATES[update][1], "grad") for update in updates}
        self.start = self.worker.extend(4 * numel * sum(map(len, self.roles.values())))
        self.worker.start()
        self.numel, self.steps = numel, 0
        generator = torch.Generator().manual_seed(3)
        self.own: Arrays = {
            update: {role: torch.rand(numel, generator=generator) for role in roles}
            for update, roles in self.roles.items()
        }
        for update, arrays in self.arrays().items():
            for role, tensor in arrays.items():
                tensor.copy_(self.own[update][role])

    def arrays(self) -> Arrays:
        place = self.start
        found: Arrays = {}
        for update, roles in self.roles.items():
            found[update] = {}
            for role in roles:
                found[update][role] = self.worker.arena.view(place, self.numel, torch.float32)
                place += 4 * self.numel
        return found

    @property
    def pid(self) -> int:
        child = self.worker._handles.child
        assert child is not None
        return child.pid

    def submit(self) -> int:
        self.steps += 1
        here, there = self._runs(self.own), self._runs(self.arrays())
        step_runs([(hypers, [run]) for hypers, run, _ in here], threads=1, flush_denormals=False)
        return self.worker.submit([(hypers, [run.run], [grad.data_ptr()]) for hypers, run, grad in there])

    def _runs(self, arrays: Arrays) -> list[tuple[Any, BoundRun, Tensor]]:
        """The next step's, with their hyperparameters and gradients."""
        found = []
        for update, tensors in arrays.items():
            grad = tensors["grad"]
            run = BoundRun({role: tensors[role] for role in tensors if role != "grad"}, torch.float32, step=self.steps)
            run.set_grad(grad)
            found.append((UPDATES[update][0].for_kernel(), run, grad))
        return found

    def step(self) -> None:
        self.worker.wait(self.submit())
        self.check()

    def check(self) -> None:
        assert_bitwise(self.arrays(), self.own)


def ends(pid: int) -> bool:
    """Wait for a process to end; return whether it has."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([pidfd], [], [], PATIENCE_S)[0])
    finally:
        os.close(pidfd)
