"""Name the pictures that are no longer what their scripts draw, or write them.

python -m docs.pictures [--write]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from . import gradient, memory, rooms

FOLDER = Path(__file__).parent
PICTURES: dict[str, Callable[[], str]] = {
    "gradient.svg": gradient.draw,
    "memory.svg": memory.draw,
    "rooms.svg": rooms.draw,
}


def main(arguments: list[str]) -> int:
    """Compare or write; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="replace the files in docs/pictures")
    write = parser.parse_args(arguments).write
    status = 0
    for name, draw in PICTURES.items():
        file, source = FOLDER / name, draw()
        if file.exists() and file.read_text(encoding="utf-8") == source:
            continue
        print(name)
        status = status or int(not write)
        if write:
            file.write_text(source, encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
