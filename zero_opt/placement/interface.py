"""The interface of placements, which take reduced gradients and step this rank's shards."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Generic, TypeVar

from torch import Tensor

from ..errors import ZeroOptError
from ..reduction.interface import GradShard, ParamsByBucket, used_params
from ..sharding.buckets import GradBucket
from .masters import MasterShard
from .read_through import ReadThrough

ParamState = MutableMapping[str, Any]


def live_tensors(state: Mapping[str, Any]) -> list[Tensor]:
    """The tensors of a live state that the user may have written to."""
    if isinstance(state, ReadThrough):
        return state.held()
    return [value for value in state.values() if isinstance(value, Tensor)]


class Placement(ABC):
    """Where this rank's shard of the parameters and optimizer state lives, and how it is stepped.

    The engine calls all methods on the user's thread, except :meth:`await_result`. Param groups come first
    (:meth:`add_group`), then buckets of their parameters (:meth:`add`), at any time between steps. Every step is a call
    of :meth:`updated_params`, then one of :meth:`step`.

    A placement may take a step whose result is in the parameters only later: until then the step is *pending*. What is
    implemented here suits a placement that never has a pending step.

    Attributes:
        loss: what the closure of the user's step under way has returned, if there is one.
    """

    loss: tuple[Any, ...] = ()

    # -- what there is ------------------------------------------------------------------------------------------------

    @abstractmethod
    def add_group(self, hypers: Mapping[str, Any]) -> None:
        """Take in a param group, whose parameters follow through :meth:`add`."""

    @abstractmethod
    def drop_groups(self, kept: int) -> None:
        """Forget all but the first ``kept`` groups, of which nothing was planned."""

    @abstractmethod
    def add(self, buckets: Sequence[GradBucket]) -> None:
        """Take charge of this rank's slices of new buckets.

        Raises:
            OutOfMemory, OutOfResources, WorkerFailed, StorageFull, StorageFailed: there is no room, or no worker or
                file can be used; nothing was taken in.
        """

    @abstractmethod
    def drop(self, buckets: Sequence[GradBucket]) -> None:
        """Take back the last :meth:`add`, which another rank could not join, if this rank could."""

    def lacks_room(self, groups: Sequence[Mapping[str, Any]]) -> bool:  # noqa: ARG002
        """Return whether a step with these hyperparameters, of all groups, has state that has no place yet.

        Raises:
            UnsupportedOptimizer: they were edited into what cannot be stepped.
        """
        return False

    def make_room(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Give that state a place. A step may be pending; entries of live state may be other tensors after that.

        Raises:
            ConfigConflict: the pending step would have had to make it. OutOfMemory and others: as :meth:`add`.
        """

    @abstractmethod
    def repoint(self, params: Sequence[int]) -> None:
        """Follow parameters, given by global index, whose data moved."""

    @property
    def spare_nbytes(self) -> int:
        """Bytes of this rank's memory for state beside those that :meth:`state` shows."""
        return 0

    @property
    def staging_nbytes(self) -> int:
        """Bytes of memory that gradients or state pass through when they are stepped."""
        return 0

    @property
    def threads(self) -> int | None:
        """How many threads of ours step; ``None`` where the class steps by itself."""
        return None

    def figures(self) -> Mapping[str, float]:
        """Return the placement's own figures for ``stats()``, of the step that ends; called once per step."""
        return {}

    def require_not_forked(self) -> None:
        """Raise WorkerFailed or StorageFailed in a process that was forked from the one that made this."""

    @abstractmethod
    def close(self) -> None:
        """Release what is held."""

    # -- a step -------------------------------------------------------------------------------------------------------

    def updated_params(self, grads: Sequence[GradShard]) -> ParamsByBucket:
        """The parameters that :meth:`step` will update, the same on every rank. Collective."""
        return used_params(grads)

    @abstractmethod
    def step(
        self, grads: Sequence[GradShard], groups: Sequence[MutableMapping[str, Any]], grad_scale: float
    ) -> Iterator[int]:
        """One optimizer step of this rank's slices with the given hyperparameters per group.

        Gradients are multiplied by ``grad_scale`` first, in the same pass over memory where the step is native.

        Yields the index of each bucket of :meth:`updated_params`, in order, once its parameters are updated here; must
        be run to the end.
        """

    @property
    def pending(self) -> bool:
        """Whether a step has been taken whose result is not in the parameters yet."""
        return False

    @property
    def predicts(self) -> bool:
        """Whether parameters show predictions, until :meth:`bring_in`. The same on every rank."""
        return False

    @property
    def lags(self) -> bool:
        """Whether parameters lack a step because the policy has it so, or show predictions."""
        return self.predicts

    def await_result(self, bucket: int) -> None:
        """Return when the result of a bucket is in the parameters; on any thread, which may have to copy it."""

    def await_results(self) -> None:
        """Return when the results of all buckets are in the parameters."""

    def resume(self, states: Mapping[int, Mapping[str, Any]]) -> None:
        """Go on from where these loaded states, of all parameters and the same on every rank, have been left."""

    def wait(self) -> None:
        """Let a pending step end; it stays pending."""

    def bring_in(self) -> Iterator[int]:
        """Bring a pending step into the parameters, as :meth:`step` yields them; those changed since are left alone."""
        return iter(())

    def conflict(self) -> ZeroOptError | None:
        """What is wrong if the user has changed a parameter that a pending step updates."""
        return None

    def ignore_writes(self) -> None:
        """Take the parameters that a pending step updates as not written to: their values are those from before."""

    # -- state --------------------------------------------------------------------------------------------------------

    @abstractmethod
    def state(self) -> Iterator[tuple[int, ParamState]]:
        """(parameter index, its live state) for each of this rank's slices that has state."""

    def array_views(self) -> Iterable[tuple[int, Tensor]]:
        """Return the tensors of the live state that are views of the placement's arrays, each with its parameter.

        If the user gives such a tensor other memory, the arrays do not follow by themselves.
        """
        return ()

    @abstractmethod
    def saved(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """As :meth:`state`, in the form that a state dict has: what is kept in a compact form is made plain."""

    def resident(self) -> Iterator[Tensor]:
        """What of the state lies on the parameters' device, or may; it is read and written there at every step."""
        return iter(())

    @abstractmethod
    def adopt_state(self, index: int, state: ParamState | None) -> bool:
        """Follow what the user made of a parameter's live state: edited it, replaced it, or (``None``) dropped it.

        Tensors may be on any device: the next step has them where this placement keeps state.

        Returns:
            Whether the live state is another object than ``state`` after that.

        Raises:
            StepPending: it was replaced or dropped while a step that changes it is pending.
            StateDictError: it was replaced by what the native kernel cannot step.
        """

    def require_counts(self) -> None:
        """Raise StateDictError if the user has written to a count of steps what the native kernel cannot count on."""

    @abstractmethod
    def param_of(self, index: int) -> Tensor:
        """The tensor that is stepped for this rank's slice of a parameter."""

    def require_writable(self) -> None:
        """Raise StorageFailed if the state cannot be written where it is. Called before a load, after :meth:`wait`."""

    @abstractmethod
    def load(self, states: Mapping[int, Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> None:
        """Replace all state, given per parameter of this rank, and the groups' hyperparameters."""


SlicesT = TypeVar("SlicesT", bound=MasterShard)


class SlicePlacement(Placement, Generic[SlicesT]):
    """A placement whose slices are held by shards or units, and that can be told of how many gradients it gets a mean.

    So another placement can be built around it.
    """

    def __init__(self) -> None:
        self._places: dict[int, tuple[SlicesT, int]] = {}  # by parameter: where its slice is, position there

    def repoint(self, params: Sequence[int]) -> None:
        for index in params:
            if index in self._places:
                slices, position = self._places[index]
                slices.repoint(position)

    def saved(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        for index, state in self.state():
            slices, position = self._places[index]
            yield index, slices.saved_state(position, state)

    def _load_mirrors(self) -> None:
        """Whole buckets are gathered, so what is edited in a parameter that no step uses must be in its mirror."""
        for slices, position in self._places.values():
            if (flat := slices.flats[position]).mirrored:
                flat.load()

    def step_by_mean_of(self, index: int, gradients: int) -> None:
        """From the next step on, take a gradient of a parameter's slice for the mean of so many.

        See :meth:`AdamHypers.for_mean_of`. Given while no step is pending.
        """
        slices, position = self._places[index]
        slices.gradients[position] = gradients
