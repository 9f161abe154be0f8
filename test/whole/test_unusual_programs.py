"""Programs that do to an optimizer what few do: as torch has it, or refused by name, and never something in between."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zero_opt
from test.support.harness import assert_bitwise, copies_of, run_processes
from test.support.scenario import AT_STEP, OVERLAPPED
from zero_opt.sharding.late_params import Unwatched

OFFLOADS = {"device": None, "host": zero_opt.CPUOffload(), "worker": zero_opt.WorkerOffload()}
NATIVE = {name: offload for name, offload in OFFLOADS.items() if offload is not None}


def _net() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def _inputs(step: int, rank: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))


def _backward(model: nn.Module, step: int, rank: int) -> None:
    model(_inputs(step, rank)).square().mean().backward()


def _made(model: nn.Module, cls: Any = torch.optim.AdamW, **options: Any) -> zero_opt.ShardedOptimizer:
    return zero_opt.ShardedOptimizer(model.parameters(), cls, lr=0.01, **options)


def _after_a_step(rank: int, offload: Any) -> tuple[nn.Sequential, zero_opt.ShardedOptimizer]:
    model = _net()
    optimizer = _made(model, offload=offload)
    _backward(model, 0, rank)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


# -- classes ----------------------------------------------------------------------------------------------------------


class Assigning(torch.optim.Optimizer):
    """Gives parameters new memory in every step."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.data = param.data - group["lr"] * param.grad


