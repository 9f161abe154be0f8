"""The seam between the reduced gradient and where the shard lives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from ..buckets import GradBucket
from ..reduction.base import GradShard

ParamState = MutableMapping[str, Any]


class Placement(Protocol):
    """Where this rank's shard of the parameters and optimizer state lives, and how it is stepped."""

    def add_group(self, hypers: Mapping[str, Any]) -> None:
        """A param group was added; its parameters follow through :meth:`add`."""

    def add(self, buckets: Sequence[GradBucket]) -> None:
        """Buckets were planned; take charge of this rank's slices of them."""

    def repoint(self, params: Sequence[int]) -> None:
        """The data of these parameters moved."""

    def step(self, grads: Sequence[GradShard], groups: Sequence[MutableMapping[str, Any]]) -> Iterator[int]:
        """One optimizer step of this rank's slices with the given hyperparameters per group.

        Yields the index of each bucket, in order, once its parameters are updated here; must be run to the end.
        """

    def state(self) -> Iterator[tuple[int, ParamState]]:
        """(parameter index, its live state) for each of this rank's slices that has state."""

    def param_of(self, index: int) -> Tensor:
        """The tensor that is stepped for this rank's slice of a parameter."""

    def load(self, states: Mapping[int, Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> None:
        """Replace all state, given per parameter of this rank, and the groups' hyperparameters."""

    def close(self) -> None:
        """Release what is held."""
