"""The site has every page and every public name. ``make site`` builds it, and checks links, anchors and docstrings."""

from __future__ import annotations

import re
from pathlib import Path

import zero_opt
from test.support.guides import DOCS

ROOT = DOCS.parent
RESULTS = DOCS / "benchmarks" / "results"


def listed(page: Path) -> list[Path]:
    """The pages that a page's tables of contents name."""
    contents = re.findall(r"^```\{toctree\}\n(?::.*\n)*\n([^`]*)```", page.read_text(), re.M)
    entries = [re.sub(r".*<(.*)>", r"\1", entry) for block in contents for entry in block.split("\n") if entry]
    return [(page.parent / f"{entry}.md").resolve() for entry in entries]


def test_every_page_is_in_the_contents_once() -> None:
    """Add a new page to a table of contents in docs/index.md."""
    pages = {path for folder in (ROOT, DOCS, RESULTS) for path in folder.glob("*.md")}
    contents = listed(DOCS / "index.md") + listed(DOCS / "measured.md")
    assert sorted(contents) == sorted(pages - {DOCS / "index.md"})


def test_every_public_name_is_in_the_api() -> None:
    page = (DOCS / "api.md").read_text()
    named = re.findall(r"^\.\. auto(?:class|exception|function):: zero_opt\.(\w+)$", page, re.M)
    assert sorted(named) == sorted(zero_opt.__all__)
