"""State that the user puts in the place of another must fit, or all ranks raise an error before anything changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_opt
from test.support.harness import assert_bitwise, run_processes

OFFLOADS: dict[str, Callable[[Path], Any]] = {
    "worker": lambda _: zero_opt.WorkerOffload(),
    "nvme": lambda folder: zero_opt.NVMeOffload(folder),
    "cpu, selective": lambda _: zero_opt.CPUOffload(selective=zero_opt.Selective(topk_ratio=1.0)),
}
EDITS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a row": (lambda state: state.update(exp_avg=torch.zeros(1, 32)), "'exp_avg' must be a floating-point tensor"),
    "one element": (lambda state: state.update(exp_avg=torch.zeros(1)), "'exp_avg' must be a floating-point tensor"),
    "a number": (lambda state: state.update(exp_avg_sq=0.5), "'exp_avg_sq' must be a floating-point tensor"),
    "integers": (
        lambda state: state.update(exp_avg=torch.zeros_like(state["exp_avg"], dtype=torch.int64)),
        "'exp_avg' must be a floating-point tensor",
    ),
    "three steps": (lambda state: state.update(step=torch.ones(3)), "'step' must be a number"),
    "a key too few": (lambda state: state.pop("exp_avg_sq"), "has no 'exp_avg_sq'"),
    "a key too many": (lambda state: state.update(mine=torch.ones(3)), "has 'mine', which has no place"),
}


def _replace(rank: int, world_size: int, name: str, folder: Path) -> list[str]:
    param = nn.Parameter(torch.zeros(64, 32))
    optimizer = zero_opt.ShardedOptimizer(
        [param], torch.optim.AdamW, lr=0.1, offload=OFFLOADS[name](folder), reduction=zero_opt.AtStep(), fused=True
    )
    (param.sum() * (1 + rank)).backward()
    optimizer.step()
    before, said = param.detach().clone(), []
    for edit, _ in EDITS.values():
        good = dict(optimizer.state[param].items())
        entry = dict(good)
        if rank == 0:
            edit(entry)
            optimizer.state[param] = entry
        with pytest.raises(zero_opt.StateDictError) as caught:
            optimizer.step()
        said.append(str(caught.value))
        assert_bitwise(param.detach(), before)
        if rank == 0:
            optimizer.state[param] = good
    optimizer.step()
    assert not torch.equal(param.detach(), before)
    optimizer.close()
    return said


@pytest.mark.parametrize("name", OFFLOADS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_state_that_does_not_fit_is_refused_on_every_rank(world_size: int, name: str, tmp_path: Path) -> None:
    for rank, said in enumerate(run_processes(world_size, _replace, name, tmp_path)):
        for text, (_, wanted) in zip(said, EDITS.values(), strict=True):
            assert text.startswith("rank 0: opt.state of" if rank else "opt.state of") and wanted in text, text