class Counting(Assigning):
    """Keeps a count that is no parameter's."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.state["count"]["steps"] = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.state["count"]["steps"] += 1
        super().step(closure)


def _assigning(rank: int, world_size: int, reduction: Any, offload: Any) -> list[Tensor]:
    ours, plain = _net(), _net()
    optimizer = _made(ours, Assigning, reduction=reduction, offload=offload)
    theirs = Assigning(plain.parameters(), lr=0.01)
    where = ours[0].weight.data_ptr()
    for step in range(3):
        _backward(ours, step, 0)
        optimizer.step()
        optimizer.zero_grad()
        _backward(plain, step, 0)
        theirs.step()
        theirs.zero_grad()
    assert ours[0].weight.data_ptr() == where
    assert_bitwise(copies_of(ours), copies_of(plain), "parameters")
    return copies_of(ours)


@pytest.mark.parametrize("offload", [None, zero_opt.CPUOffload()], ids=["device", "host"])
@pytest.mark.parametrize("reduction", [OVERLAPPED, AT_STEP], ids=["overlapped", "at step"])
def test_a_class_that_assigns_data_trains(reduction: Any, offload: Any) -> None:
    run_processes(2, _assigning, reduction, offload)


def _counting(rank: int, world_size: int) -> None:
    model = _net()
    optimizer = _made(model, Counting)
    _backward(model, 0, rank)
    with pytest.raises((zero_opt.UnsupportedOptimizer, zero_opt.StepFailed), match="keeps state under 'count'"):
        optimizer.step()


def test_state_that_is_no_parameters_is_refused_where_it_would_be_lost() -> None:
    run_processes(2, _counting)


def _count_alone(rank: int, world_size: int) -> None:
    model = _net()
    optimizer = _made(model, Counting)
    for step in range(3):
        _backward(model, step, 0)
        optimizer.step()
        optimizer.zero_grad()
    saved = optimizer.state_dict()
    assert saved["state"]["count"] == {"steps": 3}
    for strict in (True, False):
        again = _made(_net(), Counting)
        again.load_state_dict(saved, strict=strict)
        assert again.state["count"]["steps"] == 3


def test_at_world_size_1_it_is_saved_and_loaded_as_in_torch() -> None:
    run_processes(1, _count_alone)


# -- hyperparameters and state ----------------------------------------------------------------------------------------


def _without_lr(rank: int, world_size: int, offload: Any) -> None:
    model, optimizer = _after_a_step(rank, offload)
    before = copies_of(model)
    del optimizer.param_groups[0]["lr"]
    _backward(model, 1, rank)
    with pytest.raises(zero_opt.ConfigError, match=r"param group 0 has lost its 'lr'; put it back"):
        optimizer.step()
    assert_bitwise(copies_of(model), before, "parameters")


@pytest.mark.parametrize("offload", OFFLOADS.values(), ids=OFFLOADS)
def test_a_hyperparameter_that_is_deleted_is_missed(offload: Any) -> None:
    run_processes(2, _without_lr, offload)


def _spoilt_state(rank: int, world_size: int, offload: Any, spoil: str) -> str:
    model, optimizer = _after_a_step(rank, offload)
    before = copies_of(model)
    for param in model.parameters():
        if spoil == "without a moment":
            optimizer.state[param].pop("exp_avg_sq")
        elif spoil == "with more":
            optimizer.state[param]["mine"] = torch.ones(3)
    if spoil == "amsgrad":
        optimizer.param_groups[0]["amsgrad"] = True
    _backward(model, 1, rank)
    with pytest.raises(zero_opt.ZeroOptError) as caught:
        optimizer.step()
    assert_bitwise(copies_of(model), before, "parameters")
    return str(caught.value)


@pytest.mark.parametrize("offload", NATIVE.values(), ids=NATIVE)
def test_state_without_a_moment_is_not_taken_for_zeros(offload: Any) -> None:
    assert all("has no 'exp_avg_sq'" in text for text in run_processes(2, _spoilt_state, offload, "without a moment"))


@pytest.mark.parametrize("offload", OFFLOADS.values(), ids=OFFLOADS)
def test_amsgrad_that_comes_too_late_is_refused(offload: Any) -> None:
    assert all("amsgrad cannot be switched on" in text for text in run_processes(2, _spoilt_state, offload, "amsgrad"))


def test_state_that_a_worker_has_no_place_for_is_refused() -> None:
    assert all("'mine'" in text for text in run_processes(2, _spoilt_state, zero_opt.WorkerOffload(), "with more"))


def _dropped_state(rank: int, world_size: int, offload: Any, how: str, who: tuple[int, ...]) -> None:
    model, optimizer = _after_a_step(rank, offload)
    if rank in who and how == "all":
        optimizer.state.clear()
    elif rank in who:
        del optimizer.state[model[0].weight]
    _backward(model, 1, rank)
    if len(who) == world_size:
        optimizer.step()
        assert optimizer.state[model[0].weight]["step"] == 1
    else:
        with pytest.raises(zero_opt.RankMismatch, match="state was dropped"):
            optimizer.step()


@pytest.mark.sampled(6)
@pytest.mark.parametrize("who", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("how", ["all", "one"])
@pytest.mark.parametrize("offload", OFFLOADS.values(), ids=OFFLOADS)
def test_state_that_one_rank_drops_is_refused_on_all(offload: Any, how: str, who: tuple[int, ...]) -> None:
    run_processes(2, _dropped_state, offload, how, who)


# -- gradients --------------------------------------------------------------------------------------------------------


def _dropped_by_a_hook(rank: int, world_size: int, offload: Any) -> None:
    model = _net()

    def drop(param: Tensor) -> None:
        param.grad = None

    model[0].weight.register_post_accumulate_grad_hook(drop)
    optimizer = _made(model, weight_decay=0.5, offload=offload)
    before = copies_of(model)
    for step in range(2):
        _backward(model, step, rank)
        optimizer.step()
        optimizer.zero_grad()
    assert_bitwise(copies_of(model)[:1], before[:1], "a parameter without a gradient")
    assert not torch.equal(model[2].weight, before[2])
    assert not optimizer.state.get(model[0].weight)


@pytest.mark.parametrize("offload", OFFLOADS.values(), ids=OFFLOADS)
def test_a_gradient_that_a_hook_drops_is_none(offload: Any) -> None:
    run_processes(2, _dropped_by_a_hook, offload)


def _fails(grad: Tensor) -> None:
    raise ValueError("in a hook")


def _ddp_backward_fails(rank: int, world_size: int) -> None:
    model = _net()
    wrapped = DistributedDataParallel(model)
    optimizer = _made(model, reduction=zero_opt.DDPHook())
    wrapped.register_comm_hook(optimizer, zero_opt.ddp_hook)
    _backward(wrapped, 0, rank)
    optimizer.step()
    optimizer.zero_grad()
    before = copies_of(model)
    handle = model[0].weight.register_hook(_fails)
    with pytest.raises(ValueError, match="in a hook"):
        _backward(wrapped, 1, rank)
    with pytest.raises(zero_opt.StepDesync, match="a backward ended in an exception"):
        optimizer.step()
    assert_bitwise(copies_of(model), before, "parameters")
    handle.remove()
    optimizer.zero_grad()


def test_a_backward_that_failed_before_ddp_called_its_hook_is_not_stepped() -> None:
    run_processes(2, _ddp_backward_fails)


def _clipped_and_kept(rank: int, world_size: int, reduction: Any, offload: Any) -> None:
    ours, plain = nn.Parameter(torch.zeros(64)), nn.Parameter(torch.zeros(64))
    optimizer = zero_opt.ShardedOptimizer([ours], torch.optim.Adam, lr=1.0, reduction=reduction, offload=offload)
    theirs = torch.optim.Adam([plain], lr=1.0, fused=offload is not None)
    steppers: tuple[tuple[nn.Parameter, Any, Any], ...] = (
        (ours, optimizer, optimizer.clip_grad_norm_),
        (plain, theirs, partial(nn.utils.clip_grad_norm_, [plain])),
    )
    for param, stepper, clip in steppers:
        (param * 100).sum().backward()
        clip(8.0)
        stepper.step()
        (param * torch.linspace(1, 2, 64)).sum().backward()  # added to what was clipped
        stepper.step()
    torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("offload", [None, zero_opt.CPUOffload()], ids=["device", "host"])
@pytest.mark.parametrize("reduction", [OVERLAPPED, AT_STEP], ids=["overlapped", "at step"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_next_backward_adds_to_the_clipped_gradient(world_size: int, reduction: Any, offload: Any) -> None:
    run_processes(world_size, _clipped_and_kept, reduction, offload)


def _not_reduced(rank: int, world_size: int, first: float) -> None:
    param = nn.Parameter(torch.zeros(200))
    optimizer = zero_opt.ShardedOptimizer([param], torch.optim.SGD, lr=1.0, reduction=zero_opt.AlreadyReduced())
    param.grad = torch.full((200,), first if rank == 0 else 1.0)
    for grad in (param.grad, torch.full((200,), 1.0 + rank)):
        param.grad = grad
        with pytest.raises(zero_opt.GradientConflict, match="not yet reduced"):
            optimizer.step()


@pytest.mark.parametrize("first", [float("nan"), float("inf"), 3.0])
def test_gradients_that_are_not_finite_on_one_rank_alone_are_not_reduced(first: float) -> None:
    run_processes(2, _not_reduced, first)


def _nothing_to_compare(rank: int, world_size: int, first: float) -> None:
    param = nn.Parameter(torch.zeros(200))
    optimizer = zero_opt.ShardedOptimizer([param], torch.optim.SGD, lr=1.0, reduction=zero_opt.AlreadyReduced())
    param.grad = torch.full((200,), first)
    optimizer.step()
    param.grad = torch.full((200,), 1.0 + rank)
    with pytest.raises(zero_opt.GradientConflict, match="not yet reduced"):
        optimizer.step()


@pytest.mark.parametrize("first", [float("nan"), 0.0])
def test_gradients_that_show_nothing_are_compared_again_in_the_next_step(first: float) -> None:
    run_processes(2, _nothing_to_compare, first)


def _stale_graphs(rank: int, world_size: int, options: dict[str, Any]) -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    zero_opt.broadcast_params(model := nn.Sequential(first, second))
    optimizer = _made(model, **options)
    inputs = [torch.ones(2, 4, requires_grad=True) for _ in range(2)]
    losses = [layer(given).square().sum() for layer, given in zip((first, second), inputs, strict=True)]
    model(torch.ones(2, 4) * (rank + 1)).square().sum().backward()
    optimizer.step()
    optimizer.flush()
    for loss, given in zip(losses, inputs, strict=True):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(loss, given)


@pytest.mark.parametrize("exchange", ["auto", "backend"])
@pytest.mark.parametrize("offload", OFFLOADS.values(), ids=OFFLOADS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_graph_that_was_kept_over_a_step_is_stale(world_size: int, offload: Any, exchange: str) -> None:
    options = {"offload": offload, "reduction": zero_opt.Overlapped(exchange=exchange)}
    run_processes(world_size, _stale_graphs, options)


# -- gradients of another dtype --------------------------------------------------------------------------------------


def _with_grad_dtype(rank: int, world_size: int, reduction: Any, offload: Any, steps: int) -> None:
    model = _net().bfloat16()
    model[2].bias.grad_dtype = torch.float32
    with pytest.raises(zero_opt.UnsupportedParam, match=r"parameter 3 .* with grad_dtype=torch\.float32"):
        _made(model, reduction=reduction, offload=offload)
    model[2].bias.grad_dtype = torch.bfloat16
    optimizer = _made(model, reduction=reduction, offload=offload)

    def one_step() -> None:
        model(_inputs(0, rank).bfloat16()).float().square().mean().backward()
        optimizer.step()

    for _ in range(steps):
        one_step()
        optimizer.zero_grad()
    model[2].bias.grad_dtype = torch.float32

    with pytest.raises(zero_opt.UnsupportedParam, match=r"parameter 3 .* with grad_dtype=torch\.float32"):
        one_step()
    optimizer.close()


@pytest.mark.parametrize("offload", OFFLOADS.values(), ids=OFFLOADS)
@pytest.mark.parametrize("reduction", [OVERLAPPED, AT_STEP])
def test_gradients_of_another_dtype_than_their_parameter_are_refused(reduction: Any, offload: Any) -> None:
    for steps in (0, 2):
        run_processes(2, _with_grad_dtype, reduction, offload, steps)


# -- inference mode ---------------------------------------------------------------------------------------------------


_CALLS = ("make", "clip", "step", "zero_grad", "flush", "state_dict", "load", "consolidate", "rows", "forward", "close")


def _in_inference_mode(
    rank: int, world_size: int, within: tuple[str, ...], options: Any, gathers: bool
) -> list[Tensor]:
    """Train, with what ``within`` names in inference mode."""
    model = _net()
    if gathers:
        options = {**options, "reduction": zero_opt.Overlapped(overlap_param_gather=model)}

    def mode(call: str) -> Any:
        return torch.inference_mode(call in within)

    with mode("make"):
        optimizer = _made(model, **options)
    for step in range(4):
        loss = model(_inputs(step, rank)).square().mean()
        with mode("backward"):
            loss.backward()
        with mode("clip"):
            optimizer.clip_grad_norm_(1.0)
        with mode("step"):
            optimizer.step()
        with mode("zero_grad"):
            optimizer.zero_grad()
        with mode("forward"), Unwatched():  # which delay=1 refuses in inference mode; modules wait all the same
            model(_inputs(step, rank))
        with mode("flush"):
            optimizer.flush()
        with mode("state_dict"):
            saved = optimizer.state_dict()
        optimizer.flush()  # until all ranks have read it
        with mode("load"):
            optimizer.load_state_dict(saved)
        with mode("consolidate"):
            optimizer.consolidate_state_dict()
        with mode("rows"):
            zero_opt.sharded_state_dict(optimizer)
    assert not any(isinstance(v, Tensor) and v.is_inference() for s in optimizer.state.values() for v in s.values())
    with mode("close"):
        optimizer.close()
    return copies_of(model)


_AT_STEP: dict[str, Any] = {"reduction": zero_opt.AtStep()}
_IN_INFERENCE: dict[str, Any] = {
    **{name: {"offload": offload} for name, offload in OFFLOADS.items()},
    "delay": {"offload": zero_opt.WorkerOffload(delay=1)},
    "backend": {"reduction": zero_opt.Overlapped(exchange="backend")},
    "at_step": _AT_STEP,
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("within", [_CALLS, ("backward",)], ids=["calls", "backward"])
@pytest.mark.parametrize("options", _IN_INFERENCE.values(), ids=_IN_INFERENCE)
def test_every_call_has_in_inference_mode_the_bits_that_it_has_outside(options: Any, within: tuple[str, ...]) -> None:
    gathers = "reduction" not in options
    outside = run_processes(2, _in_inference_mode, (), options, gathers)
    assert_bitwise(run_processes(2, _in_inference_mode, within, options, gathers), outside, "parameters")


def test_a_rank_alone_is_stepped_in_inference_mode() -> None:
    for options in ({}, {"offload": zero_opt.CPUOffload()}):
        (outside,) = run_processes(1, _in_inference_mode, (), options, False)
        (within,) = run_processes(1, _in_inference_mode, _CALLS, options, False)
        assert_bitwise(within, outside, "parameters")


def _closure_in_inference_mode(rank: int, world_size: int) -> None:
    model, plain = _net(), _net()
    optimizer = _made(model, reduction=zero_opt.AtStep())

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(_inputs(0, rank)).square().mean()
        loss.backward()
        return loss

    with torch.inference_mode():
        optimizer.step(closure)
    assert not torch.equal(model[0].weight, plain[0].weight)
    optimizer.close()


def test_a_closure_finds_gradients_in_inference_mode() -> None:
    run_processes(2, _closure_in_inference_mode)


def _made_in_inference_mode(rank: int, world_size: int) -> None:
    with torch.inference_mode():
        model = _net()
    with pytest.raises(zero_opt.UnsupportedParam, match="cannot be trained"):
        _made(model)


def test_parameters_that_were_made_in_inference_mode_are_refused() -> None:
    run_processes(2, _made_in_inference_mode)


def _edited_gradients(rank: int, world_size: int, backward: bool, edit: bool) -> None:
    """Edit gradients between clip and step, having made them in inference mode or not."""
    model = _net()
    optimizer = _made(model, reduction=zero_opt.AtStep())
    before = copies_of(model)
    loss = model(_inputs(0, rank)).square().mean()
    with torch.inference_mode(backward):
        loss.backward()
    optimizer.clip_grad_norm_(1.0)
    with torch.inference_mode(edit):
        for param in model.parameters():
            assert param.grad is not None
            param.grad.mul_(2.0)
    with pytest.raises(zero_opt.GradientConflict, match="edited after opt"):
        optimizer.step()
    assert_bitwise(copies_of(model), before)
    optimizer.close()


@pytest.mark.parametrize("edit", [True, False])
def test_gradients_of_inference_mode_that_are_edited_after_clipping_are_noticed(edit: bool) -> None:
    for backward in (True, False):
        run_processes(2, _edited_gradients, backward, edit)
