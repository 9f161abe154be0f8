"""What can be stepped from a file, and in how many bytes of file and memory; builds the placement."""

from __future__ import annotations

from collections.abc import Sequence

from ...comm.groups import Group
from ...policies import NVMeOffload
from ...sharding.buckets import GradBucket
from ..core_sharers import agree_on_threads
from ..memory import HOST_MEMORY, MemoryInputs, Tally, reduced_gradients
from ..policy import NativePolicy
from .extents import extents_of
from .placement import NVMePlacement
from .window_pass import BUFFERS


class NVMePolicy(NativePolicy[NVMeOffload]):
    """``NVMeOffload``."""

    in_memory = False

    def build(self, group: Group) -> NVMePlacement:
        agree_on_threads(self.name, self.threads, group)
        return NVMePlacement(self.offload, self.inputs.defaults, self.kept, self.threads)

    def memory(self, buckets: Sequence[GradBucket], inputs: MemoryInputs) -> Tally:
        tally, largest, copied, most = reduced_gradients(buckets), 0, 0, self.offload.window_mb * 2**20
        for extent in extents_of(buckets, self.kept):
            arrays = extent.missing(self.update.roles(inputs.hypers[extent.group]))
            extent.add_memory(tally, arrays)
            largest = max(largest, extent.window_nbytes(most, arrays))
            copied = max(copied, extent.copied_nbytes(most, arrays))
        tally["staging", HOST_MEMORY, "windows"] += BUFFERS * largest
        tally["buffers", HOST_MEMORY, "results of windows"] += copied
        return tally
