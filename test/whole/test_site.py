"""The site has every page and every public name. ``make site`` builds it, and checks links, anchors and docstrings."""

from __future__ import annotations

import builtins
import inspect
import re
from pathlib import Path

import zero_opt
from test.support.guides import DOCS
from zero_opt.system.limits import DESCRIPTOR_LIMIT, FILE_SIZE_LIMIT
from zero_opt.system.shared_memory import CLOSED_BY_PROGRAM
from zero_opt.system.threads import THREAD_LIMIT

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


def test_what_a_limit_or_a_closed_descriptor_becomes_is_listed() -> None:
    page = (DOCS / "errors.md").read_text()
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", page, re.M | re.S))
    for limit in (DESCRIPTOR_LIMIT, FILE_SIZE_LIMIT, THREAD_LIMIT):
        assert re.findall(r"ulimit -\w", limit)[0] in sections["OutOfResources"]
    assert "closerange" in CLOSED_BY_PROGRAM
    assert all("closerange" in sections[name] for name in ("WorkerFailed", "StorageFailed"))
    made = zero_opt.ShardedOptimizer
    for function in (made, made.step, made.flush):
        listed = (inspect.getdoc(function) or "").partition("Raises:")[2]
        assert {"OutOfResources", "WorkerFailed", "StorageFailed", "PeerLost"} <= {*re.findall(r"\w+", listed)}, (
            function
        )


def test_every_error_has_a_section_with_its_types() -> None:
    sections = re.findall(r"^## (\w+)\n\n(.*)", (DOCS / "errors.md").read_text(), re.M)
    public = {name: getattr(zero_opt, name) for name in zero_opt.__all__}
    errors = {
        n: kind for n, kind in public.items() if isinstance(kind, type) and issubclass(kind, zero_opt.ZeroOptError)
    }
    first, *others = sections
    assert first[0] == "ZeroOptError" and [name for name, _ in others] == sorted(errors.keys() - {"ZeroOptError"})
    for name, text in others:
        kinds = re.findall(r"`(\w+)`", re.findall(r"^\*(.*?)\.\*", text)[0])
        assert kinds and all(issubclass(errors[name], public.get(kind) or getattr(builtins, kind)) for kind in kinds), (
            name
        )
