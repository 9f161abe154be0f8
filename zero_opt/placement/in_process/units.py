"""Slices of one bucket that are stepped together, as the tensors that an optimizer has for its parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from ...kernels.adam_state import HALVES, prefer_huge_pages
from ...policies import AdamState
from ...sharding.buckets import GradBucket
from ...sharding.flat_param import FlatParam, OwnWrites
from ...system.extension import native_available
from ..compact_state import PlainForm, form_of, is_compact, stored_form
from ..interface import ParamState
from ..masters import MasterShard, slices_of

SliceGrads = Sequence[tuple[int, Tensor]]
# Live states of an optimizer, by what it steps.
StatesByTensor = MutableMapping[Tensor, dict[str, Any]]
# The parameters that are written to, and pairs of target and source.
ResultCopies = tuple[Sequence[FlatParam], Sequence[tuple[Tensor, Tensor]]]


class Unit(MasterShard):
    """Slices of one bucket that are stepped together, named by their position among those given.

    In a step, the placement calls :meth:`read_params`, :meth:`fetch`, then :meth:`grads`. The native kernel writes to
    :meth:`targets`; a class steps ``stepped``, and :meth:`result_copies` are made. :meth:`send` comes last.

    Attributes:
        members: positions of the slices among this rank's of the bucket.
        stepped: what an optimizer has for a slice: in the parameter's shape where the slice is whole, else 1-D.
        form: what the native kernel keeps of a slice.
        splits: whether a master is the parameter and a remainder.
        compact: whether users see another state than the stored one; such slices are stepped by the kernel alone.
        mastered: what is stepped are masters or copies of parameters, not the parameters themselves.
    """

    mastered = True
    stepped: list[Tensor]

    def __init__(self, bucket: GradBucket, members: Sequence[int], form: AdamState) -> None:
        super().__init__(*slices_of(bucket, members))
        self.members, self.form = members, form
        self.splits, self.compact = form.master == "split", is_compact(form)
        self._groups = {piece.group for piece in self.pieces}
        self._targets = [self.part(position) for position in range(len(self.pieces))]
        self._carried: dict[int, Set[str]] = {}  # attributes, whose others are the class's own
        self._written: tuple[Sequence[int], OwnWrites] = ((), OwnWrites(()))

    def own_writes(self, positions: Sequence[int]) -> AbstractContextManager[None]:
        """Return a context in which writes to :meth:`targets` are ours, not edits of the user's."""
        if self._written[0] != positions:
            self._written = positions, OwnWrites(self.flats[position] for position in positions)
        return self._written[1].ours()

    def carry_attributes(self, positions: Iterable[int]) -> None:
        """Give what is stepped the attributes that the user's parameters have by now (``param.lr_scale``, say)."""
        for position in positions:
            own, given = vars(self.stepped[position]), vars(self.flats[position].param)
            for gone in self._carried.get(position, given.keys()) - given.keys():
                own.pop(gone, None)
            own.update(given)
            self._carried[position] = {*given}

    def by_group(self, positions: Sequence[int]) -> list[tuple[int, list[int]]]:
        """Return (number of the param group, positions) of neighboring slices of one group."""
        if len(self._groups) == 1:
            return [(number, list(positions)) for number in self._groups]
        runs = groupby(positions, lambda position: self.pieces[position].group)
        return [(number, list(members)) for number, members in runs]

    def repoint(self, position: int) -> None:
        super().repoint(position)
        self._targets[position] = self.part(position)

    def fetch(self, grads: SliceGrads) -> None:
        """Start to bring gradients to where they are stepped; :meth:`grads` gives them."""
        self._grads = grads

    def grads(self) -> SliceGrads:
        """The fetched gradients by position, ready to be read."""
        grads, self._grads = self._grads, ()
        return grads

    def targets(self, positions: Sequence[int]) -> list[Tensor]:
        """Where the native kernel writes new parameters, of the shape and strides of what is stepped."""
        return [self._targets[position] for position in positions]

    def result_copies(self, positions: Sequence[int]) -> ResultCopies:
        """What to copy after a class has stepped, for the values to be at :meth:`targets`."""
        return [self.flats[position] for position in positions], self.copies(positions)

    def send(self, positions: Sequence[int]) -> None:
        """Bring :meth:`targets` to the parameters."""

    def complete(self, position: int, state: ParamState) -> None:
        """Add the master to a state that a class has made."""

    def show_masters(self, positions: Sequence[int], states: MutableMapping[Tensor, ParamState]) -> None:
        """Put the masters that were stepped into the state, also of a class that keeps none of its own."""

    def take_master(self, position: int, saved: Mapping[str, Any] | None) -> None:
        """Take the master of a state that was loaded, replaced or dropped, or, without one, the parameter."""

    def resident(self) -> Sequence[Tensor]:
        """What is kept on the parameters' device beside them, and may be re-pointed: no view of it is kept."""
        return ()

    def saved_state(self, position: int, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """A state as ``torch.optim`` has it, with the master as a tensor."""
        if not self.compact:
            return super().saved_state(position, state)
        stored = state if self.splits else super().saved_state(position, state)
        return self._form_of(position, lambda: stored)

    def plain_form(self, position: int, states: StatesByTensor) -> PlainForm:
        """The compact state of a slice as users see it.

        Args:
            states: the stored ones, by what is stepped.
        """
        stepped = self.stepped[position]
        return self._form_of(position, lambda: states.get(stepped, {}))

    def _form_of(self, position: int, stored: Callable[[], Mapping[str, Any]]) -> PlainForm:
        halfway = partial(self._halfway.get, position)
        return PlainForm(stored, lambda: self._upper_half(position), halfway=halfway)

    def compact_state(self, position: int, saved: Mapping[str, Any]) -> dict[str, Any]:
        """The stored state of a compact form out of a saved one; without a master, what is stepped is it."""
        state = stored_form(saved, self.stepped[position], self.form)
        self.complete(position, state)
        self.note_halfway(position, saved.get("master") if self.splits else None)
        return state

    def settle_halfway(self, positions: Iterable[int], states: StatesByTensor) -> None:
        """Let split masters that were loaded count from now on.

        Args:
            states: the stored ones, by what is stepped.
        """
        for position in positions if self._halfway else ():
            halfway, state = self._halfway.pop(position, None), states.get(self.stepped[position], {})
            if halfway is not None and "remainder" in state:
                halfway.settle(self._upper_half(position), state["remainder"])

    def _upper_half(self, position: int) -> Tensor:
        """The parameter's half of a split master, as users see it, where that is stepped."""
        return self.shaped(self.next_stepped(position).to(self.stepped[position].device), position)


class InPlace(Unit):
    """The parameters themselves are stepped."""

    mastered = False

    def __init__(self, bucket: GradBucket, members: Sequence[int], form: AdamState) -> None:
        super().__init__(bucket, members, form)
        self.stepped = self._targets

    def master(self, position: int) -> Tensor:
        return self.param_run(position)

    def edited(self, position: int) -> bool:  # noqa: ARG002
        """No: what the user writes to the parameter is in what is stepped."""
        return False

    def rewritten(self, position: int) -> bool:
        """Whether the parameter may be other than :meth:`master` is."""
        return self.flats[position].mirrored or self.flats[position].repointed

    def read_params(self, positions: Sequence[int]) -> None:
        """Do nothing: the parameters are what is stepped."""

    def repoint(self, position: int) -> None:
        self.stepped[position].data = self.part(position)

    def result_copies(self, positions: Sequence[int]) -> ResultCopies:  # noqa: ARG002
        """Nothing: what is stepped is the target."""
        return (), ()


class Mastered(Unit):
    """fp32 masters of bf16 or fp16 parameters are stepped, on the parameters' device."""

    def __init__(self, bucket: GradBucket, members: Sequence[int], form: AdamState) -> None:
        super().__init__(bucket, members, form)
        self.stepped = self._make_stepped(bucket.device)

    def _make_stepped(self, device: torch.device) -> list[Tensor]:
        """What is stepped for each slice, not filled yet."""
        return [self._blank(position, torch.float32, device) for position in range(len(self.pieces))]

    def _blank(self, position: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return zeros for a slice, as users see it; no view, which would hold the memory that it is moved from."""
        run = torch.empty(self.pieces[position].in_param.numel, dtype=dtype, device=device)
        if run.is_cpu and native_available():
            prefer_huge_pages(run)
        return self.shaped(run.zero_(), position).detach()

    def master(self, position: int) -> Tensor:
        return self._run_of(self.stepped[position])

    def _run_of(self, tensor: Tensor) -> Tensor:
        return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())

    def complete(self, position: int, state: ParamState) -> None:
        if self.param_dtype in HALVES and not self.splits:
            state["master"] = self.stepped[position]

    def show_masters(self, positions: Sequence[int], states: MutableMapping[Tensor, ParamState]) -> None:
        if self.param_dtype in HALVES and not self.splits:
            for position in positions:
                states.setdefault(self.stepped[position], {})["master"] = self.stepped[position]

    def take_master(self, position: int, saved: Mapping[str, Any] | None) -> None:
        master = (saved or {}).get("master")
        if master is None or self.stepped[position].dtype is self.param_dtype:
            self.take_param(position)
        elif master is not self.stepped[position]:
            self.stepped[position].copy_(master)
            self.follow(position)

    def resident(self) -> Sequence[Tensor]:
        self._copies.clear()
        return self.stepped


def on_device(bucket: GradBucket, members: Sequence[int], form: AdamState) -> list[Unit]:
    """The unit of slices that are stepped on their own device; none of no slices."""
    if not members:
        return []
    own = form_of(bucket, form)
    return [Mastered(bucket, members, own) if own.master == "float32" else InPlace(bucket, members, own)]


class DeviceUnits:
    """The maker of a placement's units, and the owner of what units share: one unit per bucket, on its device.

    Args:
        form: what is kept of a parameter.
        members_of: positions of the slices of a bucket that are stepped; ``None``, of all.
    """

    def __init__(self, form: AdamState, members_of: Callable[[GradBucket], Sequence[int]] | None = None) -> None:
        self._form, self._members_of = form, members_of

    def __call__(self, buckets: Sequence[GradBucket]) -> list[list[Unit]]:
        """Return all units of each bucket."""
        members_of = self._members_of or (lambda bucket: range(len(bucket.slices)))
        return [on_device(bucket, members_of(bucket), self._form) for bucket in buckets]

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
