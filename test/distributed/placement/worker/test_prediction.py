"""WorkerOffload(delay=1) with predicted parameters, and with steps at the beginning that are not late."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_opt
from test.support.harness import assert_bitwise, run_processes
from test.support.late_params import as_they_are
from test.support.scenario import OVERLAPPED
from test.support.worker_training import (
    DTYPES,
    LRS,
    assert_as_simulated,
    backward,
    make,
    make_params,
    mean_grads,
    train_ranks,
    worker_of,
)
from zero_opt import AdamState, ConfigConflict, ConfigError, StepPending, WorkerOffload

MASTERS = AdamState(master="float32")
FORMS = [
    AdamState(master="split"),
    AdamState(moments="bfloat16", master="split"),
    AdamState(moments="block8", master="float32"),
]


def set_lrs(optimizer: torch.optim.Optimizer, step: int) -> None:
    for index, group in enumerate(optimizer.param_groups):
        group["lr"] = LRS[(step + index) % len(LRS)]


class Simulation:
    """The same by one plain optimizer over the true parameters, beside those that gradients are taken at."""

    cls: Any = zero_opt.CPUAdamW
    options: Mapping[str, Any] = {}

    def __init__(self, world_size: int, dtype: torch.dtype, form: AdamState, factor: float) -> None:
        self.world_size, self.factor = world_size, factor
        self.params, self.shown = make_params(dtype), make_params(dtype)
        self.optimizer = self.cls(self.grouped(), state=form, **self.options)
        self.waiting: tuple[list[Tensor | None], int] | None = None

    def grouped(self) -> list[dict[str, Any]]:
        return [{"params": self.params}]

    def grad_scale(self) -> float:
        return 1.0

    @staticmethod
    def masters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
        states = optimizer.state_dict()["state"]
        params = [param for group in optimizer.param_groups for param in group["params"]]
        masters = [states.get(index, {}).get("master") for index in range(len(params))]
        pairs = zip(masters, params, strict=True)
        return [(param.detach().float() if master is None else master).clone() for master, param in pairs]

    def masters_ahead(self, grads: list[Tensor | None], scale: float) -> list[Tensor]:
        """Those that another step with the same gradients would make."""
        ahead = copy.deepcopy(self.optimizer)
        params = [param for group in ahead.param_groups for param in group["params"]]
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        ahead.step(grad_scale=scale)
        return self.masters(ahead)

    def apply(self, grads: list[Tensor | None], step: int, factor: float) -> None:
        set_lrs(self.optimizer, step)
        for param, grad in zip(self.params, grads, strict=True):
            param.grad = grad
        scale = self.grad_scale()
        self.optimizer.step(grad_scale=scale)
        masters, ahead = self.masters(self.optimizer), self.masters_ahead(grads, scale)
        for new, next_, shown, param, grad in zip(masters, ahead, self.shown, self.params, grads, strict=True):
            predicted = grad is not None and factor
            shown.data.copy_(new + factor * (next_ - new) if predicted else param.detach())

    def step(self, step: int, late: bool) -> list[Tensor]:
        grads = mean_grads(self.shown, step, self.world_size)
        if not late:
            self.apply(grads, step, 0.0)
            return self.seen()
        if self.waiting is not None:
            self.apply(*self.waiting, self.factor)
        self.waiting = grads, step
        return self.seen()

    def flush(self) -> list[Tensor]:
        if self.waiting is not None:
            self.apply(*self.waiting, 0.0)
        self.waiting = None
        for shown, param in zip(self.shown, self.params, strict=True):
            shown.data.copy_(param.detach())
        return self.seen()

    def seen(self) -> list[Tensor]:
        return [shown.detach().clone() for shown in self.shown]


def _simulated(
    world_size: int,
    steps: int,
    offload: WorkerOffload,
    dtype: torch.dtype = torch.float32,
    form: AdamState = MASTERS,
    simulated: type[Simulation] = Simulation,
) -> Any:
    simulation = simulated(world_size, dtype, form, offload.prediction)
    seen = [simulation.step(step, step >= offload.warmup_steps) for step in range(steps)]
    return [*seen, simulation.flush()], simulation.optimizer.state_dict()["state"]


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("world_size", "dtype", "factor"),
    [
        *((world, dtype, 1.7) for world in (1, 2, 3) for dtype in DTYPES),
        (2, torch.float32, 0.0),
        (2, torch.bfloat16, 1.0),
    ],
)
def test_bits_of_a_plain_optimizer_whose_forwards_are_on_predictions(
    world_size: int, dtype: torch.dtype, factor: float
) -> None:
    offload = WorkerOffload(delay=1, warmup_steps=3, prediction=factor)

    def run(rank: int, world_size: int) -> Any:
        return train_ranks(rank, world_size, 12, dtype, offload=offload)

    assert_as_simulated(run_processes(world_size, run), _simulated(world_size, 12, offload, dtype))


class SGDSimulation(Simulation):
    """With Nesterov's momentum, which the first step makes."""

    cls = zero_opt.CPUSGD
    options: Mapping[str, Any] = {"momentum": 0.9, "nesterov": True}


