"""What consolidate_state_dict() has brought to a rank is current until the state there is edited, in whatever way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zero_opt
from test.support.harness import run_processes
from test.support.offloads import FORMS, OFFLOADS

KEYS = ("exp_avg", "exp_avg_sq")


def _replace(optimizer: Any, param: Tensor) -> None:
    optimizer.state[param] = {"step": torch.tensor(7.0), **{key: torch.ones(64) for key in KEYS}}


def _fill(optimizer: Any, param: Tensor) -> None:
    for key in KEYS:
        optimizer.state[param][key].fill_(1.0)


EDITS: dict[str, Callable[[Any, Tensor], None]] = {"replaced": _replace, "written to": _fill}


def _edited(rank: int, world_size: int, offload: str, form: str, edit: str, folder: str) -> list[list[bool]]:
    """Whether state_dict() has the edits: of this rank's state after them, and of all after a skipped step."""
    params = [nn.Parameter(torch.ones(64)) for _ in range(world_size)]
    made = OFFLOADS[offload](folder) if offload else None
    checks = zero_opt.Checks(nonfinite="skip")
    options: dict[str, Any] = {"state": FORMS[form], "offload": made, "checks": checks}
    optimizer = zero_opt.ShardedOptimizer(params, zero_opt.CPUAdamW, **options)

    def step(scale: float) -> None:
        torch.stack([(param * scale).sum() for param in params]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def has_edits() -> list[bool]:
        state = optimizer.state_dict()["state"]
        dist.barrier()
        return [bool((state[index][key] == 1).all()) for index in range(world_size) for key in KEYS]

    step(1.0)
    optimizer.flush()
    optimizer.consolidate_state_dict(0)
    (owned,) = [index for index, param in enumerate(params) if optimizer.state[param]["exp_avg"].numel()]
    EDITS[edit](optimizer, params[owned])
    own = has_edits()[len(KEYS) * owned :][: len(KEYS)]
    dist.barrier()
    optimizer.consolidate_state_dict(0)
    step(float("inf"))
    found = [own, has_edits()]
    optimizer.close()
    return found


@pytest.mark.sampled(8)
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("offload", ["", *OFFLOADS])
def test_state_dicts_have_the_edits(offload: str, form: str, edit: str, tmp_path: Any) -> None:
    assert all(all(map(all, found)) for found in run_processes(2, _edited, offload, form, edit, str(tmp_path)))
