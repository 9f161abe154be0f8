"""What a worker can step, and in how many bytes of shared memory; builds the placement."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...comm.groups import Group
from ...errors import ConfigConflict
from ...kernels.threads import allowed_threads
from ...policies import AlreadyReduced, AtStep, DDPHook, Overlapped, WorkerOffload
from ...sharding.buckets import GradBucket
from ...system.shared_memory import page_aligned
from ..memory import HOST_MEMORY, MemoryInputs, Tally
from ..policy import NativePolicy, PlacementInputs
from .cores import split_cores
from .placement import WorkerPlacement
from .prediction import PredictingPlacement
from .process import control_nbytes
from .speculation import SpeculativePlacement


class WorkerPolicy(NativePolicy[WorkerOffload]):
    """``WorkerOffload``."""

    def __init__(self, offload: WorkerOffload, inputs: PlacementInputs) -> None:
        super().__init__(offload, inputs)
        self.delay, self.steps_in_background = offload.delay, offload.steps_in_background

    @property
    def threads(self) -> int | None:
        return self.inputs.class_threads  # those of ``offload`` are the worker's

    @property
    def _grad_buffers(self) -> int:
        """How many buffers gradients have: in backward they come to one while the worker reads the other."""
        return 1 if isinstance(self.inputs.reduction, AlreadyReduced) else 1 + self.offload.delay

    def check(self, groups: Sequence[Mapping[str, Any]], describe: Callable[[int], str]) -> None:
        reduction = self.inputs.reduction
        if self.offload.speculate and isinstance(reduction, (AtStep, AlreadyReduced)):
            raise ConfigConflict(
                f"WorkerOffload(speculate=True) begins steps when backward has reduced a bucket, which "
                f"{type(reduction).__name__} does at step(); use reduction=zero_opt.{Overlapped.__name__}(), or "
                f"{DDPHook.__name__}() under DistributedDataParallel"
            )
        super().check(groups, describe)

    @property
    def _placement_type(self) -> type[WorkerPlacement]:
        if self.offload.speculate:
            return SpeculativePlacement
        return PredictingPlacement if self.offload.prediction else WorkerPlacement

    def build(self, group: Group) -> WorkerPlacement:
        model = self.inputs.reduction.overlap_param_gather
        return self._placement_type(self.offload, self.inputs.defaults, group, model, self.kept, self._grad_buffers)

    def memory(self, buckets: Sequence[GradBucket], inputs: MemoryInputs) -> Tally:
        tally = Tally()
        usable = sorted(os.sched_getaffinity(0))
        threads = split_cores(self.offload, usable, allowed_threads(len(usable)), inputs.ranks_per_host).threads
        # A run is a stretch of neighbors with one step count: as a rule, a bucket.
        start = taken = page_aligned(control_nbytes(threads, len(buckets)))
        for bucket in buckets:
            shard = self._placement_type.shard_type(bucket, self.kept)
            arrays = shard.missing(self.update.roles(inputs.hypers[bucket.layout.group]), self._grad_buffers)
            shard.add_memory(tally, arrays)
            taken += shard.nbytes_of(arrays)
        in_arena = sum(n for (_, where, name), n in tally.items() if where == HOST_MEMORY and name != "step")
        tally["buffers", HOST_MEMORY, "control area"] += start
        tally["buffers", HOST_MEMORY, "padding"] += page_aligned(taken) - start - in_arena
        return tally
