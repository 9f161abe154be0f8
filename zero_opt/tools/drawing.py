"""Pictures of the command line, for which matplotlib may be installed."""

from __future__ import annotations

from typing import Any

from ..errors import ConfigError


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
