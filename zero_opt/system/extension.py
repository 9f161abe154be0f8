"""The compiled extension, ``zero_opt._native``. No other module imports it."""

from __future__ import annotations

import hashlib
import importlib
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ..errors import NativeUnavailable

__all__ = ["native", "native_available", "require_native"]

# What this package calls the extension by; setup.py compiles its digest into the extension.
_STUB = Path(__file__).parents[1] / "_native.pyi"


class _Missing:
    """The stand-in for an extension that cannot be loaded: every use raises NativeUnavailable."""

    def __init__(self, why: Exception) -> None:
        self._why = why

    def __getattr__(self, name: str) -> NoReturn:
        if isinstance(self._why, NativeUnavailable):  # it says what to do
            raise NativeUnavailable(str(self._why)) from self._why
        raise NativeUnavailable(
            f"the native extension zero_opt._native is not usable here ({self._why}); it is compiled when zero_opt is "
            "installed from source with a C++17 compiler, or use torch.optim.Adam/AdamW(fused=True)"
        ) from self._why


def _loaded() -> Any:
    """Return the extension.

    Raises ImportError if there is none, and NativeUnavailable if it was built for other sources, or if ZERO_OPT_ISA
    names kernels that are not there.
    """
    module: Any = importlib.import_module("zero_opt._native")
    with suppress(OSError):  # an installation without stubs, as a frozen program: nothing to compare with
        digest = hashlib.sha256(_STUB.read_bytes()).hexdigest()[:16]
        if getattr(module, "interface", None) != int(digest, 16):
            raise NativeUnavailable(
                f"{module.__file__} is stale: it was built for another version of zero_opt; remove build/ and build it "
                "again with what installed zero_opt, as `pip install --editable .`, or `make setup` in its repository"
            )
    try:
        module.isa()  # from here on what the process has
    except RuntimeError as error:
        isa, usable = os.environ.get("ZERO_OPT_ISA"), ", ".join(module.isas())
        raise NativeUnavailable(
            f"ZERO_OPT_ISA is {isa!r}; unset it or use one of {usable}, which this processor runs"
        ) from error
    return module


if TYPE_CHECKING:
    from .. import _native as native
else:
    try:
        native = _loaded()
    except (ImportError, NativeUnavailable) as error:
        native = _Missing(error)


def require_native() -> None:
    """Raise NativeUnavailable if the extension was not built or cannot be loaded here."""
    native.isa()


def native_available() -> bool:
    """Return whether the extension can be used here."""
    return not isinstance(native, _Missing)
