"""Selective: the bits of a straightforward reference, wherever parameters are cut and whatever is selected."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import zero_opt
from test.support.harness import assert_bitwise, run_processes, run_threads
from test.support.late_params import as_they_are
from test.support.scenario import values
from test.support.selective_reference import Reference
from zero_opt import CPUOffload, NVMeOffload, Selective, WorkerOffload

SHAPES = ((130, 7), (65,), (), (40, 30), (3, 5, 7, 2), (0, 3), (24, 50), (2, 200), (64, 1))
TRANSPOSED = 6
LAST = 4
UNUSED_AT_FIRST = 3
STEPS = 23
REDUCTION = zero_opt.Overlapped(4096 / 2**20)
POLICIES = {
    "some": Selective(0.3, select_interval=6, update_interval=3),
    "warm-up": Selective(0.1, select_interval=1, update_interval=2, warmup_steps=5),
    "auto": Selective(0.5, select_interval=5, update_interval="auto"),
    "none": Selective(0.0, select_interval=3, update_interval=4),
    "all": Selective(1.0, update_interval=4),
}
EACH = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


def make_params(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    params = []
    for index, shape in enumerate(SHAPES):
        value = values(31, 0, 0, index, shape).to(dtype, copy=True)
        if index == TRANSPOSED:
            value = value.t().contiguous().t()
        elif index == LAST:
            value = value.contiguous(memory_format=torch.channels_last)
        params.append(nn.Parameter(value))
    return params


def groups_of(params: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [
        {"params": params[:3], "lr": 0.01},
        {"params": params[3:5], "lr": 0.03, "weight_decay": 0.2},
        {"params": params[5:], "lr": 0.002},
    ]


def gradient(step: int, rank: int, index: int, param: Tensor) -> Tensor | None:
    """Unused now and then; columns differ in size, and others are large later; and it depends on the parameter."""
    if (step + index) % 5 == 0:
        return None
    found = values(step, 1, rank, index, SHAPES[index])
    if found.dim() >= 2:
        columns = torch.arange(found.shape[-1])
        found = found * (1 + 3 * ((columns * 7 + step // 4) % 5 == 0))
    return (found + 0.25 * param.detach().float()).to(param.dtype)


def set_means(params: list[nn.Parameter], step: int, world_size: int) -> None:
    for index, param in enumerate(params):
        grads = [gradient(step, rank, index, param) for rank in range(world_size)]
        param.grad = None
        if grads[0] is not None:
            total = grads[0].float()
            for grad in grads[1:]:
                assert grad is not None
                total = total + grad.float()
            param.grad = (total / world_size).to(param.dtype)


def backward(params: list[nn.Parameter], step: int, rank: int) -> None:
    found = [(param, gradient(step, rank, index, param)) for index, param in enumerate(params)]
    used = [(param, grad) for param, grad in found if grad is not None]
    torch.autograd.backward([param for param, _ in used], [grad for _, grad in used])


def set_lr(groups: list[dict[str, Any]], step: int) -> None:
    for number, group in enumerate(groups):
        group["lr"] = 0.01 * (number + 1) / (1 + step % 4)


@as_they_are
def train(
    rank: int,
    world_size: int,
    offload: Any,
    dtype: torch.dtype = torch.float32,
    steps: range = range(STEPS),
    saved: Any = None,
    max_grad_norm: float | None = None,
    cleared: int | None = None,
) -> tuple[list[list[Tensor]], Any, Any]:
    """Parameters after every step and at the end; state by parameter; the state dict.

    Args:
        saved: parameters and a state dict to resume from. cleared: the step after which ``state`` is cleared.
    """
    params = make_params(dtype)
    optimizer = zero_opt.ShardedOptimizer(
        groups_of(params),
        torch.optim.AdamW,
        reduction=REDUCTION,
        offload=offload,
        fused=True,
        max_grad_norm=max_grad_norm,
    )
    if saved is not None:
        with torch.no_grad():
            for param, value in zip(params, saved[0], strict=True):
                param.copy_(value)
        optimizer.load_state_dict(saved[1])
    seen = []
    for step in steps:
        set_lr(optimizer.param_groups, step)
        optimizer.zero_grad()
        backward(params, step, rank)
        optimizer.step()
        seen.append([param.detach().clone() for param in params])
        if step == cleared:
            optimizer.state.clear()
    optimizer.consolidate_state_dict()
    seen.append([param.detach().clone() for param in params])
    state = optimizer.state_dict() if rank == 0 else None
    optimizer.close()
    return seen, None if state is None else state["state"], state


def simulate(world_size: int, policy: Selective, delay: int, dtype: torch.dtype, cleared: int | None = None) -> Any:
    params = make_params(dtype)
    reference = Reference(groups_of(params), policy, delay)
    seen = []
    for step in range(STEPS):
        set_lr(reference.groups, step)
        set_means(params, step, world_size)
        reference.step()
        seen.append([param.detach().clone() for param in params])
        if step == cleared:
            reference.clear()
    reference.flush()
    seen.append([param.detach().clone() for param in params])
    return seen, reference.state()


def assert_as_simulated(found: Any, simulated: Any) -> None:
    for step, (ours, theirs) in enumerate(zip(found[0], simulated[0], strict=True)):
        assert_bitwise(ours, theirs, f"after step {step}")
    if found[1] is not None:
        assert found[1].keys() == simulated[1].keys()
        for index, state in simulated[1].items():
            assert_bitwise({key: found[1][index][key] for key in state}, state, f"state of {index}")


@EACH
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_as_the_reference_in_process(policy: Selective, world_size: int) -> None:
    """Over threads, with parameters cut between ranks anywhere."""
    simulated = simulate(world_size, policy, 0, torch.float32)
    for found in run_threads(world_size, train, CPUOffload(selective=policy)):
        assert_as_simulated(found, simulated)


@EACH
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_state_that_is_cleared_on_every_rank_starts_afresh(policy: Selective, world_size: int) -> None:
    """In the middle of a window too; a rank without a part of a matrix shows nothing of it, and has nothing to drop."""
    arguments = (torch.float32, range(STEPS), None, None)
    for cleared in (1, 10):
        simulated = simulate(world_size, policy, 0, torch.float32, cleared)
        for found in run_threads(world_size, train, CPUOffload(selective=policy), *arguments, cleared):
            assert_as_simulated(found, simulated)


HOMES = {
    "process": lambda policy, path: CPUOffload(selective=policy),
    "worker": lambda policy, path: WorkerOffload(selective=policy),
    "worker, later": lambda policy, path: WorkerOffload(delay=1, selective=policy),
    "file": lambda policy, path: NVMeOffload(path, window_mb=0.02, selective=policy),
}


@pytest.mark.parametrize(("home", "dtype", "policy", "world_size"), [
    ("worker", torch.float32, "some", 2),
    ("worker", torch.bfloat16, "warm-up", 1),
    ("worker, later", torch.float32, "some", 2),
    ("worker, later", torch.bfloat16, "none", 3),
    ("worker, later", torch.float16, "auto", 1),
    ("file", torch.float32, "some", 2),
    ("file", torch.bfloat16, "auto", 1),
    ("process", torch.bfloat16, "warm-up", 2),
])  # fmt: skip
def test_as_the_reference_wherever_the_rest_is(
    home: str, dtype: torch.dtype, policy: str, world_size: int, tmp_path: Any
) -> None:
    """Over processes; what is stepped off device may arrive with the next step."""
    simulated = simulate(world_size, POLICIES[policy], int(home == "worker, later"), dtype)
    for found in run_processes(world_size, train, HOMES[home](POLICIES[policy], tmp_path), dtype):
        assert_as_simulated(found, simulated)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_columns_and_windows_of_one_step_are_plain(dtype: torch.dtype) -> None:
    """``topk_ratio=1``: nothing is off device. ``topk_ratio=0``, a step per window: all is, as without a selection."""
    plain = run_threads(2, train, CPUOffload(), dtype, range(STEPS), None, 0.5)
    for policy in (Selective(1.0), Selective(1.0, 3, 5, 4), Selective(0.0, update_interval=1)):
        found = run_threads(2, train, CPUOffload(selective=policy), dtype, range(STEPS), None, 0.5)
        assert_bitwise([run[0] for run in found], [run[0] for run in plain])
        for index, state in plain[0][1].items():
            assert_bitwise({key: found[0][1][index][key] for key in state}, state)


@EACH
def test_resumed_at_another_world_size(policy: Selective) -> None:
    """In the middle of a window; the gradients are the same at any world size, so all goes on to the bit."""
    through = run_threads(1, train_alike, policy, range(STEPS), None)[0]
    for half, before, after in ((10, 3, 2), (13, 1, 3)):
        saved = run_threads(before, train_alike, policy, range(half), None)[0]
        for found in run_threads(after, train_alike, policy, range(half, STEPS), saved):
            assert_bitwise(found[0], through[0])
            if found[1] is not None:
                assert_bitwise(found[1], through[1])


@as_they_are
def train_alike(rank: int, world_size: int, policy: Selective, steps: range, saved: Any) -> Any:
    """Parameters and state at the end."""
    params, optimizer = made_alike(policy)
    if saved is not None:
        with torch.no_grad():
            for param, value in zip(params, saved[0], strict=True):
                param.copy_(value)
        optimizer.load_state_dict(saved[1])
    step_alike(params, optimizer, steps)
    optimizer.consolidate_state_dict()
    state = optimizer.state_dict() if rank == 0 else None
    optimizer.close()
    return [param.detach().clone() for param in params], state


def made_alike(policy: Selective) -> tuple[list[nn.Parameter], zero_opt.ShardedOptimizer]:
    params = make_params()
    optimizer = zero_opt.ShardedOptimizer(
        groups_of(params), torch.optim.AdamW, reduction=REDUCTION, offload=CPUOffload(selective=policy), fused=True
    )
    return params, optimizer


def step_alike(params: list[nn.Parameter], optimizer: zero_opt.ShardedOptimizer, steps: range) -> None:
    """Every rank has the same gradients, small integers, so their mean is exact."""
    for step in steps:
        optimizer.zero_grad()
        used = [index for index in range(len(SHAPES)) if step > 14 or index != UNUSED_AT_FIRST]
        grads = [(values(step, 3, 0, index, SHAPES[index]) * 8).round() for index in used]
        torch.autograd.backward([params[index] for index in used], grads)
        optimizer.step()


@as_they_are
def save_parts(rank: int, world_size: int, policy: Selective, halves: tuple[int, ...], folder: str) -> Any:
    """Train, and save by parts after so many steps."""
    params, optimizer = made_alike(policy)
    done = 0
    for half in halves:
        step_alike(params, optimizer, range(done, half))
        done = half
        dcp.save({"opt": zero_opt.sharded_state_dict(optimizer)}, checkpoint_id=f"{folder}/{half}")
        if rank == 0:
            torch.save([param.detach().clone() for param in params], f"{folder}/{half}.pt")
    optimizer.close()


@as_they_are
def load_parts(rank: int, world_size: int, policy: Selective, halves: tuple[int, ...], folder: str) -> Any:
    """Load them one after the other, the first into a new optimizer, and train to the end."""
    found = []
    params, optimizer = made_alike(policy)
    for half in halves:
        loaded = {"opt": zero_opt.sharded_state_dict(optimizer)}
        dcp.load(loaded, checkpoint_id=f"{folder}/{half}")
        with torch.no_grad():
            for param, value in zip(params, torch.load(f"{folder}/{half}.pt", weights_only=True), strict=True):
                param.copy_(value)
        zero_opt.load_sharded_state_dict(optimizer, loaded["opt"])
        step_alike(params, optimizer, range(half, STEPS))
        optimizer.consolidate_state_dict()
        state = optimizer.state_dict() if rank == 0 else None
        found.append(([param.detach().clone() for param in params], state))
    optimizer.close()
    return found


@pytest.mark.parametrize("policy", ["some", "auto"])
def test_saved_by_parts_at_another_world_size(policy: str, tmp_path: Any) -> None:
    """Between windows and within one, with gradients that wait or without; before and after all have state."""
    halves = (12, 13, 17)
    through = run_threads(1, train_alike, POLICIES[policy], range(STEPS), None)[0]
    run_processes(2, save_parts, POLICIES[policy], halves, str(tmp_path))
    for world_size in (1, 3):
        for runs in run_processes(world_size, load_parts, POLICIES[policy], halves, str(tmp_path)):
            for found in runs:
                assert_bitwise(found[0], through[0])
                if found[1] is not None:
                    assert_bitwise(found[1], through[1])


@pytest.mark.parametrize("interval", [1, 2, 3, 4])
@pytest.mark.parametrize("home", HOMES)
@as_they_are
def test_windows_in_which_all_have_every_gradient(home: str, interval: int, tmp_path: Any) -> None:
    """Windows of any length, in which no parameter misses a step."""
    policy = Selective(0.3, 8, interval)
    params, expected = make_params(), make_params()
    optimizer = zero_opt.ShardedOptimizer(
        groups_of(params), torch.optim.AdamW, fused=True, offload=HOMES[home](policy, tmp_path)
    )
    reference = Reference(groups_of(expected), policy, 1 if "later" in home else 0)
    for step in range(12):
        for index, (ours, theirs) in enumerate(zip(params, expected, strict=True)):
            ours.grad = None
            theirs.grad = values(step, 1, 0, index, SHAPES[index])
        torch.autograd.backward(params, [param.grad for param in expected])
        optimizer.step()
        reference.step()
        assert_bitwise([param.detach() for param in params], [param.detach() for param in expected])
    optimizer.close()


def test_a_plain_optimizer_loads_it_and_what_it_saves_counts_steps_per_param() -> None:
    """The extra keys mean nothing to it; once it has stepped they are out of date, and are not believed."""
    policy = POLICIES["some"]
    params, saved = run_threads(1, train_alike, policy, range(10), None)[0]
    plain_params = [nn.Parameter(param.clone()) for param in params]
    plain = torch.optim.AdamW(groups_of(plain_params), fused=True)
    plain.load_state_dict(saved)
    for param in plain_params:
        param.grad = torch.ones_like(param)
    plain.step()
    kept = plain.state_dict()
    assert "column_steps" in kept["state"][0]
    again = [[param.detach() for param in plain_params], kept]
    state = run_threads(1, train_alike, policy, range(10, 11), again)[0][1]["state"]
    before = float(kept["state"][0]["step"])
    assert state[0]["column_steps"].unique().tolist() in ([before, before + 1], [before + 1])


def test_edits_of_parameters_and_state_are_followed() -> None:
    """Written to between steps: parameters, moments that ``state`` shows, an entry put in its place, one dropped."""

    def edited(policy: Selective | None) -> Any:
        params = make_params()
        optimizer = zero_opt.ShardedOptimizer(
            groups_of(params), torch.optim.AdamW, fused=True, offload=CPUOffload(selective=policy)
        )
        for step in range(8):
            optimizer.zero_grad()
            torch.autograd.backward(params, [values(step, 5, 0, index, shape) for index, shape in enumerate(SHAPES)])
            optimizer.step()
            with torch.no_grad():
                if step == 2:
                    params[0].mul_(0.5)
                if step == 3:
                    optimizer.state[params[3]]["exp_avg"].mul_(0.25)
                    assert optimizer.state[params[3]]["exp_avg"].shape == params[3].shape
                if step == 4:
                    found = optimizer.state[params[TRANSPOSED]]
                    keys = ("step", "exp_avg", "exp_avg_sq")
                    optimizer.state[params[TRANSPOSED]] = {key: found[key] * 1.5 // 0.5 * 0.5 for key in keys}
                if step == 5:
                    del optimizer.state[params[LAST]]
        state = {index: optimizer.state[param] for index, param in enumerate(params) if param in optimizer.state}
        keys = ("step", "exp_avg", "exp_avg_sq")
        kept = {index: {key: torch.as_tensor(found[key]).clone() for key in keys} for index, found in state.items()}
        optimizer.close()
        return [param.detach().clone() for param in params], kept

    assert_bitwise(edited(Selective(1.0)), edited(None))
    assert_bitwise(edited(Selective(0.0, update_interval=1)), edited(None))
    assert_bitwise(edited(Selective(0.0, 2, 1)), edited(None))
