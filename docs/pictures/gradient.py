"""The journey of a gradient through a step of ``Overlapped``: what runs when, and what a rank holds of gradients.

The phases of ``step()`` are those of the table in docs/design.md.
"""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

from .svg import Picture

DESIGN = Path(__file__).parents[1] / "design.md"
WORLD_SIZE = 4
# When the backward of each bucket's layers ends, and its reduce-scatter; the first begins at START.
START, BACKWARD, REDUCED = 150, (245, 340, 435), (325, 425, 560)
# When each phase of step() ends; the fifth steps one bucket after another.
PHASES = (500, 546, 612, 666, 867, 945)
STEPPED, GATHERED = (733, 800, 867), (798, 865, 932)
END = 960
# Heights: of the rows, and of one bucket of gradients.
MAIN, EXCHANGE, HELD, BAR, UNIT = 70, 160, 330, 30, 26


def phases() -> list[str]:
    """Return the names of the phases of a step, in order."""
    section = DESIGN.read_text(encoding="utf-8").split("### What a step does\n")[1].split("\n### ")[0]
    return re.findall(r"^\| \d\. ([\w ]+) \|", section, re.M)


def box(picture: Picture, begin: float, end: float, y: float, color: str, label: str) -> None:
    """Draw a bar from one time to another, with its name in it."""
    picture.rect(begin, y, end - begin - 2, BAR, color, radius=3)
    picture.text((begin + end) / 2 - 1, y + 19, label, "ink small", "middle")


def held(time: float) -> float:
    """Return how many buckets of gradients a rank holds, its shards included."""
    total = 0.0
    for begin, complete, reduced in zip((START, *BACKWARD), BACKWARD, REDUCED, strict=False):
        if time >= reduced:
            total += 1 / WORLD_SIZE
        elif time > begin:
            total += min(1.0, (time - begin) / (complete - begin))
    return total


def main_thread(picture: Picture) -> None:
    """Draw backward, and the phases of step()."""
    for (begin, end), layers in zip(
        pairwise((START, *BACKWARD)), ("last layers", "middle", "first layers"), strict=True
    ):
        box(picture, begin, end, MAIN, "gray", layers)
    names = phases()
    for number, ((begin, end), name) in enumerate(zip(pairwise((BACKWARD[-1], *PHASES)), names, strict=True), 1):
        if number == 5:
            picture.text((begin + end) / 2, MAIN - 8, f"5 {name}", "faint small", "middle")
            for bucket, (first, last) in enumerate(pairwise((begin, *STEPPED))):
                box(picture, first, last, MAIN, "green", f"bucket {bucket}")
        else:
            box(picture, begin, end, MAIN, "blue", f"{number} {name}")
    for begin, end, call in ((START, BACKWARD[-1], "loss.backward()"), (BACKWARD[-1], PHASES[-1], "opt.step()")):
        picture.text((begin + end) / 2, MAIN - 28, call, "ink code", "middle")
        picture.path(f"M{begin} {MAIN - 18}v-4H{end - 2}v4", "arrow")


def exchange(picture: Picture) -> None:
    """Draw the messages of each bucket, and what sets them off."""
    free = START
    for bucket, (complete, reduced) in enumerate(zip(BACKWARD, REDUCED, strict=True)):
        begin = max(free, complete + 6)
        picture.arrow(complete - 2, MAIN + BAR + 2, begin, EXCHANGE - 3)
        box(picture, begin, reduced, EXCHANGE, "orange", f"reduce {bucket}")
        free = reduced + 2
    picture.arrow(REDUCED[-1], EXCHANGE - 3, REDUCED[-1] + 6, MAIN + BAR + 4)
    free = 0
    for bucket, (stepped, gathered) in enumerate(zip(STEPPED, GATHERED, strict=True)):
        begin = max(free, stepped + 6)
        picture.arrow(stepped - 2, MAIN + BAR + 2, begin, EXCHANGE - 3)
        box(picture, begin, gathered, EXCHANGE, "violet", f"gather {bucket}")
        free = gathered + 2


def memory(picture: Picture) -> None:
    """Draw how many gradients a rank holds, and how many it would hold if it kept all."""
    times = sorted({START, *BACKWARD, *REDUCED, *(time - 0.01 for time in REDUCED)})
    points = [f"{time:.0f} {HELD - UNIT * held(time):.1f}" for time in times]
    picture.path(f"M{START} {HELD}L" + "L".join(points) + f"H{PHASES[-1]}V{HELD}Z", "orange")
    picture.path(f"M{START} {HELD}L{BACKWARD[-1]} {HELD - 3 * UNIT}H{PHASES[-1]}", "thin")
    picture.text(PHASES[-1], HELD - 3 * UNIT - 6, "all gradients, as without zero_opt", "faint small", "end")
    picture.text(PHASES[-1], HELD - 0.75 * UNIT - 6, f"this rank's shards: 1/{WORLD_SIZE}", "faint small", "end")
    picture.path(f"M{START} {HELD}H{PHASES[-1]}", "arrow")


def draw() -> str:
    """Return the picture."""
    title = f"The journey of a gradient: one step of one of {WORLD_SIZE} ranks, with three buckets"
    picture = Picture(END, 350, title)
    picture.text(16, 22, title, "ink bold")
    for y, words in (
        (MAIN, ("this rank's", "thread")),
        (EXCHANGE, ("with the", "other ranks")),
        (HELD - 60, ("gradients", "in memory")),
    ):
        for line, word in enumerate(words):
            picture.text(16, y + 12 + 15 * line, word, "faint")
    picture.text(START, EXCHANGE + 48, "mean of all ranks to shards; full gradients are freed", "faint small")
    picture.text(GATHERED[-1], EXCHANGE + 48, "updated parameters to all ranks", "faint small", "end")
    main_thread(picture)
    exchange(picture)
    memory(picture)
    return picture.source()
