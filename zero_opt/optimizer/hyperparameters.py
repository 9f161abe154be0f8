"""Checks that hyperparameters which the user has edited between two steps can be stepped with."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigConflict, ConfigError, ConfigTypeError, StateDictError, ZeroOptError, quoted
from ..field_checks import is_on, plain_numbers, truth_of
from ..kernels.checks import require_number, require_numbers
from ..sharding.param_groups import hypers_of
from ..sharding.wrapped_class import require_real_if_fused, steps_params_apart
from ..state.trial import Trial, state_after_a_step
from ..system.unedited_hypers import UneditedHypers


class HyperForms:
    """The forms that hyperparameters had when the wrapped class checked them, which edits are compared with.

    Only arguments of the class are compared: what else is in a group is the class's or the user's own. Values that the
    class can compute with pass, even where its constructor refuses them (a negative lr).
    """

    def __init__(self, cls: type[torch.optim.Optimizer]) -> None:
        self._class, self._by_torch = cls, _is_known(cls)
        self._known: list[dict[str, Any]] = []
        self._off: list[dict[str, Any]] = []  # by group: options that have been off, or zero, since then
        self._needed: dict[tuple[int, tuple[str, ...]], list[str]] = {}
        self._checked = UneditedHypers()

    def learn(self, groups: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]) -> None:
        """Take the values that there are now for such as can work."""
        self._checked = UneditedHypers()
        form = plain_numbers if self._by_torch else lambda value: value  # a copy: an array may be written to
        self._known = [{key: form(group[key]) for key in arguments if key in group} for group in groups]
        self._off = [{} for _ in groups]
        self._needed.clear()

    def check(self, groups: Sequence[Mapping[str, Any]], state: Mapping[Tensor, Any]) -> None:
        """Raise ConfigError or ConfigTypeError, naming group and key, for a value that cannot work.

        A value that is the known object is not looked at, unless it can be written in place.

        Args:
            state: by parameter, as steps with the known values have made it.

        Raises:
            ConfigConflict: an option needs state that steps without it have not made, or real parameters.
        """
        if self._checked.are(groups):
            return
        any_switched = False
        for number, (known, off, group) in enumerate(zip(self._known, self._off, groups, strict=False)):
            switched: list[str] = []
            for key, before in known.items():
                if key not in group:
                    raise ConfigError(f"param group {number} has lost its {key!r}; put it back")
                value = group[key]
                if not isinstance(value, Tensor) and not is_on(value):
                    off[key] = value
                elif not isinstance(value, Tensor) and (key in off or not is_on(before)):
                    switched.append(key)
                unset = value is None and not self._by_torch  # it may stand for something
                if (value is not before and not unset) or isinstance(value, (Tensor, list)):
                    label = f"{key!r} of param group {number}"
                    _require_alike(label, value, before)
                    if self._by_torch:
                        _require_truth(label, value, before)
                        if key == "betas" and not all(0.0 <= float(beta) < 1.0 for beta in value):
                            raise ConfigError(f"{label} must be in [0, 1), got {quoted(value)}")
            if switched and steps_params_apart(self._class):
                any_switched = True
                self._require_state(number, switched, group, state)
        require_real_if_fused(self._class, groups)
        if not any_switched:  # else it depends on the state too
            self._checked.note(groups)

    def fit(self, groups: Sequence[Mapping[str, Any]], state: Mapping[Tensor, Any]) -> bool:
        """Return whether :meth:`check` raises nothing."""
        try:
            self.check(groups, state)
        except ZeroOptError:
            return False
        return True

    def _require_state(
        self, number: int, switched: Sequence[str], group: Mapping[str, Any], state: Mapping[Tensor, Any]
    ) -> None:
        """Raise ConfigConflict if state lacks what the class needs for options that were off, or zero, before."""
        case = number, tuple(switched)
        if case not in self._needed:
            self._needed[case] = self._newly_needed(number, group, switched)
        entries = filter(None, (state.get(param) for param in group["params"]))
        kept = (entry for entry in entries if isinstance(entry, Mapping))
        missing = [key for entry in kept for key in self._needed[case] if key not in entry]
        if missing:
            switched = [key for key in switched if self._newly_needed(number, group, [key])] or switched
            raise ConfigConflict(
                f"param group {number}: {' and '.join(switched)} cannot be switched on after the first step, which has "
                f"left no {missing[0]!r} in the state; set it back, or load a state dict that was saved with it"
            )

    def _newly_needed(self, number: int, group: Mapping[str, Any], switched: Sequence[str]) -> list[str]:
        """Return the keys of state that a second step misses if these options are switched on after a first one."""
        before = {**hypers_of(group), **self._known[number], **self._off[number]}
        zeros = partial(torch.zeros, 2, 2, device="cpu", dtype=torch.float32)
        after = {**before, **{key: group[key] for key in switched}}
        try:
            trial = Trial(self._class, zeros(), before)
            trial.step()
            trial.set_hypers(after)
            trial.step()
        except (KeyError, StateDictError):
            return sorted(state_after_a_step(self._class, after, zeros()).keys() - trial.state.keys())
        except Exception:  # the step will raise that too
            return []
        return []


def require_types(
    cls: type[torch.optim.Optimizer], groups: Iterable[Any], defaults: Mapping[str, Any], first: int = 0
) -> None:
    """Raise ConfigError or ConfigTypeError, naming the argument, for a value of a type that a known class cannot take.

    Args:
        cls: a class of other libraries is not looked at, since its arguments may mean anything.
        groups: param groups, numbered from ``first``, or parameters. defaults: the arguments of the class.
    """
    if not _is_known(cls):
        return
    usual = inspect.signature(cls).parameters
    given: list[tuple[str, Mapping[str, Any]]] = [("", defaults)]
    given += [(f" of param group {n}", group) for n, group in enumerate(groups, first) if isinstance(group, Mapping)]
    for where, values in given:
        for key in filter(values.__contains__, usual):
            _require_alike(f"{key!r}{where}", values[key], usual[key].default)
            _require_truth(f"{key!r}{where}", values[key], usual[key].default)


def _is_known(cls: type) -> bool:
    return cls.__module__.startswith(("torch.", "zero_opt."))


def _require_alike(label: str, value: Any, before: Any) -> None:
    """Raise ConfigError or ConfigTypeError unless ``value`` can stand in the place of the known ``before``."""
    if isinstance(before, (tuple, list)) and before and all(map(_is_number, before)):
        require_numbers(label, value, len(before))
    elif isinstance(before, bool):
        if isinstance(value, str):
            raise ConfigTypeError(f"{label} must be True or False, got {quoted(value)}")
    elif _is_number(before):
        require_number(label, value)


def _require_truth(label: str, value: Any, before: Any) -> None:
    """Raise ConfigTypeError if ``value``, in the place of an option, has no truth value, as an array of two has none.

    Args:
        before: ``None`` leaves an option to torch.
    """
    if (before is None or isinstance(before, bool)) and truth_of(value) is None:
        raise ConfigTypeError(f"{label} must be True or False, got {quoted(value)}")


def _is_number(value: object) -> bool:
    return isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1)


def moves_nothing(groups: Sequence[Mapping[str, Any]]) -> bool:
    """Whether every learning rate is 0, with which a step leaves parameters as they are."""
    return all(float(group.get("lr", 1.0)) == 0.0 for group in groups)
