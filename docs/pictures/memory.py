"""What a rank holds of a 7B model and where, by offload, as ``zero_opt.estimate`` tells it."""

from __future__ import annotations

import torch

import zero_opt

from .svg import Picture

NUMEL, WORLD_SIZE = 7_000_000_000, 8
MASTERS = zero_opt.MixedPrecision(master_dtype=torch.float32)
OFFLOADS = {
    "None": (None, MASTERS),
    "CPUOffload()": (zero_opt.CPUOffload(), zero_opt.MixedPrecision()),
    "WorkerOffload()": (zero_opt.WorkerOffload(), zero_opt.MixedPrecision()),
    "NVMeOffload(path)": (zero_opt.NVMeOffload("."), zero_opt.MixedPrecision()),
}
PLACES = {"device": "device", "host": "host", "nvme": "file"}
# By color: the legend, and the kinds of an estimate.
SEGMENTS = {
    "blue": ("parameters, whole", ("params",)),
    "orange": ("gradients, sharded", ("grads", "grad_shards")),
    "green": ("moments, sharded", ("state",)),
    "violet": ("fp32 masters, sharded", ("masters",)),
    "gray": ("on their way", ("staging", "buffers", "communicator")),
}
GIB = 1 << 30
# Of a picture: units per GiB, where bars begin, the height of a bar, and how far one is below the other.
SCALE, LEFT, BAR, PITCH = 21.0, 256.0, 16, 21


def estimated(name: str) -> zero_opt.Estimate:
    """Return the estimate for one offload, by its name in ``OFFLOADS``."""
    offload, precision = OFFLOADS[name]
    return zero_opt.estimate(
        NUMEL,
        WORLD_SIZE,
        torch.optim.AdamW,
        offload=offload,
        precision=precision,
        param_dtype=torch.bfloat16,
        device="cuda",
    )


def bar(picture: Picture, y: float, found: zero_opt.Estimate, place: str) -> None:
    """Draw what lies in one place, kind by kind, and the sum."""
    x = LEFT
    picture.text(LEFT - 8, y + 12, PLACES[place], "faint small", "end")
    for color, (_, kinds) in SEGMENTS.items():
        width = SCALE * round(sum(found.nbytes(kind, place) for kind in kinds) / GIB, 1)
        if width:
            picture.rect(x, y, width - 1, BAR, color)
            x += width
    picture.text(x + 6, y + 12, f"{found.nbytes(where=place) / GIB:.1f} GiB", "ink small")


def draw() -> str:
    """Return the picture."""
    held = {name: estimated(name) for name in OFFLOADS}
    rows = {name: [place for place in PLACES if found.nbytes(where=place) > GIB / 20] for name, found in held.items()}
    height = 76 + sum(PITCH * len(places) + 16 for places in rows.values())
    words = f"What each of {WORLD_SIZE} ranks holds: AdamW, {NUMEL // 10**9} billion bf16 parameters, fp32 masters"
    picture = Picture(880, height, words)
    picture.text(16, 26, words, "ink bold")
    x = 16.0
    for color, (label, _) in SEGMENTS.items():
        picture.rect(x, 40, 12, 12, color)
        picture.text(x + 17, 50, label, "faint small")
        x += 34 + 6.7 * len(label)
    y = 76
    for name, places in rows.items():
        picture.text(16, y + 12, f"offload={name}", "ink code")
        for place in places:
            bar(picture, y, held[name], place)
            y += PITCH
        y += 16
    return picture.source()
