"""Entries without state, which torch makes where someone looks at those of parameters that have not been stepped."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_opt
from test.support.harness import assert_bitwise, run_processes
from test.support.scenario import BUCKET_MB

FP32 = {"precision": zero_opt.MixedPrecision(master_dtype=torch.float32)}
WAYS: dict[str, Any] = {
    "masters": lambda _: (torch.optim.Adam, FP32),
    "masters, NAdam": lambda _: (torch.optim.NAdam, FP32),
    "host": lambda _: (torch.optim.AdamW, {"offload": zero_opt.CPUOffload()}),
    "host, torch's": lambda _: (torch.optim.AdamW, {"offload": zero_opt.CPUOffload(), "fused": False}),
    "host, 8 bits": lambda _: (
        zero_opt.CPUAdamW,
        {"state": zero_opt.AdamState("block8"), "offload": zero_opt.CPUOffload()},
    ),
    "columns": lambda _: (torch.optim.AdamW, {"offload": zero_opt.CPUOffload(selective=zero_opt.Selective())}),
    "worker": lambda _: (torch.optim.AdamW, {"offload": zero_opt.WorkerOffload()}),
    "file": lambda folder: (torch.optim.AdamW, {"offload": zero_opt.NVMeOffload(folder)}),
}


def _steps_after_a_load(rank: int, world_size: int, way: Any, dtype: torch.dtype, empty: bool) -> Any:
    cls, options = way

    def make() -> tuple[list[nn.Parameter], Any]:
        params = [nn.Parameter(torch.linspace(1, 2, 300).to(dtype)) for _ in range(3)]
        reduction = zero_opt.Overlapped(BUCKET_MB)
        return params, zero_opt.ShardedOptimizer(params, cls, lr=0.1, reduction=reduction, **options)

    params, first = make()
    params[1].sum().backward()
    first.step()
    saved = first.state_dict()
    assert list(saved["state"]) == [1]
    if empty:
        saved["state"] |= {0: {}, 2: {}}
    first.close()
    params, optimizer = make()
    optimizer.load_state_dict(saved)
    for _ in range(2):
        optimizer.zero_grad()
        sum(param.float().square().sum() for param in params).backward()
        optimizer.step()
    found = [param.detach() for param in params], optimizer.state_dict()
    optimizer.close()
    return found


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_their_parameters_begin_afresh(way: str, dtype: torch.dtype, world_size: int, tmp_path: Path) -> None:
    given = WAYS[way](tmp_path)
    without, found = (run_processes(world_size, _steps_after_a_load, given, dtype, empty) for empty in (False, True))
    assert_bitwise(found, without)


def test_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    params = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    plain = torch.optim.AdamW(params, fused=True)
    params[1].grad = torch.ones(3)
    plain.step()
    assert not plain.state[params[0]]
    with caplog.at_level(logging.WARNING, "zero_opt"):
        zero_opt.ShardedOptimizer(params, torch.optim.AdamW, offload=zero_opt.CPUOffload()).load_state_dict(
            plain.state_dict()
        )
    assert "no state for 1 of 2 parameters, the first of them parameter 0" in caplog.text
