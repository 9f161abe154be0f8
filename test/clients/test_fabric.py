"""Lightning Fabric: setup, backward, clip_gradients, save and load."""

from __future__ import annotations

from pathlib import Path

import lightning
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from . import models, runs

_EPOCHS, _EPOCH_STEPS = 4, 3


def _program(make: runs.MakeOptimizer, folder: Path, resume_from: Path | None) -> runs.Outcome:
    fabric = lightning.Fabric(accelerator="cpu", devices=runs.WORLD_SIZE, strategy="ddp", precision="bf16-mixed")
    fabric.launch()
    net = models.mlp()
    bare = make(models.decayed_apart(net))
    schedule = torch.optim.lr_scheduler.OneCycleLR(bare, max_lr=0.01, total_steps=_EPOCHS * _EPOCH_STEPS + 1)
    model, opt = fabric.setup(net, bare)
    loader = fabric.setup_dataloaders(DataLoader(models.Vectors(_EPOCH_STEPS * runs.WORLD_SIZE * 4), batch_size=4))
    state = {"model": model, "opt": opt, "schedule": schedule, "epoch": 0}
    if resume_from is not None:
        fabric.load(resume_from, state)
    for epoch in range(state["epoch"], _EPOCHS):
        for vectors, classes in loader:
            fabric.backward(F.cross_entropy(model(vectors), classes))
            fabric.clip_gradients(model, opt, max_norm=0.5)
            opt.step()
            schedule.step()
            opt.zero_grad()
        state["epoch"] = epoch + 1
        fabric.save(folder / f"epoch_{epoch + 1}.ckpt", state)
    return runs.outcome(net, bare)


def test_as_plain_adamw(tmp_path: Path) -> None:
    runs.check(_program, tmp_path, "epoch_2.ckpt", _EPOCHS * _EPOCH_STEPS)
