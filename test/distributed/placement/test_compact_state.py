"""Compact state under every placement: the bits of the class itself with the same form, fed the same mean gradient."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zero_opt
from test.support.compact_training import FORMS, REDUCTIONS, expected, train
from test.support.harness import assert_bitwise, run_processes
from test.support.nvme_training import step_copies_of_params
from test.support.scenario import values

PLACEMENTS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "device": lambda _: {},
    "cpu": lambda _: {"offload": zero_opt.CPUOffload()},
    "worker": lambda _: {"offload": zero_opt.WorkerOffload(threads=1)},
    "worker, delay": lambda _: {"offload": zero_opt.WorkerOffload(threads=1, delay=1)},
    "nvme": lambda folder: {"offload": zero_opt.NVMeOffload(folder, window_mb=4096 / 2**20, threads=1)},
    "worker, speculating": lambda _: {"offload": zero_opt.WorkerOffload(threads=1, speculate=True)},
}
SPECULATING = "worker, speculating"


def _train_all(rank: int, world_size: int, options: dict[str, Any], kinds: list[str]) -> Any:
    return {
        (name, kind): train(rank, world_size, form, REDUCTIONS[kind], **options)
        for name, form in FORMS.items()
        for kind in kinds
    }


@pytest.mark.sampled(3)
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_bits_of_the_class_with_the_same_form(placement: str, world_size: int, tmp_path: Path) -> None:
    """Groups, unused parameters, accumulation, clipping, amsgrad: every form with every reduction."""
    clip = world_size > 1 or placement != "device"  # a rank alone clips by torch's norm, of other bits
    options = PLACEMENTS[placement](tmp_path) | ({} if clip else {"max_grad_norm": None})
    kinds = ["Overlapped"] if placement == SPECULATING else list(REDUCTIONS)
    runs = run_processes(world_size, _train_all, options, kinds)
    for (name, kind), (_, state) in runs[0].items():
        params, plain_state = expected(FORMS[name], world_size, REDUCTIONS[kind], clip=clip)
        for rank, run in enumerate(runs):
            assert_bitwise(run[name, kind][0], params, f"{name}, {kind}, rank {rank}")
        assert_bitwise(state, plain_state, f"{name}, {kind}, state")


def test_split_masters_in_a_file_whose_parameters_are_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step_copies_of_params(monkeypatch)
    for name, form in FORMS.items():
        found = train(0, 1, form, zero_opt.AtStep(), offload=zero_opt.NVMeOffload(tmp_path))
        assert_bitwise(found, expected(form, 1, zero_opt.AtStep()), name)


@pytest.mark.parametrize("name", ["block8", "block8, split"])
def test_windows_cut_between_blocks(name: str, tmp_path: Path) -> None:
    """A window has whole blocks of the file of every array: of the bases, those of 131072 elements."""
    form, found = FORMS[name], []
    for window_mb in (0.001, 64.0):
        param = torch.nn.Parameter(values(1, 0, 0, 0, (300_001,)).to(form.dtype))
        offload = zero_opt.NVMeOffload(tmp_path, window_mb=window_mb, threads=2)
        optimizer = zero_opt.ShardedOptimizer([param], zero_opt.CPUAdamW, lr=0.1, state=form.state, offload=offload)
        for step in range(3):
            param.backward(values(step, 1, 0, 0, (300_001,)).to(form.dtype))
            optimizer.step()
            optimizer.zero_grad()
        found.append([param.detach(), optimizer.state_dict()["state"]])
        windows = len(optimizer._engine.placement._windows)  # type: ignore[attr-defined]
        assert windows == (3 if window_mb < 1 else 1)
        optimizer.close()
    assert_bitwise(found[1], found[0])
