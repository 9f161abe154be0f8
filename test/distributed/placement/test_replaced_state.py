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

IN_PROCESS = "cpu"  # keeps entries that it has no place for
OFFLOADS: dict[str, Callable[[Path], Any]] = {
    "worker": lambda _: zero_opt.WorkerOffload(),
    "nvme": lambda folder: zero_opt.NVMeOffload(folder),
    "cpu": lambda _: zero_opt.CPUOffload(),
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
    "no count": (lambda state: state.update(step=torch.ones((), device="meta")), "'step' must be a number"),
    "a key too few": (lambda state: state.pop("exp_avg_sq"), "has no 'exp_avg_sq'"),
    "a share of elements": (
        lambda state: state.update(exp_avg=torch.sparse_coo_tensor(size=state["exp_avg"].shape, check_invariants=True)),
        "'exp_avg' must be a floating-point tensor",
    ),
    "no values": (
        lambda state: state.update(exp_avg=torch.empty_like(state["exp_avg"], device="meta")),
        "'exp_avg' must be a floating-point tensor",
    ),
    "a key too many": (lambda state: state.update(mine=torch.ones(3)), "has 'mine', which has no place"),
}


def _edits(name: str) -> list[tuple[Callable[[dict[str, Any]], Any], str]]:
    return [edit for key, edit in EDITS.items() if name != IN_PROCESS or key != "a key too many"]


def _replace(rank: int, world_size: int, name: str, dtype: torch.dtype, folder: Path) -> list[str]:
    param = nn.Parameter(torch.zeros(64, 32, dtype=dtype))
    optimizer = zero_opt.ShardedOptimizer(
        [param], torch.optim.AdamW, lr=0.1, offload=OFFLOADS[name](folder), reduction=zero_opt.AtStep(), fused=True
    )
    (param.sum() * (1 + rank)).backward()
    optimizer.step()
    before, said = param.detach().clone(), []
    for number, (edit, _) in enumerate(_edits(name) * 2):
        good = dict(optimizer.state[param].items())
        in_place = number >= len(_edits(name))
        entry: Any = optimizer.state[param] if in_place else dict(good)
        if rank == 0:
            edit(entry)
            optimizer.state[param] = entry
        with pytest.raises(zero_opt.StateDictError) as caught:
            optimizer.step()
        said.append(str(caught.value))
        assert_bitwise(param.detach(), before)
        if rank == 0 and not in_place:
            optimizer.state[param] = good
        elif rank == 0:
            for key in entry.keys() - good.keys():
                del entry[key]
            entry.update(good)
    optimizer.step()
    assert not torch.equal(param.detach(), before)
    optimizer.close()
    return said


@pytest.mark.parametrize("name", OFFLOADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world_size", [1, 2])
def test_state_that_does_not_fit_is_refused_on_every_rank(
    world_size: int, dtype: torch.dtype, name: str, tmp_path: Path
) -> None:
    for rank, said in enumerate(run_processes(world_size, _replace, name, dtype, tmp_path)):
        for text, (_, wanted) in zip(said, _edits(name) * 2, strict=True):
            assert text.startswith("rank 0: opt.state of" if rank else "opt.state of") and wanted in text, text


def _replace_split(rank: int, world_size: int) -> None:
    param = nn.Parameter(torch.zeros(64, 32, dtype=torch.bfloat16))
    optimizer = zero_opt.ShardedOptimizer(
        [param],
        torch.optim.AdamW,
        lr=0.1,
        precision=zero_opt.MixedPrecision("split"),
        reduction=zero_opt.AtStep(),
        fused=True,
    )
    (param.sum() * (1 + rank)).backward()
    optimizer.step()
    before, live = param.detach().clone(), optimizer.state[param]
    wide = {key: value.double() if key == "exp_avg" else value for key, value in live.items()}
    for key, wrong in (
        ("exp_avg", torch.zeros(1, 32)),
        ("exp_avg_sq", torch.zeros(64, 32, dtype=torch.int64)),
        ("remainder", torch.zeros(3, dtype=torch.int16)),
    ):
        for entry in (dict(live), {k: v for k, v in live.items() if k != "remainder"}):
            if key == "remainder" and key not in entry:
                continue
            entry[key] = wrong
            if rank == 0:
                optimizer.state[param] = entry
            with pytest.raises(zero_opt.StateDictError, match=r"opt\.state"):
                optimizer.step()
            assert_bitwise(param.detach(), before)
            optimizer.state[param] = live
    optimizer.state[param] = wide
    optimizer.step()
    assert optimizer.state[param]["exp_avg"].dtype is torch.float32
    optimizer.close()


@pytest.mark.parametrize("world_size", [1, 2])
def test_state_that_does_not_fit_a_split_master_is_refused_on_every_rank(world_size: int) -> None:
    run_processes(world_size, _replace_split)
