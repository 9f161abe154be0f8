"""The way of a worker's results into the parameters: within ``step()``, or bucket by bucket after it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import nn

from ...sharding.flat_param import FlatParam, OwnWrites
from ...system.devices import is_host
from ...system.interrupts import uninterrupted
from ..masters import write_counted
from .arena_shard import ArenaShard
from .cores import Confined, CoreSplit


class Used(NamedTuple):
    """The slices of one shard that a step has."""

    shard: ArenaShard
    positions: Sequence[int]


class ParamWriter:
    """Copies what was stepped into parameters, on the worker's cores too: it has nothing to do then.

    Args:
        confined: what keeps the trainer from these cores.
    """

    def __init__(self, split: CoreSplit, confined: Confined | None) -> None:
        self._split, self._confined = split, confined

    def write(self, made: Sequence[Used]) -> None:
        """Copy on all cores, while the trainer waits. The writes are counted already, as all here."""
        threads = self._split.threads + len(self._split.trainer)
        with nullcontext() if self._confined is None else self._confined.lifted():
            write_counted(made, threads=max(threads, torch.get_num_threads()))

    def write_beside(self, made: Sequence[Used]) -> None:
        """Copy while the trainer computes: on the worker's cores, or, where they are the trainer's too, on one."""
        if self._confined is None:
            write_counted(made, threads=1)
            return
        with self._confined.lifted(self._split.worker):
            write_counted(made, threads=self._split.threads)


class ResultDelivery:
    """The way of a worker's results into the parameters.

    Given a model, the delivery keeps results until they are asked for. What lies on an accelerator does not wait here:
    the processor only enqueues its copies, on the current stream. Without a model, nothing waits.

    The placement calls :meth:`deliver` for each step. Until :meth:`await_results`, another thread may call
    :meth:`await_result` for single buckets.

    Attributes:
        overtaken: a parameter that the user has written to before its result had arrived, which was dropped then.
    """

    def __init__(self, writer: ParamWriter, model: nn.Module | None) -> None:
        self._writer, self._keeps = writer, model is not None  # no reference to it: it may have one to the optimizer
        self._left: dict[int, Used] = {}  # by bucket, until they have arrived
        self._lock = threading.Lock()  # of who copies
        self.overtaken: FlatParam | None = None

    def deliver(self, made: Sequence[Used]) -> None:
        """Take in what a step has made, which stays as it is until :meth:`await_result` or :meth:`await_results`."""
        OwnWrites(shard.flats[position] for shard, positions in made for position in positions).count()
        at_once = made
        if self._keeps:
            at_once = [used for used in made if not is_host(used.shard.bucket.device)]
            late = [used for used in made if is_host(used.shard.bucket.device)]
            self._left.update({used.shard.bucket.layout.index: used for used in late})
        if at_once:
            self._writer.write(at_once)

    def await_result(self, bucket: int) -> None:
        """Copy a bucket's result, if it has not been copied, while the trainer computes; on any thread."""
        if bucket in self._left:  # what has arrived is to be had without waiting for another bucket
            with uninterrupted(), self._lock:
                if bucket in self._left:
                    self._writer.write_beside(self._current([self._left[bucket]]))
                    del self._left[bucket]

    def await_results(self) -> None:
        """Copy all results that are left, on all cores: the trainer waits."""
        if self._left:
            with uninterrupted(), self._lock:
                if self._left:
                    self._writer.write(self._current(list(self._left.values())))
                    self._left.clear()

    def _current(self, made: Sequence[Used]) -> list[Used]:
        """Leave out slices whose parameters the user has written to since the step."""
        current = []
        for shard, positions in made:
            edited = [position for position in positions if shard.edited(position)]
            self.overtaken = next((shard.flats[position] for position in edited), self.overtaken)
            current.append(Used(shard, [position for position in positions if position not in edited]))
        return current
