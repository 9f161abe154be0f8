"""The compiled extension, ``zero_opt._native``. No other module imports it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, NoReturn

from ..errors import NativeUnavailable

__all__ = ["native", "native_available", "require_native"]


class _Missing:
    """The stand-in for an extension that cannot be loaded: every use raises NativeUnavailable."""

    def __init__(self, why: Exception) -> None:
        self._why = why

    def __getattr__(self, name: str) -> NoReturn:
        raise NativeUnavailable(
            f"the native extension zero_opt._native is not usable here ({self._why}); it is compiled when zero_opt is "
            "installed from source with a C++17 compiler, or use torch.optim.Adam/AdamW(fused=True)"
        ) from self._why


if TYPE_CHECKING:
    from .. import _native as native
else:
    try:
        native = importlib.import_module("zero_opt._native")
        native.isa()  # raises RuntimeError if ZERO_OPT_ISA names kernels that are not there
    except (ImportError, RuntimeError) as error:
        native = _Missing(error)


def require_native() -> None:
    """Raise NativeUnavailable if the extension was not built or cannot be loaded here."""
    native.isa()


def native_available() -> bool:
    """Return whether the extension can be used here."""
    return not isinstance(native, _Missing)
