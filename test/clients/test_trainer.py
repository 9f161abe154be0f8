"""The Trainer of transformers, which calls ``state_dict()`` on rank 0 alone while the other ranks go on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import AdamW
from transformers import Trainer, TrainerCallback, TrainingArguments

import zero_opt

from . import models, runs

_STEPS, _ACCUMULATED, _SAVE_STEPS = 9, 2, 3
_BATCH = 2


def _arguments(folder: Path) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        ddp_backend="gloo",
        max_steps=_STEPS,
        per_device_train_batch_size=_BATCH,
        gradient_accumulation_steps=_ACCUMULATED,
        max_grad_norm=0.5,
        save_steps=_SAVE_STEPS,
        learning_rate=runs.HYPERS["lr"],
        weight_decay=runs.HYPERS["weight_decay"],
        adam_beta1=runs.HYPERS["betas"][0],
        adam_beta2=runs.HYPERS["betas"][1],
        warmup_steps=2,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        seed=5,
    )


def _data() -> models.Text:
    """Two epochs and a half, so that a checkpoint is in the middle of one."""
    return models.Text(4 * _ACCUMULATED * runs.WORLD_SIZE * _BATCH)


class _Flush(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        if control.should_save:
            optimizer.optimizer.flush()


def _finish(trainer: Trainer, resume_from: Path | None) -> runs.Outcome:
    trainer.train(resume_from_checkpoint=None if resume_from is None else str(resume_from))
    return runs.outcome(trainer.model, trainer.optimizer.optimizer)


def _passed_in(make: runs.MakeOptimizer, folder: Path, resume_from: Path | None) -> runs.Outcome:
    """``Trainer(optimizers=(opt, schedule))``."""
    arguments, model = _arguments(folder), models.gpt2()
    opt = make(models.decayed_apart(model))
    schedule = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.01, total_steps=_STEPS + 1)
    callbacks = [_Flush()] if make is runs.delayed else []
    trainer = Trainer(model, arguments, train_dataset=_data(), optimizers=(opt, schedule), callbacks=callbacks)
    return _finish(trainer, resume_from)


class _Overriding(Trainer):
    make: runs.MakeOptimizer

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        self.optimizer = self.make(models.decayed_apart(self.model if model is None else model))
        return self.optimizer


def _overridden(make: runs.MakeOptimizer, folder: Path, resume_from: Path | None) -> runs.Outcome:
    """A Trainer with a ``create_optimizer`` of its own."""
    trainer = _Overriding(models.gpt2(), _arguments(folder), train_dataset=_data())
    trainer.make = make
    return _finish(trainer, resume_from)


def _by_class(make: runs.MakeOptimizer, folder: Path, resume_from: Path | None) -> runs.Outcome:
    """``Trainer(optimizer_cls_and_kwargs=(cls, kwargs))``."""
    kwargs: dict[str, Any] = dict(runs.HYPERS)
    cls: type[torch.optim.Optimizer] = AdamW
    if make is runs.sharded:
        cls = zero_opt.ShardedOptimizer
        kwargs |= {"optimizer_class": AdamW, "reduction": zero_opt.AlreadyReduced()}
    trainer = Trainer(models.gpt2(), _arguments(folder), train_dataset=_data(), optimizer_cls_and_kwargs=(cls, kwargs))
    return _finish(trainer, resume_from)


@pytest.mark.parametrize("program", [_passed_in, _overridden, _by_class])
def test_as_plain_adamw(program: Callable[..., runs.Outcome], tmp_path: Path) -> None:
    runs.check(program, tmp_path, f"checkpoint-{2 * _SAVE_STEPS}", _STEPS)


def test_delayed_steps(tmp_path: Path) -> None:
    """A callback brings the pending step in, on every rank, before rank 0 saves."""
    runs.check_resumed(_passed_in, tmp_path, f"checkpoint-{2 * _SAVE_STEPS}", _STEPS, runs.delayed)


def test_reduction_forgotten(tmp_path: Path) -> None:
    """DDP and our reduction are not both wanted: the first step says so, on every rank."""
    for failure in runs.launch(_passed_in, runs.forgetful, tmp_path, None, expect_errors=True):
        assert failure.type_name == "GradientConsumed"
        assert "reduction=zero_opt.AlreadyReduced()" in failure.message
