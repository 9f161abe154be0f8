"""The snippets of docs/clients.md, each a program that torchrun starts and that ends as programs do."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import AdamW

from test.support.guides import run_under_torchrun, snippets

from . import models, runs

_PRELUDE = """
import torch
from test.clients import models
torch.set_num_threads(1)
model, data = models.gpt2(), models.Text(16)
"""


def _lightning(folder: Path) -> dict[str, Any]:
    checkpoint = torch.load(folder / "out" / "last.ckpt", weights_only=True)
    found: dict[str, Any] = checkpoint["optimizer_states"][0]
    return found


def _together(model: torch.nn.Module) -> Iterable[Any]:
    return model.parameters()


def _loaded(name: str) -> Callable[[Path], dict[str, Any]]:
    return lambda folder: torch.load(folder / name, weights_only=True)


@pytest.mark.parametrize(
    ("number", "saved", "steps", "groups"),
    [
        pytest.param(0, _loaded("checkpoint/optimizer.bin"), 1, _together, id="accelerate"),
        pytest.param(1, _loaded("out/checkpoint-4/optimizer.pt"), 4, models.decayed_apart, id="trainer"),
        pytest.param(2, _lightning, 2, _together, id="lightning"),
        pytest.param(4, _loaded("out/checkpoint-4/optimizer.pt"), 4, models.decayed_apart, id="delayed"),
        pytest.param(3, lambda folder: _loaded("epoch_1.pt")(folder)["optimizer"], 4, _together, id="timm_style"),
    ],
)
def test_snippet(
    number: int,
    saved: Callable[[Path], dict[str, Any]],
    steps: int,
    groups: Callable[[torch.nn.Module], Iterable[Any]],
    tmp_path: Path,
) -> None:
    """It ends well, and AdamW loads and goes on with what it has saved."""
    run_under_torchrun(_PRELUDE + snippets("clients.md")[number], tmp_path, runs.WORLD_SIZE, runs.TIMEOUT_S)
    state_dict = saved(tmp_path)
    opt = AdamW(groups(models.gpt2()))
    params = [param for group in opt.param_groups for param in group["params"]]
    assert len(state_dict["state"]) == len(params)
    assert {int(state["step"]) for state in state_dict["state"].values()} == {steps}
    opt.load_state_dict(state_dict)
    for param in params:
        param.grad = torch.zeros_like(param)
    opt.step()
