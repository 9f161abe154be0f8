"""Slices of one bucket that are stepped together, as the tensors that an optimizer has for its parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ...kernels.adam_state import HALVES, live_state, plain_state, prefer_huge_pages, remainder_of
from ...layout import ParamSlice
from ...policies import AdamState
from ...sharding.buckets import GradBucket
from ...sharding.flat_param import FlatParam, own_writes
from ...system.extension import native_available
from ..interface import ParamState, Stretch
from ..masters import MasterShard

PLAIN, SPLIT = AdamState(), AdamState(master="split")

SliceGrads = Sequence[tuple[int, Tensor]]


def slices_of(bucket: GradBucket, members: Sequence[int]) -> tuple[list[ParamSlice], list[FlatParam]]:
    """This rank's slices of a bucket at the given positions, and their parameters."""
    by_index = dict(zip(bucket.layout.params, bucket.params, strict=True))
    pieces = [bucket.slices[member] for member in members]
    return pieces, [by_index[piece.param] for piece in pieces]


class Unit(ABC):
    """Slices of one bucket that are stepped together, named by their position among those given.

    In a step, the placement calls :meth:`read_params`, :meth:`fetch`, then :meth:`grads`. The native kernel writes to
    :meth:`target`; a class steps ``stepped``, and :meth:`round` follows. :meth:`send` comes last.

    Attributes:
        members: positions of the slices among this rank's of the bucket.
        stepped: what an optimizer has for a slice: in the parameter's shape where the slice is whole, else 1-D.
        form: what the native kernel keeps of a slice.
        stretches: by position, of slices that are not stepped as a whole; by the native kernel alone.
        gradients: of how many the gradient of such a slice is the mean.
    """

    pieces: Sequence[ParamSlice]
    flats: Sequence[FlatParam]
    stepped: list[Tensor]

    def __init__(self, members: Sequence[int], form: AdamState) -> None:
        self.members, self.form = members, form
        self.stretches: dict[int, Sequence[Stretch]] = {}
        self.gradients: dict[int, int] = {}

    @abstractmethod
    def repoint(self, position: int) -> None:
        """Follow a parameter whose data moved."""

    @abstractmethod
    def read_params(self, positions: Sequence[int]) -> None:
        """Follow what the user has written to parameters since the last step."""

    def fetch(self, found: SliceGrads) -> None:
        """Start to bring gradients to where they are stepped; :meth:`grads` gives them."""
        self._found = found

    def grads(self) -> SliceGrads:
        """The fetched gradients by position, ready to be read."""
        found, self._found = self._found, ()
        return found

    @abstractmethod
    def target(self, position: int) -> Tensor:
        """Where the native kernel writes the new parameter, of the shape and strides of what is stepped."""

    @abstractmethod
    def round(self, positions: Sequence[int]) -> None:
        """Bring what a class has stepped to :meth:`target`."""

    def send(self, positions: Sequence[int]) -> None:
        """Bring :meth:`target` to the parameters."""

    def native_writes(self) -> AbstractContextManager[None]:
        """Return a context in which the kernel's writes do not count as edits."""
        return nullcontext()

    def complete(self, position: int, state: ParamState) -> None:
        """Add the master to a state that a class has made."""

    def show_masters(self, positions: Sequence[int], states: MutableMapping[Tensor, ParamState]) -> None:
        """Put the masters that were stepped into the state, also of a class that keeps none of its own."""

    def take_master(self, position: int, saved: Mapping[str, Any] | None) -> None:
        """Take the master of a state that was loaded, replaced or dropped, or, without one, the parameter."""

    def resident(self) -> Sequence[Tensor]:
        """What is kept on the parameters' device beside them, and may be re-pointed: no view of it is kept."""
        return ()

    def saved(self, position: int, state: ParamState) -> Mapping[str, Any]:
        """A state as ``torch.optim`` has it, with the master as a tensor."""
        if "remainder" not in state:
            return state
        return plain_state(self.flats[position].label, self.next_stepped(position), state)

    def next_stepped(self, position: int) -> Tensor:
        """What the next step starts from: what is stepped, or, if the user has written to the parameter, a copy."""
        return self.stepped[position]


class InPlace(Unit):
    """The parameters themselves are stepped."""

    def __init__(self, bucket: GradBucket, members: Sequence[int], form: AdamState = PLAIN) -> None:
        super().__init__(members, form)
        self.pieces, self.flats = slices_of(bucket, members)
        self.stepped = [flat.part(piece.in_param) for flat, piece in zip(self.flats, self.pieces, strict=True)]

    def repoint(self, position: int) -> None:
        self.stepped[position].data = self.flats[position].part(self.pieces[position].in_param)

    def read_params(self, positions: Sequence[int]) -> None:
        """Do nothing: parameters and what is stepped are the same."""

    def target(self, position: int) -> Tensor:
        return self.stepped[position]

    def round(self, positions: Sequence[int]) -> None:
        """Do nothing: what is stepped is the target."""


