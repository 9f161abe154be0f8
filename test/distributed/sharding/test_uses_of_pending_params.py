"""Every way to read or to change parameters while a step is pending: training, or refused."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

import zero_opt
from test.support.harness import run_processes
from test.support.late_results import optimizer_of
from test.support.uses_of_params import ONES, READS, WRITES, Model
from zero_opt import StepPending, WorkerOffload

WAYS = {**READS, **WRITES}


def _refused(call: Callable[[], object]) -> bool:
    try:
        call()
    except StepPending:
        return True
    return False


def _use_while_pending(rank: int, world_size: int, offload: WorkerOffload, overlap: bool) -> list[str]:
    """The ways that no error tells of."""
    silent = []
    model = Model()
    optimizer = optimizer_of(model, overlap, offload)
    for name, way in WAYS.items():
        for _ in range(2):
            model(ONES).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            told = _refused(partial(way, model))
        told = _refused(optimizer.flush) or told
        if not told:
            silent.append(name)
        with torch.no_grad():
            way(model)  # nothing is pending any more
        optimizer.flush()
        assert all(type(param) is nn.Parameter for param in model.parameters())
    optimizer.close()
    return silent


@pytest.mark.parametrize(
    ("offload", "overlap"),
    [(WorkerOffload(delay=1, prediction=1.0, warmup_steps=1), False), (WorkerOffload(delay=1), True)],
)
def test_a_use_is_refused_while_a_step_is_pending(offload: WorkerOffload, overlap: bool) -> None:
    # broadcast_params() is collective, and leaves parameters alone on one rank.
    assert run_processes(1, _use_while_pending, offload, overlap) == [["broadcast_params"]]


def _evaluate(rank: int, world_size: int) -> list[bool]:
    model = Model()
    optimizer = optimizer_of(model, False, WorkerOffload(delay=1))
    model(ONES).square().mean().backward()
    optimizer.step()
    found = [_refused(lambda: torch.no_grad()(model)(ONES)), _refused(lambda: torch.inference_mode()(model)(ONES))]
    found.append(_refused(lambda: copy.deepcopy(model)))
    model(ONES).square().mean().backward()
    found.append(_refused(model.state_dict))  # in the middle of a window
    optimizer.step()
    optimizer.flush()
    model.eval()(ONES)
    optimizer.close()
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_evaluation_is_refused_while_a_step_is_pending(world_size: int) -> None:
    assert run_processes(world_size, _evaluate) == [[True] * 4] * world_size


class Scale(torch.autograd.Function):
    """A Function whose forward and backward read the weight with gradients disabled."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t().clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight.clone(), grad.t() @ x


class Own(Model):
    """Training that reads parameters with gradients disabled, or reads what autograd does not record."""

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.first, x.requires_grad_(), use_reentrant=True)
        x = checkpoint(self.second, x, use_reentrant=False)
        return Scale.apply(x, self.second.weight) / self.second.weight.detach().abs().max()  # type: ignore[no-any-return]


class Normed(Model):
    """Its weight is read by a function that disables gradients."""

    def __init__(self) -> None:
        super().__init__()
        spectral_norm(self.first)


class Compiled(Model):
    """Called as torch.compile makes it, in one graph."""


def _train(rank: int, world_size: int, kind: type[Model]) -> bool:
    """Whether an evaluation is refused after some training that is not."""
    torch.manual_seed(0)
    model = kind()
    call = torch.compile(model, backend="eager", fullgraph=True) if kind is Compiled else model
    optimizer = optimizer_of(model, False, WorkerOffload(delay=1), reduction=zero_opt.AlreadyReduced)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for _ in range(3):
        scaler.scale(call(ONES.clone()).square().mean() + model.second.weight.square().sum()).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    with torch.no_grad(), pytest.raises(Exception, match="step for it is pending") as error:
        call(ONES.clone())
    optimizer.flush()
    with torch.no_grad():
        call(ONES.clone())
    optimizer.close()
    return type(error.value) is StepPending or kind is Compiled


@pytest.mark.parametrize("kind", [Model, Own, Normed, Compiled])
def test_training_is_let_read_late_parameters(kind: type[Model]) -> None:
    assert run_processes(1, _train, kind) == [True]


def test_parameters_of_an_optimizer_that_is_gone() -> None:
    model = Model()
    optimizer = optimizer_of(model, False, WorkerOffload(delay=1))
    model(ONES).square().mean().backward()
    optimizer.step()
    assert _refused(model.state_dict)
    del optimizer
    gc.collect()
    assert all(type(param) is nn.Parameter for param in model.parameters())
    model.state_dict()
