"""A step count that is none is refused in every form and under every placement, before anything is changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_opt
from test.support.harness import assert_bitwise, run_processes
from test.support.scenario import values

NUMEL = 200
PLACEMENTS: dict[str, Callable[[str], Any]] = {
    "device": lambda _: None,
    "cpu": lambda _: zero_opt.CPUOffload(threads=1),
    "worker": lambda _: zero_opt.WorkerOffload(threads=1),
    "worker, delay": lambda _: zero_opt.WorkerOffload(threads=1, delay=1),
    "worker, speculating": lambda _: zero_opt.WorkerOffload(threads=1, speculate=True),
    "nvme": lambda folder: zero_opt.NVMeOffload(folder, threads=1),
}
KEPT = [
    zero_opt.AdamState(moments, master) for moments in ("float32", "bfloat16", "block8") for master in (None, "split")
]
Entry = dict[str, Any]
ODD: dict[str, Callable[[Entry], Any]] = {
    "NaN": lambda entry: entry.update(step=torch.nan),
    "inf": lambda entry: entry.update(step=torch.tensor(torch.inf)),
    "too large": lambda entry: entry.update(step=1e39),
    "below 0": lambda entry: entry.update(step=-7.0),
    "True": lambda entry: entry.update(step=True),
    "NaN in place": lambda entry: entry["step"].fill_(torch.nan),
    "-0.5 in place": lambda entry: entry["step"].fill_(-0.5),
    "-1 in place": lambda entry: entry["step"].fill_(-1.0),
}


def _odd_counts(rank: int, world_size: int, folder: str, kind: str) -> None:
    for form in KEPT:
        dtype = torch.bfloat16 if form.master else torch.float32
        params = [nn.Parameter(values(3, 0, 0, at, (NUMEL,)).to(dtype, copy=True)) for at in range(2)]
        optimizer = zero_opt.ShardedOptimizer(
            params, zero_opt.CPUAdamW, lr=0.1, state=form, offload=PLACEMENTS[kind](folder)
        )

        def backward(step: int, params: list[nn.Parameter] = params, dtype: torch.dtype = dtype) -> None:
            torch.autograd.backward(params, [values(step, 1, 0, at, (NUMEL,)).to(dtype) for at in range(2)])

        backward(0)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.flush()
        before = [param.detach().clone() for param in params]
        moments = [optimizer.state[param]["exp_avg"].clone() for param in params]
        for edit in ODD.values():
            for param in params if rank == world_size - 1 else ():  # of which it has a part of one at least
                edit(optimizer.state[param])
            backward(1)
            with pytest.raises(zero_opt.StateDictError, match=r"step.* must be a number"):
                optimizer.step()
            assert_bitwise([param.detach() for param in params], before)
            optimizer.zero_grad()
            for param in params:
                optimizer.state[param]["step"] = torch.tensor(1.0)
        assert_bitwise([optimizer.state[param]["exp_avg"] for param in params], moments)
        backward(1)
        optimizer.step()
        optimizer.flush()
        assert [float(optimizer.state[param]["step"]) for param in params] == [2.0, 2.0]
        optimizer.close()


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("kind", PLACEMENTS)
def test_a_count_that_is_none_is_refused_on_every_rank(kind: str, world_size: int, tmp_path: Path) -> None:
    run_processes(world_size, _odd_counts, str(tmp_path), kind)
