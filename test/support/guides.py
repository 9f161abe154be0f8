"""What the guides have of code."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"


def snippets(guide: str) -> list[str]:
    """The Python blocks of a guide, padded so that errors give the guide's line numbers."""
    text = (DOCS / guide).read_text()
    return [
        "\n" * text[: m.start(1)].count("\n") + m[1] for m in re.finditer(r"^```python\n(.*?)^```", text, re.M | re.S)
    ]
