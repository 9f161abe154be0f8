"""Single values that users give: checks that name what is wrong, and conversion to Python's own numbers."""

from __future__ import annotations

import operator
import os
import sys
from dataclasses import fields
from math import inf
from numbers import Integral, Real
from typing import Any

from .errors import ConfigError, ConfigTypeError, quoted

# The most threads that may step. A typo could otherwise use up all the threads that the system grants.
_THREADS_LIMIT = 1024
# Memory has no more: its sizes are of 64 bits with a sign.
_MOST_MIB = 2**43
# Backends count whole milliseconds, and take 0 for no limit. The system counts milliseconds in 31 bits.
_LEAST_WAIT_S, _LONGEST_WAIT_S = 0.001, 2147483.0
# An array of more numbers is no pair such as betas; to read it at every step would take long.
_FEW_NUMBERS = 64


def waited_for(seconds: float) -> float:
    """Cut a timeout of the user's or torch's, in seconds, to the longest that can be waited: 24.8 days."""
    return min(seconds, _LONGEST_WAIT_S)


def plain_number(value: Any) -> Any:
    """Return Python's own number for another real one, such as numpy's, which may wrap around; all else as it is."""
    if type(value) in (bool, int, float):
        return value
    if isinstance(value, Integral):
        return operator.index(value)
    try:
        return float(value) if isinstance(value, Real) else value
    except OverflowError:  # of a fraction
        return inf if value > 0 else -inf


def plain_numbers(value: Any) -> Any:
    """Return a small NumPy array as a list of Python's numbers, a NumPy scalar as one; anything else as it is."""
    is_array = hasattr(type(value), "__array_interface__") and hasattr(value, "tolist")
    return value.tolist() if is_array and value.size <= _FEW_NUMBERS else value


def truth_of(option: Any) -> bool | None:
    """Return ``bool(option)``; ``None`` if it has no truth value, as an array of two has none."""
    try:
        return bool(option)
    except (RuntimeError, TypeError, ValueError):
        return None


def is_on(option: Any) -> bool:
    """Return whether an option is on. A value without a truth value counts as on."""
    return truth_of(option) is not False


def keep_plain_numbers(policy: Any) -> None:
    """Put Python's own numbers in the place of others in the fields of a frozen dataclass, before they are checked."""
    for each in fields(policy):
        object.__setattr__(policy, each.name, plain_number(getattr(policy, each.name)))


def check_number(name: str, value: object) -> None:
    """Raise ConfigTypeError, by ``name``, unless ``value`` is a number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigTypeError(f"{name} must be a number, got {quoted(value)}")


def check_positive(name: str, value: Any) -> None:
    """Raise ConfigTypeError or ConfigError, by ``name``, unless ``value`` is a positive, finite number."""
    check_number(name, value)
    if not 0 < value <= sys.float_info.max:  # refuses NaN, and integers that no float can hold
        raise ConfigError(f"{name} must be positive and finite, got {quoted(value)}")


def check_mebibytes(name: str, value: Any) -> None:
    """Raise ConfigTypeError or ConfigError, by ``name``, unless ``value`` is a size in MiB, of less than 2^63 bytes."""
    check_positive(name, value)
    if value >= _MOST_MIB:
        raise ConfigError(f"{name} is in MiB and must be less than {_MOST_MIB}, got {quoted(value)}")


def check_not_negative(name: str, value: Any) -> None:
    """Raise ConfigTypeError or ConfigError, by ``name``, unless ``value`` is a finite number of at least 0."""
    check_number(name, value)
    if not 0 <= value <= sys.float_info.max:
        raise ConfigError(f"{name} must be finite and not negative, got {quoted(value)}")


def check_seconds(name: str, value: Any) -> None:
    """Raise ConfigTypeError or ConfigError, by ``name``, unless ``value`` is a timeout that can be waited."""
    check_positive(name, value)
    if value < _LEAST_WAIT_S:
        raise ConfigError(f"{name} is in seconds and must be at least {_LEAST_WAIT_S}, got {quoted(value)}")


def check_integer(name: str, value: object, least: int = 1, most: float = inf) -> None:
    """Raise ConfigTypeError or ConfigError, by ``name``, unless ``value`` is an integer from ``least`` to ``most``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigTypeError(f"{name} must be an integer, got {quoted(value)}")
    if value < least:
        raise ConfigError(f"{name} must be at least {least}, got {quoted(value)}")
    if value > most:
        raise ConfigError(f"{name} must be at most {most}, got {quoted(value)}")


def check_threads(owner: str, value: object) -> None:
    """Raise ConfigTypeError or ConfigError unless ``value`` is ``None`` or a number of threads."""
    if value is not None:
        check_integer(f"{owner}.threads", value, most=_THREADS_LIMIT)


def check_flag(name: str, value: object) -> None:
    """Raise ConfigTypeError, by ``name``, unless ``value`` is a bool."""
    if not isinstance(value, bool):
        raise ConfigTypeError(f"{name} must be True or False, got {quoted(value)}")


def check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise ConfigError, by ``name``, unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ConfigError(f"{name} must be one of {choices}, got {quoted(value)}")


def check_dtype(name: str, value: Any) -> None:
    """Raise ConfigTypeError or ConfigError, by ``name``, unless ``value`` is ``None`` or a dtype of 16 or more bits."""
    if value is None:
        return
    kind = type(value)
    if (kind.__module__, kind.__qualname__) != ("torch", "dtype"):  # this floor does not import torch
        raise ConfigTypeError(f"{name} must be a torch.dtype, got {quoted(value)}")
    if not (value.is_floating_point and value.itemsize >= 2):
        raise ConfigError(f"{name} must be floating-point, of 16 bits or more, got {quoted(value)}")


def check_folder(name: str, value: object) -> None:
    """Raise ConfigTypeError or ConfigError, by ``name``, unless ``value`` can be a directory's path."""
    if not isinstance(value, (str, os.PathLike)):
        raise ConfigTypeError(f"{name} must be a directory's path, got {quoted(value)}")
    try:
        encoded = os.fsencode(value)
    except UnicodeEncodeError:
        encoded = b""
    if not encoded or b"\0" in encoded:
        raise ConfigError(f"{name} must be a directory's path, got {quoted(value)}")


def check_model(owner: str, value: object) -> None:
    """Raise ConfigTypeError unless ``value``, for ``overlap_param_gather``, is ``None`` or a module."""
    if value is not None and (isinstance(value, type) or not hasattr(value, "named_modules")):
        raise ConfigTypeError(
            f"{owner}.overlap_param_gather must be the torch.nn.Module being trained, got {quoted(value)}"
        )