class Mastered(MasterShard, Unit):
    """fp32 masters of bf16 or fp16 parameters are stepped, on the parameters' device."""

    def __init__(self, bucket: GradBucket, members: Sequence[int], form: AdamState = PLAIN) -> None:
        Unit.__init__(self, members, form)
        MasterShard.__init__(self, *slices_of(bucket, members))
        self._targets: dict[int, Tensor] = {}
        self.stepped = self._make_stepped(bucket.device)

    def _make_stepped(self, device: torch.device) -> list[Tensor]:
        """What is stepped for each slice, not filled yet."""
        return [self._blank(position, torch.float32, device) for position in range(len(self.pieces))]

    def _blank(self, position: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return zeros for a slice, as users see it."""
        run = torch.empty(self.pieces[position].in_param.numel, dtype=dtype, device=device)
        if run.is_cpu and native_available():
            prefer_huge_pages(run)
        return self.shaped(run.zero_(), position)

    def master(self, position: int) -> Tensor:
        return self._run_of(self.stepped[position])

    def _run_of(self, tensor: Tensor) -> Tensor:
        return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())

    def result(self, position: int) -> Tensor:
        return self.master(position)

    def repoint(self, position: int) -> None:
        super().repoint(position)
        self._targets.pop(position, None)

    def target(self, position: int) -> Tensor:
        """The parameter itself."""
        if position not in self._targets:
            self._targets[position] = self.flats[position].part(self.pieces[position].in_param)
        return self._targets[position]

    def round(self, positions: Sequence[int]) -> None:
        self.write_params(positions)

    def native_writes(self) -> AbstractContextManager[None]:
        return own_writes(self.flats)

    def complete(self, position: int, state: ParamState) -> None:
        if self.param_dtype in HALVES and self.form is PLAIN:
            state["master"] = self.stepped[position]

    def show_masters(self, positions: Sequence[int], states: MutableMapping[Tensor, ParamState]) -> None:
        if self.param_dtype in HALVES and self.form is PLAIN:
            for position in positions:
                states.setdefault(self.stepped[position], {})["master"] = self.stepped[position]

    def take_master(self, position: int, saved: Mapping[str, Any] | None) -> None:
        master = (saved or {}).get("master")
        if master is None or self.stepped[position].dtype is self.param_dtype:
            self.take_param(position)
        elif master is not self.stepped[position]:
            self.stepped[position].copy_(master)
            self.follow(position)

    def saved(self, position: int, state: ParamState) -> Mapping[str, Any]:
        return super().saved(position, dict(self.saved_state(position, state)))

    def next_stepped(self, position: int) -> Tensor:
        """What is stepped, or a copy as :meth:`read_params` makes it of a split master, whose remainder stays."""
        stepped = self.stepped[position]
        if not self.edited(position):
            return stepped
        self.flats[position].load()
        return self.shaped(self.param_run(position).to(stepped.device), position)

    def resident(self) -> Sequence[Tensor]:
        self._copies.clear()
        return self.stepped


class UnitMaker(ABC):
    """The maker of a placement's units, and the owner of what units share."""

    @abstractmethod
    def __call__(self, buckets: Sequence[GradBucket]) -> Sequence[Sequence[Unit]]:
        """Return all units of each bucket."""

    @property
    def spare_nbytes(self) -> int:
        """Bytes of state that is not shown."""
        return 0

    @property
    def staging_nbytes(self) -> int:
        """Bytes of memory that gradients pass through when they are stepped."""
        return 0

    def class_threads(self) -> AbstractContextManager[None]:
        """Return a context in which torch uses the policy's number of threads, for the class's own step."""
        return nullcontext()

    def begin(self) -> None:
        """Note that a step begins: its copies come after all that the current streams have been given so far."""

    def close(self) -> None:
        """Let go of what units share."""


def all_members(bucket: GradBucket) -> Sequence[int]:
    """Positions of all slices of this rank in a bucket."""
    return range(len(bucket.slices))


class DeviceUnits(UnitMaker):
    """The maker of one unit per bucket, on its device.

    Args:
        master_dtype: as in :class:`MixedPrecision`.
        members_of: positions of the slices of a bucket that are stepped.
    """

    def __init__(self, master_dtype: object, members_of: Callable[[GradBucket], Sequence[int]] = all_members) -> None:
        self._master_dtype, self._members_of = master_dtype, members_of

    def __call__(self, buckets: Sequence[GradBucket]) -> list[Sequence[Unit]]:
        members = ((bucket, self._members_of(bucket)) for bucket in buckets)
        return [[self._unit(bucket, found)] if found else [] for bucket, found in members]

    def _unit(self, bucket: GradBucket, members: Sequence[int]) -> Unit:
        if bucket.params[0].param.dtype not in HALVES or self._master_dtype is None:
            return InPlace(bucket, members)
        return InPlace(bucket, members, SPLIT) if self._master_dtype == "split" else Mastered(bucket, members)


def load_split(saved: Mapping[str, Any], param: Tensor) -> dict[str, Any]:
    """The live state of a split master out of a saved one; without a master, the parameter is it."""
    plain = {key: value for key, value in saved.items() if key != "master"}
    state = live_state(plain, torch.empty_like(param, dtype=torch.float32), PLAIN)
    return {**state, "remainder": remainder_of(param, saved.get("master"))}
