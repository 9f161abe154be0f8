"""Checks that hyperparameters which the user has edited between two steps can be stepped with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError, ConfigTypeError, quoted
from ..kernels.checks import require_number, require_numbers


class HyperForms:
    """The forms that hyperparameters had when the wrapped class checked them, which edits are compared with.

    Only arguments of the class are compared: what else is in a group is the class's or the user's own. Values that the
    class can compute with pass, even where its constructor refuses them (a negative lr).
    """

    def __init__(self, cls: type[torch.optim.Optimizer]) -> None:
        self._by_torch = cls.__module__.startswith(("torch.", "zero_opt."))
        self._known: list[dict[str, Any]] = []

    def learn(self, groups: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]) -> None:
        """Take the values that there are now for such as can work."""
        self._known = [{key: group[key] for key in arguments if key in group} for group in groups]

    def check(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raise ConfigError or ConfigTypeError, naming group and key, for a value that cannot work.

        A value that is the known object is not looked at, unless it can be written in place.
        """
        for number, (known, group) in enumerate(zip(self._known, groups, strict=False)):
            for key, before in known.items():
                if key not in group:
                    raise ConfigError(f"param group {number} has lost its {key!r}; put it back")
                value = group[key]
                if value is not before or isinstance(value, (Tensor, list)):
                    self._require_alike(f"{key!r} of param group {number}", value, before)
                    if key == "betas" and self._by_torch and not all(0.0 <= float(beta) < 1.0 for beta in value):
                        raise ConfigError(f"'betas' of param group {number} must be in [0, 1), got {quoted(value)}")

    def _require_alike(self, label: str, value: Any, before: Any) -> None:
        if value is None and not self._by_torch:  # it may stand for something
            return
        if isinstance(before, (tuple, list)) and before and all(map(_is_number, before)):
            require_numbers(label, value, len(before))
        elif isinstance(before, bool):
            if isinstance(value, str):
                raise ConfigTypeError(f"{label} must be True or False, got {quoted(value)}")
        elif _is_number(before):
            require_number(label, value)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1)
