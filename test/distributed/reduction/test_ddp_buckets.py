"""Steps before the first backward of a DDP module that has our hook, or lacks it."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_optimizer_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

import zero_opt
from test.support.harness import assert_bitwise, run_processes
from zero_opt.reduction import ddp_buckets

STEPS = 3


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(30, 20), nn.Tanh(), nn.Linear(20, 3))


def _wrapped(model: nn.Module, *, hooked: bool = True) -> tuple[DistributedDataParallel, zero_opt.ShardedOptimizer]:
    optimizer = zero_opt.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=0.02, reduction=zero_opt.DDPHook())
    ddp = DistributedDataParallel(model)
    if hooked:
        ddp.register_comm_hook(optimizer, zero_opt.ddp_hook)
    return ddp, optimizer


def _train(ddp: nn.Module, optimizer: torch.optim.Optimizer, seeds: range, rank: int) -> None:
    for seed in seeds:
        generator = torch.Generator().manual_seed(2 * seed + rank)
        ddp(torch.randn(4, 30, generator=generator)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def _resumed(rank: int, world_size: int, how: str) -> Any:
    ddp, optimizer = _wrapped(_model())
    _train(ddp, optimizer, range(STEPS), rank)
    saved = copy.deepcopy(get_state_dict(ddp, optimizer))
    optimizer.close()
    ddp, optimizer = _wrapped(_model())
    if how == "get_state_dict":
        get_state_dict(ddp, optimizer)
    if how == "set_optimizer_state_dict":
        ddp.module.load_state_dict({key.removeprefix("module."): value for key, value in saved[0].items()})
        set_optimizer_state_dict(ddp, optimizer, saved[1])
    else:
        set_state_dict(ddp, optimizer, model_state_dict=saved[0], optim_state_dict=saved[1])
    _train(ddp, optimizer, range(STEPS, 2 * STEPS), rank)
    optimizer.consolidate_state_dict()
    state = optimizer.state_dict()["state"] if rank == 0 else None
    optimizer.close()
    return [param.detach() for param in ddp.parameters()], state


def _through(rank: int, world_size: int) -> Any:
    ddp = DistributedDataParallel(_model())
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.02)
    _train(ddp, optimizer, range(2 * STEPS), rank)
    return [param.detach() for param in ddp.parameters()], optimizer.state_dict()["state"]


@pytest.mark.parametrize("how", ["get_state_dict", "set_state_dict", "set_optimizer_state_dict"])
def test_torchs_functions_take_and_set_state_before_the_first_backward(how: str) -> None:
    found, wanted = run_processes(2, _resumed, how), run_processes(2, _through)
    for params, _ in found:
        assert_bitwise(params, wanted[0][0])
    assert_bitwise(found[0][1], wanted[0][1])


def _without_a_hook(rank: int, world_size: int, what: str) -> str:
    ddp, optimizer = _wrapped(_model(), hooked=False)
    before = [param.detach().clone() for param in ddp.parameters()]
    if what == "after get_state_dict":
        get_state_dict(ddp, optimizer)
        ddp(torch.ones(4, 30)).sum().backward()
    elif what == "zeros of a backward":
        (0 * ddp(torch.ones(4, 30)).sum()).backward()
        assert not any(param.grad.any() for param in ddp.parameters())  # type: ignore[union-attr]
    else:
        for number, param in enumerate(ddp.parameters()):
            param.grad = torch.zeros_like(param)
            if what == "not zero" or (what == "not zero on one rank" and number == 2 and rank == 1):
                param.grad.view(-1)[-1] = 1e-30
    with pytest.raises(zero_opt.GradientConflict) as caught:
        optimizer.step()
    assert_bitwise([param.detach() for param in ddp.parameters()], before)
    optimizer.close()
    return str(caught.value)


@pytest.mark.parametrize("what", ["after get_state_dict", "zeros of a backward", "not zero", "not zero on one rank"])
def test_gradients_without_a_hook_are_still_an_error_on_every_rank(what: str) -> None:
    for message in run_processes(2, _without_a_hook, what):
        assert "DistributedDataParallel has not called zero_opt.ddp_hook" in message


class _Layers(nn.Module):
    """Three layers, of which a forward may leave some out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(30, 30) for _ in range(3))

    def forward(self, values: torch.Tensor, *left_out: int) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            values = values if number in left_out else layer(values)
        return values


