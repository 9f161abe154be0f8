"""Gradients that have moved into buckets are never silently missed, counted twice or lost."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import zero_opt
from test.support.actors import make_params, plain_actor, rank_actor, two_groups
from test.support.harness import assert_bitwise, run_processes, run_threads
from test.support.scenario import AT_STEP, OVERLAPPED, values

Ranks = Callable[..., list[Any]]


def _after_backward(rank: int) -> Any:
    actor = rank_actor(rank)
    actor.backward(0, everyone=True)
    return actor


# ---------------------------------------------------------------------------------------------------------------------
# reading and editing

FORBIDDEN: dict[str, Callable[[list[torch.nn.Parameter]], Any]] = {
    "add": lambda params: params[0].grad + 1,  # type: ignore[operator]
    "norm": lambda params: params[0].grad.norm(),  # type: ignore[union-attr]
    "vector norm": lambda params: torch.linalg.vector_norm(params[0].grad),
    "clip_grad_norm_": lambda params: torch.nn.utils.clip_grad_norm_(params, 1.0),
    "clip_grad_norm_ without foreach": lambda params: torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=False),
    "clip_grad_value_": lambda params: torch.nn.utils.clip_grad_value_(params, 1.0),
    "in-place scaling": lambda params: params[0].grad.mul_(0.5),  # type: ignore[union-attr]
    "in-place adding": lambda params: params[0].grad.add_(1.0),  # type: ignore[union-attr]
    "adding a tensor": lambda params: params[0].grad.add_(torch.ones(130, 7)),  # type: ignore[union-attr]
    "assigning elements": lambda params: params[0].grad.__setitem__(0, 0.0),  # type: ignore[index]
    "copying into": lambda params: params[0].grad.copy_(torch.ones(130, 7)),  # type: ignore[union-attr]
    "copying from": lambda params: torch.empty(130, 7).copy_(params[0].grad),  # type: ignore[arg-type]
    "clone": lambda params: params[0].grad.clone(),  # type: ignore[union-attr]
    "item": lambda params: params[2].grad.item(),  # type: ignore[union-attr]
    "tolist": lambda params: params[1].grad.tolist(),  # type: ignore[union-attr]
    "data": lambda params: params[1].grad.data.sum(),  # type: ignore[union-attr]
    "isnan": lambda params: params[1].grad.isnan().any(),  # type: ignore[union-attr]
    "to another dtype": lambda params: params[1].grad.double(),  # type: ignore[union-attr]
    "foreach": lambda params: torch._foreach_mul_([params[0].grad, params[1].grad], 0.5),  # type: ignore[list-item]
}


def _try_forbidden(rank: int, world_size: int) -> list[tuple[str, str]]:
    actor, messages = _after_backward(rank), []
    for name, call in FORBIDDEN.items():
        with torch.no_grad():
            try:
                call(actor.params)
                messages.append((name, "allowed"))
            except zero_opt.GradientConsumed as error:
                messages.append((name, str(error)))
    actor.optimizer.close()
    return messages


def test_reading_or_editing_a_consumed_gradient_raises_and_names_the_ways_out() -> None:
    for messages in run_threads(2, _try_forbidden):
        for name, message in messages:
            assert "opt.clip_grad_norm_" in message, f"{name}: {message}"
            assert "AtStep()" in message, name
            assert "AlreadyReduced()" in message, name
            assert "parameter " in message, name


def _look_at_metadata(rank: int, world_size: int) -> None:
    actor = _after_backward(rank)
    for index, param in enumerate(actor.params):
        grad = param.grad
        assert grad is not None
        assert (grad.shape, grad.dtype, grad.device) == (param.shape, param.dtype, param.device)
        assert grad.requires_grad is False and grad.is_leaf and not grad.is_sparse
        assert f"parameter {index} " in repr(grad)
    actor.optimizer.close()
    for param in actor.params:
        with pytest.raises(zero_opt.GradientConsumed, match="are gone"):
            param.grad.norm()  # type: ignore[union-attr]


def test_metadata_of_a_consumed_gradient_is_the_parameters() -> None:
    run_threads(2, _look_at_metadata)


def _read_at_step(rank: int, world_size: int) -> list[Tensor]:
    actor = rank_actor(rank, AT_STEP)
    actor.backward(0, everyone=True)
    for index, param in enumerate(actor.params):
        assert param.grad is not None
        assert_bitwise(param.grad, values(0, 0, rank, index, tuple(param.shape)))
        param.grad.mul_(2)
    actor.optimizer.step()
    return [param.detach() for param in actor.params]


def test_at_step_gradients_can_be_read_and_edited_until_the_step() -> None:
    oracle = plain_actor(2, AT_STEP)
    oracle.backward(0, everyone=True)
    for param in oracle.params:
        assert param.grad is not None
        param.grad.mul_(2)  # a power of two: scaling before or after the mean is the same
    oracle.optimizer.step()
    for params in run_threads(2, _read_at_step):
        assert_bitwise(params, [param.detach() for param in oracle.params])


# ---------------------------------------------------------------------------------------------------------------------
# no_sync


def _accumulate(rank: int, world_size: int, reduction: Any) -> list[Tensor]:
    actor = rank_actor(rank, reduction)
    optimizer: Any = actor.optimizer
    for number in range(0, 12, 4):
        with optimizer.no_sync():
            actor.backward(number, everyone=True, only=range(6))
            actor.backward(number + 1, everyone=True, only=range(2, 8))
            if isinstance(reduction, zero_opt.Overlapped):
                assert_bitwise(
                    actor.params[2].grad, values(number, 0, rank, 2, ()) + values(number + 1, 0, rank, 2, ())
                )
        # Parameters 0 to 3 arrive again here; 4 to 7 have arrived under no_sync only.
        actor.backward(number + 2, everyone=True, only=range(4))
        if number == 8:
            with optimizer.no_sync():
                actor.backward(number + 3, everyone=True, only=range(1, 9))
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    return [param.detach() for param in actor.params]


def _accumulate_plainly(world_size: int) -> list[Tensor]:
    """One mean per exchange: of all local sums up to the synchronised backward, and of what came after it."""
    params = make_params()
    optimizer = torch.optim.Adam(two_groups(params))
    for number in range(0, 12, 4):
        before = [(number, range(6)), (number + 1, range(2, 8)), (number + 2, range(4))]
        after = [(number + 3, range(1, 9))] if number == 8 else []
        for index, param in enumerate(params):
            param.grad = None
            # What did not take part in the synchronised backward is exchanged at the step.
            for exchange in [before, after] if index < 4 else [before + after]:
                turns = [turn for turn, used in exchange if index in used]
                if not turns:
                    continue
                total: Any = 0
                for rank in range(world_size):
                    local: Any = 0
                    for turn in turns:
                        local = local + values(turn, 0, rank, index, tuple(param.shape))
                    total = total + local
                param.grad = total / world_size if param.grad is None else param.grad + total / world_size
        optimizer.step()
    return [param.detach() for param in params]


@pytest.mark.parametrize("run", [run_threads, run_processes])
def test_no_sync_keeps_gradients_local_and_reduces_them_once(run: Ranks) -> None:
    expected = _accumulate_plainly(3)
    for params in run(3, _accumulate, OVERLAPPED):
        assert_bitwise(params, expected)


def _count_exchanges(rank: int, world_size: int) -> list[int]:
    actor = rank_actor(rank)
    optimizer: Any = actor.optimizer
    reduction, counts = optimizer._engine.reduction, []
    with optimizer.no_sync():
        actor.backward(0, everyone=True)
        counts.append(len(reduction._futures))
    actor.backward(1, everyone=True)
    counts.append(len(reduction._futures))
    optimizer.step()
    optimizer.close()
    return counts


def test_no_sync_exchanges_nothing_and_the_next_backward_exchanges_each_bucket_once() -> None:
    for before, after in run_threads(2, _count_exchanges):
        assert before == 0
        assert after > 3


def _step_without_sync(rank: int, world_size: int) -> list[Tensor]:
    """Before a step and a clip, twice over; one more backward outside, and what is there is reduced."""
    actor = rank_actor(rank)
    optimizer: Any = actor.optimizer
    for number in (0, 2):
        with optimizer.no_sync():
            actor.backward(number, everyone=True)
        before = [param.detach().clone() for param in actor.params]
        for call in (optimizer.step, lambda: optimizer.clip_grad_norm_(1.0)):
            with pytest.raises(zero_opt.GradientsLocal, match="outside no_sync"):
                call()
        assert_bitwise([param.detach() for param in actor.params], before)
        assert_bitwise(actor.params[1].grad, values(number, 0, rank, 1, (65,)))
        actor.backward(number + 1, everyone=True)
        optimizer.step()
        optimizer.zero_grad()
    for drop in (lambda: [setattr(param, "grad", None) for param in actor.params], optimizer.zero_grad):
        with optimizer.no_sync():
            actor.backward(4, everyone=True)
        drop()
        optimizer.step()  # of nothing, which no_sync has no part in any more
    optimizer.close()
    return [param.detach() for param in actor.params]


@pytest.mark.parametrize("run", [run_threads, run_processes])
def test_a_step_after_no_sync_alone_is_refused_and_can_be_made_good(run: Ranks) -> None:
    params = make_params()
    optimizer = torch.optim.Adam(two_groups(params))
    for number in (0, 2):
        for index, param in enumerate(params):
            shape = tuple(param.shape)
            sums = [values(number, 0, r, index, shape) + values(number + 1, 0, r, index, shape) for r in range(2)]
            param.grad = (sums[0] + sums[1]) / 2
        optimizer.step()
    for found in run(2, _step_without_sync):
        assert_bitwise(found, [param.detach() for param in params])


# ---------------------------------------------------------------------------------------------------------------------
# two owners of one gradient


def _two_live_optimizers(rank: int, world_size: int, reductions: list[Any], clips: bool) -> str:
    params = make_params()
    both = [zero_opt.ShardedOptimizer(params, torch.optim.SGD, lr=0.1, reduction=policy) for policy in reductions]
    try:
        torch.autograd.backward(params, [torch.ones_like(param) for param in params])
        for optimizer in both:
            if clips:
                optimizer.clip_grad_norm_(1.0)
            optimizer.step()
    except zero_opt.GradientConflict as error:
        return str(error)
    finally:
        for optimizer in both:
            optimizer.close()
    return "allowed"


_PAIRS = [[OVERLAPPED, OVERLAPPED], *([OVERLAPPED, other] for other in (AT_STEP, zero_opt.AlreadyReduced()))]


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("reductions", [*_PAIRS, *(pair[::-1] for pair in _PAIRS[1:])], ids=str)
def test_two_live_optimizers_over_the_same_params_are_refused(reductions: list[Any], clips: bool) -> None:
    for message in run_processes(2, _two_live_optimizers, reductions, clips):
        assert "two ShardedOptimizers" in message and "close() the older one" in message


def _set_again(rank: int, world_size: int) -> str:
    actor = _after_backward(rank)
    actor.params[4].grad = torch.ones(300)
    before = [param.detach().clone() for param in actor.params]
    try:
        actor.optimizer.step()
    except zero_opt.GradientConflict as error:
        assert_bitwise([param.detach() for param in actor.params], before)
        actor.optimizer.zero_grad()
        actor.backward(1, everyone=True)
        actor.optimizer.step()
        return str(error)
    finally:
        actor.optimizer.close()
    return "allowed"


def test_a_gradient_set_again_after_it_was_reduced_is_refused_on_every_rank() -> None:
    for message in run_processes(2, _set_again):
        assert "AlreadyReduced()" in message and "parameter 4 " in message


def _set_again_on_one_rank(rank: int, world_size: int) -> str:
    actor = _after_backward(rank)
    if rank == 1:
        actor.params[4].grad = torch.ones(300)
    with pytest.raises(zero_opt.GradientConflict) as caught:
        actor.optimizer.step()
    actor.optimizer.close()
    return str(caught.value)


def test_what_one_rank_alone_did_is_refused_on_every_rank() -> None:
    for message in run_processes(2, _set_again_on_one_rank):
        assert "parameter 4 " in message


def _thaw(rank: int, world_size: int, reduction: Any, frozen: int) -> list[float]:
    """So many of two parameters are frozen when the optimizer is made; what the first steps after that change."""
    params = [torch.nn.Parameter(torch.zeros(4), requires_grad=number >= frozen) for number in range(2)]
    optimizer = zero_opt.ShardedOptimizer(params, torch.optim.SGD, lr=1.0, reduction=reduction)
    optimizer.step()
    seen = []
    for _ in range(2):
        optimizer.zero_grad()
        for param in params:
            param.requires_grad_()
        torch.autograd.backward(params, [torch.full((4,), 1.0 + rank)] * 2)
        optimizer.step()
        seen.append([float(param.detach()[0]) for param in params])
    optimizer.close()
    return [value for values in seen for value in values]


@pytest.mark.parametrize("frozen", [1, 2])
@pytest.mark.parametrize(
    "reduction", [zero_opt.Overlapped(), zero_opt.Overlapped(exchange="backend"), zero_opt.AtStep()]
)
def test_gradients_of_parameters_that_were_frozen_at_first(reduction: Any, frozen: int) -> None:
    """They are planned in the step that meets the first one, which must not be lost."""
    assert run_processes(2, _thaw, reduction, frozen) == [[-1.5, -1.5, -3.0, -3.0]] * 2


# ---------------------------------------------------------------------------------------------------------------------
# the optimizer's own end


def _replace_optimizer(rank: int, world_size: int, how: str) -> list[Tensor]:
    actor = rank_actor(rank)
    actor.backward(0, everyone=True)
    actor.optimizer.step()
    alive = weakref.ref(actor.optimizer)
    if how == "close":
        actor.optimizer.close()  # type: ignore[attr-defined]
    else:
        actor.optimizer.zero_grad()
        actor.optimizer = torch.optim.SGD(actor.params)
        gc.collect()
        assert alive() is None
    for _ in range(2):
        actor.optimizer = zero_opt.ShardedOptimizer(two_groups(actor.params), torch.optim.Adam, reduction=OVERLAPPED)
        actor.backward(1, everyone=True)
        actor.optimizer.step()
        actor.optimizer.close()
    return [param.detach() for param in actor.params]


@pytest.mark.parametrize("how", ["close", "drop"])
def test_a_new_optimizer_takes_over_from_an_old_one(how: str) -> None:
    oracle = plain_actor(2)
    for number in (0, 1, 1):
        oracle.optimizer = torch.optim.Adam(two_groups(oracle.params))
        oracle.optimizer.zero_grad()
        oracle.backward(number, everyone=True)
        oracle.optimizer.step()
    for params in run_processes(2, _replace_optimizer, how):
        assert_bitwise(params, [param.detach() for param in oracle.params])


def _drop_without_zero_grad(rank: int, world_size: int) -> str:
    actor = _after_backward(rank)
    actor.optimizer.step()
    actor.optimizer = torch.optim.SGD(actor.params)
    gc.collect()
    actor.optimizer = zero_opt.ShardedOptimizer(actor.params, torch.optim.SGD, lr=0.1)
    with pytest.raises(zero_opt.GradientConflict) as caught:
        actor.backward(1, everyone=True)
    actor.optimizer.zero_grad()
    actor.backward(1, everyone=True)
    actor.optimizer.step()
    actor.optimizer.close()
    return str(caught.value)


def test_gradients_of_a_dropped_optimizer_are_not_taken_for_zero() -> None:
    for message in run_processes(2, _drop_without_zero_grad):
        assert "zero_grad()" in message


def _use_after_close(rank: int, world_size: int) -> None:
    actor = rank_actor(rank)
    optimizer: Any = actor.optimizer
    optimizer.close()
    optimizer.close()
    uses: list[Callable[[], Any]] = [
        optimizer.step,
        optimizer.consolidate_state_dict,
        optimizer.no_sync,
        lambda: optimizer.clip_grad_norm_(1.0),
        lambda: optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]}),
        lambda: optimizer.load_state_dict({"state": {}, "param_groups": []}),
    ]
    for use in uses:
        with pytest.raises(zero_opt.OptimizerClosed):
            use()
    actor.backward(0, everyone=True)  # nobody listens any more
    assert_bitwise(actor.params[1].grad, values(0, 0, rank, 1, (65,)))


def test_a_closed_optimizer_says_so_and_leaves_gradients_alone() -> None:
    run_threads(2, _use_after_close)


# ---------------------------------------------------------------------------------------------------------------------
# beside DDP


def _under_ddp(rank: int, world_size: int, hooked: bool) -> str:
    models = [DistributedDataParallel(torch.nn.Linear(5, 3)) for _ in range(2)]
    reduction = zero_opt.DDPHook() if hooked else zero_opt.AtStep()
    params = [param for model in models for param in model.parameters()]
    optimizer = zero_opt.ShardedOptimizer(params, torch.optim.Adam, reduction=reduction)
    if hooked:
        models[0].register_comm_hook(optimizer, zero_opt.ddp_hook)
    sum(model(torch.ones(2, 5)).sum() for model in models).backward()  # type: ignore[union-attr]
    with pytest.raises(zero_opt.GradientConflict) as caught:
        optimizer.step()
    optimizer.close()
    return str(caught.value)


@pytest.mark.parametrize("hooked", [False, True], ids=["AtStep", "DDPHook over one of two"])
def test_gradients_that_ddp_reduces_are_not_reduced_again(hooked: bool) -> None:
    for message in run_processes(2, _under_ddp, hooked):
        assert "AlreadyReduced()" in message


def _after_ddp(rank: int, world_size: int) -> None:
    model = torch.nn.Linear(5, 3)
    DistributedDataParallel(model)
    optimizer = zero_opt.ShardedOptimizer(model.parameters(), torch.optim.Adam, reduction=zero_opt.AtStep())
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    optimizer.close()


def test_a_ddp_that_is_gone_does_not_matter() -> None:
    run_processes(2, _after_ddp)


def _steps_after_compiled_autograd(rank: int, world_size: int) -> str:
    """Rank 1 catches what its backward raises, and both ranks step."""
    params = [torch.nn.Parameter(torch.ones(9)) for _ in range(3)]
    optimizer = zero_opt.ShardedOptimizer(params, torch.optim.Adam)
    compiles = torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager"))
    with contextlib.suppress(zero_opt.ConfigConflict), compiles if rank == 1 else contextlib.nullcontext():
        torch.stack([param * param for param in params]).sum().backward()
    with pytest.raises(zero_opt.StepDesync) as caught:
        optimizer.step()
    assert all(bool((param == 1).all()) for param in params)
    optimizer.zero_grad()
    torch.stack([param * param for param in params]).sum().backward()
    optimizer.step()
    optimizer.close()
    return str(caught.value)


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin")  # and leaves it as it is
def test_a_backward_that_compiled_autograd_has_ended_is_not_stepped() -> None:
    for message in run_processes(2, _steps_after_compiled_autograd):
        assert "a backward ended in an exception; call opt.zero_grad() on every rank and repeat it" in message


def _compiled_autograd(rank: int, world_size: int, reduction: zero_opt.ReductionPolicy) -> Tensor:
    param = torch.nn.Parameter(torch.ones(9))
    optimizer = zero_opt.ShardedOptimizer([param], torch.optim.Adam, reduction=reduction)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        (param * param).sum().backward()
    optimizer.step()
    return param.detach()


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin")  # and leaves it as it is
def test_compiled_autograd_is_refused_where_gradients_move() -> None:
    param = torch.nn.Parameter(torch.ones(9))
    optimizer = torch.optim.Adam([param])
    (param * param).sum().backward()
    optimizer.step()
    for found in run_processes(2, _compiled_autograd, zero_opt.AtStep()):
        assert_bitwise(found, param.detach())
    with pytest.raises(zero_opt.ConfigConflict, match=r"compiled autograd .* use reduction=zero_opt.AtStep"):
        run_processes(2, _compiled_autograd, zero_opt.Overlapped())
