"""Codes in the state of an optimizer by itself, which only the step may write or replace."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ..errors import StateDictError
from ..policies import AdamState
from ..system.inference_mode import version_of, versions_of
from ..system.same_objects import SameObjects
from .adam_state import BESIDE, HIGHEST_BASES, MOMENTS, require_bases
from .checks import oddity
from .runs import BASES

# Keys that may have codes, and their dtypes.
CODES, CODE_DTYPES = (*MOMENTS, *BESIDE), (torch.uint8, torch.int16)
_ELSEWHERE = -1  # a value that has lain under another key

# Of each param, in one order: its state, an empty one where there is none.
States = Sequence[Mapping[str, Any]]
# Version, address, and the memory there: held by the mark, so that no other comes to lie at that address.
WriteMark = tuple[int, int, torch.UntypedStorage]
# Position of the parameter, key, and write mark of a noted tensor.
_Noted = tuple[int, str, WriteMark]


def write_mark(tensor: Tensor) -> WriteMark:
    """Return a value that changes when a tensor is written to, or its data are replaced."""
    return version_of(tensor), tensor.data_ptr(), tensor.untyped_storage()


class _Values:
    """Values as they are when this is made."""

    def __init__(self, values: list[Any]) -> None:
        self.values, self.marks = values, _marks_of(values)
        self._same = SameObjects()
        self._same.note(values)

    def are(self, values: list[Any]) -> bool:
        """Return whether these are the same objects, and nobody has written to them."""
        return self._same.are(values) and _marks_of(self.values) == self.marks


class CodeWatch:
    """The codes in an optimizer's state: 8-bit moments with their bases, and what split masters have beside params.

    A moment's codes mean something beside their own base alone, and so may come in the place of others together with
    it, as they do where the user moves or copies the entry of a param.
    """

    def __init__(self, form: AdamState) -> None:
        self._form = form
        self._pairs = tuple(zip(MOMENTS, BASES, strict=True)) if form.moments == "block8" else ()
        # A remainder belongs to its param, and comes back to it, as a copy, with the whole entry alone.
        whole = ("remainder", "step", *MOMENTS) if form.master == "split" else ()
        self._keys = tuple(dict.fromkeys((*whole, *chain.from_iterable(self._pairs))))
        self._left = _Values([])  # by the last step or load: of each state in turn, of each key

    @property
    def watches(self) -> bool:
        """Whether the form has codes."""
        return bool(self._keys)

    def _values_of(self, states: States) -> list[Any]:
        return [state.get(key) for state in states for key in self._keys]

    def note(self, states: States) -> None:
        """Remember states as they are."""
        self._left = _Values(self._values_of(states))

    def forget(self) -> None:
        """Know nothing of the states, as they are about to be written to: whatever there is then is taken."""
        self._left = _Values([])

    def require_own(self, states: States, name_of: Callable[[int], str]) -> None:
        """Raise StateDictError if the user has written to codes, or replaced some without what belongs to them.

        Args:
            name_of: returns what error messages call the param at a position.
        """
        left = self._left
        if left.are(self._values_of(states)):
            return
        places = ((at, key) for at in range(len(left.values) // len(self._keys)) for key in self._keys)
        marks = iter(zip(*left.marks, strict=True))
        noted = {
            id(value): (at, key, next(marks))
            for (at, key), value in zip(places, left.values, strict=True)
            if isinstance(value, Tensor)
        }
        for at, state in enumerate(states):
            own = {key: noted[id(state[key])] for key in self._keys if id(state.get(key)) in noted}
            self._require_own(at, state, own, name_of)

    def _require_own(
        self, at: int, state: Mapping[str, Any], noted: Mapping[str, _Noted], name_of: Callable[[int], str]
    ) -> None:
        """Raise as :meth:`require_own`, of the state at a position; ``noted``: what is known of its values."""
        for key in CODES:
            if key in noted and state[key].dtype in CODE_DTYPES and noted[key][2] != write_mark(state[key]):
                raise self._refusal(name_of(at), key, "was written to in place")
        # By key: whose value it is under that key. Of values that the user has made nothing is known.
        origins = {key: place if known == key else _ELSEWHERE for key, (place, known, _) in noted.items()}
        for moment, base in self._pairs:
            first, second = origins.get(moment), origins.get(base)
            if first != second or first == _ELSEWHERE:
                replaced, kept = (base, moment) if first == at else (moment, base)
                what = f"was replaced without {kept!r}" if replaced in state else f"is missing beside {kept!r}"
                if _ELSEWHERE in (first, second):
                    replaced, what = (moment if first == _ELSEWHERE else base), "is the value of another key"
                raise self._refusal(name_of(at), replaced, what)
            if first is None and isinstance(state.get(base), Tensor) and oddity(state[base]) is None:
                require_bases(f"{name_of(at)}: state {base!r}", state[base], HIGHEST_BASES[base])
        mine, others = origins.get("remainder"), {origins[key] for key in origins if key != "remainder"}
        if "remainder" in state and mine != at and (mine is not None or others):
            what = "was replaced without the rest of the entry" if mine is None else "belongs to another parameter"
            raise self._refusal(name_of(at), "remainder", what)

    def _refusal(self, name: str, key: str, what: str) -> StateDictError:
        dtype = torch.uint8 if key in MOMENTS else torch.int16
        return StateDictError(
            f"{name}: state {key!r} {what}. It holds no values: it is stored as {dtype} in the form of {self._form}; "
            "change values in what state_dict() returns, and load that. To go on, load a state dict, or start afresh "
            "with opt.state.clear()"
        )


def _marks_of(values: list[Any]) -> tuple[list[int], list[int], list[torch.UntypedStorage]]:
    """Return the parts of the write marks of those that are tensors."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    return versions_of(tensors), [*map(Tensor.data_ptr, tensors)], [*map(Tensor.untyped_storage, tensors)]
