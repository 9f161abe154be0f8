"""Clipping: one norm on all ranks, torch's coefficient up to torch's own rounding, the plain class given ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_opt
from test.support.harness import assert_bitwise, run_processes, run_threads
from test.support.scenario import BUCKET_MB, SHAPES, mean, values

REDUCTIONS = (zero_opt.Overlapped(BUCKET_MB), zero_opt.AtStep(BUCKET_MB), zero_opt.AlreadyReduced())
EACH = pytest.mark.parametrize("reduction", REDUCTIONS, ids=lambda policy: type(policy).__name__)
STEPS, LIMIT = 4, 35.0
# The norm of a step's gradients is below, above, and above the limit.
SCALES = (0.5, 1.0, 8.0, 2.0)

# Unit roundoff of fp32.
U = 2.0**-24
_LARGEST = max(torch.Size(shape).numel() for shape in SHAPES)
# torch squares and adds up the n elements of a tensor in fp32: relative error of the sum at most n u, so of its root at
# most n u / 2 + u; then the same over the m norms of tensors. Ours is accumulated in fp64 and rounded once: u. Then
# each side adds 1e-6, divides, and takes the minimum with 1: 2 u. First-order terms; the factor covers the others.
BOUND = 1.01 * ((_LARGEST + len(SHAPES)) / 2 + 2 + 1 + 4) * U


def _params() -> list[nn.Parameter]:
    return [nn.Parameter(values(5, 0, 0, index, shape).clone()) for index, shape in enumerate(SHAPES)]


def _grad(step: int, rank: int, index: int) -> Tensor:
    return values(step, 1, rank, index, SHAPES[index]) * SCALES[step]


def _mean_grads(step: int, world_size: int) -> list[Tensor]:
    found = [mean([_grad(step, rank, index) for rank in range(world_size)]) for index in range(len(SHAPES))]
    return [grad for grad in found if grad is not None]


def _train(rank: int, world_size: int, reduction: Any, how: str) -> tuple[list[Tensor], list[Tensor]]:
    params, norms = _params(), []
    limit = LIMIT if how == "max_grad_norm" else None
    optimizer = zero_opt.ShardedOptimizer(params, torch.optim.AdamW, reduction=reduction, max_grad_norm=limit)
    for step in range(STEPS):
        optimizer.zero_grad()
        if isinstance(reduction, zero_opt.AlreadyReduced):
            for param, grad in zip(params, _mean_grads(step, world_size), strict=True):
                param.grad = grad
        else:
            torch.autograd.backward(params, [_grad(step, rank, index) for index in range(len(params))])
        if how != "max_grad_norm":
            norms.append(optimizer.clip_grad_norm_(LIMIT))
        if how == "clip twice":
            assert optimizer.clip_grad_norm_(LIMIT) <= norms[-1]
        optimizer.step()
    optimizer.close()
    return [param.detach() for param in params], norms


def _given(norms: list[Tensor], world_size: int, times: int = 1) -> list[Tensor]:
    """The plain class, its gradients scaled by the coefficient that follows from our norms."""
    params = _params()
    optimizer = torch.optim.AdamW(params, fused=times > 1)
    for step, norm in enumerate(norms):
        assert norm.dtype is torch.float32 and norm.dim() == 0
        coefficient = torch.clamp(LIMIT / (norm + 1e-6), max=1.0)
        for param, grad in zip(params, _mean_grads(step, world_size), strict=True):
            param.grad = grad * coefficient
        for _ in range(times):
            optimizer.step()
    return [param.detach() for param in params]


def _repeatedly(rank: int, world_size: int, reduction: Any, offload: Any, anew: str) -> list[list[Tensor]]:
    """Every gradient is clipped once, and stepped with three times; parameters, and norms."""
    params, norms = _params(), []
    model = nn.ParameterList(params)
    optimizer = zero_opt.ShardedOptimizer(params, torch.optim.AdamW, fused=True, reduction=reduction, offload=offload)
    for step in range(STEPS):
        if isinstance(reduction, zero_opt.AlreadyReduced):
            for param, grad in zip(params, _mean_grads(step, world_size), strict=True):
                param.grad = grad
        else:
            torch.autograd.backward(params, [_grad(step, rank, index) for index in range(len(params))])
        norms.append(optimizer.clip_grad_norm_(LIMIT))
        for _ in range(3):
            optimizer.step()
        if anew == "model":  # the optimizer hears nothing of it
            model.zero_grad(set_to_none=isinstance(reduction, zero_opt.Overlapped))
        else:
            optimizer.zero_grad(set_to_none=anew == "none")
    optimizer.flush()
    optimizer.close()
    return [[param.detach() for param in params], norms]


@EACH
@pytest.mark.parametrize(
    "offload", [None, zero_opt.CPUOffload(), zero_opt.WorkerOffload()], ids=["no", "host", "worker"]
)
@pytest.mark.parametrize("anew", ["none", "zeros", "model"])
def test_a_clipped_gradient_is_still_clipped_in_further_steps(reduction: Any, offload: Any, anew: str) -> None:
    """As in torch, where p.grad itself is scaled. The mean of three equal values may be another one."""
    for params, norms in run_processes(3, _repeatedly, reduction, offload, anew):
        assert_bitwise(params, _given(norms, 3, times=3))


@EACH
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_clipped_run_is_the_plain_run_given_our_coefficient(world_size: int, reduction: Any) -> None:
    runs = run_threads(world_size, _train, reduction, "clip_grad_norm_")
    for params, norms in runs:
        assert_bitwise(norms, runs[0][1])
        assert_bitwise(params, _given(norms, world_size))


@EACH
def test_max_grad_norm_is_clip_grad_norm_at_every_step(reduction: Any) -> None:
    expected = run_processes(2, _train, reduction, "clip_grad_norm_")[0][0]
    for params, _ in run_processes(2, _train, reduction, "max_grad_norm"):
        assert_bitwise(params, expected)


@EACH
def test_clipping_twice_is_harmless(reduction: Any) -> None:
    once = run_threads(2, _train, reduction, "clip_grad_norm_")[0][0]
    for params, _ in run_threads(2, _train, reduction, "clip twice"):
        for found, expected in zip(params, once, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@EACH
def test_the_coefficient_is_torchs_within_torchs_rounding(reduction: Any) -> None:
    norms = run_threads(3, _train, reduction, "clip_grad_norm_")[0][1]
    clipped = 0
    for step, norm in enumerate(norms):
        params = _params()
        for param, grad in zip(params, _mean_grads(step, 3), strict=True):
            param.grad = grad
        theirs = torch.nn.utils.clip_grad_norm_(params, LIMIT)
        exact = torch.cat([grad.flatten() for grad in _mean_grads(step, 3)]).double().norm().item()
        assert abs(norm.item() - exact) <= 1.01 * U * exact
        ours, torchs = min(1.0, LIMIT / (norm.item() + 1e-6)), min(1.0, LIMIT / (theirs.item() + 1e-6))
        assert abs(ours - torchs) <= BOUND * torchs
        clipped += ours < 1
    assert 0 < clipped < STEPS


def _wide(rank: int, world_size: int, scale: float, by_call: bool) -> tuple[Tensor | None, Tensor, int]:
    """fp64 gradients whose norm fp32 may not hold."""
    param = nn.Parameter(torch.ones(6, dtype=torch.float64))
    checks, limit = zero_opt.Checks(nonfinite="skip"), None if by_call else scale / 10
    optimizer = zero_opt.ShardedOptimizer([param], torch.optim.SGD, lr=0.1, checks=checks, max_grad_norm=limit)
    (param * scale).sum().backward()
    norm = optimizer.clip_grad_norm_(scale / 10) if by_call else None
    optimizer.step()
    optimizer.close()
    return norm, param.detach(), optimizer.skipped_steps


@pytest.mark.parametrize("by_call", [True, False])
@pytest.mark.parametrize("scale", [1e40, 1.0, 1e-50])
def test_the_norm_of_fp64_gradients_is_fp64_as_in_torch(scale: float, by_call: bool) -> None:
    plain = nn.Parameter(torch.ones(6, dtype=torch.float64))
    (plain * scale).sum().backward()
    wanted = torch.nn.utils.clip_grad_norm_([plain], scale / 10)
    torch.optim.SGD([plain], lr=0.1).step()
    for norm, param, skipped in run_processes(2, _wide, scale, by_call):
        assert skipped == 0
        torch.testing.assert_close(param, plain.detach(), rtol=1e-15, atol=0.0)
        if norm is not None:
            torch.testing.assert_close(norm, wanted, rtol=1e-15, atol=0.0)


def _not_finite(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    params = [nn.Parameter(torch.ones(130)), nn.Parameter(torch.ones(3))]
    optimizer = zero_opt.ShardedOptimizer(params, torch.optim.SGD, lr=0.1)
    grads = [torch.ones(130), torch.ones(3)]
    if rank == 1:
        grads[0][7] = torch.nan
    torch.autograd.backward(params, grads)
    norm = optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.close()
    return norm, params[1].detach()


def test_a_norm_that_is_not_finite_is_so_on_every_rank_as_in_torch() -> None:
    for norm, param in run_threads(2, _not_finite):
        assert norm.isnan()
        assert param.isnan().all()


@pytest.mark.parametrize("limit", [0, -1.0, float("nan"), "1", None, True])
def test_a_bad_limit_is_refused(limit: Any) -> None:
    optimizer = zero_opt.ShardedOptimizer(_params(), torch.optim.SGD, lr=0.1)
    with pytest.raises((zero_opt.ConfigError, zero_opt.ConfigTypeError), match="max_norm"):
        optimizer.clip_grad_norm_(limit)
    if limit is not None:
        with pytest.raises((zero_opt.ConfigError, zero_opt.ConfigTypeError), match="max_grad_norm"):
            zero_opt.ShardedOptimizer(_params(), torch.optim.SGD, lr=0.1, max_grad_norm=limit)
