"""Lightning: DDP, a schedule, accumulation, clipping, ModelCheckpoint and ``ckpt_path``, in fp32 and bf16-mixed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

import zero_opt
from test.support.guides import snippets

from . import models, runs

_EPOCHS, _EPOCH_STEPS, _ACCUMULATED = 4, 3, 2


def _on_train_start_of_guide() -> Callable[[lightning.LightningModule], None]:
    (snippet,) = (text for text in snippets("clients.md") if "def on_train_start" in text)
    names: dict[str, Any] = {"zero_opt": zero_opt}
    exec(compile(snippet, "clients.md", "exec"), names)
    return names["on_train_start"]


class _Classifier(lightning.LightningModule):
    def __init__(self, make: runs.MakeOptimizer) -> None:
        super().__init__()
        self.net = models.mlp()
        self._make = make

    def on_train_start(self) -> None:
        if self._make is runs.hooked:
            _on_train_start_of_guide()(self)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        vectors, classes = batch
        return F.cross_entropy(self.net(vectors), classes)

    def configure_optimizers(self) -> dict[str, Any]:
        opt = self._make(models.decayed_apart(self))
        schedule = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.01, total_steps=_EPOCHS * _EPOCH_STEPS + 1)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class _Flush(lightning.Callback):
    """Before a checkpoint is written, which is last in an epoch."""

    def on_train_epoch_end(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        trainer.optimizers[0].flush()


def _fit(
    module: lightning.LightningModule,
    folder: Path,
    resume_from: Path | None,
    callbacks: Sequence[lightning.Callback] = (),
    **options: Any,
) -> lightning.Trainer:
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=runs.WORLD_SIZE,
        max_epochs=_EPOCHS,
        callbacks=[ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1), *callbacks],
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    data = models.Vectors(_EPOCH_STEPS * _ACCUMULATED * runs.WORLD_SIZE * 4)
    trainer.fit(module, DataLoader(data, batch_size=4, shuffle=True), ckpt_path=resume_from)
    return trainer


def _program(
    precision: str, max_norm: float | None, make: runs.MakeOptimizer, folder: Path, resume_from: Path | None
) -> runs.Outcome:
    classifier = _Classifier(make)
    options = {"precision": precision, "accumulate_grad_batches": _ACCUMULATED, "gradient_clip_val": max_norm}
    callbacks = [_Flush()] if make is runs.delayed else []
    trainer = _fit(classifier, folder, resume_from, callbacks, strategy="ddp", **options)
    return runs.outcome(classifier.net, trainer.optimizers[0])


class _Adversaries(lightning.LightningModule):
    """Two optimizers, each of which trains while the other's parameters are frozen."""

    def __init__(self, make: runs.MakeOptimizer) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic = models.mlp()
        self.generator = torch.nn.Linear(20, 20)
        self._make = make

    def training_step(self, batch: list[Tensor], index: int) -> None:
        vectors, _ = batch
        for opt, sign in zip(self.optimizers(), (1.0, -1.0), strict=True):
            self.toggle_optimizer(opt)
            self.manual_backward(sign * self.critic(self.generator(vectors)).square().mean())
            self.clip_gradients(opt, gradient_clip_val=0.5)
            opt.step()
            opt.zero_grad()
            self.untoggle_optimizer(opt)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [self._make(self.generator.parameters()), self._make(self.critic.parameters())]


def _adversaries(make: runs.MakeOptimizer, folder: Path, resume_from: Path | None) -> runs.Outcome:
    module = _Adversaries(make)
    trainer = _fit(module, folder, resume_from, strategy="ddp_find_unused_parameters_true")
    found = [
        runs.outcome(part, opt) for part, opt in zip((module.generator, module.critic), trainer.optimizers, strict=True)
    ]
    params = {f"{part}.{name}": param for part, one in enumerate(found) for name, param in one.params.items()}
    if not trainer.is_global_zero:
        return runs.Outcome(params, None)
    states = {(part, index): state for part, one in enumerate(found) for index, state in one.optimizer["state"].items()}
    return runs.Outcome(params, {"state": states, "param_groups": [one.optimizer["param_groups"] for one in found]})


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_as_plain_adamw(precision: str, tmp_path: Path) -> None:
    runs.check(partial(_program, precision, 0.5), tmp_path, "epoch=1.ckpt", _EPOCHS * _EPOCH_STEPS)


def test_ddp_hook(tmp_path: Path) -> None:
    """Gradients are sharded too; so there is nothing that Lightning could clip."""
    program = partial(_program, "32-true", None)
    runs.check(program, tmp_path, "epoch=1.ckpt", _EPOCHS * _EPOCH_STEPS, replacement=runs.hooked)


def test_two_optimizers(tmp_path: Path) -> None:
    runs.check(_adversaries, tmp_path, "epoch=1.ckpt", _EPOCHS * _EPOCH_STEPS * _ACCUMULATED)


def test_delayed_steps(tmp_path: Path) -> None:
    """A callback brings the pending step in before the model's weights are read."""
    program = partial(_program, "32-true", 0.5)
    runs.check_resumed(program, tmp_path, "epoch=1.ckpt", _EPOCHS * _EPOCH_STEPS, runs.delayed)


def test_reduction_forgotten(tmp_path: Path) -> None:
    """DDP and our reduction are not both wanted: the first step says so, on every rank."""
    for failure in runs.launch(partial(_program, "32-true", 0.5), runs.forgetful, tmp_path, None, expect_errors=True):
        assert failure.type_name == "GradientConsumed"
        assert "reduction=zero_opt.AlreadyReduced()" in failure.message