class AdagradSimulation(Simulation):
    """With steps that get smaller by themselves, too."""

    cls = zero_opt.CPUAdagrad
    options: Mapping[str, Any] = {"initial_accumulator_value": 0.1, "lr_decay": 0.1}


class LionSimulation(Simulation):
    """With decoupled weight decay."""

    cls = zero_opt.CPULion
    options: Mapping[str, Any] = {"weight_decay": 0.1}


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("simulated", [SGDSimulation, AdagradSimulation, LionSimulation])
def test_predictions_of_other_updates(simulated: type[Simulation], dtype: torch.dtype) -> None:
    offload = WorkerOffload(delay=1, prediction=1.5)

    def run(rank: int, world_size: int) -> Any:
        options = {"cls": simulated.cls, "state": MASTERS, **simulated.options}
        return train_ranks(rank, world_size, 9, dtype, offload=offload, **options)

    assert_as_simulated(run_processes(2, run), _simulated(2, 9, offload, dtype, simulated=simulated))


@pytest.mark.parametrize("reduction", [zero_opt.AtStep(), zero_opt.AlreadyReduced()])
def test_with_other_reductions(reduction: Any) -> None:
    offload = WorkerOffload(delay=1, prediction=1.5)

    def run(rank: int, world_size: int) -> Any:
        return train_ranks(0, world_size, 9, offload=offload, reduction=reduction)

    found = run_processes(2, run)
    simulation = _simulated(1, 9, offload)
    assert_bitwise(found[0][0], simulation[0])
    assert_bitwise(found[1][0], simulation[0])
    assert_bitwise(found[0][1], simulation[1])


@pytest.mark.parametrize("form", FORMS)
def test_in_compact_forms(form: AdamState) -> None:
    offload = WorkerOffload(delay=1, warmup_steps=1, prediction=1.0)

    @as_they_are
    def run(rank: int, world_size: int) -> Any:
        params = make_params(torch.bfloat16)
        optimizer = zero_opt.ShardedOptimizer(
            params, zero_opt.CPUAdamW, reduction=OVERLAPPED, offload=offload, state=form
        )
        seen = []
        for step in range(8):
            optimizer.param_groups[0]["lr"] = LRS[step % len(LRS)]
            optimizer.zero_grad()
            backward(params, step, rank)
            optimizer.step()
            seen.append([param.detach().clone() for param in params])
        optimizer.flush()
        seen.append([param.detach().clone() for param in params])
        optimizer.close()
        return seen

    expected = _simulated(2, 8, offload, torch.bfloat16, form)[0]
    for rank, found in enumerate(run_processes(2, run)):
        assert_bitwise(found, expected, f"rank {rank}")


def test_a_worker_that_is_killed_at_any_time_loses_nothing() -> None:
    offload = WorkerOffload(delay=1, prediction=1.0)

    def kill(optimizer: zero_opt.ShardedOptimizer, step: int, rank: int) -> None:
        if step % 3 == rank:
            os.kill(worker_of(optimizer)._handles.child.pid, signal.SIGKILL)

    def run(rank: int, world_size: int) -> Any:
        return train_ranks(rank, world_size, 40, offload=offload, meanwhile=kill)

    assert_as_simulated(run_processes(2, run), _simulated(2, 40, offload))


CLIP, MIXED = 34.0, 500


