"""A state that is put together when it is read, because it lies in memory in another form."""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ..kernels.code_watch import write_mark
from ..system.inference_mode import outside_inference_mode
from ..system.same_objects import memory_of


class MadeState(Mapping[str, Any]):
    """A slice's state in the form of ``torch.optim``, of which every value is made when it is asked for."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of what the values are made from."""

    def is_live(self, key: str) -> bool:  # noqa: ARG002  (of the protocol)
        """Return whether a value is the state's own memory, where a write counts at once, and others write too."""
        return False


def _mark_of(value: Any) -> object:
    """Return what changes with a value: its write mark, and how its elements lie."""
    return (write_mark(value), memory_of([value])) if isinstance(value, Tensor) else None


class ReadThrough(MutableMapping[str, Any]):
    """What users see of a state: values are made once and kept until :meth:`forget`, as a step changes the state.

    So nothing written to them before the step is lost: what is :meth:`edited` is adopted, and :meth:`settled`.
    """

    def __init__(self, saved: MadeState) -> None:
        self._saved = saved
        self._values: dict[str, Any] = {}
        self._made: dict[str, tuple[Any, object]] = {}  # each value, and its marks
        self._dropped: set[str] = set()

    def __iter__(self) -> Iterator[str]:
        keys = dict.fromkeys(chain(self._saved, self._values))
        return iter([key for key in keys if key not in self._dropped])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __getitem__(self, key: str) -> Any:
        if key in self._dropped:
            raise KeyError(key)
        if key not in self._values:
            with outside_inference_mode():  # users may write to it later
                value = self._saved[key]
            self._values[key] = value
            self._made[key] = value, _mark_of(value)
        return self._values[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._dropped.discard(key)
        self._values[key] = value

    def __delitem__(self, key: str) -> None:
        if key not in self:
            raise KeyError(key)
        self._values.pop(key, None)
        self._dropped.add(key)

    def copy(self) -> dict[str, Any]:
        """Return the values as they are now, as ``dict.copy`` does."""
        return dict(self)

    def __reduce__(self) -> tuple[Any, ...]:
        # So do copy.copy() and copy.deepcopy() make it. torch.load(weights_only=True) knows no other dict by name.
        return OrderedDict, (), None, None, iter(self.items())

    def __or__(self, other: Mapping[str, Any]) -> dict[str, Any]:
        return {**self, **other}

    def __ror__(self, other: Mapping[str, Any]) -> dict[str, Any]:
        return {**other, **self}

    def __ior__(self, other: Any) -> ReadThrough:  # type: ignore[misc]  # ``|`` makes a dict
        self.update(other)
        return self

    def __repr__(self) -> str:
        return repr(dict(self))

    @property
    def nbytes(self) -> int:
        """Bytes of what the values are made from."""
        return self._saved.nbytes

    def held(self) -> list[Tensor]:
        """Return the tensors that this state has given out."""
        return [value for value in self._values.values() if isinstance(value, Tensor)]

    @property
    def adopted(self) -> object:
        """A token that is replaced whenever values of the user's were adopted."""
        return self._made

    def given(self) -> dict[str, Any]:
        """Return the values that users have put in."""
        made = self._made
        return {key: value for key, value in self._values.items() if key not in made or made[key][0] is not value}

    def unread(self) -> bool:
        """Whether nobody has asked for a value, put one in or dropped one since :meth:`forget`."""
        return not (self._values or self._dropped)

    def edited(self) -> bool:
        """Whether users have written to a value, put another in its place, or dropped one."""
        return bool(self._dropped) or any(map(self.wrote_to, self._values))

    def wrote_to(self, key: str) -> bool:
        """Whether users have written to a value that there is, or put another in its place."""
        if key not in self._made:
            return key in self._values
        value, (made, marks) = self._values.get(key), self._made[key]
        return value is not made or _mark_of(value) != marks

    @contextmanager
    def settled(self) -> Iterator[None]:
        """A context in which the caller adopts the values; afterwards, tensors that were read before show the result.

        So what users write to them then is another edit.
        """
        self.forget_live()
        read = {key: value for key, value in self._values.items() if self._is_own(key) and isinstance(value, Tensor)}
        yield
        self.forget()
        with outside_inference_mode(), torch.no_grad():
            for key, value in read.items():
                now = self._saved.get(key)
                if now is not None and (now.dtype, now.shape) == (value.dtype, value.shape):
                    self._values[key] = value.copy_(now)
                    self._made[key] = value, _mark_of(value)

    def forget_live(self) -> None:
        """Show what there is now of values in the state's own memory: what users write to these needs no adoption."""
        for key in [key for key in self._made if self._is_own(key) and self._saved.is_live(key)]:
            del self._values[key], self._made[key]

    def _is_own(self, key: str) -> bool:
        """Return whether there is a value that was made here, and not one that users have put in its place."""
        return key in self._made and self._values.get(key) is self._made[key][0]

    def forget(self) -> None:
        """Show what there is now."""
        self._values.clear()
        self._made = {}
        self._dropped.clear()
