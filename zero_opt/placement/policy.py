"""The base of what answers for an offload policy: checks, bytes, and building the placement."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..comm.groups import Group
from ..errors import ConfigConflict, UnsupportedOptimizer, UnsupportedParam
from ..kernels.adam_state import HALVES
from ..kernels.native_optimizer import torch_class_of
from ..kernels.table import NATIVE_CLASSES, UPDATES
from ..kernels.updates import NativeUpdate
from ..policies import AdamState, MixedPrecision
from ..reduction import ReductionPolicy
from ..sharding.buckets import GradBucket
from ..system.devices import HOST, is_host
from .compact_state import is_compact
from .interface import Placement, SlicePlacement
from .memory import MemoryInputs, Tally
from .native_rules import check_groups, check_state, require_native_dtype, without_column_keys
from .state_shard import Kept

OffloadT = TypeVar("OffloadT")


def refuse_compact(policy: str, form: AdamState) -> None:
    """Raise ConfigConflict for compact state, under a policy that keeps fp32 moments and masters."""
    if is_compact(form):
        raise ConfigConflict(
            f"{policy} keeps fp32 moments and masters, not {form!r}: leave moments and master as they are by default"
        )


ParamStates = Mapping[int, Mapping[str, Any]]


class PlacementInputs(NamedTuple):
    """What a placement is chosen and built from, besides its policy; the same on every rank."""

    optimizer_class: type[torch.optim.Optimizer]
    defaults: Mapping[str, Any]
    precision: MixedPrecision
    reduction: ReductionPolicy

    @property
    def form(self) -> AdamState:
        """What is kept of a parameter; ``master`` is as the user says it, and ``None`` leaves it to the offload.

        Of this package's classes ``state`` says it, of all others ``precision``.
        """
        if self.is_native_class:
            own = self.defaults.get("state")
            return own if isinstance(own, AdamState) else AdamState()
        dtype = self.precision.master_dtype
        return AdamState(master=None if dtype is None else "split" if dtype == "split" else "float32")

    @property
    def form_with_masters(self) -> AdamState:
        """The same for an offload: where nothing is said, bf16 and fp16 parameters have fp32 masters."""
        return self.form if self.form.master is not None else replace(self.form, master="float32")

    @property
    def splits_masters(self) -> bool:
        """Whether a master is to be the parameter and a remainder."""
        return self.form.master == "split"

    @property
    def fp32_masters(self) -> str:
        """What to pass for fp32 masters in place of split ones, for messages."""
        if self.is_native_class:
            return "state=zero_opt.AdamState(master='float32')"
        return "precision=zero_opt.MixedPrecision(master_dtype=torch.float32)"

    @property
    def is_native_class(self) -> bool:
        """Whether the class is one of this package's, which step on the CPU alone."""
        return self.optimizer_class in NATIVE_CLASSES

    @property
    def class_threads(self) -> int | None:
        """The class's own argument for how many threads step; ``None`` without one."""
        return self.defaults.get("threads") if self.is_native_class else None


