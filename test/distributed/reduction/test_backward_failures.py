"""A backward that fails, on some ranks or on all, does not touch what comes after zero_grad()."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor

import zero_opt
from test.support.harness import assert_bitwise, run_processes
from test.support.scenario import BUCKET_MB
from test.support.tripwire import Failed, Tripwire
from zero_opt.sharding.buckets import GradBucket

STEPS, FAILED = 6, (1, 3)
WIDTH, DEPTH = 24, 8


def _model() -> torch.nn.ModuleList:
    torch.manual_seed(0)
    return torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))


def _loss(model: torch.nn.ModuleList, step: int, rank: int, armed: bool) -> Tensor:
    value = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))
    for depth, layer in enumerate(model):
        value = torch.tanh(layer(Tripwire.apply(value, armed and depth == 3)))  # type: ignore[no-untyped-call]
    return value.square().mean()


def _train(rank: int, world_size: int, where: str, who: tuple[int, ...], exchange: str) -> list[Tensor]:
    """Train; ``where`` and on which ranks (``who``) the extra windows before the steps in FAILED go wrong."""
    model = _model()
    optimizer = zero_opt.ShardedOptimizer(
        model.parameters(), torch.optim.Adam, lr=0.01, reduction=zero_opt.Overlapped(BUCKET_MB, exchange=exchange)
    )
    for step in range(STEPS):
        if step in FAILED and where:
            try:
                fails = rank in who
                loss = _loss(model, 50 + step, rank, armed=fails and where == "backward")
                if fails and where == "forward":
                    raise Failed
                loss.backward()
            except Failed:
                pass
            else:
                assert not fails
            optimizer.zero_grad()
        optimizer.zero_grad()
        _loss(model, step, rank, armed=False).backward()
        optimizer.step()
    optimizer.close()
    return [param.detach() for param in model.parameters()]


@pytest.mark.parametrize("exchange", ["auto", "backend"])
@pytest.mark.parametrize(
    ("where", "who"),
    [("backward", (0,)), ("backward", (2,)), ("backward", (1, 2)), ("backward", (0, 1, 2)), ("forward", (1,))],
)
def test_training_goes_on_as_if_the_failed_window_had_not_been(where: str, who: tuple[int, ...], exchange: str) -> None:
    for failed, good in zip(
        run_processes(3, _train, where, who, exchange), run_processes(3, _train, "", (), exchange), strict=True
    ):
        assert_bitwise(failed, good)


def _optimizer(model: torch.nn.Module) -> zero_opt.ShardedOptimizer:
    return zero_opt.ShardedOptimizer(model.parameters(), torch.optim.Adam, reduction=zero_opt.Overlapped(BUCKET_MB))


def _step_without_the_failed_rank(rank: int, world_size: int) -> str:
    """Rank 1 fails and calls zero_grad(); rank 0, which did not, steps."""
    model = _model()
    optimizer = _optimizer(model)
    before = [param.detach().clone() for param in model.parameters()]
    try:
        _loss(model, 0, rank, armed=rank == 1).backward()
    except Failed:
        optimizer.zero_grad()
        _loss(model, 0, rank, armed=False).backward()
    with pytest.raises(zero_opt.StepDesync) as caught:
        optimizer.step()
    assert_bitwise([param.detach() for param in model.parameters()], before)
    # The way out that the message names.
    optimizer.zero_grad()
    _loss(model, 1, rank, armed=False).backward()
    optimizer.step()
    optimizer.close()
    return str(caught.value)


def test_a_rank_that_did_not_call_zero_grad_is_told_so_and_can_go_on() -> None:
    for message in run_processes(2, _step_without_the_failed_rank):
        assert "rank 1 has called zero_grad() 1 times and rank 0 0 times" in message


class Tripped:
    """A hook of the user's that raises at the first gradient after it was armed."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.armed = False
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(self)

    def __call__(self, param: Tensor) -> None:
        if self.armed:
            self.armed = False
            raise Failed


