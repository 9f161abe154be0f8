"""The programs of the pages for other projects end well, and AdamW goes on with what they have saved."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from test.support.guides import DOCS, run_under_torchrun

from . import runs


def _program(page: str) -> str:
    """The block of a page that makes a ShardedOptimizer."""
    text = (DOCS / "upstream" / page).read_text()
    blocks = re.findall(r"^```py(?:thon)?\n(.*?)^```", text, re.M | re.S)
    blocks += re.findall(r"^\.\. code-block:: python\n\n((?: {4}.*\n|\n)+)", text, re.M)
    (program,) = blocks
    return textwrap.dedent(program)


def _of_trainer(folder: Path) -> Any:
    return torch.load(folder / "out" / "checkpoint-4" / "optimizer.pt", weights_only=True)


def _of_accelerate(folder: Path) -> Any:
    return torch.load(folder / "checkpoint" / "optimizer.bin", weights_only=True)


def _of_lightning(folder: Path) -> Any:
    (state,) = torch.load(folder / "last.ckpt", weights_only=True)["optimizer_states"]
    return state


@pytest.mark.parametrize(
    ("page", "saved", "steps"),
    [
        pytest.param("transformers.md", _of_trainer, 4, id="transformers"),
        pytest.param("accelerate.md", _of_accelerate, 2, id="accelerate"),
        pytest.param("lightning.rst", _of_lightning, 8, id="lightning"),
    ],
)
def test_program(page: str, saved: Callable[[Path], dict[str, Any]], steps: int, tmp_path: Path) -> None:
    run_under_torchrun(_program(page), tmp_path, runs.WORLD_SIZE, runs.TIMEOUT_S)
    state_dict = saved(tmp_path)
    shapes = [entry["exp_avg"].shape for _, entry in sorted(state_dict["state"].items())]
    params = iter([torch.nn.Parameter(torch.zeros(shape)) for shape in shapes])
    groups = [{"params": [next(params) for _ in group["params"]]} for group in state_dict["param_groups"]]
    opt = torch.optim.AdamW(groups)
    opt.load_state_dict(state_dict)
    assert {int(state["step"]) for state in opt.state.values()} == {steps}
    for group in opt.param_groups:
        for param in group["params"]:
            param.grad = torch.ones_like(param)
    opt.step()
    assert {int(state["step"]) for state in opt.state.values()} == {steps + 1}
