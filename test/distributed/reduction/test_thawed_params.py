"""Parameters that have been frozen until the ranks last agreed: a rank's own gradient is not taken for the mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_opt
from test.support.harness import assert_bitwise, run_processes, run_threads
from zero_opt.errors import GradientConflict, GradientConsumed

LR, SCALE = 0.25, 8.0
# What is trained in each step: the parameter that is frozen when the optimizer is made, or the other one.
SINCE_CONSTRUCTION, FOR_A_STEP = ("head", "late"), ("head", "late", "head", "late")


def _params() -> dict[str, nn.Parameter]:
    params = {name: nn.Parameter(torch.ones(4, 4)) for name in ("late", "head")}
    params["late"].requires_grad_(False)
    return params


def _made(params: dict[str, nn.Parameter]) -> zero_opt.ShardedOptimizer:
    return zero_opt.ShardedOptimizer(params.values(), torch.optim.SGD, lr=LR)


def _train_alone(params: dict[str, nn.Parameter], name: str) -> None:
    for other, param in params.items():
        param.requires_grad_(other == name)


def _backward(param: nn.Parameter, rank: int, step: int, factor: float = 1.0) -> None:
    """Small integers, of which sums have the same bits in any order."""
    (param.sum() * (1 + step + 2 * rank) * factor).backward()


def _thawed(rank: int, order: tuple[str, ...]) -> tuple[Any, dict[str, nn.Parameter]]:
    """Take all steps but for the last, and have the backward of that."""
    params = _params()
    optimizer = _made(params)
    for step, name in enumerate(order):
        _train_alone(params, name)
        _backward(params[name], rank, step)
        if step < len(order) - 1:
            optimizer.step()
            optimizer.zero_grad()
    return optimizer, params


def _expected(world_size: int, order: tuple[str, ...], last: float) -> list[Tensor]:
    """What one process has, whose last gradient is multiplied."""
    params = _params()
    for step, name in enumerate(order):
        mean = sum(1.0 + step + 2 * rank for rank in range(world_size)) / world_size
        params[name].data -= LR * mean * (last if step == len(order) - 1 else 1.0)
    return [param.detach() for param in params.values()]


USES: dict[str, Callable[[Tensor], Any]] = {
    "clipped by torch": lambda param: torch.nn.utils.clip_grad_norm_([param], 0.5),
    "read": lambda param: param.grad.sum(),  # type: ignore[union-attr]
    "multiplied in place": lambda param: param.grad.mul_(0.5),  # type: ignore[union-attr]
}


def _use(rank: int, world_size: int, order: tuple[str, ...], use: str) -> list[Tensor]:
    optimizer, params = _thawed(rank, order)
    with pytest.raises(GradientConsumed):
        USES[use](params["late"])
    optimizer.step()
    optimizer.close()
    return [param.detach() for param in params.values()]


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("order", [SINCE_CONSTRUCTION, FOR_A_STEP])
def test_its_gradient_is_refused_to_who_takes_it_for_the_mean(order: tuple[str, ...], use: str) -> None:
    for held in run_threads(2, _use, order, use):
        assert_bitwise(held, _expected(2, order, 1.0))


def _clip(rank: int, world_size: int, order: tuple[str, ...]) -> list[Tensor]:
    optimizer, params = _thawed(rank, order)
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.close()
    return [params["late"].detach()]


@pytest.mark.parametrize("order", [SINCE_CONSTRUCTION, FOR_A_STEP])
def test_clip_grad_norm_clips_the_mean(order: tuple[str, ...]) -> None:
    held = run_threads(2, _clip, order)
    before = _expected(2, order, 0.0)[0]
    assert_bitwise(*held)
    assert torch.linalg.vector_norm(held[0][0] - before).item() == pytest.approx(LR, rel=1e-5)


def _scale(rank: int, world_size: int, order: tuple[str, ...], unscales: bool, bad: int | None) -> Any:
    params = _params()
    optimizer, scaler = _made(params), torch.amp.GradScaler("cpu", init_scale=SCALE)
    for step, name in enumerate(order):
        _train_alone(params, name)
        last = step == len(order) - 1
        scale = float(scaler.scale(torch.ones(())))
        _backward(params[name], rank, step, scale * (float("inf") if last and rank == bad else 1.0))
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    optimizer.close()
    return scaler.get_scale(), [param.detach() for param in params.values()]


@pytest.mark.parametrize("bad", [None, 0, 1])
@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("order", [SINCE_CONSTRUCTION, FOR_A_STEP])
def test_an_overflow_on_one_rank_is_one_on_all(order: tuple[str, ...], unscales: bool, bad: int | None) -> None:
    for scale, held in run_processes(2, _scale, order, unscales, bad):
        assert scale == (SCALE if bad is None else SCALE / 2)
        assert_bitwise(held, _expected(2, order, 1.0 if bad is None else 0.0))


def _part_of_them(rank: int, world_size: int, order: tuple[str, ...]) -> list[Tensor]:
    """The last backward reaches both parameters on rank 1, and the thawed one alone on rank 0."""
    params = _params()
    optimizer, scaler = _made(params), torch.amp.GradScaler("cpu", init_scale=SCALE)
    for step, name in enumerate(order):
        last = step == len(order) - 1
        _train_alone(params, name)
        params["head"].requires_grad_(last or name == "head")
        _backward(params[name], rank, step, SCALE)
        if last and rank == 1:
            _backward(params["head"], rank, step, SCALE)
        scaler.scale(torch.ones(()))
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        optimizer.zero_grad()
        scaler.update()
    optimizer.close()
    return [params["late"].detach()]


@pytest.mark.parametrize("order", [SINCE_CONSTRUCTION, FOR_A_STEP])
def test_ranks_unscale_alike_whichever_parameters_they_use(order: tuple[str, ...]) -> None:
    for held in run_processes(2, _part_of_them, order):
        assert_bitwise(held, _expected(2, order, 1.0)[:1])


def _drop(rank: int, world_size: int, order: tuple[str, ...], dropping: int) -> list[list[Tensor]]:
    """One rank drops what waits; then all take another step."""
    optimizer, params = _thawed(rank, order)
    if rank == dropping:
        params["late"].grad = None
    optimizer.step()
    optimizer.zero_grad()
    first = [param.detach().clone() for param in params.values()]
    _backward(params["late"], rank, 0)
    optimizer.step()
    optimizer.close()
    return [first, [param.detach() for param in params.values()]]


@pytest.mark.parametrize("dropping", [0, 1])
@pytest.mark.parametrize("order", [SINCE_CONSTRUCTION, FOR_A_STEP])
def test_what_is_dropped_is_not_counted(order: tuple[str, ...], dropping: int) -> None:
    gradients = [float(len(order) + 2 * rank) for rank in range(2)]
    kept = sum(gradient for rank, gradient in enumerate(gradients) if rank != dropping)
    expected = _expected(2, order, kept / sum(gradients))
    for first, then in run_threads(2, _drop, order, dropping):
        assert_bitwise(first, expected)
        assert_bitwise(then, [expected[0] - LR * 2.0, expected[1]])


def _repeat(rank: int, world_size: int, order: tuple[str, ...]) -> list[Tensor]:
    """What waits is dropped on all ranks by zero_grad(), and the backward is repeated."""
    optimizer, params = _thawed(rank, order)
    optimizer.zero_grad()
    _backward(params["late"], rank, len(order) - 1)
    _backward(params["late"], rank, len(order) - 1)
    optimizer.step()
    optimizer.close()
    return [param.detach() for param in params.values()]


@pytest.mark.parametrize("order", [SINCE_CONSTRUCTION, FOR_A_STEP])
def test_what_zero_grad_drops_is_not_counted_and_two_backwards_add_up(order: tuple[str, ...]) -> None:
    for held in run_threads(2, _repeat, order):
        assert_bitwise(held, _expected(2, order, 2.0))


def _close(rank: int, world_size: int, order: tuple[str, ...]) -> None:
    optimizer, params = _thawed(rank, order)
    optimizer.close()
    with pytest.raises(GradientConsumed, match="are gone"):
        params["late"].grad.sum()  # type: ignore[union-attr]


@pytest.mark.parametrize("order", [SINCE_CONSTRUCTION, FOR_A_STEP])
def test_it_is_gone_when_the_optimizer_is_closed(order: tuple[str, ...]) -> None:
    run_threads(2, _close, order)


def _quantized(rank: int, world_size: int) -> list[Tensor]:
    params = _params()
    with torch.inference_mode():
        inferred = nn.Parameter(torch.ones(3), requires_grad=False)
    codes = nn.Parameter(torch.ones(3, dtype=torch.uint8), requires_grad=False)
    optimizer = zero_opt.ShardedOptimizer([*params.values(), codes, inferred], torch.optim.SGD, lr=LR)
    _backward(params["head"], rank, 0)
    optimizer.step()
    optimizer.close()
    return [param.detach() for param in params.values()]


def test_what_can_have_no_gradient_is_no_matter() -> None:
    for held in run_threads(2, _quantized):
        assert_bitwise(held, _expected(2, ("head",), 1.0))


def _by_turns(rank: int, world_size: int) -> list[Tensor]:
    """Two optimizers have both parameters, and each met the other's frozen."""
    params, optimizers = _params(), dict[str, Any]()
    for name in ("head", "late"):
        _train_alone(params, name)
        optimizers[name] = _made(params)
    for step, name in enumerate(FOR_A_STEP):
        _train_alone(params, name)
        _backward(params[name], rank, step)
        optimizers[name].step()
        optimizers[name].zero_grad()
    for optimizer in optimizers.values():
        optimizer.close()
    return [param.detach() for param in params.values()]


def test_optimizers_that_train_by_turns_have_each_their_own_gradients() -> None:
    for held in run_threads(2, _by_turns):
        assert_bitwise(held, _expected(2, FOR_A_STEP, 1.0))


def _put_back(rank: int, world_size: int, order: tuple[str, ...], where: list[int]) -> list[Tensor]:
    """Some ranks put a stand-in back that they have kept; the step is repeated with the right one."""
    optimizer, params = _thawed(rank, order)
    param = params["late"]
    kept, param.grad = param.grad, None
    _backward(param, rank, len(order) - 1)
    right = param.grad
    if rank in where:
        param.grad = kept
    with pytest.raises(GradientConflict, match="are gone"):
        optimizer.step()
    param.grad = right
    optimizer.step()
    optimizer.close()
    return [param.detach() for param in params.values()]


@pytest.mark.parametrize("where", [[0], [0, 1]])
@pytest.mark.parametrize("order", [SINCE_CONSTRUCTION, FOR_A_STEP])
def test_an_old_stand_in_is_refused_on_every_rank(order: tuple[str, ...], where: list[int]) -> None:
    for held in run_processes(2, _put_back, order, where):
        assert_bitwise(held, _expected(2, order, 1.0))
