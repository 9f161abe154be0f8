"""A decorator for functions that read late parameters as they are, which the library refuses."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from zero_opt.sharding.late_params import Unwatched

_Function = TypeVar("_Function", bound=Callable[..., Any])


def as_they_are(function: _Function) -> _Function:
    """Decorate a function that reads parameters of which a step is pending, to compare them or to make gradients."""

    @wraps(function)
    def unwatched(*args: Any, **kwargs: Any) -> Any:
        with Unwatched():
            return function(*args, **kwargs)

    return cast(_Function, unwatched)