def _left_out(rank: int, world_size: int, first: bool, finds: bool) -> tuple[str, bool]:
    """Leave the second layer out, in the first step, or later, when DDP has several buckets."""
    model = _Layers()
    optimizer = zero_opt.ShardedOptimizer(model.parameters(), torch.optim.AdamW, reduction=zero_opt.DDPHook())
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.002, find_unused_parameters=finds)
    ddp.register_comm_hook(optimizer, zero_opt.ddp_hook)
    for _ in range(0 if first else 2):
        ddp(torch.ones(4, 30)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    before, said = [param.detach().clone() for param in model.parameters()], "nothing"
    ddp(torch.ones(4, 30), 1).sum().backward()
    try:
        optimizer.step()
    except zero_opt.GradientConflict as error:
        said = str(error)
    changed = not all(map(torch.equal, model.parameters(), before))
    optimizer.close()
    return said, changed


@pytest.mark.parametrize("first", [True, False])
def test_a_bucket_that_ddp_still_waits_to_fill_is_an_error_that_says_so(first: bool) -> None:
    for said, changed in run_processes(2, _left_out, first, False):
        assert "has not handed over all gradients of the last backward: a parameter got none" in said
        assert not changed
    for said, changed in run_processes(2, _left_out, first, True):
        assert said == "nothing" and changed


def _called_within(rank: int, world_size: int, call: str, where: str) -> tuple[list[str], Any]:
    """A signal handler of rank 0 calls the optimizer after a gradient, or as a backward ends; it catches the error."""
    ddp, optimizer = _wrapped(_model())
    said = list[str]()
    method = getattr(ddp_buckets.DDPHookReduction, where)

    def interrupted(*arguments: Any) -> None:
        if not said and rank == 0 and call:
            said.append("nothing")
            try:
                getattr(optimizer, call)()
            except zero_opt.StepDesync as error:
                said[0] = str(error)
        method(*arguments)

    with mock.patch.object(ddp_buckets.DDPHookReduction, where, interrupted):
        _train(ddp, optimizer, range(STEPS), rank)
    optimizer.close()
    return said, [param.detach() for param in ddp.parameters()]


@pytest.mark.parametrize("where", ["_take_from", "_end_backward"])
@pytest.mark.parametrize("call", ["zero_grad", "step"])
def test_calls_within_a_backward_of_ddp_are_refused_and_change_nothing(call: str, where: str) -> None:
    found, wanted = (run_processes(2, _called_within, made, where) for made in (call, ""))
    for (_, params), (_, expected) in zip(found, wanted, strict=True):
        assert_bitwise(params, expected)
    assert found[0][0][0].startswith(f"opt.{call}() was called while backward() is under way")


def _raised_at_the_end(rank: int, world_size: int) -> str:
    """A signal handler of rank 0 raises as the reduction puts ``p.grad`` back."""
    ddp, optimizer = _wrapped(_model())
    loss = ddp(torch.ones(4, 30)).sum()
    if rank == 0:
        raising = mock.patch.object(ddp_buckets.DDPHookReduction, "_end_backward", side_effect=KeyError("handler"))
        with raising, pytest.raises(KeyError):
            loss.backward()
    else:
        loss.backward()
    with pytest.raises(zero_opt.StepDesync) as raised:
        optimizer.step()
    optimizer.close()
    return str(raised.value)


def test_a_backward_that_a_handler_has_ended_as_it_puts_gradients_back_is_not_stepped() -> None:
    for said in run_processes(2, _raised_at_the_end):
        assert "a backward ended in an exception" in said
