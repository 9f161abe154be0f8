"""An arena with a worker on it, without the package's own process management."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import zero_opt
from test.native.kernels import HYPERS, run_of
from test.support.failures import PATIENCE_S
from zero_opt import _native

MAIN = Path(zero_opt.__file__).parent / "placement/worker/worker_main.py"
MAX_RUNS = 64
ALIGN = 64


@dataclass(frozen=True)
class Group:
    """Arrays by role of several runs that share hyperparameters, and their gradients."""

    runs: Sequence[Mapping[str, Tensor]]
    grads: Sequence[Tensor]
    options: Mapping[str, Any] = field(default_factory=dict)
    step: float = 3.0

    def batch(self) -> tuple[_native.Hypers, list[_native.UpdateRun], list[int]]:
        runs = [run_of(run, grad, self.step) for run, grad in zip(self.runs, self.grads)]
        return _native.Hypers("adam", **{**HYPERS, **self.options}), runs, [grad.data_ptr() for grad in self.grads]

    def tensors(self) -> Iterator[Tensor]:
        for run in self.runs:
            yield from run.values()
        yield from self.grads


def copied(groups: Iterable[Group], place: Any = Tensor.clone) -> list[Group]:
    """The groups over copies of their tensors."""
    return [
        Group(
            [{role: place(t) for role, t in run.items()} for run in group.runs],
            [place(grad) for grad in group.grads],
            group.options,
            group.step,
        )
        for group in groups
    ]


def all_same(a: Iterable[Group], b: Iterable[Group]) -> bool:
    """Equality of all bytes."""
    pairs = zip((t for g in a for t in g.tensors()), (t for g in b for t in g.tensors()), strict=True)
    return all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in pairs)


class Arena:
    """A memfd, mapped here, with a control area and room for tensors."""

    def __init__(self, lanes: int, nbytes: int) -> None:
        self.lanes = lanes
        self._used = _native.control_nbytes(lanes, MAX_RUNS)
        self.nbytes = self._used + -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.fd = os.memfd_create("test", os.MFD_CLOEXEC)
        self.wake, self.done = (os.eventfd(0, os.EFD_CLOEXEC) for _ in range(2))
        self._map()

    def _map(self) -> None:
        os.ftruncate(self.fd, self.nbytes)
        self.bytes = torch.frombuffer(mmap.mmap(self.fd, self.nbytes), dtype=torch.uint8)
        self.control = self.mapped_control()

    def grow(self, nbytes: int) -> None:
        """More room, in a new mapping; tensors stay in the old one."""
        self.nbytes += -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._map()

    def mapped_control(self) -> _native.Control:
        return _native.Control(self.bytes.data_ptr(), self.nbytes, lanes=self.lanes, max_runs=MAX_RUNS)

    def place(self, tensor: Tensor) -> Tensor:
        """A copy in the arena."""
        begin = -(-self._used // ALIGN) * ALIGN
        nbytes = tensor.numel() * tensor.element_size()
        self._used = begin + nbytes
        assert self._used <= self.nbytes
        copy = self.bytes[begin : begin + nbytes].view(tensor.dtype)
        return copy.copy_(tensor)

    def submit(self, groups: Iterable[Group], **options: Any) -> int:
        return self.control.submit([group.batch() for group in groups], self.wake, **options)

    def close(self) -> None:
        for fd in (self.fd, self.wake, self.done):
            os.close(fd)


class Worker:
    """A worker process on an arena; ``trainer_pid`` is whose death ends it."""

    def __init__(self, arena: Arena, trainer_pid: int, cpus: Sequence[int] = ()) -> None:
        self.arena, self.before = arena, arena.control.generation
        trainer = os.pidfd_open(trainer_pid)
        fds = [arena.fd, arena.wake, arena.done, trainer]
        command = [sys.executable, "-I", "-S", str(MAIN), str(_native.__file__)]
        command += map(str, [*fds, arena.lanes, *cpus])
        self.process = subprocess.Popen(command, pass_fds=fds, stderr=subprocess.PIPE, text=True)
        self.pidfd = os.pidfd_open(self.process.pid)
        os.close(trainer)

    def wait(self, sequence: int) -> str:
        """What became of the step: done or dead."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            found = self.arena.control.wait(sequence, self.arena.done, self.pidfd, 0.1)
            if found != "waiting":
                return found
        return "waiting"

    def wait_ready(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while self.arena.control.generation == self.before:
            assert self.process.poll() is None, self.ended()
            assert time.monotonic() < deadline
            time.sleep(1e-3)

    def kill(self) -> None:
        self.process.kill()
        self.ended()

    def ended(self) -> tuple[int, str]:
        """Its exit status and what it wrote."""
        _, text = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, text

    def close(self) -> None:
        if self.process.poll() is None:
            self.kill()
        os.close(self.pidfd)


@contextmanager
def arena_for(groups: Sequence[Group], lanes: int) -> Iterator[tuple[Arena, list[Group]]]:
    """An arena and the groups in it."""
    tensors = [t for group in groups for t in group.tensors()]
    arena = Arena(lanes, sum(t.numel() * t.element_size() + ALIGN for t in tensors))
    try:
        yield arena, copied(groups, arena.place)
    finally:
        arena.close()


@contextmanager
def worker_on(arena: Arena, trainer_pid: int | None = None, cpus: Sequence[int] = ()) -> Iterator[Worker]:
    worker = Worker(arena, os.getpid() if trainer_pid is None else trainer_pid, cpus)
    try:
        yield worker
    finally:
        worker.close()
