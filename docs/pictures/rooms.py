"""The rooms of zero_opt/ from top to bottom, and an arc for the imports of one from another."""

from __future__ import annotations

import itertools
import math
import re
from textwrap import shorten

from .. import rooms
from .svg import CURVES, Picture

# Where the first room is, how far one is below the other, and where the arcs begin.
TOP, PITCH, ARCS = 72, 34, 520
# The least number of imports that a line of each width stands for.
WIDTHS = {1: 0.8, 5: 1.6, 15: 3.0, 40: 5.0}


def words(room: str) -> str:
    """Return what a room is, up to the first period or colon, in 56 characters at the most."""
    sentence = rooms.first_sentence(rooms.modules()[room]).replace("`", "")
    return shorten(re.split(r"[.:](?:\s|$)", sentence)[0], 56, placeholder=" …")


def draw() -> str:
    """Return the picture."""
    place = {room: TOP + PITCH * number for number, room in enumerate(rooms.FLOORS)}
    color = dict(zip(place, itertools.cycle(CURVES), strict=False))
    title = "The rooms of zero_opt: imports only go down"
    picture = Picture(850, TOP + PITCH * len(place), title)
    picture.text(16, 26, title, "ink bold")
    what = "An arc leads from a room, in that room's color, down to one that it imports: the more imports, the wider."
    picture.text(16, 44, what, "faint small")
    counts = rooms.arrows()
    for upper, lower in sorted(counts, key=lambda arrow: [place[room] for room in arrow]):
        begin, end = place[upper], place[lower]
        reach = ARCS + 400 * math.sqrt((end - begin) / (PITCH * (len(place) - 1)))
        width = max(width for least, width in WIDTHS.items() if counts[upper, lower] >= least)
        picture.path(
            f"M{ARCS} {begin}C{reach:.0f} {begin} {reach:.0f} {end} {ARCS} {end}", f"line {color[upper]}", width
        )
    for room, y in place.items():
        picture.rect(16, y - 14, 112, 26, color[room], radius=5)
        picture.text(72, y + 4, room, "ink bold", "middle")
        picture.text(140, y + 4, words(room), "faint small")
        picture.path(f"M{ARCS - 8} {y}h8", "arrow")
    return picture.source()