def _step_after_failure(
    rank: int, world_size: int, who: tuple[int, ...], in_no_sync: bool, in_hook: bool
) -> list[Tensor]:
    """Ranks step although the backward of some has failed: a part of the gradient is missing."""
    model = _model()
    tripped = Tripped(model)
    optimizer = _optimizer(model)
    before = [param.detach().clone() for param in model.parameters()]
    if who:
        with contextlib.suppress(Failed), optimizer.no_sync() if in_no_sync else contextlib.nullcontext():
            tripped.armed = in_hook and rank in who
            _loss(model, 0, rank, armed=rank in who and not in_hook).backward()
        if in_no_sync:  # what is missing was not to be sent, but added to what this one sends
            _loss(model, 0, rank, armed=False).backward()
        with pytest.raises(zero_opt.StepDesync, match="a backward ended in an exception"):
            optimizer.step()
        assert_bitwise([param.detach() for param in model.parameters()], before)
        optimizer.zero_grad()
    for step in range(2):
        _loss(model, step, rank, armed=False).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    return [param.detach() for param in model.parameters()]


@pytest.mark.parametrize("in_hook", [False, True])
@pytest.mark.parametrize("in_no_sync", [False, True])
@pytest.mark.parametrize("who", [(1,), (0, 1)])
def test_a_step_after_a_failure_is_refused_on_all_ranks(who: tuple[int, ...], in_no_sync: bool, in_hook: bool) -> None:
    failed = run_processes(2, _step_after_failure, who, in_no_sync, in_hook)
    for ours, good in zip(failed, run_processes(2, _step_after_failure, (), False, False), strict=True):
        assert_bitwise(ours, good)


def _drop_after_unequal_backwards(rank: int, world_size: int) -> str:
    """The second forward of rank 1 fails; both ranks drop p.grad, which no epoch counts."""
    params = [torch.nn.Parameter(torch.zeros(300)) for _ in range(3)]
    optimizer = zero_opt.ShardedOptimizer(params, torch.optim.SGD, lr=1.0, reduction=zero_opt.Overlapped(BUCKET_MB))
    for value in (1.0, 2.0)[: 2 - rank]:
        torch.autograd.backward(params, [torch.full_like(param, value) for param in params])
    for param in params:
        param.grad = None
    torch.autograd.backward(params, [torch.full_like(param, 4.0) for param in params])
    with pytest.raises(zero_opt.GradientConflict) as caught:
        optimizer.step()
    assert all(not param.detach().any() for param in params)
    optimizer.close()
    return str(caught.value)


def test_gradients_dropped_after_unequal_numbers_of_backwards_are_refused() -> None:
    for message in run_processes(2, _drop_after_unequal_backwards):
        assert "unequal" in message and "call opt.zero_grad()" in message


def _given_up(rank: int, world_size: int, exchange: Any) -> list[Tensor]:
    """Each rank is told of the exchange of one step that the other has skipped it."""
    params = [torch.nn.Parameter(torch.ones(300)), torch.nn.Parameter(torch.ones(70))]
    optimizer = zero_opt.ShardedOptimizer(
        params, torch.optim.SGD, lr=0.1, reduction=zero_opt.AtStep(0.001, exchange=exchange)
    )
    in_stages = GradBucket.reduce_in_stages

    def skipped(*args: Any) -> Any:
        yield from in_stages(*args)
        return False

    for step in range(3):
        for param in params:
            param.grad = torch.full_like(param, 1.0 + rank + step)
        if step == 1:
            before = [param.detach().clone() for param in params]
            GradBucket.reduce_in_stages = skipped  # type: ignore[method-assign]
            with pytest.raises(zero_opt.StepDesync, match="another rank left this step early"):
                optimizer.step()
            GradBucket.reduce_in_stages = in_stages  # type: ignore[method-assign]
            assert_bitwise([param.detach() for param in params], before)
            optimizer.zero_grad()
            continue
        optimizer.step()
    optimizer.close()
    return [param.detach() for param in params]


@pytest.mark.parametrize("exchange", ["auto", "backend"])
def test_a_sum_that_lacks_another_rank_is_not_stepped_by(exchange: Any) -> None:
    params = [torch.nn.Parameter(torch.ones(300)), torch.nn.Parameter(torch.ones(70))]
    plain = torch.optim.SGD(params, lr=0.1)
    for mean in (1.5, 3.5):
        for param in params:
            param.grad = torch.full_like(param, mean)
        plain.step()
    for found in run_processes(2, _given_up, exchange):
        assert_bitwise(found, [param.detach() for param in params])
