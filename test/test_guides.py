"""The snippets of the guides run as they stand, in order, in one program per guide."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import zero_opt
from test.distributed.harness import assert_bitwise, run_processes

DOCS = Path(__file__).resolve().parents[1] / "docs"


def snippets(guide: str) -> list[str]:
    """The Python blocks of a guide, padded so that errors give the guide's line numbers."""
    text = (DOCS / guide).read_text()
    return [
        "\n" * text[: m.start(1)].count("\n") + m[1] for m in re.finditer(r"^```python\n(.*?)^```", text, re.M | re.S)
    ]


def run(guide: str, folder: str) -> dict[str, Any]:
    """What the snippets of a guide define."""
    os.chdir(folder)
    names: dict[str, Any] = {}
    for snippet in snippets(guide):
        exec(compile(snippet, guide, "exec"), names)
    return names


def _checkpointing(rank: int, world_size: int, folder: str) -> Any:
    names = run("checkpointing.md", folder)
    opt, saved = names["opt"], torch.load("checkpoint.pt", weights_only=True)["opt"]
    trained = zero_opt.sharded_state_dict(opt)["state"][0]["step"]
    during = {"opt": zero_opt.sharded_state_dict(opt)}
    dcp.load(during, checkpoint_id="checkpoint_async")
    zero_opt.load_sharded_state_dict(opt, during["opt"])
    opt.consolidate_state_dict(to=0)
    loaded = opt.state_dict() if rank == 0 else None
    opt.close()
    return saved, names["plain"].state_dict(), loaded, int(trained)


def test_checkpointing(tmp_path: Path) -> None:
    found = run_processes(2, _checkpointing, str(tmp_path))
    for saved, plain, _, trained in found:
        assert len(saved["state"]) == 4 and int(saved["state"][0]["step"]) == 3
        assert_bitwise(plain, saved)
        assert trained == 4
    assert_bitwise(found[0][2], found[0][0])
