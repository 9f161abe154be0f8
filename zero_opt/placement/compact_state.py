"""Compact forms of Adam's state, shown as values in torch's form."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..errors import StateDictError
from ..kernels.adam_state import (
    HALVES,
    SQUARES,
    Halfway,
    code_key,
    packed_moments,
    plain_keys,
    plain_value,
    remainder_of,
    require_squares,
)
from ..kernels.runs import BASES
from ..policies import AdamState
from ..sharding.buckets import GradBucket
from ..system.readable_pages import require_readable
from .read_through import MadeState, ReadThrough


def is_compact(form: AdamState) -> bool:
    """Return whether a stored state of this form is another than what users and state dicts see of it."""
    return form.moments != "float32" or form.master == "split"


def form_of(bucket: GradBucket, form: AdamState) -> AdamState:
    """Return what is kept of a bucket's slices: masters of bf16 and fp16 parameters only."""
    return form if bucket.params[0].param.dtype in HALVES else replace(form, master=None)


def stored_form(saved: Mapping[str, Any], stepped: Tensor, form: AdamState) -> dict[str, Any]:
    """Return the stored state of a saved one, but for a master that is not split. The parameter is not written.

    Of a split master what rounding cuts off is kept; without a master, the parameter is it.
    """
    state = packed_moments(saved, stepped, form)
    if form.master == "split":
        state["remainder"] = remainder_of(stepped, saved.get("master"))
    return state


def require_own_master(label: str, state: Mapping[str, Any], form: AdamState) -> None:
    """Raise StateDictError, and show what there is again, if users have written to the split master of a parameter.

    Args:
        label: names the parameter.
    """
    if form.master == "split" and isinstance(state, ReadThrough) and state.wrote_to("master"):
        state.forget()
        raise StateDictError(
            f"the split master of {label} was written to, and has been left as it was: it is the parameter and what "
            "rounding has cut off from it. Write to the parameter"
        )


def require_squares_of(label: str, state: Mapping[str, Any], form: AdamState) -> None:
    """Raise StateDictError for values that users have given a compact state, and that its form may not hold.

    Args:
        label: names the parameter. state: with tensors of its shape.
    """
    for key in SQUARES if is_compact(form) else ():
        if key in state:
            require_squares(f"opt.state of {label}: {key!r}", state[key])


class PlainForm(MadeState):
    """A slice's compact state in torch's form.

    Args:
        stored: returns the state as it is stored. stepped: returns the parameter, which is half of a split master, in
            the shape of that. shaped: returns a value of that shape as users see it. halfway: returns what waits for
            the parameter, of a split master that was loaded.
    """

    def __init__(
        self,
        stored: Callable[[], Mapping[str, Any]],
        stepped: Callable[[], Tensor],
        shaped: Callable[[Tensor], Tensor] = lambda value: value,
        halfway: Callable[[], Halfway | None] = lambda: None,
    ) -> None:
        self._stored, self._stepped, self._shaped, self._halfway = stored, stepped, shaped, halfway

    def __iter__(self) -> Iterator[str]:
        return iter(plain_keys(self._stored()))

    def __len__(self) -> int:
        return len(plain_keys(self._stored()))

    @property
    def nbytes(self) -> int:
        return sum(value.nbytes for value in self._stored().values() if isinstance(value, Tensor))

    def is_live(self, key: str) -> bool:
        value = self._stored().get(key)
        return isinstance(value, Tensor) and value.dtype is torch.float32

    def as_stored(self) -> dict[str, Any]:
        """Return the state as it is stored, elements in the shape that users see; see :func:`code_key`."""
        shapeless = ("step", *BASES)
        return {
            code_key(key, value): value if key in shapeless else self._shaped(value)
            for key, value in self._settled().items()
        }

    def _settled(self) -> Mapping[str, Any]:
        """Return the state as it is stored, of a split master what the parameter lacks as it is now."""
        stored, halfway = self._stored(), self._halfway()
        if halfway is None:
            return stored
        require_readable(stored["remainder"])
        return {**stored, "remainder": halfway.settle(self._stepped(), stored["remainder"].clone())}

    def __getitem__(self, key: str) -> Any:
        stored = self._stored()
        if key not in plain_keys(stored):
            raise KeyError(key)
        require_readable(*(value for value in stored.values() if isinstance(value, Tensor)))
        value = plain_value(self._settled() if key == "master" else stored, self._stepped(), key)
        return value if key == "step" else self._shaped(value)
