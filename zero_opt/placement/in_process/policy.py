"""What can be stepped by this process, on the device or in host memory, and in how many bytes; builds the placement."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...comm.groups import Group
from ...errors import UnsupportedOptimizer
from ...kernels.functions import ADAM
from ...kernels.native_optimizer import NativeOptimizer
from ...kernels.table import UPDATES
from ...layout import ParamSlice
from ...policies import AdamState, CPUOffload
from ...sharding.buckets import GradBucket
from ...sharding.flat_param import FlatParam
from ...sharding.wrapped_class import require_real_if_fused, steps_params_apart
from ...system.devices import is_host
from ...system.extension import native_available, require_native
from ...system.shared_memory import page_aligned
from ..compact_state import is_compact
from ..core_sharers import agree_on_threads
from ..masters import slices_of
from ..memory import DEVICE, HOST_MEMORY, MemoryInputs, Tally, reduced_gradients
from ..policy import OffloadT, PlacementInputs, SinglePlacePolicy
from .host_offload import CPUPlacement, HostUnits, room_for
from .native_steps import FusedRule, NativeSteps, allows_fused, asks_for_fused
from .placement import DevicePlacement
from .units import DeviceUnits


class InProcessPolicy(SinglePlacePolicy[OffloadT]):
    """A policy by which the wrapped class steps, or the native kernel where it has the class's formula.

    Attributes:
        fused_rule: which param groups the kernel steps.
    """

    fused_rule: FusedRule
    mixes_groups = True

    @property
    @abstractmethod
    def form(self) -> AdamState:
        """What is kept of a parameter that is stepped."""

    def check(self, groups: Sequence[Mapping[str, Any]], describe: Callable[[int], str]) -> None:
        self._check_trainable(groups, describe)
        self.check_hypers(groups)

    def check_param(self, param: Tensor, label: str) -> None:
        super().check_param(param, label)
        cls = self.inputs.optimizer_class
        if self.inputs.is_native_class:  # a user's subclass steps by itself, and checks what it is given
            assert issubclass(cls, NativeOptimizer)
            cls.require_dtype(label, param.dtype, self.form)

    def check_hypers(self, groups: Sequence[Mapping[str, Any]]) -> None:
        cls = self.inputs.optimizer_class
        require_real_if_fused(cls, groups)
        for number, group in enumerate(groups if self.inputs.splits_masters else ()):
            if all(param.dtype is not torch.bfloat16 for param in group["params"]):
                continue
            require_native()
            if UPDATES.get(cls) is not ADAM or not self.fused_rule(group):
                raise UnsupportedOptimizer(
                    f"split masters are stepped by the native kernel alone, which does not step group {number} of "
                    f"{cls.__name__} (fused={group.get('fused')!r}): take Adam or AdamW with fused=True, or "
                    f"{self.inputs.fp32_masters}"
                )

    def require_known_state(self) -> None:
        """Raise UnsupportedOptimizer for compact state of a user's subclass of a native class, which it alone reads."""
        cls, state = self.inputs.optimizer_class, self.inputs.defaults.get("state")
        if isinstance(state, AdamState) and is_compact(state) and not self.inputs.is_native_class:
            raise UnsupportedOptimizer(
                f"{cls.__name__} keeps {state!r} as its own, which can be neither sharded nor offloaded: take the "
                "class that it is derived from, or state=zero_opt.AdamState(master='float32')"
            )

    def native_steps(self) -> NativeSteps | None:
        """What steps by the native kernel, if there is one for the class here."""
        update = UPDATES.get(self.inputs.optimizer_class)
        if update is None or not native_available():
            return None
        return NativeSteps(update, self.inputs.defaults, self.fused_rule, self.threads)


def add_slice(
    tally: Tally,
    inputs: MemoryInputs,
    piece: ParamSlice,
    flat: FlatParam,
    where: str,
    stepped: torch.dtype,
    *,
    stays: bool = True,
    splits: bool = False,
) -> None:
    """Add what is kept of a slice, whose dtype becomes ``stepped``: beside the parameter or, if it leaves, instead.

    Args:
        stays: what is stepped is the parameter, or a master beside it; else a copy elsewhere.
        splits: a bf16 parameter's master is the parameter and a remainder.
    """
    param, numel = flat.param, piece.in_param.numel
    if stepped is not param.dtype:
        name, itemsize = ("remainder", 2) if splits and param.dtype is torch.bfloat16 else ("master", 4)
        tally["masters", where, name] += numel * itemsize
        if not stays:
            tally["buffers", where, "copies of parameters"] += numel * param.dtype.itemsize
    elif not stays:
        tally["masters", where, "master"] += numel * param.dtype.itemsize
    shape = param.shape if numel == param.numel() else (numel,)
    for key, nbytes in inputs.state_nbytes(piece.group, shape, stepped).items():
        tally["state", where, key] += nbytes


