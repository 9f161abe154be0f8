"""ShardedOptimizer at world size 1, and what it does before any rank talks to another."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import Parameter

import zero_opt
from test.distributed.harness import assert_bitwise, run_threads


def stepped() -> zero_opt.ShardedOptimizer:
    """Two groups, one step taken."""
    params = [Parameter(torch.full((shape,), 2.0)) for shape in (3, 5)]
    groups = [{"params": params[:1], "lr": 0.1}, {"params": params[1:]}]
    optimizer = zero_opt.ShardedOptimizer(groups, torch.optim.AdamW, max_grad_norm=1.0)
    step(optimizer, 0.5)
    return optimizer


def step(optimizer: torch.optim.Optimizer, grad: float) -> None:
    """One step with this gradient everywhere."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.full_like(param, grad)
    optimizer.step()


def _save(optimizer: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(optimizer, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda optimizer: pickle.loads(pickle.dumps(optimizer)),
    "torch.save": _save,
}


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_goes_on_by_itself_as_a_copy_of_the_wrapped_class_does(how: str) -> None:
    original = stepped()
    copied = COPIES[how](original)
    params = [[group["params"][0].detach().clone() for group in opt.param_groups] for opt in (original, copied)]
    assert_bitwise(params[0], params[1])
    before = copy.deepcopy(original.state_dict())
    step(copied, 0.25)
    assert_bitwise(original.state_dict(), before)
    step(original, 0.25)
    assert_bitwise(copied.state_dict(), original.state_dict())
    for ours, theirs in zip(copied.param_groups, original.param_groups, strict=True):
        assert torch.equal(ours["params"][0], theirs["params"][0])
    copied.zero_grad()
    copied.add_param_group({"params": [Parameter(torch.ones(2))]})
    copied.load_state_dict(copied.state_dict())
    assert len(original.param_groups) == 2
    copied.close()
    with pytest.raises(zero_opt.OptimizerClosed):
        COPIES[how](copied).step()


def _copy_sharded(rank: int, world_size: int) -> list[str]:
    params, messages = [Parameter(torch.full((3,), 2.0))], []
    optimizer = zero_opt.ShardedOptimizer(params, torch.optim.AdamW)
    for copied in COPIES.values():
        with pytest.raises(zero_opt.ConfigTypeError) as caught:
            copied(optimizer)
        messages.append(str(caught.value))
    optimizer.close()
    return messages


def test_a_sharded_one_is_not_copied_but_says_how_to_save() -> None:
    for messages in run_threads(2, _copy_sharded):
        assert all("consolidate_state_dict" in message for message in messages)
