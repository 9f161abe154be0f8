"""The announced name of :mod:`zero_opt.kernels`."""

from .kernels import *  # noqa: F403
from .kernels import __all__ as __all__
