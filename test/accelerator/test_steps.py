"""What only shows where parameters lie on a device: second steps, and memory that state gives back."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest
import torch

import zero_opt
from test.accelerator import C, unavailable
from test.accelerator.ranks import on_device, on_ranks
from test.accelerator.runner import DEVICE
from test.support.failures import PATIENCE_S
from test.support.harness import assert_bitwise
from zero_opt.placement.in_process import placement
from zero_opt.reduction.consumed_grad import ConsumedGrad
from zero_opt.system.waiting import until

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))

NUMEL = 1 << 16
MASTERS = zero_opt.MixedPrecision(torch.float32)


def _made(rank: int, **options: Any) -> tuple[torch.nn.Parameter, zero_opt.ShardedOptimizer]:
    param = torch.nn.Parameter(torch.ones(NUMEL, device=torch.device(DEVICE, rank), dtype=torch.bfloat16))
    return param, zero_opt.ShardedOptimizer([param], torch.optim.Adam, lr=0.25, precision=MASTERS, **options)


def _stepped_again(rank: int) -> list[float]:
    """Clip gradients of norm 256 to 1, and step twice, by a quarter."""
    param = torch.nn.Parameter(torch.ones(NUMEL, device=torch.device(DEVICE, rank), dtype=torch.bfloat16))
    options: dict[str, Any] = {"reduction": zero_opt.AtStep(), "precision": MASTERS}
    optimizer = zero_opt.ShardedOptimizer([param], torch.optim.SGD, lr=64.0, **options)
    param.grad = torch.ones_like(param)
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.step()
    optimizer.close()
    return sorted(set(param.detach().cpu().tolist()))


def test_gradients_that_were_clipped_within_a_step_are_clipped_in_the_next() -> None:
    """A graph may have written others, so they are reduced again."""
    assert on_ranks(_stepped_again) == [[0.5]] * 2


def _unreduced(rank: int) -> str:
    """Reduce the gradients of every step but number 1."""
    param, optimizer = _made(rank, reduction=zero_opt.AlreadyReduced())
    for step in range(3):
        param.grad = torch.full_like(param, 1.0 + rank * (step == 1))
        try:
            optimizer.step()
        except zero_opt.GradientConflict as error:
            return f"{step}: {error}"
        finally:
            optimizer.zero_grad()
    return ""


@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_hook_on_autograds_thread_cannot_read_a_gradient_by_adding() -> None:
    """There the engine, which adds with ``create_graph``, has no frame."""

    def train(reads: bool) -> tuple[bool, bool]:
        param = torch.nn.Parameter(torch.ones(4, device=DEVICE))
        owner: Any = UserDict()  # stand-ins refer to it weakly
        param.grad = grad = ConsumedGrad(param, owner, 0, "a parameter")
        if reads:
            param.register_post_accumulate_grad_hook(lambda param: param.grad + torch.ones_like(param))  # type: ignore
        refused = False
        try:
            param.square().sum().backward(create_graph=True)
        except zero_opt.GradientConsumed:
            refused = True
        pending = grad.take_pending()
        return refused, pending is not None and pending.cpu().equal(torch.full((4,), 2.0))

    assert on_device(lambda: [train(False), train(True)]) == [(False, True), (True, True)]


def test_gradients_that_nobody_has_reduced_are_noticed_in_the_step_after() -> None:
    for message in on_ranks(_unreduced):
        assert message.startswith("2: ") and "in step 1" in message and "not yet reduced" in message


def _leaves() -> tuple[int, int]:
    param, optimizer = _made(0)
    param.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    before = C.live_bytes()
    optimizer.offload_state()
    away = C.live_bytes()
    optimizer.reload_state()
    param.sum().backward()
    optimizer.step()
    assert param.detach().cpu().tolist() == [0.5] * NUMEL
    optimizer.close()
    return before, away


def test_offload_state_leaves_no_master_on_the_device() -> None:
    """Of an element, 12 bytes of masters and moments leave, and two of the reduced gradient."""
    before, away = on_device(_leaves)
    assert before - away >= 14 * NUMEL


def _in_portions(rank: int, numel: int, options: dict[str, Any]) -> tuple[int, list[torch.Tensor]]:
    """Train with buckets of 512 elements, so many elements of which are stepped by one call."""
    placement._TOGETHER_NUMEL = numel  # in this process, which is the rank's own
    calls, step_of_class = [], torch.optim.Adam.step
    torch.optim.Adam.step = lambda *given: calls.append(step_of_class(*given))
    device = torch.device(DEVICE, rank)
    params = [torch.nn.Parameter(torch.ones(512, device=device, dtype=torch.bfloat16)) for _ in range(6)]
    reduction = zero_opt.Overlapped(bucket_mb=1024 / 2**20)
    optimizer = zero_opt.ShardedOptimizer(params, torch.optim.Adam, lr=0.25, reduction=reduction, **options)
    for step in range(3):
        used = params if step != 1 else params[:2]  # the others have no gradient on any rank
        torch.autograd.backward(used, [torch.full_like(param, 1 + rank + i) for i, param in enumerate(used)])
        optimizer.step()
        optimizer.zero_grad()
    found = [param.detach().cpu() for param in params]
    optimizer.close()
    return len(calls), found


@pytest.mark.parametrize("options", [{}, {"precision": MASTERS}], ids=["narrow", "masters"])
def test_buckets_are_stepped_together_to_the_same_bits(options: dict[str, Any]) -> None:
    """A call takes the host longer than it takes a device to step a bucket. Ranks have half of each bucket."""
    found = {}
    for numel, calls in ((1, 6 + 2 + 6), (2 * 256, 3 + 1 + 3), (1 << 20, 1 + 1 + 1)):
        for counted, params in on_ranks(lambda rank, numel=numel: _in_portions(rank, numel, options)):
            assert counted == calls
            found.setdefault(numel, []).append(params)
    assert_bitwise(found[1], found[512])
    assert_bitwise(found[1], found[1 << 20])


def _speculating(rank: int, dtype: torch.dtype, speculate: bool, drops: bool) -> tuple[float, list[torch.Tensor]]:
    """Train in buckets of 512 elements; all steps but two wait until each is drafted.

    Args:
        drops: a second backward comes after the first, whose gradients are dropped; no step waits.
    """
    device = torch.device(DEVICE, rank)
    params = [torch.nn.Parameter(torch.ones(512, device=device, dtype=dtype)) for _ in range(4)]
    optimizer = zero_opt.ShardedOptimizer(
        params,
        torch.optim.AdamW,
        lr=0.25,
        fused=True,
        reduction=zero_opt.Overlapped(bucket_mb=512 * dtype.itemsize / 2**20),
        offload=zero_opt.WorkerOffload(speculate=speculate, threads=1),
    )
    placed: Any = optimizer._engine.placement  # type: ignore[union-attr]
    for step in range(4):
        for turn in range(1 + drops):
            if turn:
                optimizer.zero_grad()
            grads = [torch.full_like(param, (1 + rank + i) * (1 + turn + step)) for i, param in enumerate(params)]
            torch.autograd.backward(params, grads)
        # The first step looks at the parameters, and reductions of the second may wait for it.
        if speculate and step > 1 and not drops:
            assert until(lambda: len(placed._drafts) == len(params), PATIENCE_S)
        optimizer.step()
        optimizer.zero_grad()
    found = [param.detach().cpu() for param in params]
    kept = optimizer.stats().get("worker/drafts_kept", 0.0)
    optimizer.close()
    return kept, found


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_begin_during_backward_to_the_same_bits(dtype: torch.dtype, drops: bool) -> None:
    for run in (on_ranks, lambda fn: [on_device(lambda: fn(0))]):
        drafted = run(lambda rank: _speculating(rank, dtype, True, drops))
        plain = run(lambda rank: _speculating(rank, dtype, False, drops))
        for (kept, ours), (_, expected) in zip(drafted, plain, strict=True):
            assert drops or kept >= 2 * 4
            assert_bitwise(ours, expected)
