"""What consolidate_state_dict() has brought to a rank is current until the state there is edited, in whatever way."""

from __future__ import annotations

import gc
import weakref
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


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("offload", ["", *OFFLOADS])
def test_state_dicts_have_the_edits(offload: str, form: str, edit: str, tmp_path: Any) -> None:
    assert all(all(map(all, found)) for found in run_processes(2, _edited, offload, form, edit, str(tmp_path)))


class Numbered(torch.optim.Optimizer):
    """Momentum, with a number of Python's for its steps."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in (param for group in self.param_groups for param in group["params"] if param.grad is not None):
            state = self.state[param]
            if not state:
                state |= {"step": 0, "exp_avg": torch.zeros_like(param)}
            state["step"] += 1
            state["exp_avg"] = state["exp_avg"] + param.grad


def _number(entry: Any) -> dict[str, Any]:
    entry["step"] = 100
    return dict(entry)


def _value(entry: Any) -> dict[str, Any]:
    entry["exp_avg"] = torch.full_like(entry["exp_avg"], 7.0)
    return dict(entry)


def _twice(entry: Any) -> dict[str, Any]:
    return _value(entry) and _value(entry)


NEW_VALUES: dict[str, Callable[[Any], dict[str, Any]]] = {"number": _number, "value": _value, "value twice": _twice}


def _replaced_after_a_load(rank: int, world_size: int, cls: Any, edit: str, entry: bool) -> None:
    """Loaded state is all at version 0, and so is what takes its place."""
    zero_opt.register_elementwise(Numbered)
    param = nn.Parameter(torch.ones(64 * world_size))
    optimizer = zero_opt.ShardedOptimizer([param], cls, lr=0.1)
    param.sum().backward()
    optimizer.step()
    state_dict = optimizer.state_dict()
    dist.barrier()
    optimizer.load_state_dict(state_dict)
    optimizer.consolidate_state_dict(0)
    before = optimizer.state_dict()["state"][0]
    dist.barrier()
    if entry:
        optimizer.state[param] = NEW_VALUES[edit](dict(optimizer.state[param]))
    else:
        NEW_VALUES[edit](optimizer.state[param])
    found = optimizer.state_dict()["state"][0]
    dist.barrier()
    own = slice(64 * rank, 64 * (rank + 1))
    if edit == "number":
        assert rank or float(found["step"]) == 100 != float(before["step"])  # which the first rank sends
    else:
        assert (found["exp_avg"][own] == 7).all()
        assert not (before["exp_avg"] == 7).any()
    optimizer.close()


CLASSES = [torch.optim.AdamW, torch.optim.Adamax, zero_opt.CPUAdamW, Numbered]


@pytest.mark.parametrize("entry", [False, True], ids=["by key", "by entry"])
@pytest.mark.parametrize(
    ("cls", "edit"), [*((cls, edit) for cls in CLASSES for edit in ("value", "value twice")), (Numbered, "number")]
)
def test_new_values_are_in_it_at_any_version(cls: Any, edit: str, entry: bool) -> None:
    run_processes(2, _replaced_after_a_load, cls, edit, entry)


def _freed(rank: int, world_size: int, load: bool) -> None:
    zero_opt.register_elementwise(Numbered)
    param = nn.Parameter(torch.ones(64 * world_size))
    optimizer = zero_opt.ShardedOptimizer([param], Numbered)
    param.sum().backward()
    optimizer.step()
    state_dict = optimizer.state_dict()
    dist.barrier()
    optimizer.consolidate_state_dict(0)
    value = weakref.ref(optimizer.state[param]["exp_avg"])
    if load:
        optimizer.load_state_dict(state_dict)
    else:
        optimizer.step()
    gc.collect()
    assert value() is None
    optimizer.close()


@pytest.mark.parametrize("load", [False, True], ids=["a step", "a load"])
def test_what_a_change_replaces_is_freed(load: bool) -> None:
    run_processes(2, _freed, load)