class OnDevicePolicy(InProcessPolicy[None]):
    """No offload: the shard is stepped where the parameters are."""

    fused_rule = staticmethod(asks_for_fused)
    splits_on_accelerators = False

    @property
    def form(self) -> AdamState:
        return self.inputs.form

    def stepped_as(self, param: Tensor) -> tuple[torch.dtype, torch.device]:
        dtype, _ = super().stepped_as(param)
        return param.dtype if self.form.master is None else dtype, param.device

    def build(self, group: Group) -> DevicePlacement:  # noqa: ARG002
        self.require_known_state()
        cls, defaults = self.inputs.optimizer_class, self.inputs.defaults
        return DevicePlacement(cls, defaults, DeviceUnits(self.form), self.native_steps())

    def memory(self, buckets: Sequence[GradBucket], inputs: MemoryInputs) -> Tally:
        tally, splits = reduced_gradients(buckets), self.inputs.splits_masters
        for bucket in buckets:
            for piece, flat in zip(*slices_of(bucket), strict=True):
                stepped, _ = self.stepped_as(flat.param)
                add_slice(tally, inputs, piece, flat, DEVICE, stepped, splits=splits)
        return tally


class CPUPolicy(InProcessPolicy[CPUOffload]):
    """``CPUOffload``: the shard is stepped in host memory, but for what ``ratio`` leaves on the device."""

    fused_rule = staticmethod(allows_fused)

    def __init__(self, offload: CPUOffload, inputs: PlacementInputs) -> None:
        super().__init__(offload, inputs)
        self.leaves_some = offload.ratio < 1

    @property
    def form(self) -> AdamState:
        return self.inputs.form_with_masters

    def check_param(self, param: Tensor, label: str) -> None:
        super().check_param(param, label)
        if self.leaves_some:
            self._require_class_steps(param, label, f"ratio={self.offload.ratio} may leave it", ", or ratio=1")

    def build(self, group: Group) -> DevicePlacement:
        self.require_known_state()
        agree_on_threads(self.name, self.threads, group)
        cls, defaults = self.inputs.optimizer_class, self.inputs.defaults
        strategy = CPUPlacement if steps_params_apart(cls) else DevicePlacement
        return strategy(cls, defaults, self._units(), self.native_steps())

    def _units(self) -> HostUnits:
        return HostUnits(self.offload, self.form)

    def memory(self, buckets: Sequence[GradBucket], inputs: MemoryInputs) -> Tally:
        tally, splits, units = reduced_gradients(buckets), self.inputs.splits_masters, self._units()
        away = [bucket for bucket in buckets if not is_host(bucket.device)]
        staying = units.staying(away)
        for bucket in buckets:
            for piece, flat in zip(*slices_of(bucket), strict=True):
                stepped, _ = self.stepped_as(flat.param)
                if piece.param in staying:
                    add_slice(tally, inputs, piece, flat, DEVICE, stepped)
                else:
                    in_place = is_host(bucket.device)
                    add_slice(tally, inputs, piece, flat, HOST_MEMORY, stepped, stays=in_place, splits=splits)
        for device in dict.fromkeys(bucket.device for bucket in away):
            there = [bucket for bucket in away if bucket.device == device]
            self._add_link(tally, list(units.leaving(there, staying)))
        return tally

    def _add_link(self, tally: Tally, parts: Sequence[tuple[GradBucket, Sequence[int]]]) -> None:
        """Add what is page-locked beside results: the ends of pages, and the buffers that gradients arrive in."""
        room = room_for(parts)
        owned = sum(
            bucket.slices[at].in_param.numel * bucket.params[0].param.element_size()
            for bucket, members in parts
            for at in members
        )
        tally["buffers", HOST_MEMORY, "padding"] += page_aligned(max(room.results, 1)) - owned
        # One arrives while another is stepped; a class that is not known to step parameters apart has all at once.
        count = min(len(parts), 2) if steps_params_apart(self.inputs.optimizer_class) else len(parts)
        tally["buffers", HOST_MEMORY, "gradients on their way"] += count * page_aligned(room.grads)
