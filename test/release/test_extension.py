"""The extension as it is built everywhere."""

from __future__ import annotations

import platform
from pathlib import Path

from release import audit
from zero_opt.system.extension import native


def test_the_extension_is_stripped_and_exports_its_initialization_alone() -> None:
    built = Path(native.__file__).read_bytes()  # type: ignore[arg-type]
    found = list(audit.extension_findings(built, platform.machine()))
    # Libraries and versions of symbols are those of the machine that built it.
    assert [finding for finding in found if not finding.startswith("needs ")] == []
