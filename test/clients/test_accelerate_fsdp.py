"""accelerate with FSDP2: prepare() puts DTensors in the place of the parameters that the optimizer was made over.

accelerate runs FSDP2 on accelerators alone, so its state is told that this is one; all that it does then is its own.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

import zero_opt

from . import models, runs

_EPOCHS, _EPOCH_STEPS, _ACCUMULATED = 4, 2, 2


def _accelerator(**options: Any) -> Accelerator:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=True, **options)
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=_ACCUMULATED,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )
    for state in (PartialState(), accelerator.state):
        state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    assert accelerator.is_fsdp2
    return accelerator


def _outcome(model: Any, opt: torch.optim.Optimizer) -> runs.Outcome:
    """Full tensors of everything. All ranks must call it."""
    plain = [name for name, param in model.named_parameters() if not isinstance(param, DTensor)]
    assert plain == []
    params = {name: param.full_tensor().detach().clone() for name, param in model.named_parameters()}
    state = get_optimizer_state_dict(model, opt, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if isinstance(opt, zero_opt.ShardedOptimizer):
        opt.close()
    return runs.Outcome(params, state if dist.get_rank() == 0 else None)


def _program(efficient: bool, make: runs.MakeOptimizer, folder: Path, resume_from: Path | None) -> runs.Outcome:
    accelerator = _accelerator(
        cpu_ram_efficient_loading=efficient,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["GPT2Block"],
    )
    set_seed(3, device_specific=True)
    data = models.Text(_EPOCH_STEPS * _ACCUMULATED * runs.WORLD_SIZE * 4)
    model = models.gpt2()
    opt = make(models.decayed_apart(model))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 2 * _EPOCHS * _EPOCH_STEPS)
    loader = DataLoader(data, batch_size=4, shuffle=True)
    model, opt, loader, schedule = accelerator.prepare(model, opt, loader, schedule)
    first = 0
    if resume_from is not None:
        accelerator.load_state(str(resume_from))
        first = int(resume_from.name.removeprefix("epoch_"))
    for epoch in range(first, _EPOCHS):
        loader.set_epoch(epoch)
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                opt.step()
                schedule.step()
                opt.zero_grad()
        accelerator.save_state(str(folder / f"epoch_{epoch + 1}"))
    return _outcome(model, opt.optimizer)


@pytest.mark.parametrize("efficient", [False, True], ids=["sharded in place", "loaded after sharding"])
def test_as_plain_adamw(efficient: bool, tmp_path: Path) -> None:
    """The line that replaces AdamW's needs no reduction: FSDP2 has reduced."""
    runs.check(partial(_program, efficient), tmp_path, "epoch_2", _EPOCHS * _EPOCH_STEPS, replacement=runs.forgetful)


def _fused(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, fused=True, **runs.HYPERS)


def _fused_sharded(params: Any, offload: Any) -> torch.optim.Optimizer:
    return zero_opt.ShardedOptimizer(params, torch.optim.AdamW, offload=offload, fused=True, **runs.HYPERS)


def _matrices(make: runs.MakeOptimizer) -> runs.Outcome:
    """Parts of 16 elements times anything, of which torch's fused kernel makes no other bits than ours."""
    accelerator = _accelerator(cpu_ram_efficient_loading=False)
    torch.manual_seed(5)
    model: Any = torch.nn.Sequential(
        torch.nn.Linear(48, 96, bias=False), torch.nn.Tanh(), torch.nn.Linear(96, 48, bias=False)
    )
    model, opt = accelerator.prepare(model, make(model.parameters()))
    generator = torch.Generator().manual_seed(accelerator.process_index)
    for _ in range(5):
        accelerator.backward(model(torch.randn(8, 48, generator=generator)).square().mean())
        opt.step()
        opt.zero_grad()
    return _outcome(model, opt.optimizer)


@pytest.mark.parametrize("offload", [None, zero_opt.CPUOffload(), zero_opt.WorkerOffload()], ids=repr)
def test_as_fused_adamw(offload: Any) -> None:
    wanted = runs.launch(_matrices, _fused)
    found = runs.launch(_matrices, partial(_fused_sharded, offload=offload))
    runs.require_same(found, wanted, repr(offload))
    assert {int(state["step"]) for state in found[0].optimizer["state"].values()} == {5}


def _too_late() -> None:
    accelerator = _accelerator(cpu_ram_efficient_loading=False)
    model: Any = torch.nn.Linear(48, 96, bias=False)
    opt = zero_opt.ShardedOptimizer(model.parameters(), torch.optim.AdamW)
    model(torch.ones(2, 48)).sum().backward()
    opt.step()
    opt.zero_grad()
    model, opt = accelerator.prepare(model, opt)
    model(torch.ones(2, 48)).sum().backward()
    opt.step()


def test_prepared_after_a_step() -> None:
    for failure in runs.launch(_too_late, expect_errors=True):
        assert failure.type_name == "ParamsReplaced"
        assert "construct the optimizer after prepare()" in failure.message