class PlacementPolicy(ABC):
    """All that an offload policy decides: what can be stepped, as what, in how much memory, and by which placement.

    An optimizer has one, made before anything else. Every method may be called at any time, on any rank alone, except
    :meth:`build`.

    Attributes:
        steps_in_background: whether steps are made while this process computes: gradients are better early than at
            ``step()``.
        mixes_groups: whether parameters of one bucket may be of several param groups.
    """

    steps_in_background = mixes_groups = False

    def __init__(self, inputs: PlacementInputs) -> None:
        self.inputs = inputs

    @abstractmethod
    def check(self, groups: Sequence[Mapping[str, Any]], describe: Callable[[int], str]) -> None:
        """Raise an error for what cannot be stepped as the policy says.

        Args:
            groups: param groups as the wrapped class completes them.
            describe: names a parameter, given its number among those of ``groups``.

        Raises:
            UnsupportedOptimizer, UnsupportedParam, ConfigConflict, NativeUnavailable.
        """

    @abstractmethod
    def check_hypers(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raise an error for hyperparameters that cannot be stepped with.

        Args:
            groups: as for :meth:`check`.

        Raises:
            UnsupportedOptimizer, ConfigConflict, NativeUnavailable.
        """

    @abstractmethod
    def check_param(self, param: Tensor, label: str) -> None:
        """Raise UnsupportedParam, naming it ``label``, for a parameter that cannot be stepped as the policy says.

        Frozen ones may be among the parameters, whatever they are: they are checked once they are to be stepped.
        """

    def _check_trainable(self, groups: Sequence[Mapping[str, Any]], describe: Callable[[int], str]) -> None:
        """Make :meth:`check_param` of every parameter that is not frozen; see :meth:`check`."""
        for index, param in enumerate(param for group in groups for param in group["params"]):
            if param.requires_grad:
                self.check_param(param, describe(index))

    def check_state(self, index: int, state: Mapping[str, Any]) -> None:  # noqa: ARG002
        """Raise StateDictError for the loaded state of a parameter if the placement cannot take all of it."""
        return

    def _require_class_steps(self, param: Tensor, label: str, left: str, otherwise: str) -> None:
        """Raise UnsupportedParam, naming it, for a parameter on an accelerator if the class steps on the CPU alone.

        Args:
            left, otherwise: parts of the message: by what the parameter is left there, and what else helps.
        """
        if self.inputs.is_native_class and not is_host(param.device):
            cls = self.inputs.optimizer_class
            raise UnsupportedParam(
                f"{label} is on {param.device}, where {left}, and {cls.__name__} steps on the CPU alone; use "
                f"{torch_class_of(cls)}{otherwise}"
            )

    def loadable(self, states: ParamStates) -> ParamStates:
        """Loaded states, per parameter, without what the placement would keep and not follow."""
        return without_column_keys(states)

    def steps_by_columns(self, param: Tensor) -> bool:
        """Whether the number of steps of a parameter does not follow from how often it had gradients."""
        return bool(self.column_places(param))

    def column_places(self, param: Tensor) -> Mapping[str, tuple[Tensor, torch.Size]]:  # noqa: ARG002
        """The state that a parameter has because it is stepped by columns: a value each, and the shape it grows to."""
        return {}

    def stepped_as(self, param: Tensor) -> tuple[torch.dtype, torch.device]:
        """The dtype of what is stepped for a parameter, and the device of its state, where it is not left there."""
        return torch.float32 if param.dtype in HALVES else param.dtype, HOST

    @abstractmethod
    def build(self, group: Group) -> Placement:
        """The placement, without any parameters. Collective."""

    @abstractmethod
    def memory(self, buckets: Sequence[GradBucket], inputs: MemoryInputs) -> Tally:
        """Bytes that the placement will hold of one rank's buckets, those of reduced gradients among them.

        Args:
            buckets: of tensors on the meta device; ``bucket.device`` alone says where their parameters will be.
        """


class SinglePlacePolicy(PlacementPolicy, Generic[OffloadT]):
    """A policy by which the whole shard is stepped in one place.

    Attributes:
        offload: the policy as the user gave it.
        delay: steps after which an update arrives.
        leaves_some: whether a part of the parameters stays on an accelerator.
        in_memory: whether state is in memory between steps, not in a file.
        splits_on_accelerators: whether parameters on an accelerator may have split masters.
    """

    delay = 0
    leaves_some = False
    in_memory = True
    splits_on_accelerators = True

    def __init__(self, offload: OffloadT, inputs: PlacementInputs) -> None:
        super().__init__(inputs)
        self.offload = offload

    @property
    def name(self) -> str:
        """The policy's name, for messages."""
        return type(self.offload).__name__

    @property
    def threads(self) -> int | None:
        """How many threads of this process step, as set by the user; ``None`` if not set."""
        given: int | None = getattr(self.offload, "threads", None)
        return given or self.inputs.class_threads

    def check_param(self, param: Tensor, label: str) -> None:
        """Raise UnsupportedParam for one whose master is to be split and cannot be; see :class:`PlacementPolicy`."""
        away = not (self.splits_on_accelerators or is_host(param.device))
        if self.inputs.splits_masters and (param.dtype is torch.float16 or away):
            where = "" if self.splits_on_accelerators else " on the CPU, or with offload=CPUOffload()"
            raise UnsupportedParam(
                f"{label} is {param.dtype} on {param.device}; split masters are for torch.bfloat16{where}; use "
                f"{self.inputs.fp32_masters}"
            )

    @abstractmethod
    def build(self, group: Group) -> SlicePlacement[Any]: ...


class NativePolicy(SinglePlacePolicy[OffloadT]):
    """A policy whose placement keeps state and masters in arrays of its own, and steps them natively."""

    @property
    def update(self) -> NativeUpdate:
        """The class's, which there is after :meth:`check`."""
        return UPDATES[self.inputs.optimizer_class]

    @property
    def kept(self) -> Kept:
        """What is kept of parameters."""
        first = self.update.first_value(self.inputs.defaults)
        return Kept(self.update, self.inputs.form_with_masters, first)

    def check(self, groups: Sequence[Mapping[str, Any]], describe: Callable[[int], str]) -> None:
        check_groups(self.name, self.inputs.optimizer_class, groups)
        if self.inputs.splits_masters and not self.update.compact:
            raise UnsupportedOptimizer(
                f"{self.name} keeps split masters of Adam and AdamW alone, not of "
                f"{self.inputs.optimizer_class.__name__}; use {self.inputs.fp32_masters}"
            )
        self._check_trainable(groups, describe)

    def check_param(self, param: Tensor, label: str) -> None:
        require_native_dtype(self.name, self.inputs.optimizer_class, param, label)
        super().check_param(param, label)

    def check_hypers(self, groups: Sequence[Mapping[str, Any]]) -> None:
        check_groups(self.name, self.inputs.optimizer_class, groups)

    def check_state(self, index: int, state: Mapping[str, Any]) -> None:
        check_state(index, state, self.update)
