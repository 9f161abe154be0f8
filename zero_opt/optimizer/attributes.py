"""Attributes of the optimizer that the user has made: its own, and those of the wrapped one, whose step reads them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from ..errors import ConfigConflict

# Arguments of the constructor, which are no attributes.
_CHOSEN_ONCE = frozenset(("process_group", "reduction", "offload", "precision", "max_grad_norm", "checks"))


class WrappedAttributes:
    """Public attributes that this optimizer lacks are those of the wrapped one, where there is one as a whole."""

    # Those of the wrapped class, where each rank steps by instances of its own.
    _of_class: Collection[str] = ()

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute.

        Raises:
            ConfigConflict: it is an argument of the constructor, or an attribute of a class that steps in parts.
        """
        if name in _CHOSEN_ONCE:
            instead = "clip with opt.clip_grad_norm_(), or " if name == "max_grad_norm" else ""
            raise ConfigConflict(f"{name} cannot change after construction; {instead}construct a new optimizer")
        own = name in vars(self) or hasattr(type(self), name)
        wrapped = None if own else self._wrapped(name)
        if wrapped is not None:
            setattr(wrapped, name, value)
        elif own or name not in self._of_class:
            super().__setattr__(name, value)
        else:
            raise ConfigConflict(
                f"{name} is an attribute of the wrapped class, whose steps would not see it over several ranks, nor "
                "with an offload or masters; keep it in the param groups, where they do"
            )

    def __getattr__(self, name: str) -> Any:
        wrapped = self._wrapped(name)
        if wrapped is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        return getattr(wrapped, name)

    def __delattr__(self, name: str) -> None:
        wrapped = None if name in vars(self) else self._wrapped(name)
        if wrapped is None:
            super().__delattr__(name)
        else:
            delattr(wrapped, name)

    def _wrapped(self, name: str) -> torch.optim.Optimizer | None:
        """Return the wrapped optimizer, if there is one, and a public attribute of this name may be its."""
        engine = vars(self).get("_engine")
        wrapped: torch.optim.Optimizer | None = None if engine is None or name.startswith("_") else engine.wrapped
        return wrapped
