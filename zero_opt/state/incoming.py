"""Room for the state of all ranks, once what they list is known to be all of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, islice
from operator import attrgetter
from typing import Any

from torch import Tensor

from ..comm.groups import FAKE, Group
from ..errors import StateDictError
from ..sharding.flat_param import FlatParam
from ..system.garbage_collection import without_collection
from .entries import Batch, Field, small_values
from .state_dict import StatesByIndex

_numel_of = attrgetter("numel")
# Messages name so many ranks.
_NAMED_RANKS = 4


def checked_uncut(flats: Mapping[int, FlatParam], listings: Sequence[Sequence[Batch]]) -> dict[str, set[int]]:
    """Check that the slices that all ranks list of a value are all of the value. The same on every rank.

    A value with one element looks like a slice on a rank whose slice has one element. It is not a slice if the owner
    of the parameter's first element lists it as a small value. Those come from that owner alone, and are not compared.

    Args:
        listings: by rank.

    Returns:
        By key, the parameters of which what is listed is not a slice.

    Raises:
        StateDictError: some elements of a value are on no rank.
    """
    listed: defaultdict[tuple[int, str], dict[int, int]] = defaultdict(dict)  # elements by rank, of cut parameters
    for rank, batches in enumerate(listings):
        for batch in batches:
            numels = list(map(_numel_of, map(flats.__getitem__, batch.params)))
            if batch.numels == numels:
                continue
            pairs = zip(batch.params, batch.numels, numels, strict=True)
            cut = [(index, numel) for index, numel, whole in pairs if numel != whole]
            for key in (field.key for field in batch.fields if field.is_cut):
                for index, numel in cut:
                    listed[index, key][rank] = numel
    uncut: defaultdict[str, set[int]] = defaultdict(set)
    for (index, key), by_rank in listed.items():
        if sum(by_rank.values()) == flats[index].numel:
            continue
        if sum(by_rank.values()) > 1 or not _is_small(index, key, listings):
            raise _missing(flats[index], key, by_rank)
        uncut[key].add(index)
    return uncut


def uncut_over(
    group: Group, flats: Mapping[int, FlatParam], listings: Sequence[Sequence[Batch]]
) -> Mapping[str, set[int]]:
    """Return :func:`checked_uncut`, but over the fake process group, whose other ranks list what this one does."""
    return {} if group.backend == FAKE else checked_uncut(flats, listings)


def _is_small(index: int, key: str, listings: Sequence[Sequence[Batch]]) -> bool:
    """Return whether a rank lists a parameter's value as one that comes in the listing."""
    batches = (batch for batch in chain.from_iterable(listings) if index in batch.params)
    return any(field.key == key and not field.travels for batch in batches for field in batch.fields)


def _missing(flat: FlatParam, key: str, by_rank: Mapping[int, int]) -> StateDictError:
    have = " and ".join(f"rank {rank} has {numel}" for rank, numel in islice(by_rank.items(), _NAMED_RANKS))
    have += f" and {len(by_rank) - _NAMED_RANKS} more ranks have others" if len(by_rank) > _NAMED_RANKS else ""
    return StateDictError(
        f"state {key!r} of {flat.label} is not on all ranks that own a part of the parameter: of its {flat.numel} "
        f"elements {have}. Give opt.state[p] the same keys on every rank that shows the entry, drop the whole entry on "
        "all of them, or load a checkpoint"
    )


class RoomForState(ABC):
    """Room for the state of all ranks: the values that came inside listings, and memory for elements that travel.

    Args:
        listings: of all ranks, by rank. The keys of a state on several of them will have the order of the listings.
        uncut: what :func:`checked_uncut` returns of them, where they are checked already.
    """

    @without_collection()
    def __init__(
        self,
        flats: Mapping[int, FlatParam],
        listings: Sequence[Sequence[Batch]],
        uncut: Mapping[str, set[int]] | None = None,
    ) -> None:
        self.flats, self._uncut = flats, checked_uncut(flats, listings) if uncut is None else uncut
        self._states: StatesByIndex = {}
        for batch in chain.from_iterable(listings):
            keys = [field.key for field in batch.fields]
            for index in batch.params:
                self._states[index] = dict.fromkeys([*self._states.get(index, ()), *keys])
        self.runs: defaultdict[str, dict[int, Tensor]] = defaultdict(dict)  # by key and parameter: 1-D, of what travels

    @abstractmethod
    def _new(self, field: Field, indices: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
        """Return memory for the elements of these parameters' values, and the values."""

    @without_collection()
    def make(self, batches: Iterable[Batch]) -> None:
        """Make room for what a rank lists, unless there is some; what came inside the listing is there at once."""
        for batch in batches:
            for field in batch.fields:
                if field.travels:
                    self._make(batch, field)
                else:
                    self._put(batch.params, field.key, small_values(batch, field))

    def _make(self, batch: Batch, field: Field) -> None:
        there, uncut = self.runs[field.key], self._uncut.get(field.key, ())
        absent = [index for index in batch.params if not (index in there or index in uncut)]
        runs, values = self._new(field, absent)
        there.update(zip(absent, runs, strict=True))
        self._put(absent, field.key, values)

    def _put(self, indices: Iterable[int], key: str, values: Iterable[Any]) -> None:
        for index, value in zip(indices, values, strict=True):
            self._states[index][key] = value

    def by_param(self) -> StatesByIndex:
        """Return the state by global parameter index."""
        return {index: self._states[index] for index in sorted(self._states)}
