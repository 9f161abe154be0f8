"""Squares added up while shards are reduced: with the bits of a sum afterwards, and never of other gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_opt
from test.support.harness import assert_bitwise, run_processes
from test.support.scenario import values
from zero_opt.reduction.grad_norm import square_sum

SHAPES = ((90, 130), (65,), (4096,), (1,), (9000,))
OVERLAPPED = zero_opt.Overlapped(bucket_mb=0.03)
LOOKING = {"checks": zero_opt.Checks(nonfinite="skip")}


def _optimizer(dtype: torch.dtype = torch.float32, **options: Any) -> tuple[zero_opt.ShardedOptimizer, list[Tensor]]:
    params = [nn.Parameter(values(3, 0, 0, i, shape).to(dtype)) for i, shape in enumerate(SHAPES)]
    options.setdefault("reduction", OVERLAPPED)
    return zero_opt.ShardedOptimizer(params, torch.optim.AdamW, lr=0.1, **options), list(params)


def _backward(params: list[Tensor], step: int, rank: int, size: float = 1.0) -> None:
    grads = [values(step, 1, rank, i, shape).to(params[0].dtype) * size for i, shape in enumerate(SHAPES)]
    torch.autograd.backward(params, grads)


def _known(optimizer: Any) -> list[Tensor | None]:
    """What is known of the norm, once every bucket is reduced."""
    optimizer._engine.reduce()
    return [sums for bucket in optimizer._engine.partition.buckets for sums in bucket.squares()]


def _right(optimizer: Any, known: list[Tensor | None]) -> bool:
    """Whether all is known, and is what the shards hold."""
    grads = [grad for bucket in optimizer._engine.partition.buckets for grad in bucket.slice_grads()]
    return all(sums is not None for sums in known) and square_sum(grads, known) == square_sum(grads) > 0


def _nothing(known: list[Tensor | None]) -> bool:
    return known == [None] * len(known)


def _follow(rank: int, world_size: int, dtype: torch.dtype) -> None:
    optimizer, params = _optimizer(dtype, **LOOKING)
    for step in range(5):
        for part in range(1 + step % 2):
            _backward(params, step + 7 * part, rank)
        known = _known(optimizer)
        assert _nothing(known) if step == 0 else _right(optimizer, known), step
        optimizer.step()
        optimizer.zero_grad()
    _backward(params, 5, rank)
    assert _right(optimizer, _known(optimizer))
    optimizer.clip_grad_norm_(1e-3)
    assert _nothing(_known(optimizer)), "gradients were multiplied"
    optimizer.zero_grad()
    _backward(params, 6, rank)
    assert _right(optimizer, _known(optimizer))
    params[1].grad.zero_()  # type: ignore[union-attr]
    _backward(params, 7, rank)
    assert _right(optimizer, _known(optimizer))
    optimizer.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("world_size", [2, 3])
def test_squares_are_of_the_gradients_that_are_stepped_with(world_size: int, dtype: torch.dtype) -> None:
    run_processes(world_size, _follow, dtype)


def _wider(rank: int, world_size: int) -> None:
    optimizer, params = _optimizer(torch.float64, **LOOKING)
    for step in range(3):
        _backward(params, step, rank)
        assert _nothing(_known(optimizer))
        optimizer.step()
    optimizer.close()


def test_what_the_kernel_cannot_square_is_left_to_step() -> None:
    run_processes(2, _wider)


def _unasked(rank: int, world_size: int) -> None:
    optimizer, params = _optimizer()
    for step in range(4):
        _backward(params, step, rank)
        if step == 1:
            optimizer.clip_grad_norm_(1e9)
        optimizer._engine.reduce()  # type: ignore[union-attr]
        readers: list[Any] = [bucket.reader for bucket in optimizer._engine.partition.buckets]  # type: ignore[union-attr]
        assert [reader._known for reader in readers] == [step == 2] * len(readers)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()


def test_nothing_is_added_up_unless_the_step_before_asked() -> None:
    run_processes(2, _unasked)


def _subnormal(rank: int, world_size: int) -> None:
    optimizer, params = _optimizer(**LOOKING)
    for step in range(3):
        _backward(params, step, rank)
        known = _known(optimizer)
        if step == 1:
            assert _right(optimizer, known)
            torch.set_flush_denormal(True)
            assert _nothing(_known(optimizer)), "they count as zero from here on"
            torch.set_flush_denormal(False)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()


def test_sums_with_subnormals_are_not_those_without() -> None:
    run_processes(2, _subnormal)


def _train(rank: int, world_size: int, exchange: str) -> tuple[list[Tensor], list[Tensor], int]:
    policy = zero_opt.Overlapped(bucket_mb=0.03, exchange=exchange)
    optimizer, params = _optimizer(reduction=policy, max_grad_norm=30.0, **LOOKING)
    norms = []
    for step in range(6):
        _backward(params, step, rank, size=(0.1, 5.0, float("inf"))[step % 3] if rank else 1.0)
        norms.append(optimizer.clip_grad_norm_(1e9))
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    return [param.detach() for param in params], norms, optimizer.skipped_steps


def test_training_is_the_same_with_and_without() -> None:
    """torch.distributed reduces without adding up; clipped, unclipped and non-finite steps."""
    (early, early_norms, skipped), *_ = run_processes(2, _train, "auto")
    (late, late_norms, also_skipped), *_ = run_processes(2, _train, "backend")
    assert skipped == also_skipped == 2
    assert_bitwise(early, late)
    assert_bitwise(early_norms, late_norms)


class Decayed(torch.optim.Optimizer):
    """Writes to the gradients that it steps with."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.add_(param, alpha=0.5)
                    param.add_(param.grad, alpha=-group["lr"])


def _twice(rank: int, world_size: int, exchange: str) -> list[Tensor]:
    zero_opt.register_elementwise(Decayed)
    params = [nn.Parameter(values(3, 0, 0, i, shape)) for i, shape in enumerate(SHAPES)]
    policy = zero_opt.Overlapped(bucket_mb=0.03, exchange=exchange)
    optimizer = zero_opt.ShardedOptimizer(params, Decayed, lr=0.1, reduction=policy)
    norms = []
    for step in range(3):
        _backward(list(params), step, rank)
        for _ in range(2):
            norms.append(optimizer.clip_grad_norm_(1e9))
            optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    return norms


def test_an_optimizer_that_writes_to_its_gradients() -> None:
    early, late = (run_processes(2, _twice, exchange) for exchange in ("auto", "backend"))
    assert_bitwise(early, late)
