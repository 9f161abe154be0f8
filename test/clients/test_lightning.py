"""Lightning: DDP, a schedule, accumulation, clipping, ModelCheckpoint and ``ckpt_path``, in fp32 and bf16-mixed."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from . import models, runs

_EPOCHS, _EPOCH_STEPS, _ACCUMULATED = 4, 3, 2


class _Classifier(lightning.LightningModule):
    def __init__(self, make: runs.MakeOptimizer) -> None:
        super().__init__()
        self.net = models.mlp()
        self._make = make

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        vectors, classes = batch
        return F.cross_entropy(self.net(vectors), classes)

    def configure_optimizers(self) -> dict[str, Any]:
        opt = self._make(models.decayed_apart(self))
        schedule = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.01, total_steps=_EPOCHS * _EPOCH_STEPS + 1)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def _program(precision: str, make: runs.MakeOptimizer, folder: Path, resume_from: Path | None) -> runs.Outcome:
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=runs.WORLD_SIZE,
        strategy="ddp",
        precision=precision,
        max_epochs=_EPOCHS,
        accumulate_grad_batches=_ACCUMULATED,
        gradient_clip_val=0.5,
        callbacks=[ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1)],
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = models.Vectors(_EPOCH_STEPS * _ACCUMULATED * runs.WORLD_SIZE * 4)
    classifier = _Classifier(make)
    trainer.fit(classifier, DataLoader(data, batch_size=4, shuffle=True), ckpt_path=resume_from)
    return runs.outcome(classifier.net, trainer.optimizers[0])


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_as_plain_adamw(precision: str, tmp_path: Path) -> None:
    runs.check(partial(_program, precision), tmp_path, "epoch=1.ckpt", _EPOCHS * _EPOCH_STEPS)


def test_reduction_forgotten(tmp_path: Path) -> None:
    """DDP and our reduction are not both wanted: the first step says so, on every rank."""
    for failure in runs.launch(partial(_program, "32-true"), runs.forgetful, tmp_path, None, expect_errors=True):
        assert failure.type_name == "GradientConsumed"
        assert "reduction=zero_opt.AlreadyReduced()" in failure.message
