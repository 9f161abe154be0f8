"""The seam between the reduced gradient and where the shard lives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from ..errors import ZeroOptError
from ..reduction.interface import GradShard
from ..sharding.buckets import GradBucket
from ..sharding.flat_param import FlatParam

ParamState = MutableMapping[str, Any]


class Stretch(NamedTuple):
    """Elements ``start`` to ``stop`` (exclusive) of a slice. Their next step has the number ``steps`` + 1, an fp32."""

    start: int
    stop: int
    steps: float


class ReadThrough(ABC, MutableMapping[str, Any]):
    """A state that is put together when it is read, since it does not lie in memory as users see it."""

    @abstractmethod
    def held(self) -> list[Tensor]:
        """The tensors that it has given out; what is written to them is taken over with the next step."""


def tensors_of(state: Mapping[str, Any]) -> list[Tensor]:
    """The tensors of a live state that somebody may have written to."""
    if isinstance(state, ReadThrough):
        return state.held()
    return [value for value in state.values() if isinstance(value, Tensor)]


class Slices(Protocol):
    """Slices of parameters, named by their position."""

    @property
    def flats(self) -> Sequence[FlatParam]:
        """The parameter of each."""


def load_mirrors(places: Iterable[tuple[Slices, int]]) -> None:
    """Bring mirrors of the parameters of these slices up to date with what the user has written to those."""
    for slices, position in places:
        slices.flats[position].load()


class Placement(Protocol):
    """Where this rank's shard of the parameters and optimizer state lives, and how it is stepped."""

    def add_group(self, hypers: Mapping[str, Any]) -> None:
        """A param group was added; its parameters follow through :meth:`add`."""

    def drop_groups(self, kept: int) -> None:
        """Only the first ``kept`` groups are there after all; nothing was planned of the others."""

    def add(self, buckets: Sequence[GradBucket]) -> None:
        """Buckets were planned; take charge of this rank's slices of them."""

    def repoint(self, params: Sequence[int]) -> None:
        """The data of these parameters moved."""

    @property
    def staging_nbytes(self) -> int:
        """Bytes of memory that state passes through when it is stepped."""

    def require_own(self) -> None:
        """Raise WorkerFailed or StorageFailed in a process that was forked from the one that made this."""

    @property
    def pending(self) -> bool:
        """Whether a step has been taken whose result is not in the parameters yet."""

    @property
    def spare_nbytes(self) -> int:
        """Bytes of this rank's memory for state beside those that :meth:`adam_state` shows."""

    def landing(self, grads: Sequence[GradShard]) -> Sequence[int]:
        """The buckets that :meth:`step` will update, the same on every rank.

        Called once before each step, on every rank: it may be collective.
        """

    def step(
        self, grads: Sequence[GradShard], groups: Sequence[MutableMapping[str, Any]], grad_scale: float
    ) -> Iterator[int]:
        """One optimizer step of this rank's slices with the given hyperparameters per group.

        Gradients are multiplied by ``grad_scale`` first, in the same pass over memory where the step is native.

        Yields the index of each bucket of :meth:`landing`, in order, once its parameters are updated here; must be run
        to the end.
        """

    def wait(self) -> None:
        """Let a pending step end; it stays pending."""

    def require_writable(self) -> None:
        """Raise StorageFailed if the state cannot be written where it is. Called before a load, after :meth:`wait`."""

    def land(self) -> Iterator[int]:
        """Bring a pending step into the parameters, as :meth:`step` yields them; those changed since are left alone."""

    def conflict(self) -> ZeroOptError | None:
        """What is wrong if the user has changed a parameter that a pending step updates."""

    def state(self) -> Iterator[tuple[int, ParamState]]:
        """(parameter index, its live state) for each of this rank's slices that has state."""

    def saved(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """As :meth:`adam_state`, in the form that a state dict has: what is kept in a compact form is made plain."""

    def resident(self) -> Iterator[Tensor]:
        """What of the state lies on the parameters' device, or may; it is read and written there at every step."""

    def adopt(self, index: int, state: ParamState | None) -> bool:
        """The user may have edited the live state of a parameter, put another in its place, or (``None``) dropped it.

        Returns:
            Whether the live state is another object than ``state`` after that.

        Raises:
            StepPending: it is not as it was while a step that changes it is pending.
        """

    def param_of(self, index: int) -> Tensor:
        """The tensor that is stepped for this rank's slice of a parameter."""

    def load(self, states: Mapping[int, Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> None:
        """Replace all state, given per parameter of this rank, and the groups' hyperparameters."""

    def close(self) -> None:
        """Release what is held."""


class Home(Placement, Protocol):
    """A placement that can be told to step parts of slices, so that another can be built around it."""

    def set_stretches(self, index: int, stretches: Sequence[Stretch], gradients: int) -> None:
        """Step this rank's slice of a parameter in these stretches from the next step on, and nothing else of it.

        Their counts are the caller's to keep; each step needs them anew. Given while no step is pending.

        Args:
            gradients: what the slice's gradient is the mean of, see :meth:`AdamHypers.over`.
        """


class AtOnce:
    """The part of a :class:`Placement` that is about pending steps, for one that never has any."""

    pending = False

    def require_own(self) -> None:
        """See :class:`Placement`."""

    def landing(self, grads: Sequence[GradShard]) -> Sequence[int]:
        return [shard.bucket for shard in grads if shard.used]

    def wait(self) -> None:
        """See :class:`Placement`."""

    def require_writable(self) -> None:
        """See :class:`Placement`; memory can be."""

    def land(self) -> Iterator[int]:
        return iter(())

    def conflict(self) -> None:
        """See :class:`Placement`."""
