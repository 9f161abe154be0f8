"""The library's logger."""

from __future__ import annotations

import logging

log = logging.getLogger("zero_opt")