def _groups(params: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [
        {"params": params[:2], "weight_decay": 0.1},
        {"params": params[2:], "weight_decay": 0.0, "betas": (0.8, 0.99), "eps": 1e-6},
    ]


class MixedSimulation(Simulation):
    """With groups, and gradients clipped to a norm."""

    def __init__(self, world_size: int, dtype: torch.dtype, form: AdamState, factor: float) -> None:
        super().__init__(world_size, dtype, form, factor)
        self.scales: list[float] = []

    def grouped(self) -> list[dict[str, Any]]:
        return _groups(self.params)

    def grad_scale(self) -> float:
        squares = [param.grad.double().square().sum() for param in self.params if param.grad is not None]
        norm = torch.stack(squares).sum().sqrt().float()
        self.scales.append(float(torch.clamp(CLIP / (norm + 1e-6), max=1.0)))
        return self.scales[-1]


def _overflows(step: int) -> bool:
    return step % 7 == 4


@as_they_are
def _mixed(rank: int, world_size: int, offload: WorkerOffload) -> Any:
    params = make_params()
    optimizer = make(_groups(params), offload=offload, max_grad_norm=CLIP, checks=zero_opt.Checks(nonfinite="skip"))
    seen = []
    for step in range(MIXED):
        set_lrs(optimizer, step)
        optimizer.zero_grad()
        backward(params, step, rank)
        if _overflows(step) and rank == world_size - 1:
            params[1].backward(torch.full_like(params[1], float("inf")))
        if step % 97 == 50 + rank:
            os.kill(worker_of(optimizer)._handles.child.pid, signal.SIGKILL)
        optimizer.step()
        seen.append([param.detach().clone() for param in params])
        if step % 200 == 150:
            optimizer.flush()
            seen.append([param.detach().clone() for param in params])
    optimizer.consolidate_state_dict()
    seen.append([param.detach().clone() for param in params])
    state, deaths = optimizer.state_dict()["state"] if rank == 0 else None, worker_of(optimizer).deaths
    skipped = optimizer.skipped_steps
    optimizer.close()
    return seen, state, deaths, skipped


@pytest.mark.parametrize("world_size", [1, 2])
def test_many_mixed_steps(world_size: int) -> None:
    """Clipped, skipped, by a schedule, of two groups, some parameters unused, flushed, and with workers killed."""
    offload = WorkerOffload(delay=1, warmup_steps=20, prediction=1.3)
    found = run_processes(world_size, lambda rank, world_size: _mixed(rank, world_size, offload))
    simulation, expected, made = MixedSimulation(world_size, torch.float32, MASTERS, offload.prediction), [], 0
    for step in range(MIXED):
        if _overflows(step):
            expected.append(simulation.seen())
        else:
            expected.append(simulation.step(step, late=made >= offload.warmup_steps))
            made += 1
        if step % 200 == 150:
            expected.append(simulation.flush())
    expected.append(simulation.flush())
    assert min(simulation.scales) < 1.0 == max(simulation.scales)
    for rank, (seen, _, deaths, skipped) in enumerate(found):
        assert_bitwise(seen, expected, f"rank {rank}")
        assert deaths > 0
        assert skipped == MIXED - made
    assert_bitwise(found[0][1], simulation.optimizer.state_dict()["state"], "state")


@as_they_are
def test_large_runs_whose_results_go_past_the_caches() -> None:
    """Blocks of a run that is stepped in registers without predictions, one that is cut, and several threads."""
    numel, offload = (1 << 20) + 37, WorkerOffload(delay=1, prediction=1.0, threads=2)
    start = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    true, param = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    plain = zero_opt.CPUAdamW([true], lr=0.01)
    optimizer = make([param], offload=offload, lr=0.01)
    predicted = start
    for step in range(3):
        param.grad, true.grad = None, torch.randn(numel, generator=torch.Generator().manual_seed(step))
        param.backward(true.grad)
        optimizer.step()
        assert_bitwise(param.detach(), predicted)
        plain.step()
        true_now, again = true.detach().clone(), copy.deepcopy(plain)
        ahead = again.param_groups[0]["params"][0]
        ahead.grad = true.grad
        again.step()
        predicted = true_now + (ahead.detach() - true_now)
    optimizer.flush()
    assert_bitwise(param.detach(), true.detach())
    optimizer.close()


@as_they_are
def test_a_flush_in_the_middle_and_a_checkpoint_go_on_as_if_nothing_were() -> None:
    """State saved after a flush, and loaded into a fresh optimizer, which has no steps to make without delay."""
    offload = WorkerOffload(delay=1, warmup_steps=2, prediction=1.0)
    simulation = Simulation(1, torch.float32, AdamState(), offload.prediction)
    expected = [simulation.step(step, step >= 2) for step in range(5)]
    expected += [simulation.flush()]
    expected += [simulation.step(step, late=True) for step in range(5, 9)]
    params, found = make_params(), []
    optimizer = make(params, offload=offload)

    def train(steps: range) -> None:
        for step in steps:
            optimizer.param_groups[0]["lr"] = LRS[step % len(LRS)]
            optimizer.zero_grad()
            backward(params, step, 0)
            optimizer.step()
            found.append([param.detach().clone() for param in params])

    train(range(5))
    optimizer.flush()
    found.append([param.detach().clone() for param in params])
    saved = optimizer.state_dict()
    optimizer.close()
    params = [nn.Parameter(param.detach().clone()) for param in params]
    optimizer = make(params, offload=offload)
    optimizer.load_state_dict(saved)
    train(range(5, 9))
    optimizer.close()
    assert_bitwise(found, expected)


@as_they_are
def _load_in_the_middle(rank: int, world_size: int) -> Any:
    params = make_params()
    optimizer = make(params, offload=WorkerOffload(delay=1, prediction=1.0), lr=LRS[0])
    for step in range(4):
        optimizer.param_groups[0]["lr"] = LRS[step % len(LRS)]
        backward(params, step, rank)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.load_state_dict(torch.optim.AdamW(make_params(), fused=True).state_dict())
    found = [param.detach().clone() for param in params]
    optimizer.close()
    return found


def test_a_load_leaves_no_parameter_predicted() -> None:
    simulation = Simulation(2, torch.float32, AdamState(), 1.0)
    for step in range(4):
        simulation.step(step, late=True)
    expected = simulation.flush()
    for found in run_processes(2, _load_in_the_middle):
        assert_bitwise(found, expected)


@as_they_are
def test_a_write_to_a_parameter_that_shows_a_prediction_is_refused() -> None:
    params = make_params()
    optimizer = make(params, offload=WorkerOffload(delay=1, prediction=1.0))
    for _ in range(2):
        torch.autograd.backward(params, [torch.ones_like(param) for param in params])
        optimizer.step()
        optimizer.zero_grad()
    torch.autograd.backward(params[1:], [torch.ones_like(param) for param in params[1:]])
    optimizer.step()  # params[0] shows a prediction, and is not in the step that is pending
    with torch.no_grad():
        params[0].mul_(2)
    torch.autograd.backward(params, [torch.ones_like(param) for param in params])
    with pytest.raises(StepPending, match="changed while a step for it was pending"):
        optimizer.step()
    optimizer.close()


def test_what_the_fields_take() -> None:
    assert WorkerOffload(delay=1, warmup_steps=5, prediction=1).prediction == 1
    with pytest.raises(ConfigError, match=r"WorkerOffload\.prediction must be finite and not negative, got -1"):
        WorkerOffload(delay=1, prediction=-1)
    with pytest.raises(ConfigError, match=r"WorkerOffload\.warmup_steps must be at least 0"):
        WorkerOffload(delay=1, warmup_steps=-1)
    with pytest.raises(ConfigConflict, match=r"WorkerOffload\.prediction is for delay=1"):
        WorkerOffload(prediction=1.0)
    with pytest.raises(ConfigConflict, match=r"WorkerOffload\.warmup_steps is for delay=1"):
        WorkerOffload(warmup_steps=1)
    with pytest.raises(ConfigConflict, match="not with selective"):
        WorkerOffload(delay=1, prediction=1.0, selective=zero_opt.Selective())


@pytest.mark.parametrize("moments", ["float32", "bfloat16", "block8"])
def test_steps_that_are_not_late_round_ties_as_split_masters_do(moments: Any) -> None:
    """The new master, 0.7421875 * 0.99 - 0.1 or about so, is as far from 0.6328125 as from 0.63671875."""
    offload = WorkerOffload(delay=1, prediction=1.0, warmup_steps=1)
    plain, param = (nn.Parameter(torch.full((200,), 0.7421875, dtype=torch.bfloat16)) for _ in range(2))
    options: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1, "state": AdamState(moments, "split")}
    reference = zero_opt.CPUAdamW([plain], **options)
    optimizer = zero_opt.ShardedOptimizer([param], zero_opt.CPUAdamW, offload=offload, **options)
    for stepped, stepper in ((plain, reference), (param, optimizer)):
        stepped.grad = torch.full((200,), 0.53125, dtype=torch.bfloat16)
        stepper.step()
    optimizer.flush()
    assert float(plain[0].detach()) == 0.63671875  # a tie, rounded away from 0
    assert_bitwise(param.detach(), plain.detach())
    optimizer.close()
