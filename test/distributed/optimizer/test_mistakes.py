"""A mistake of one rank in a call of all ranks: the same error on all of them, and training goes on."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import zero_opt
from test.support.fsdp_models import mesh_of
from test.support.harness import assert_bitwise, run_processes

Optimizer = zero_opt.ShardedOptimizer
Call = Callable[[Optimizer], object]
Calls = dict[str, tuple[Call, Call, str]]


def _never() -> float:
    raise AssertionError("a step with a mistake calls no closure")


# By name: the call, the same with a mistake, and the error.
_STEPS: Calls = {
    "step's closure": (lambda opt: opt.step(), lambda opt: opt.step(5), "a closure that computes the loss, or nothing"),
    "step's others": (lambda opt: opt.step(), lambda opt: opt.step(None, 3), "step() takes one closure, or nothing"),
    "step's options": (
        lambda opt: opt.step(),
        lambda opt: opt.step(_never, foo=5),
        "takes a closure alone, got ['foo']",
    ),
}
_CLIPS: Calls = {
    "norm": (lambda opt: opt.clip_grad_norm_(0.1), lambda opt: opt.clip_grad_norm_("x"), "max_norm must be a number"),
    "another": (lambda opt: opt.clip_grad_norm_(0.1), lambda opt: opt.clip_grad_norm_(0.1, 2), "takes the norm alone"),
    "option": (
        lambda opt: zero_opt.clip_grad_norm_([opt], 0.1),
        lambda opt: zero_opt.clip_grad_norm_([opt], 0.1, norm_type=1),
        "zero_opt.clip_grad_norm_() takes the norm alone",
    ),
    "no list": (
        lambda opt: zero_opt.clip_grad_norm_([opt], 0.1),
        lambda opt: zero_opt.clip_grad_norm_(opt, 0.1),  # type: ignore[arg-type]
        "zero_opt.clip_grad_norm_() takes a sequence of ShardedOptimizers",
    ),
    "offloaded": (
        lambda opt: opt.clip_grad_norm_(0.1),
        lambda opt: (opt.offload_state(), opt.clip_grad_norm_(0.1)),
        "the state is in host memory since offload_state()",
    ),
}
_ROWS: Calls = {
    "compact": (
        zero_opt.sharded_state_dict,
        lambda opt: zero_opt.sharded_state_dict(opt, compact="x"),  # type: ignore[arg-type]
        "compact must be True or False, got 'x'",
    )
}


def _mistaken(optimizer: Optimizer, rank: int, calls: Calls) -> None:
    """Make each call with a mistake on rank 1, then right on all."""
    for right, wrong, text in calls.values():
        kinds = (zero_opt.ConfigTypeError, zero_opt.StateOffloaded)
        with pytest.raises(kinds, match=re.escape(text)) as caught:
            (wrong if rank == 1 else right)(optimizer)
        assert str(caught.value).startswith("rank 1: ") is (rank != 1)
        optimizer.reload_state()
        right(optimizer)


def _train(rank: int, param: nn.Parameter, options: dict[str, Any], calls: Calls, *, mistakes: bool) -> Any:
    """Return what every call leaves behind, with mistakes on rank 1 before it or without."""
    optimizer = Optimizer([param], torch.optim.AdamW, lr=0.1, checks=zero_opt.Checks(timeout=20.0), **options)
    for step in range(2):
        for name, (right, wrong, text) in calls.items():
            grad = torch.linspace(1, 2 + rank + step, param.numel()).view(param.shape)
            if isinstance(param, DTensor):
                param.grad = DTensor.from_local(grad[:3], param.device_mesh, param.placements)
            else:
                (param * grad).sum().backward()
            if mistakes:
                _mistaken(optimizer, rank, {name: (right, wrong, text)})
            else:
                right(optimizer)
            if name not in _STEPS:
                optimizer.step()
            optimizer.zero_grad()
    optimizer.flush()
    optimizer.consolidate_state_dict(0)
    left = param.detach().clone(), optimizer.state_dict() if rank == 0 else None
    optimizer.close()
    return left


def _compared(rank: int, world_size: int, dtensors: bool, options: dict[str, Any], calls: Calls) -> None:
    left = []
    for mistakes in (True, False):
        values = torch.linspace(-1, 1, 24).view(6, 4)
        param = nn.Parameter(distribute_tensor(values, mesh_of((2,)), [Shard(0)]) if dtensors else values)
        value, state = _train(rank, param, options, calls, mistakes=mistakes)
        left.append((value.to_local() if isinstance(value, DTensor) else value, state))
    assert_bitwise(*left)


_POLICIES: dict[str, dict[str, Any]] = {
    "overlapped": {},
    "at step": {"reduction": zero_opt.AtStep()},
    "clipped": {"max_grad_norm": 0.5, "offload": zero_opt.CPUOffload()},
    "worker": {"offload": zero_opt.WorkerOffload(delay=1)},
}


@pytest.mark.parametrize("policy", _POLICIES)
def test_a_mistake_of_one_rank_is_an_error_on_all_and_changes_nothing(policy: str) -> None:
    run_processes(2, _compared, False, _POLICIES[policy], _STEPS | _CLIPS | _ROWS)


@pytest.mark.parametrize("options", [{}, {"offload": zero_opt.CPUOffload()}])
def test_over_dtensors_too(options: dict[str, Any]) -> None:
    run_processes(2, _compared, True, options, _CLIPS | _ROWS)


def _mistaken_as_params_are_replaced(rank: int, world_size: int) -> list[torch.Tensor]:
    params = [nn.Parameter(torch.ones(5)) for _ in range(3)]
    optimizer = zero_opt.ShardedOptimizer(params, torch.optim.SGD, lr=0.5)
    others = [nn.Parameter(torch.ones(5)) for _ in range(3)]
    optimizer.param_groups[0]["params"] = others
    calls: list[Any] = []
    for param in others:
        param.grad = torch.ones(5)
    with pytest.raises(zero_opt.ConfigTypeError, match="takes one closure"):
        optimizer.step(lambda: calls.append(0), 3) if rank else optimizer.step()
    optimizer.zero_grad()
    for param in others:
        param.grad = torch.ones(5)
    optimizer.step()
    optimizer.close()
    assert calls == []
    return [param.detach() for param in others]


def test_a_mistake_is_told_where_parameters_have_been_replaced() -> None:
    found = run_processes(2, _mistaken_as_params_are_replaced)
    assert all(torch.equal(param, torch.full((5,), 0.5)) for params in found for param in params)
