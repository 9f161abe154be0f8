"""A training loop as timm's: after each epoch rank 0 alone saves model, averaged model and optimizer."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler

from . import models, runs

_EPOCHS, _EPOCH_STEPS = 4, 5


def _program(
    init_scale: float | None, make: runs.MakeOptimizer, folder: Path, resume_from: Path | None
) -> runs.Outcome:
    dist.init_process_group("gloo")
    model = models.mlp()
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    opt = make(models.decayed_apart(model))
    half = init_scale is not None
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale or 1.0, backoff_factor=2.0**-8, enabled=half)
    first = 0
    if resume_from is not None:
        checkpoint = torch.load(resume_from, weights_only=True)
        model.load_state_dict(checkpoint["state_dict"])
        ema.load_state_dict(checkpoint["state_dict_ema"])
        opt.load_state_dict(checkpoint["optimizer"])
        scaler.load_state_dict(checkpoint["amp_scaler"])
        first = checkpoint["epoch"]
    ddp = DistributedDataParallel(model)
    data = models.Vectors(_EPOCH_STEPS * runs.WORLD_SIZE * 4)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    for epoch in range(first, _EPOCHS):
        sampler.set_epoch(epoch)
        for group in opt.param_groups:  # timm's schedulers write it like this
            group["lr"] = runs.HYPERS["lr"] * (1 - epoch / _EPOCHS)
        for vectors, classes in loader:
            opt.zero_grad()
            with torch.autocast("cpu", torch.float16, enabled=half):
                loss = F.cross_entropy(ddp(vectors), classes)
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(opt)
            scaler.update()
            ema.update_parameters(model)
        if dist.get_rank() == 0:
            torch.save(
                {
                    "epoch": epoch + 1,
                    "state_dict": model.state_dict(),
                    "state_dict_ema": ema.state_dict(),
                    "optimizer": opt.state_dict(),
                    "amp_scaler": scaler.state_dict(),
                },
                folder / f"checkpoint-{epoch + 1}.pth.tar",
            )
    found = runs.outcome(model, opt)
    found.params.update({f"ema.{name}": value.clone() for name, value in ema.module.named_parameters()})
    return found


@pytest.mark.parametrize(("init_scale", "skipped"), [(None, 0), (2.0**40, 4)])
def test_as_plain_adamw(init_scale: float | None, skipped: int, tmp_path: Path) -> None:
    """With a scale, in fp16, the first gradients overflow and no rank steps."""
    runs.check(partial(_program, init_scale), tmp_path, "checkpoint-2.pth.tar", _EPOCHS * _EPOCH_STEPS - skipped)


@pytest.mark.parametrize("world_size", [1, 3])
def test_other_world_size(world_size: int, tmp_path: Path) -> None:
    """What rank 0 of two has saved is resumed by one rank, and by three, as AdamW resumes it."""
    runs.launch(partial(_program, None), runs.sharded, tmp_path, None)
    checkpoint = tmp_path / "checkpoint-2.pth.tar"
    ours, theirs = (
        runs.launch(partial(_program, None), make, tmp_path, checkpoint, world_size=world_size)
        for make in (runs.sharded, runs.plain)
    )
    runs.require_same(ours, theirs, f"{world_size} ranks")
