"""Pictures of the command line, for which matplotlib may be installed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ..errors import ConfigError


def require_drawable(path: str | None) -> None:
    """Find out before there is anything to draw whether a picture can be made.

    Raises:
        ConfigError: matplotlib is not installed, or ``path`` is no PNG file that can be written.
    """
    if path is None:
        return
    file_pyplot()
    file = Path(path)
    if file.suffix.lower() != ".png" or file.is_dir():
        raise ConfigError(f"--plot takes a PNG file, got {path}")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ConfigError(f"--plot cannot write {path}")


def file_pyplot() -> Any:
    """Return matplotlib's pyplot, which draws to files alone.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise ConfigError("--plot draws with matplotlib; pip install matplotlib") from error
    return pyplot
