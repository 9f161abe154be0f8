"""Draw the rooms of zero_opt/ from its imports, and list what is in them and in native/.

    python docs/rooms.py [--write]

``--write`` replaces docs/rooms.md and its picture; a test fails while these differ from what the imports say.
"""

from __future__ import annotations

import argparse
import ast
import configparser
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "zero_opt"
NATIVE = ROOT / "native"
PAGE = ROOT / "docs" / "rooms.md"
PICTURE = ROOT / "docs" / "pictures" / "rooms.svg"


def floors() -> tuple[str, ...]:
    """Return the rooms from top to bottom, as the contract in setup.cfg has them."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    return ("__init__", *config["importlinter:contract:rooms"]["layers"].replace("(", "").replace(")", "").split())


FLOORS = floors()


def modules() -> dict[str, Path]:
    """Return the files by dotted name below the package; that of a folder is of its ``__init__``."""
    named = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        named[".".join(parts if parts == ("__init__",) or parts[-1] != "__init__" else parts[:-1])] = path
    return named


def imported(name: str, path: Path, known: dict[str, Path]) -> Iterator[str]:
    """Yield the module that each import of this module within the package names."""
    folder = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    folder = [] if name == "__init__" else folder
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = folder[: len(folder) - node.level + 1] + ((node.module or "").split(".") if node.module else [])
            for alias in node.names:
                whole = ".".join([*base, alias.name])
                module = whole if whole in known else ".".join(base)
                if module in known:
                    yield module


def arrows() -> dict[tuple[str, str], int]:
    """Return how many imports lead from one room to another."""
    known, counts = modules(), dict[tuple[str, str], int]()
    for name, path in known.items():
        for module in imported(name, path, known):
            pair = (name.split(".")[0], module.split(".")[0])
            if pair[0] != pair[1]:
                counts[pair] = counts.get(pair, 0) + 1
    return counts


def upward() -> list[tuple[str, str]]:
    """Return the pairs of rooms of which the lower imports the upper."""
    return [pair for pair in arrows() if FLOORS.index(pair[0]) >= FLOORS.index(pair[1])]


def first_sentence(path: Path) -> str:
    """Return the first line of a module's docstring, without a closing period and Sphinx's roles."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return re.sub(r":\w+:(?=`)", "", text.splitlines()[0].rstrip("."))


def native_rows() -> Iterator[str]:
    """Yield a row per file of native/ that begins with a comment; a source without one has its header's."""
    for path in sorted(NATIVE.rglob("*.[chi]*")):
        lines = itertools.takewhile(lambda line: line.startswith("//"), path.read_text(encoding="utf-8").splitlines())
        sentence, *_ = re.split(r"\.(?:\s|$)", " ".join(line.removeprefix("//").strip() for line in lines))
        if sentence:
            yield f"| `{path.relative_to(NATIVE)}` | {sentence} |"


def drawing() -> str:
    """Return the rooms in one column, and beside each how many imports lead to the rooms below."""
    counts, width, below = arrows(), max(map(len, FLOORS)), FLOORS[3:]
    lines = [f"{'':{width}} " + " ".join(f"{name[:5]:>5}" for name in below)]
    for name in FLOORS:
        lower = FLOORS[FLOORS.index(name) + 1 :]
        cells = (counts.get((name, other)) or ("." if other in lower else "") for other in below)
        lines.append(f"{name:{width}} " + " ".join(f"{cell:>5}" for cell in cells))
    return "\n".join(line.rstrip() for line in lines)


def page() -> str:
    """Return docs/rooms.md."""
    known = modules()
    lines = [
        "# The rooms\n",
        "`python docs/rooms.py --write` makes this page from the imports. A room imports only rooms below it. A number",
        "is how many names the modules of the room on its left import from the room above it.\n",
        "![The rooms in one column; arcs lead from each room down to those it imports](pictures/rooms.svg)\n",
        f"```text\n{drawing()}\n```",
    ]
    for room in FLOORS:
        lines += [f"\n## `{room}`\n", first_sentence(known[room]) + "."]
        inside = [name for name in known if name.startswith(f"{room}.")]
        if inside:
            lines += ["\n| file | what it is |", "| --- | --- |"]
            lines += [f"| `{name.partition('.')[2]}` | {first_sentence(known[name])} |" for name in inside]
    lines += ["\n## native\n", "The C++ extension.", "\n| file | what it is |", "| --- | --- |", *native_rows()]
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    """Print the page, or write it; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="replace docs/rooms.md and docs/pictures/rooms.svg")
    if parser.parse_args(arguments).write:
        sys.path.insert(0, str(ROOT))
        from docs.pictures import rooms as picture

        PAGE.write_text(page(), encoding="utf-8")
        PICTURE.write_text(picture.draw(), encoding="utf-8")
    else:
        print(page(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
