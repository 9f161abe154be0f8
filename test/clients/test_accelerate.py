"""accelerate: prepare, accumulate, clip_grad_norm_, save_state and load_state, in fp32 and under bf16 autocast."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader

import zero_opt

from . import models, runs

_EPOCHS, _EPOCH_STEPS, _ACCUMULATED = 4, 3, 2


def _program(
    mixed_precision: str, max_norm: float | None, make: runs.MakeOptimizer, folder: Path, resume_from: Path | None
) -> runs.Outcome:
    accelerator = Accelerator(
        cpu=True,
        mixed_precision=mixed_precision,
        gradient_accumulation_steps=_ACCUMULATED,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )
    set_seed(3, device_specific=True)
    data = models.Text(_EPOCH_STEPS * _ACCUMULATED * runs.WORLD_SIZE * 4)
    model = models.gpt2()
    opt = make(models.decayed_apart(model))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 2 * _EPOCHS * _EPOCH_STEPS)
    loader = DataLoader(data, batch_size=4, shuffle=True)
    model, opt, loader, schedule = accelerator.prepare(model, opt, loader, schedule)
    if make is runs.hooked:
        model.register_comm_hook(opt.optimizer, zero_opt.ddp_hook)
    first = 0
    if resume_from is not None:
        accelerator.load_state(str(resume_from))
        first = int(resume_from.name.removeprefix("epoch_"))
    for epoch in range(first, _EPOCHS):
        loader.set_epoch(epoch)
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                if accelerator.sync_gradients and max_norm is not None:
                    accelerator.clip_grad_norm_(model.parameters(), max_norm)
                opt.step()
                schedule.step()
                opt.zero_grad()
        accelerator.save_state(str(folder / f"epoch_{epoch + 1}"))
    return runs.outcome(accelerator.unwrap_model(model), opt.optimizer)


@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
def test_as_plain_adamw(mixed_precision: str, tmp_path: Path) -> None:
    runs.check(partial(_program, mixed_precision, 0.5), tmp_path, "epoch_2", _EPOCHS * _EPOCH_STEPS)


def test_ddp_hook(tmp_path: Path) -> None:
    """Gradients are sharded too; so there is nothing that accelerate could clip."""
    program = partial(_program, "no", None)
    runs.check(program, tmp_path, "epoch_2", _EPOCHS * _EPOCH_STEPS, replacement=runs.hooked)


def test_reduction_forgotten(tmp_path: Path) -> None:
    """DDP and our reduction are not both wanted: the first step says so, on every rank."""
    for failure in runs.launch(partial(_program, "no", 0.5), runs.forgetful, tmp_path, None, expect_errors=True):
        assert failure.type_name == "GradientConsumed"
        assert "reduction=zero_opt.AlreadyReduced()" in failure.message
