"""What Python knows of a native update: its hyperparameters, and what it keeps of a param."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from torch import Tensor

from ..system.extension import native
from .checks import require_number


class StepHypers(Protocol):
    """The hyperparameters of one group for one step."""

    def for_mean_of(self, gradients: int) -> StepHypers:
        """Return those of one step by the mean of so many steps' gradients."""

    def for_kernel(self, grad_scale: float = 1.0, *, prediction: float = 0.0) -> native.Hypers:
        """Return them as the kernel takes them.

        Args:
            prediction: how many times the copy of the param in ``out`` has the update too that the next step would make
                with the same gradient.
        """


class NativeUpdate(ABC):
    """An update of the table in native/kernels/update_table.inl; one object each.

    Attributes:
        name: the table's. arrays: what it may keep of a param, fp32 and of the param's shape, in the table's order.
        counts: whether it keeps the number of steps, too. squares: which arrays have no values below 0.
        switches: by which hyperparameter an array is there, of those that a step may do without.
        from_start: whether a state is there before the first step. compact: whether arrays may have a compact form.
    """

    name: ClassVar[str]
    arrays: ClassVar[tuple[str, ...]]
    counts: ClassVar[bool] = True
    squares: ClassVar[tuple[str, ...]] = ()
    switches: ClassVar[Mapping[str, str]] = {}
    from_start: ClassVar[bool] = False
    compact: ClassVar[bool] = False

    @abstractmethod
    def hypers(self, group: Mapping[str, Any]) -> StepHypers:
        """Return the hyperparameters of a param group.

        Raises:
            ConfigError, ConfigTypeError: names one that is no number.
        """

    def roles(self, group: Mapping[str, Any]) -> tuple[str, ...]:  # noqa: ARG002
        """Return which of ``arrays`` a step of a param group reads and writes."""
        return self.arrays

    def begins(self, state: Mapping[str, Any], roles: Sequence[str]) -> bool:  # noqa: ARG002
        """Return whether the next step is the first one of a state, and makes what that lacks."""
        return not state

    def first_value(self, defaults: Mapping[str, Any]) -> float:  # noqa: ARG002
        """Return what the elements of new arrays are, given the optimizer's defaults."""
        return 0.0

    @property
    def least(self) -> tuple[str, ...]:
        """What a state that is not new has in any case."""
        return self.needed([role for role in self.arrays if role not in self.switches])

    @property
    def keys(self) -> tuple[str, ...]:
        """All that a state may have."""
        return (*(("step",) if self.counts else ()), *self.arrays, "master")

    def needed(self, roles: Sequence[str]) -> tuple[str, ...]:
        """Return what a state that is not new must have, given what a step reads."""
        return (*(("step",) if self.counts else ()), *roles)


@dataclass(frozen=True, slots=True)
class PlainHypers:
    """Hyperparameters by the table's names; see :class:`StepHypers`."""

    update: str
    values: Mapping[str, float]
    maximize: bool

    def for_mean_of(self, gradients: int) -> PlainHypers:
        """Return them: only Adam is stepped by columns."""
        assert gradients == 1, "no other update waits for gradients"
        return self

    def for_kernel(self, grad_scale: float = 1.0, *, prediction: float = 0.0) -> native.Hypers:
        """Return them as the kernel takes them."""
        return native.Hypers(
            self.update, maximize=self.maximize, grad_scale=grad_scale, prediction=prediction, **self.values
        )


def plain_hypers(update: str, group: Mapping[str, Any], names: Sequence[str], **more: Any) -> PlainHypers:
    """Return hyperparameters that a param group has under the table's names, and ``more``.

    Raises:
        ConfigError, ConfigTypeError: names one that is no number.
    """
    given = {**{name: group[name] for name in names}, **more}
    for name, value in given.items():
        require_number(name, value)
    return PlainHypers(update, {name: float(value) for name, value in given.items()}, bool(group["maximize"]))


def given_arrays(state: Mapping[str, Any], names: Sequence[str]) -> dict[str, Tensor]:
    """Return those of these entries of a state that are there."""
    return {name: state[name] for name in names if state.get(name) is not None}
