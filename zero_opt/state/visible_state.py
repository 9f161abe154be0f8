"""What users see as ``state`` over several ranks, and what becomes of entries that they add, replace or drop.

A write to a tensor in place needs nothing: the tensor is what is stepped, but for :class:`ReadThrough`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..errors import StateDictError, StepPending, ZeroOptError, quoted
from ..kernels.checks import oddity
from ..layout import ParamSlice
from ..placement import ParamState, Placement, ReadThrough, live_tensors
from ..sharding.partition import Partition
from ..system.devices import is_host
from ..system.garbage_collection import without_collection
from ..system.interrupts import uninterrupted
from ..system.same_objects import SameMemory, SameObjects, flattened
from .alike_entries import StateOwner
from .guard import NoReentry
from .stand_ins import FORMS, Kind, StandIns
from .state_dict import cut


class VisibleState:
    """Keeps the owner's ``state`` and the placement's live state in step. No method is collective.

    Every rank has an entry for every parameter that has state on any: the live one of its slice, or, where it has no
    slice, one of :class:`StandIns`. Every method is called under :attr:`lock`, on the user's thread or on one that
    calls ``state_dict()``.

    Attributes:
        dropped: parameters whose entries the user has dropped since the last step.
        lock: other threads see all changes that are made under it at once.
    """

    def __init__(
        self,
        owner: StateOwner,
        stand_ins: StandIns,
        params: Sequence[Tensor],
        partition: Partition,
        placement: Placement,
    ) -> None:
        self._owner, self._stand_ins, self._params = owner, stand_ins, params
        self._partition, self._placement = partition, placement
        self._due: list[int] = []  # steps that the entries of stand-ins lack, each as a mask
        self._pieces: Sequence[ParamSlice] = ()  # this rank's
        self._cut: set[int] = set()  # of these, the parameters of which other ranks have slices too
        self._live: dict[int, ParamState] = {}  # as users see it, by global index; all had values when first shown
        self._versions: dict[int, list[int]] = {}  # of what lies on accelerators, as of follow()
        # While a step is pending: the owner's entries as of follow(), and the values in each.
        self._followed: dict[int, tuple[ParamState, dict[str, Any]]] | None = None
        self.dropped: set[int] = set()
        self.lock = threading.RLock()
        self._adopting = NoReentry("while this thread was looking at opt.state")
        self._adopted = SameObjects()  # all of the owner's state when a look at it found no edit
        self._memory = SameMemory()  # where the placement's array views lay at that look
        self._unedited: bool | None = None  # since stand-ins were stepped last; None if nobody has looked

    def add(self, added: Mapping[int, Kind]) -> None:
        """Take in planned parameters, by global index; those without a slice on this rank get stand-ins."""
        self._pieces = self._partition.owned()
        mine, flats = {piece.param for piece in self._pieces}, self._partition.flats
        self._cut = {piece.param for piece in self._pieces if piece.in_param.numel != flats[piece.param].numel}
        self._stand_ins.add({index: kind for index, kind in added.items() if index not in mine})
        self._show_live()
        self.note_entries()

    @without_collection()
    def _show_live(self) -> None:
        """Let the owner's ``state`` have the live state of this rank's slices."""
        for index, live in self._placement.state():
            if self._live.get(index) is not live:
                self._owner.state[self._params[index]] = live
                if live:
                    self._live[index] = live

    def kept(self) -> set[int]:
        """Return the parameters that have state here, but for :attr:`dropped`."""
        with self.lock:
            return self._entries().keys() - self.dropped

    def count_step(self, used: int) -> None:
        """Note a step, with a bit per global index, whether any rank had a gradient; :meth:`follow` comes next."""
        self.dropped.clear()
        self._due.append(used)

    def follow(self) -> None:
        """Show what steps have made of the state; not the last step's while it is pending.

        What the user has made of entries while a step was pending is undone.
        """
        self._undo_edits()
        due = len(self._due) - self._placement.pending
        for used in self._due[: max(due, 0)]:
            self._stand_ins.step(used, edited=self._unedited is not True)
        if due > 0:
            del self._due[:due]
            self._unedited = None
        self._show_live()
        if not self._adopted.are(self._held()):  # else the user could bring back what a step has replaced
            self._adopted.forget()
            self._memory.forget()
        self._versions = self._versions_now()
        self.note_entries()

    @contextmanager
    def bringing_in(self) -> Iterator[None]:
        """A context in which a pending step is brought in, which may put other tensors into entries."""
        with self.lock:
            self._undo_edits()
        try:
            yield
        except BaseException:
            with self.lock:
                self.note_entries()
            raise

    def _undo_edits(self) -> None:
        """Undo what the user has made of entries while a step was pending."""
        for index in self._edited_while_pending():
            self._put_back(index)
        self._followed = None

    def note_entries(self) -> None:
        """Remember the owner's entries, to notice what becomes of them while a step is pending."""
        self._followed = self._entries() if self._placement.pending else None

    def _entries(self) -> dict[int, tuple[ParamState, dict[str, Any]]]:
        """Return the owner's entries, each with its values but for those that are put together when they are read."""
        state, found = self._owner.state, {}
        for index in self._partition.flats:
            entry: ParamState | None = state.get(self._params[index]) or None
            if entry is not None:
                found[index] = (entry, dict(entry) if isinstance(entry, dict) else {})
        return found

    def _edited_while_pending(self) -> list[int]:
        """Return the parameters whose entries the user has added, replaced, changed or dropped while a step is pending.

        A write to a tensor in place is seen by the placement, but for :class:`ReadThrough`.
        """
        if self._followed is None:
            return []
        now, before = self._entries(), self._followed
        return [index for index in self._partition.flats if _is_edited(before.get(index), now.get(index))]

    def _put_back(self, index: int) -> None:
        """Let a parameter's entry be what :meth:`follow` has shown."""
        state, param = self._owner.state, self._params[index]
        if self._followed is None or index not in self._followed:
            state.pop(param, None)
            return
        entry, values = self._followed[index]
        if isinstance(entry, ReadThrough):
            entry.forget()
        else:
            entry.clear()
            entry.update(values)
        state[param] = entry

    def require_as_shown(self) -> None:
        """Raise StepPending if the user has edited entries while a step is pending; :meth:`follow` undoes that."""
        edited = self._edited_while_pending()
        if edited:
            raise StepPending(
                f"opt.state of {self._partition.flats[edited[0]].label} was changed while a step for it was pending; "
                "call opt.flush() before that. To go on, call it on every rank, unless it is what raises this: it "
                "brings the step in and undoes the change; make it again then"
            )

    def _versions_now(self) -> dict[int, list[int]]:
        """Return versions of the live state on accelerators. On the CPU a write is over when the call returns."""
        if all(map(is_host, self._partition.streams)):
            return {}
        tensors = {index: live_tensors(live) for index, live in self._live.items()}
        return {
            index: [tensor._version for tensor in found if not (is_host(tensor.device) or tensor.is_inference())]
            for index, found in tensors.items()
        }

    def written(self) -> list[int]:
        """Return the parameters whose state on an accelerator the user has written to in place since :meth:`follow`."""
        with self.lock:
            now = self._versions_now()
        return [index for index, versions in now.items() if versions != self._versions.get(index)]

    @without_collection()
    def load(self, states: Mapping[int, Mapping[str, object]]) -> None:
        """Replace all state by loaded state, given by global index in full shape; :meth:`follow` comes next."""
        self._due.clear()
        self._followed = None
        self.dropped.clear()
        self._owner.state.clear()
        self._live.clear()
        self._adopted.forget()
        self._memory.forget()
        self._stand_ins.load(states)

    def adopt_edits(self) -> None:
        """Take over entries that the user has added, replaced or dropped.

        Tensors may have the parameter's shape, of which this rank's slice is taken.

        Raises:
            StepPending: state was edited while a step was pending. StateDictError: what it was replaced by.
            StepDesync: called by a signal handler that has interrupted such a call.
        """
        with self._adopting.held():
            self.require_as_shown()
            try:
                self._adopt_slices()
            except ZeroOptError:
                raise
            except Exception:
                with uninterrupted():  # what a signal handler has raised is not raised again
                    try:
                        self._adopt_slices()
                    except ZeroOptError:
                        raise
                    except Exception as error:
                        raise StateDictError(f"opt.state was edited into what cannot be stepped: {error}") from error
                raise

    def _adopt_slices(self) -> None:
        held = self._held()
        if held and self._adopted.are(held) and self._memory.holds():
            self._unedited = self._unedited is not False
            return
        self._unedited = False
        self._require_params_alone()
        self._part_exchanged()
        changed = [self._adopt_slice(piece) for piece in self._pieces]
        self.dropped |= self._stand_ins.take_dropped()
        self._adopted.forget()
        self._memory.forget()
        if any(changed):
            self._show_live()
            for piece, replaced in zip(self._pieces, changed, strict=True):
                # The entry holds no state any more: cleared, or a buffer of None.
                if replaced and piece.param not in self._live:
                    self._owner.state.pop(self._params[piece.param], None)
        elif held:
            self._adopted.note(held)
            self._memory.note(view for _, view in self._placement.array_views())

    def _require_params_alone(self) -> None:
        """Raise StateDictError if the user has added an entry that is no parameter's."""
        keys: Iterable[object] = self._owner.state
        known = {*map(id, self._params)}
        for key in (key for key in keys if id(key) not in known):
            said = f"a tensor of shape {tuple(key.shape)}" if isinstance(key, Tensor) else quoted(key)
            raise StateDictError(
                f"opt.state has an entry under {said}, which is none of its parameters: it would be in no checkpoint; "
                "keep it outside of the optimizer"
            )

    def _part_exchanged(self) -> None:
        """Copy entries that have other parameters' values: a placement overwrites its arrays one after the other."""
        state, owners = self._owner.state, {id(live): index for index, live in self._live.items()}
        places = {view.data_ptr(): index for index, view in self._placement.array_views() if view.numel()}
        for index in (piece.param for piece in self._pieces):
            entry: Any = state.get(self._params[index])
            if isinstance(entry, ReadThrough):
                exchanged = owners.get(id(entry), index) != index
            else:
                values = live_tensors(entry) if places and isinstance(entry, MutableMapping) else []
                strided = (value for value in values if value.layout is torch.strided)  # others have no one address
                exchanged = any(places.get(value.data_ptr(), index) != index for value in strided)
            if exchanged:
                state[self._params[index]] = {
                    key: value.clone() if isinstance(value, Tensor) else value for key, value in entry.items()
                }

    def _held(self) -> list[Any]:
        """Return all objects of which one is another after an edit; none if entries may be edited otherwise."""
        state = self._owner.state
        entries = [*state.values()]
        contents = flattened(entries)
        if contents is None:
            contents = flattened([e for e in entries if not (isinstance(e, ReadThrough) and e.unread())])
        if contents is None:
            return []
        # By these hyperparameters a placement chooses in which form it steps, and keeps state.
        forms = (group.get(key) for group in self._owner.param_groups for key in FORMS)
        return [*state, *entries, *contents, *forms]

    def _adopt_slice(self, piece: ParamSlice) -> bool:
        """Return whether the placement's live state of a slice is another object than the user's entry."""
        entry: Any = self._owner.state.get(self._params[piece.param]) or None
        if entry is None:
            if piece.param not in self._live:
                return False
            self.dropped.add(piece.param)
        elif not isinstance(entry, MutableMapping):
            label = self._partition.flats[piece.param].label
            raise StateDictError(f"opt.state of {label} is {quoted(entry)}, which is no dict; take it out")
        if entry and piece.param in self._cut:
            flat, given = self._partition.flats[piece.param], entry.given() if isinstance(entry, ReadThrough) else entry
            shape = flat.shape
            full = {key: value for key, value in given.items() if isinstance(value, Tensor) and value.shape == shape}
            for key, value in full.items():
                if (odd := oddity(value)) is not None:
                    raise StateDictError(
                        f"opt.state of {flat.label}: {key!r} must be a dense tensor with values, and is {odd}"
                    )
            entry.update(cut(full, piece, flat))
        replaced = self._placement.adopt_state(piece.param, entry)
        if replaced or entry is None:
            self._live.pop(piece.param, None)
        else:
            self._live[piece.param] = entry
        return replaced


def _is_edited(before: tuple[ParamState, dict[str, Any]] | None, now: tuple[ParamState, dict[str, Any]] | None) -> bool:
    """Return whether an entry is another object than before, or has other values or some that were written to."""
    if before is None or now is None:
        return before is not now
    (entry, values), (other, others) = before, now
    if entry is not other or values.keys() != others.keys():
        return True
    return any(others[key] is not value for key, value in values.items()) or (
        isinstance(entry, ReadThrough) and entry.edited()
    )
