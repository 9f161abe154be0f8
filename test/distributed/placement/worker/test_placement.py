"""WorkerOffload: the bits of a step in process, at once or a step later, whatever happens to the worker."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_opt
from test.support.harness import assert_bitwise, run_processes
from test.support.late_params import as_they_are
from test.support.scenario import BUCKET_MB, OVERLAPPED, Case, case, expected, train, values
from test.support.worker_training import (
    DTYPES,
    LATER,
    NATIVE,
    NOW,
    SHAPES,
    assert_as_simulated,
    backward,
    make,
    make_params,
    simulate,
    train_ranks,
    worker_of,
)

# -- bits -------------------------------------------------------------------------------------------------------------


def _train_case(rank: int, world_size: int, adam: Case, reduction: Any) -> Any:
    return train(adam, rank, world_size, reduction, offload=NOW)


@pytest.mark.parametrize("reduction", [OVERLAPPED, zero_opt.AtStep(BUCKET_MB), zero_opt.AlreadyReduced()])
@pytest.mark.parametrize("world_size", [1, 2])
def test_same_bits_as_a_plain_optimizer(world_size: int, reduction: Any) -> None:
    """Three groups, one with amsgrad, parameters that no rank uses, several backwards."""
    second = {"lr": 0.02, "amsgrad": True, "weight_decay": 0.3}
    adam = case(torch.optim.AdamW, second, fused=True, lr=0.01)
    params, state = expected(case(zero_opt.CPUAdamW, second, lr=0.01), world_size, reduction)
    for rank, (found, found_state) in enumerate(run_processes(world_size, _train_case, adam, reduction)):
        assert_bitwise(found, params, f"rank {rank}")
        if found_state is not None:
            assert_bitwise(found_state["state"], state["state"], "state")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world_size", [1, 2])
def test_every_dtype(world_size: int, dtype: torch.dtype) -> None:
    found = run_processes(world_size, train_ranks, 6, dtype)
    assert_as_simulated(found, simulate(world_size, 6, 0, dtype))


@as_they_are
def _train_placed(rank: int, world_size: int, cls: Any, offload: Any) -> Any:
    params = make_params()
    optimizer = zero_opt.ShardedOptimizer(params, cls, reduction=OVERLAPPED, offload=offload, fused=True, maximize=True)
    for step in range(4):
        optimizer.zero_grad()
        backward(params, step, rank)
        optimizer.step()
    optimizer.consolidate_state_dict()
    state = optimizer.state_dict() if rank == 0 else None
    optimizer.close()
    return [param.detach() for param in params], state


@pytest.mark.parametrize("cls", [*NATIVE, *NATIVE.values()])
def test_same_bits_as_on_the_device(cls: Any) -> None:
    on_device, in_worker = (run_processes(2, _train_placed, cls, offload) for offload in (None, NOW))
    assert_bitwise(on_device, in_worker)


def _train_alone(rank: int, world_size: int, **options: Any) -> Any:
    """Without any process group."""
    assert not torch.distributed.is_initialized()
    return train_ranks(0, 1, 6, **options)


@pytest.mark.parametrize("delay", [0, 1])
def test_without_a_process_group(delay: int) -> None:
    def run(rank: int, world_size: int) -> Any:
        return _train_alone(rank, world_size, offload=zero_opt.WorkerOffload(delay))

    assert_as_simulated(run_processes(1, run, backend=None), simulate(1, 6, delay))


# -- a step later -----------------------------------------------------------------------------------------------------


def _train_views(optimizer: Any) -> Tensor:
    flat = values(31, 0, 0, 0, (3000,))
    params = [nn.Parameter(flat[start : start + 750]) for start in range(0, 3000, 750)]  # one version counter
    stepper = optimizer(params)
    for step in range(4):
        torch.autograd.backward(params, [values(step, 1, 0, index, (750,)) for index in range(4)])
        stepper.step()
        stepper.zero_grad()
    if isinstance(stepper, zero_opt.ShardedOptimizer):
        stepper.flush()
        stepper.close()
    return flat


@pytest.mark.parametrize("offload", [NOW, LATER])
def test_parameters_that_are_views_of_one_tensor(offload: Any) -> None:
    plain = _train_views(lambda params: zero_opt.CPUAdamW(params, lr=0.1))
    assert_bitwise([_train_views(lambda params: make(params, offload=offload, lr=0.1))], [plain])


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_update_lands_a_step_later(world_size: int) -> None:
    def run(rank: int, world_size: int) -> Any:
        return train_ranks(rank, world_size, 200, offload=LATER)

    assert_as_simulated(run_processes(world_size, run), simulate(world_size, 200, 1))


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (zero_opt.CPUSGD, {"momentum": 0.9, "dampening": 0.2, "weight_decay": 0.1}),
        (zero_opt.CPUAdagrad, {"initial_accumulator_value": 0.1}),
        (zero_opt.CPULion, {"weight_decay": 0.1}),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_other_updates_at_once_and_a_step_later(cls: Any, options: dict[str, Any], dtype: torch.dtype) -> None:
    """Gradients depend on where the parameters are, so a result that lands at another time shows."""
    form = {"state": zero_opt.AdamState(master="float32")}
    for delay in (0, 1):

        def run(rank: int, world_size: int, delay: int = delay) -> Any:
            offload = zero_opt.WorkerOffload(delay)
            return train_ranks(rank, world_size, 9, dtype, cls=cls, offload=offload, **options, **form)

        assert_as_simulated(run_processes(2, run), simulate(2, 9, delay, dtype, cls, **options))


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("reduction", [zero_opt.AtStep(BUCKET_MB), zero_opt.AtStep(exchange="backend")])
def test_a_step_later_in_other_ways(dtype: torch.dtype, reduction: Any) -> None:
    def run(rank: int, world_size: int) -> Any:
        return train_ranks(rank, world_size, 9, dtype, offload=LATER, reduction=reduction)

    assert_as_simulated(run_processes(2, run), simulate(2, 9, 1, dtype))


@as_they_are
def _clip(rank: int, world_size: int, delay: int, by_call: bool, zero: bool) -> Any:
    """Gradients do not depend on the parameters, so that only the time of landing differs."""
    params = make_params()
    optimizer = make(params, offload=zero_opt.WorkerOffload(delay), max_grad_norm=None if by_call else 3.0)
    for step in range(7):
        if zero:
            optimizer.zero_grad()
        torch.autograd.backward(params, [values(step, 1, rank, i, shape) for i, shape in enumerate(SHAPES)])
        if by_call:
            optimizer.clip_grad_norm_(2.0)
        optimizer.step()
        if step == 4:
            optimizer.step()  # the same gradients again, as torch applies them again
    optimizer.flush()
    optimizer.consolidate_state_dict()
    state = optimizer.state_dict() if rank == 0 else None
    optimizer.close()
    return [param.detach() for param in params], state


@pytest.mark.parametrize("by_call", [False, True])
@pytest.mark.parametrize("zero", [False, True])
def test_clipping_and_accumulation(by_call: bool, zero: bool) -> None:
    """Without zero_grad, what a backward adds to is what the worker may be reading."""
    results = [run_processes(2, _clip, delay, by_call, zero) for delay in (0, 1)]
    assert_bitwise(results[0], results[1])
    assert_bitwise(results[0][0][0], results[0][1][0])


def _accumulate_plain(by_worker: bool) -> Any:
    params = make_params()
    optimizer: Any = make(params, offload=LATER) if by_worker else zero_opt.CPUAdamW(params)
    for step in range(5):
        torch.autograd.backward(params, [values(step, 1, 0, i, shape) for i, shape in enumerate(SHAPES)])
        optimizer.step()
    if by_worker:
        optimizer.flush()
        optimizer.close()
    return [param.detach() for param in params]


@as_they_are
def test_gradients_accumulate_over_steps_as_in_torch() -> None:
    assert_bitwise(_accumulate_plain(True), _accumulate_plain(False))


@as_they_are
def test_what_is_pending() -> None:
    params = make_params()
    optimizer = make(params, offload=LATER)
    optimizer.state_dict()  # nothing is
    start = [param.detach().clone() for param in params]
    backward(params, 1, 0)
    optimizer.step()
    assert_bitwise([param.detach() for param in params], start)
    with pytest.raises(zero_opt.StepPending, match=r"opt\.flush\(\)"):
        optimizer.state_dict()
    optimizer.flush()
    optimizer.flush()
    assert not torch.equal(params[0], start[0])
    assert optimizer.state_dict()["state"][0]["step"] == 1
    saved = optimizer.state_dict()
    at = [param.detach().clone() for param in params]
    optimizer.zero_grad()
    backward(params, 2, 0)
    optimizer.step()
    optimizer.load_state_dict(saved)  # forgets it
    optimizer.flush()
    assert_bitwise([param.detach() for param in params], at)
    assert_bitwise(optimizer.state_dict(), saved)
    optimizer.close()


# -- what the user does to parameters ---------------------------------------------------------------------------------


def _edit(params: list[nn.Parameter]) -> None:
    """Overwrite one parameter, scale a part of another, re-point a third and leave one alone."""
    with torch.no_grad():
        params[0].fill_(0.25)
        params[1][3:40] *= 2
        params[2].data = params[2].detach().clone() + 1


def _backward_fixed(params: list[nn.Parameter], step: int) -> None:
    """Gradients that do not depend on the parameters."""
    torch.autograd.backward(params, [values(step, 1, 0, i, s).to(params[i].dtype) for i, s in enumerate(SHAPES)])


@as_they_are
def _train_edited(rank: int, world_size: int, dtype: torch.dtype, offload: Any) -> Any:
    params = make_params(dtype)
    optimizer = make(params, offload=offload, lr=0.01)
    for step in range(6):
        optimizer.zero_grad()
        _backward_fixed(params, step)
        optimizer.step()
        optimizer.flush()
        if step == 2:
            _edit(params)
    optimizer.close()
    return [param.detach() for param in params]


def _edited_plain(dtype: torch.dtype) -> Any:
    params = make_params(dtype)
    optimizer = zero_opt.CPUAdamW(params, lr=0.01, state=zero_opt.AdamState(master="float32"))
    for step in range(6):
        optimizer.zero_grad()
        _backward_fixed(params, step)
        optimizer.step()
        if step == 2:
            _edit(params)
            for param in params if dtype is not torch.float32 else ():
                master, at = optimizer.state[param]["master"], param.detach()
                torch.where(master.to(dtype) == at, master, at.float(), out=master)
    return [param.detach() for param in params]


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("offload", [NOW, LATER])
@pytest.mark.parametrize("world_size", [1, 2])
def test_edits_are_noticed(world_size: int, offload: Any, dtype: torch.dtype) -> None:
    """A master that still rounds to its parameter is kept."""
    plain = _edited_plain(dtype)
    for found in run_processes(world_size, _train_edited, dtype, offload):
        assert_bitwise(found, plain)


@as_they_are
def _edit_unused(rank: int, world_size: int, offload: Any, reduction: Any) -> Any:
    """One with gaps is edited, and is not used in the next step; the other one in its bucket is."""
    gaps, other = params = nn.Parameter(torch.ones(4, 10)[:, ::2]), nn.Parameter(torch.ones(50))
    plain: Any = zero_opt.CPUAdamW
    optimizer = plain(params) if offload is None else make(params, offload=offload, reduction=reduction)
    seen = []
    for used in ([gaps, other], [other], [gaps, other]):
        optimizer.zero_grad()
        torch.autograd.backward(used, [torch.ones(param.shape) for param in used])
        optimizer.step()
        if offload is not None:
            optimizer.flush()
        seen.append([gaps.detach().clone(), other.detach().clone()])
        if len(seen) == 1:
            with torch.no_grad():
                gaps.fill_(7.0)
    if offload is not None:
        optimizer.close()
    return seen


@pytest.mark.parametrize("reduction", [zero_opt.Overlapped(), zero_opt.AtStep(exchange="backend")])
@pytest.mark.parametrize("offload", [NOW, LATER])
@pytest.mark.parametrize("world_size", [1, 2])
def test_an_edited_parameter_that_a_step_does_not_use(world_size: int, offload: Any, reduction: Any) -> None:
    plain = _edit_unused(0, 1, None, reduction)
    assert (plain[1][0] == 7).all()
    for found in run_processes(world_size, _edit_unused, offload, reduction):
        assert_bitwise(found, plain)


@as_they_are
def _edit_while_pending(rank: int, world_size: int) -> None:
    params = make_params()
    optimizer = make(params, offload=LATER)
    for step in (1, 2):
        optimizer.zero_grad()
        backward(params, step, rank)
        if step == 1:
            optimizer.step()
            with torch.no_grad():
                params[2].fill_(0.5)
    before = [param.detach().clone() for param in params]
    with pytest.raises(zero_opt.StepPending, match=r"parameter 2 .* call opt\.flush\(\) before changing"):
        optimizer.step()
    assert_bitwise([param.detach() for param in params], before)
    optimizer.flush()
    assert_bitwise(params[2].detach(), before[2])
    assert not torch.equal(params[0], before[0])
    optimizer.step()
    optimizer.flush()
    assert not torch.equal(params[2], before[2])
    optimizer.close()


def test_an_edit_while_a_step_is_pending_is_refused() -> None:
    run_processes(2, _edit_while_pending)


@as_they_are
def _edit_state_while_pending(rank: int, world_size: int) -> None:
    params = make_params()
    optimizer = make(params, offload=LATER)
    for step in (1, 2):
        optimizer.zero_grad()
        backward(params, step, rank)
        optimizer.step()
    if rank == 0:
        optimizer.state[params[0]]["exp_avg"].zero_()
    optimizer.zero_grad()
    backward(params, 3, rank)
    with pytest.raises(
        zero_opt.StepPending, match=r"opt\.state was written to while a step .* set the values, by copy_\(\)"
    ):
        optimizer.step()
    optimizer.flush()
    optimizer.state[params[0]]["exp_avg"].zero_()
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(7))]})  # the arena grows
    optimizer.step()
    optimizer.flush()
    assert optimizer.state_dict()["state"][0]["step"] == 3
    optimizer.close()


@as_they_are
def _clip_while_pending(rank: int, world_size: int, clips: bool) -> list[Tensor]:
    """The worker is stopped, so that it reads the gradients of the step after they were clipped once more."""
    params = make_params()
    optimizer = make(params, offload=LATER, reduction=zero_opt.AtStep(BUCKET_MB))
    pid = worker_of(optimizer)._handles.child.pid
    backward(params, 1, rank)
    os.kill(pid, signal.SIGSTOP)
    try:
        optimizer.step()
        if clips:
            optimizer.clip_grad_norm_(1e-3)
    finally:
        os.kill(pid, signal.SIGCONT)
    optimizer.flush()
    optimizer.close()
    return [param.detach() for param in params]


@pytest.mark.parametrize("world_size", [1, 2])
def test_clipping_after_a_step_does_not_change_that_step(world_size: int) -> None:
    plain = run_processes(world_size, _clip_while_pending, False)
    assert_bitwise(run_processes(world_size, _clip_while_pending, True), plain)


def test_so_is_one_of_the_state_which_the_worker_writes_to() -> None:
    run_processes(2, _edit_state_while_pending)
