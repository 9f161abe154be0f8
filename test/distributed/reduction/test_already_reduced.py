"""Under AlreadyReduced, gradients that nobody has reduced are noticed, in the first step and later."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import zero_opt
from test.support.harness import assert_bitwise, run_processes, run_threads
from test.support.scenario import values

Ranks = Callable[..., list[Any]]


def _step_unreduced(rank: int, world_size: int, scale: float, dtype: torch.dtype) -> str:
    param = torch.nn.Parameter(torch.ones(300, dtype=dtype))
    optimizer = zero_opt.ShardedOptimizer([param], torch.optim.Adam, reduction=zero_opt.AlreadyReduced())
    param.grad = torch.linspace(1.0, 2.0, 300).to(dtype) * (1 + rank * scale)
    try:
        optimizer.step()
    except zero_opt.GradientConflict as error:
        assert bool((param == 1).all())
        return str(error)
    finally:
        optimizer.close()
    return ""


@pytest.mark.parametrize("ranks", [run_threads, run_processes])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_gradients_that_differ_between_ranks_are_not_already_reduced(ranks: Ranks, dtype: torch.dtype) -> None:
    for message in ranks(3, _step_unreduced, 0.5, dtype):
        assert "not yet reduced" in message and "DistributedDataParallel" in message


def test_gradients_that_were_reduced_with_other_roundings_are() -> None:
    assert run_threads(2, _step_unreduced, 1e-4, torch.float32) == ["", ""]


def _unreduced_later(rank: int, world_size: int) -> str:
    ddp = DistributedDataParallel(torch.nn.Linear(50, 3))
    optimizer = zero_opt.ShardedOptimizer(ddp.parameters(), torch.optim.Adam, reduction=zero_opt.AlreadyReduced())
    for step in range(3):
        with ddp.no_sync() if step == 2 else contextlib.nullcontext():
            ddp(values(0, step, rank, 0, (4, 50))).square().sum().backward()
        before = ddp.module.weight.detach().clone()
        try:
            optimizer.step()
        except zero_opt.GradientConflict as error:
            assert step == 2
            assert_bitwise(ddp.module.weight, before)
            return str(error)
        finally:
            optimizer.zero_grad()
    return ""


def test_a_later_step_inside_no_sync_is_noticed() -> None:
    first, second = run_processes(2, _unreduced_later)
    assert first == second
    assert "in step 2" in first and "no_sync()" in first


def _frozen_under_ddp(rank: int, world_size: int, finds: bool) -> str:
    model = torch.nn.Sequential(torch.nn.Linear(50, 9), torch.nn.Linear(9, 3))
    ddp = DistributedDataParallel(model, find_unused_parameters=finds)
    optimizer = zero_opt.ShardedOptimizer(ddp.parameters(), torch.optim.Adam, reduction=zero_opt.AlreadyReduced())
    for step in range(2):
        ddp(values(0, step, rank, 0, (4, 50))).square().sum().backward()
        try:
            optimizer.step()
        except zero_opt.GradientConflict as error:
            assert step == 1
            return str(error)
        optimizer.zero_grad()
        model[0].requires_grad_(False)
    return ""


def test_a_layer_that_is_frozen_after_ddp_was_made_is_noticed_and_the_advice_works() -> None:
    """DDP reduces no bucket of which a gradient is missing."""
    for message in run_processes(2, _frozen_under_ddp, False):
        assert "find_unused_parameters=True" in message
    assert run_processes(2, _frozen_under_ddp, True) == ["", ""]


def _one_left_out(rank: int, world_size: int) -> str:
    model = torch.nn.Sequential(torch.nn.Linear(50, 9), torch.nn.Linear(9, 3))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["1.bias"])
    ddp = DistributedDataParallel(model)
    optimizer = zero_opt.ShardedOptimizer(ddp.named_parameters(), torch.optim.Adam, reduction=zero_opt.AlreadyReduced())
    ddp(values(0, 0, rank, 0, (4, 50))).square().sum().backward()
    with pytest.raises(zero_opt.GradientConflict) as caught:
        optimizer.step()
    return str(caught.value)


def test_a_parameter_that_ddp_ignores_is_noticed_in_the_first_step() -> None:
    for message in run_processes(2, _one_left_out):
        assert "module.1.bias" in message
        assert "was told to ignore this parameter" in message and "no_sync" not in message


def _frozen_at_first(rank: int, world_size: int) -> int:
    """Return in which step a parameter is noticed that nobody reduces, and that got its first gradient in step 1."""
    params = [torch.nn.Parameter(torch.ones(40)) for _ in range(3)]
    optimizer = zero_opt.ShardedOptimizer(params, torch.optim.SGD, lr=0.1, reduction=zero_opt.AlreadyReduced())
    for step in range(5):
        for at, param in enumerate(params):
            unreduced = at == 2 and step > 0
            param.grad = None if at == 2 and step == 0 else torch.full((40,), 1.0 + rank * unreduced)
        try:
            optimizer.step()
        except zero_opt.GradientConflict:
            return step
    return -1


def test_one_gradient_is_compared_in_turn_with_every_step() -> None:
    assert run_threads(2, _frozen_at_first) == [2, 2]


def _without_memory(rank: int, world_size: int) -> None:
    """One that stands for zeros is stepped; of one whose memory was given back, torch raises what it does."""
    first, second = torch.nn.Parameter(torch.ones(5)), torch.nn.Parameter(torch.ones(3, 2))
    optimizer = zero_opt.ShardedOptimizer(
        [first, second],
        torch.optim.AdamW,
        fused=True,
        weight_decay=0.0,
        reduction=zero_opt.AlreadyReduced(),
        offload=zero_opt.WorkerOffload(),
    )
    first.grad, second.grad = torch._efficientzerotensor(5), torch.ones(3, 2)
    optimizer.step()
    assert bool((first == 1).all()) and bool((second < 1).all())
    first.grad = torch.ones(5)
    first.grad.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError):
        optimizer.step()
    optimizer.close()


def test_a_gradient_without_memory_is_not_read() -> None:
    run_processes(1, _without_memory)


def _one_differs(rank: int, world_size: int, ahead: int) -> int:
    """The step in which a gradient that is another one on each rank is noticed, after steps without gradients."""
    params = [torch.nn.Parameter(torch.ones(16)) for _ in range(8)]
    optimizer = zero_opt.ShardedOptimizer(params, torch.optim.SGD, lr=0.1, reduction=zero_opt.AlreadyReduced())
    for _ in range(ahead):
        optimizer.step()
    for step in range(9):
        for index, param in enumerate(params):
            param.grad = torch.full_like(param, 1.0 + rank * (index == 7))
        try:
            optimizer.step()
        except zero_opt.GradientConflict:
            return step
        finally:
            optimizer.zero_grad()
    return 9


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_steps_without_gradients_compare_nothing(ahead: int) -> None:
    """As users call to silence a scheduler."""
    assert run_threads(2, _one_differs, ahead) == [0, 0]


def _all_frozen(rank: int, world_size: int, offload: Any) -> list[torch.Tensor]:
    """A model that is frozen at first: two optimizers train by turns."""
    model = torch.nn.Linear(8, 8)
    zero_opt.broadcast_params(model)
    plain = torch.nn.Linear(8, 8)
    plain.load_state_dict(model.state_dict())
    model.requires_grad_(False)
    reduction = zero_opt.AlreadyReduced()
    optimizer = zero_opt.ShardedOptimizer(
        model.parameters(), torch.optim.AdamW, lr=0.1, fused=True, reduction=reduction, offload=offload
    )
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.1, fused=True)
    for step in range(5):
        if step == 3:
            model.requires_grad_(True)
        for module in (model, plain) if step >= 3 else ():
            module(torch.ones(1, 8)).sum().backward()
        optimizer.clip_grad_norm_(1e9)
        optimizer.step()
        theirs.step()
        for each in (optimizer, theirs):
            each.zero_grad()
    optimizer.close()
    return [param.detach() for pair in zip(model.parameters(), plain.parameters(), strict=True) for param in pair]


@pytest.mark.parametrize("offload", [None, zero_opt.CPUOffload()], ids=["device", "host"])
def test_a_model_that_is_frozen_is_stepped(offload: Any) -> None:
    for weight, plain_weight, bias, plain_bias in run_processes(2, _all_frozen, offload):
        assert_bitwise([weight, bias], [plain_weight, plain_bias])


def _unfrozen_under_ddp(rank: int, world_size: int, cure: str) -> str:
    model = torch.nn.Sequential(torch.nn.Linear(50, 9), torch.nn.Linear(9, 3))
    model[0].requires_grad_(False)
    hook = cure == "DDPHook"
    optimizer = zero_opt.ShardedOptimizer(
        model.parameters(), torch.optim.Adam, reduction=zero_opt.DDPHook() if hook else zero_opt.AlreadyReduced()
    )
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    if hook:
        ddp.register_comm_hook(optimizer, zero_opt.ddp_hook)
    for step in range(5):  # each gradient has its turn
        if step == 1:
            model[0].requires_grad_()
            ddp = DistributedDataParallel(model) if cure == "anew" else ddp
        ddp(values(0, step, rank, 0, (4, 50))).square().sum().backward()
        try:
            optimizer.step()
        except zero_opt.GradientConflict as error:
            assert step > 0
            return str(error)
        optimizer.zero_grad()
    weights = [torch.empty_like(model[0].weight) for _ in range(world_size)]
    torch.distributed.all_gather(weights, model[0].weight.detach())
    assert_bitwise(weights[0], weights[1])
    optimizer.close()
    return ""


def test_a_layer_that_is_unfrozen_after_ddp_was_made_is_noticed_and_the_advice_works() -> None:
    """DDP reduces what was trainable when it was made."""
    for message in run_processes(2, _unfrozen_under_ddp, "none"):
        assert "unfrozen since, make it anew" in message
    assert run_processes(2, _unfrozen_under_ddp, "anew") == ["", ""]
    assert run_processes(2, _unfrozen_under_ddp, "DDPHook") == ["", ""]
