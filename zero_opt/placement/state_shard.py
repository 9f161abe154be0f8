"""One bucket's shard of optimizer state, in arrays of the shard's size, as it is shown, replaced and counted."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import StateDictError
from ..kernels.adam_state import BESIDE, HALVES, span_of
from ..kernels.checks import lacks_memory
from ..kernels.updates import NativeUpdate, given_arrays
from ..policies import AdamState
from ..sharding.buckets import GradBucket
from ..system.devices import HOST
from ..system.same_objects import memory_of
from .compact_state import PlainForm, form_of, is_compact, stored_form
from .interface import ParamState
from .masters import MasterShard, slices_of
from .read_through import ReadThrough


class Kept(NamedTuple):
    """What is kept of parameters between steps.

    Attributes:
        update: what keeps it. form: in which form. first: what the elements of new arrays are.
    """

    update: NativeUpdate
    form: AdamState
    first: float


class StateShard(MasterShard):
    """One bucket's shard of optimizer state. Slices are those of this rank in the bucket.

    Arrays are (shard numel,): those of :func:`state_dtypes`, of which bases have one element per block; master, fp32,
    where the parameter is not that itself, nor the half of a split one.

    Attributes:
        update: what keeps the state. form: what is kept of a slice. splits: whether masters are split.
        compact: whether users see another state than the arrays.
        roles: which of the update's arrays the step has that was begun last.
        steps: steps done, fp32, one per slice; of an update that does not count them, 1 where the arrays are made.
        stepped: positions of slices that have state.
    """

    def __init__(self, bucket: GradBucket, kept: Kept) -> None:
        super().__init__(*slices_of(bucket))
        self.bucket, self.form = bucket, form_of(bucket, kept.form)
        self.update, self._first = kept.update, kept.first
        self.roles: tuple[str, ...] = ()
        self.splits, self.compact = self.form.master == "split", is_compact(self.form)
        self.param_dtype = bucket.params[0].param.dtype
        self.steps = torch.zeros(len(self.pieces), dtype=torch.float32, device="cpu")
        self.stepped = set(range(len(self.pieces)) if self.update.from_start else ())
        self._arrays: dict[str, Tensor] = {}
        self._unseen: set[int] = set()  # positions of slices of which arrays have been made since they were shown
        self._views: dict[int, tuple[ParamState, ParamState]] = {}  # per position: what users hold, and what it shows
        self._memory: dict[int, object] = {}  # how that lies, of tensors in the order that it has

    def master(self, position: int) -> Tensor:
        return self._slice("master", position)

    def _slice(self, role: str, position: int) -> Tensor:
        return self._array(role, position)[span_of(role, slice(*self.pieces[position].in_shard))]

    def _array(self, role: str, position: int) -> Tensor:  # noqa: ARG002  (which of several a slice is in)
        return self._arrays[role]

    def _renew_view(self, position: int, own: ParamState) -> None:
        """Let the dict that the user holds show other tensors of ours, but for what the user put into it."""
        shown, before = self._views[position]
        if isinstance(shown, ReadThrough):
            return
        for key in before.keys() - own.keys():
            if shown.get(key) is before[key]:
                del shown[key]
        for key, value in own.items():
            if shown.get(key) is before.get(key):
                shown[key] = value
        self._note_view(position, shown, own)

    def _note_view(self, position: int, shown: ParamState, own: ParamState) -> None:
        self._views[position] = (shown, own)
        self._memory[position] = memory_of(own.values())

    def _renew_views(self) -> None:
        """Let the dicts that the user holds show the arrays as they are mapped now."""
        for position in self._views:
            self._renew_view(position, self._shown(position))

    def state(self, position: int) -> ParamState:
        """The live state of a slice: tensors in the parameter's shape where it is whole, else 1-D."""
        if position not in self._views:
            own = self._shown(position)
            self._note_view(position, self._plain_form(position) if self.compact else dict(own), own)
        elif position in self._unseen:
            self._renew_view(position, self._shown(position))
        self._unseen.discard(position)
        return self._views[position][0]

    def _plain_form(self, position: int) -> ReadThrough:
        return ReadThrough(self._form_of(position, partial(self._stored, position)))

    def _form_of(self, position: int, stored: Callable[[], Mapping[str, Any]]) -> PlainForm:
        upper_half, halfway = partial(self._upper_half, position), partial(self._halfway.get, position)
        return PlainForm(stored, upper_half, partial(self.shaped, position=position), halfway)

    def _stored(self, position: int) -> ParamState:
        """The state of a slice as it is kept, 1-D."""
        made = self.update.counts or self.steps[position] > 0
        roles = [role for role in (*self.update.arrays, *BESIDE) if made and role in self._arrays]
        masters = ["master"] if self.shows_masters else []
        slices = {role: self._slice(role, position) for role in (*roles, *masters)}
        return {"step": self.steps[position], **slices} if self.update.counts else slices

    def _upper_half(self, position: int) -> Tensor:
        """The parameter's half of a split master, 1-D in host memory."""
        return self.next_stepped(position).to(HOST)

    def _shown(self, position: int) -> ParamState:
        stored = self._stored(position).items()
        return {key: value if key == "step" else self.shaped(value, position) for key, value in stored}

    def saved_state(self, position: int, state: Mapping[str, Any]) -> Mapping[str, Any]:
        if not self.compact:
            return super().saved_state(position, state)
        stored = super().saved_state(position, self._stored(position))
        return self._form_of(position, lambda: stored)

    def replaced(self, position: int, shown: ParamState) -> bool:
        """Whether the user has put other values in the place of those that :meth:`state` shows, or other memory.

        Of compact state, also whether values that it has shown were written to.
        """
        mine, own = self._views.get(position, ({}, {}))
        if isinstance(mine, ReadThrough):
            return shown is not mine or mine.edited()
        if shown.keys() != own.keys() or any(shown[key] is not value for key, value in own.items()):
            return True
        return bool(own) and memory_of(own.values()) != self._memory[position]

    def apart(self, position: int, state: ParamState) -> dict[str, Any]:
        """A state with copies of what lies in the arrays, but not as its own value does: a load overwrites it."""
        own = self._shown(position)
        arrays = {value.untyped_storage().data_ptr() for value in own.values() if isinstance(value, Tensor)}

        def is_apart(key: str, value: Any) -> bool:
            if not isinstance(value, Tensor) or value.layout is not torch.strided or lacks_memory(value):
                return True
            return value.untyped_storage().data_ptr() not in arrays or memory_of([value]) == memory_of([own.get(key)])

        return {key: value if is_apart(key, value) else value.clone() for key, value in state.items()}

    def array_views(self) -> Iterator[tuple[int, Tensor]]:
        """Return the tensors that users see, which are views of arrays, each with its parameter."""
        for position, (shown, own) in self._views.items():
            if not isinstance(shown, ReadThrough):
                index = self.pieces[position].param
                yield from ((index, value) for value in own.values() if isinstance(value, Tensor))

    def holds_edits(self) -> bool:
        """Whether values of compact state that were shown have been written to."""
        return any(shown.edited() for shown in self._made_views())

    def _made_views(self, positions: Collection[int] | None = None) -> Iterator[ReadThrough]:
        for position in self._views if positions is None else positions:
            shown, _ = self._views.get(position, (None, None))
            if isinstance(shown, ReadThrough):
                yield shown

    def forget_values(self, positions: Collection[int]) -> None:
        """Let values of compact state be made anew when they are read."""
        for shown in self._made_views(positions):
            shown.forget()

    def forget_views(self, position: int) -> None:
        """Let :meth:`state` show the arrays' own values again."""
        self._views.pop(position, None)
        self._memory.pop(position, None)

    def take_param(self, position: int) -> None:
        super().take_param(position)
        if self.splits:
            self._slice("remainder", position).zero_()

    def read_params(self, positions: Sequence[int]) -> None:
        super().read_params(positions)
        self.settle_halfway(positions)

    def settle_halfway(self, positions: Collection[int]) -> bool:
        """Let split masters that were loaded count from now on; return whether that has written to them."""
        waiting = self._halfway.keys() & positions if self._halfway else ()
        for position in waiting:
            self._halfway[position].settle(self._upper_half(position), self._slice("remainder", position))
            del self._halfway[position]
        return bool(waiting)

    def _load_compact(self, position: int, saved: Mapping[str, Any]) -> None:
        """As :meth:`load`."""
        if not self._keeps_master(saved):
            self.take_param(position)
        self._halfway.pop(position, None)
        stored = self._stored(position)
        flat = {
            key: value if key == "step" or not isinstance(value, Tensor) else self.flat_grad(position, value)
            for key, value in saved.items()
        }
        made = stored_form(flat, self._upper_half(position), self.form) if saved else {}
        self.note_halfway(position, flat.get("master") if self.splits else None)
        self.steps[position] = float(saved.get("step", 0.0))
        for role in stored.keys() - {"step"}:
            if role in made:
                stored[role].copy_(made[role])
            elif role == "master" and role in saved:
                stored[role].copy_(flat[role])
            elif role != "master":
                stored[role].zero_()

    def load(self, position: int, saved: Mapping[str, Any]) -> None:
        """Replace the state of a slice; an empty one makes it new. Without a master, the parameter is it."""
        if self.compact:
            self._load_compact(position, saved)
            self._end_load(position, saved)
            return
        given = given_arrays(saved, self.places())
        for role in self.places():
            value = self.shaped(self._slice(role, position), position)
            if role in given:
                value.copy_(given[role])
            else:
                value.fill_(self._first)
        self.steps[position] = float(saved.get("step", 0.0)) if self.update.counts else float(bool(given))
        if self._keeps_master(saved):
            self.shaped(self.master(position), position).copy_(saved["master"])
        else:
            self.take_param(position)
        self._end_load(position, saved)

    def _keeps_master(self, saved: Mapping[str, Any]) -> bool:
        """Whether a saved state has a master that is kept as it is. It may be the one that lies here."""
        return "master" in saved and self.shows_masters

    @property
    def shows_masters(self) -> bool:
        """Whether masters are state of their own, which users see."""
        return self.param_dtype in HALVES and not self.splits

    def _end_load(self, position: int, saved: Mapping[str, Any]) -> None:
        if saved and self._stored(position):
            self.stepped.add(position)
        else:
            self.stepped.discard(position)
        self._show_loaded(position)
        self.follow(position)

    def _show_loaded(self, position: int) -> None:
        """Let what the user holds show what was loaded, and nothing that the user has made or written."""
        shown, _ = self._views.get(position, (None, None))
        if isinstance(shown, ReadThrough):
            shown.forget()
        elif shown is not None:
            own = self._shown(position)
            shown.clear()
            shown.update(own)
            self._note_view(position, shown, own)

    def next_step(self, position: int, number: float) -> float:
        """Return the number of a slice's next step, in fp32, where counting ends at 2^24, as torch's does.

        Of an update that does not count, step 1 makes the arrays.

        Raises:
            StateDictError: the user has made it something else.
        """
        if not 1 <= number < math.inf:
            label = self.flats[position].label
            raise StateDictError(f"the step count of {label} must be a number from 0, and is {number - 1}")
        return number

    def places(self) -> tuple[str, ...]:
        """Return which of the update's arrays have a place."""
        return tuple(role for role in self.update.arrays if role in self._arrays)

    def fill_new(self, roles: Collection[str]) -> None:
        """Give arrays that have just got their place the values of new ones. Nobody has seen them yet."""
        for role in self.update.arrays if self._first else ():
            if role in roles:
                self._arrays[role].data.fill_(self._first)

    def next_steps(self, positions: Sequence[int]) -> list[float]:
        """Return the :meth:`next_step` of each of these slices."""
        counts = (self.steps + 1).tolist()
        return [self.next_step(position, counts[position]) for position in positions]

    def count_step(self, positions: Collection[int], numbers: Sequence[float]) -> None:
        """Count the step that was begun last of these slices.

        Args:
            numbers: what :meth:`next_steps` was when it began: counted twice, it counts once.
        """
        if not self.update.counts:
            self._note_made(positions)
        elif positions:
            self.steps[list(positions)] = torch.tensor(numbers, dtype=torch.float32, device="cpu")
        if self.update.counts or self.roles or self.shows_masters:
            self.stepped.update(positions)
        self.forget_values(positions)

    def _note_made(self, positions: Collection[int]) -> None:
        """Note that the step has made the arrays of these slices, for :meth:`state` to show."""
        made = self.steps.tolist() if self.roles else ()
        for position in [position for position in positions if made and not made[position]]:
            self._unseen.add(position)
            self.steps[position] = 1
