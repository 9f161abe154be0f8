"""The policy of a shard whose selected columns are stepped at every step, and all others now and then."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...comm.groups import Group
from ...errors import ConfigConflict
from ...kernels.functions import ADAM
from ...layout import ParamSlice
from ...policies import Selective
from ...sharding.buckets import GradBucket
from ...system.log import log
from ..masters import slices_of
from ..memory import DEVICE, HOST_MEMORY, MemoryInputs, Tally, reduced_gradients
from ..native_rules import ADAM_CLASSES, check_groups, check_state, require_native_dtype
from ..policy import ParamStates, PlacementPolicy, SinglePlacePolicy, refuse_compact
from .columns import column_places, columns_of, is_matrix, selected_count
from .placement import SelectivePlacement, home_bucket


class SelectivePolicy(PlacementPolicy):
    """``Selective``, within an offload policy.

    Args:
        home: the policy of what is not selected.
    """

    def __init__(self, selective: Selective, home: SinglePlacePolicy[Any]) -> None:
        super().__init__(home.inputs)
        self._selective, self._inner = selective, home

    def check(self, groups: Sequence[Mapping[str, Any]], describe: Callable[[int], str]) -> None:
        params = [param for group in groups for param in group["params"]]
        refuse_compact("Selective", self.inputs.form)
        if self._inner.leaves_some:
            raise ConfigConflict(
                "CPUOffload.ratio and Selective both leave a part on the device: leave ratio 1 with it"
            )
        check_groups("Selective", self.inputs.optimizer_class, groups, ADAM_CLASSES)
        self._check_trainable(groups, describe)
        self._inner.check(groups, describe)
        if self._inner.in_memory and all(param.device.type == "cpu" for param in params):
            log.warning(
                "Selective makes step() longer where parameters and %s's state are in host memory: adding gradients up "
                "moves as many bytes there as it saves; leave selective out",
                self._inner.name,
            )

    def check_param(self, param: Tensor, label: str) -> None:
        self._require_class_steps(param, label, "Selective leaves a part of it", "")
        require_native_dtype("Selective", self.inputs.optimizer_class, param, label)
        self._inner.check_param(param, label)

    def check_hypers(self, groups: Sequence[Mapping[str, Any]]) -> None:
        check_groups(self._inner.name, self.inputs.optimizer_class, groups, ADAM_CLASSES)

    def check_state(self, index: int, state: Mapping[str, Any]) -> None:
        check_state(index, state, ADAM)

    def loadable(self, states: ParamStates) -> ParamStates:
        return states

    def column_places(self, param: Tensor) -> Mapping[str, tuple[Tensor, torch.Size]]:
        return column_places(param.shape) if is_matrix(param.shape) else {}

    def build(self, group: Group) -> SelectivePlacement:
        return SelectivePlacement(self._selective, self._inner, group)

    # -- memory -------------------------------------------------------------------------------------------------------

    def memory(self, buckets: Sequence[GradBucket], inputs: MemoryInputs) -> Tally:
        tally = reduced_gradients(buckets)
        for bucket in buckets:
            for piece, flat in zip(*slices_of(bucket), strict=True):
                self._add_columns(tally, piece, flat.shape, ADAM.roles(inputs.hypers[piece.group]))
        for (kind, where, name), nbytes in self._inner.memory(list(map(home_bucket, buckets)), inputs).items():
            place = ("buffers", HOST_MEMORY, "means of gradients") if kind == "grad_shards" else (kind, where, name)
            tally[place] += nbytes
        return tally

    def _add_columns(self, tally: Tally, piece: ParamSlice, shape: torch.Size, roles: Sequence[str]) -> None:
        """Add what is kept of a slice beside what the inner placement has of it."""
        total, numel, itemsize = columns_of(shape), piece.in_param.numel, torch.float32.itemsize
        count = selected_count(self._selective.topk_ratio, total) if is_matrix(shape) else 1
        here = round(numel * count / total)  # where the slice is cut within a row, as a rule
        if count < total or (is_matrix(shape) and self._selective.warmup_steps):
            tally["staging", HOST_MEMORY, "gradients that wait"] += numel * itemsize
        tally["masters", DEVICE, "selected columns"] += here * itemsize
        for key in roles:
            tally["state", DEVICE, key] += here * itemsize
        tally["buffers", HOST_MEMORY, "columns"] += total * torch.bool.itemsize
        tally["buffers", DEVICE, "places of selected columns"] += here * torch.int64.itemsize
