"""WorkerOffload: gradients that leave a device as soon as they are reduced are those that the step is made with."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

import zero_opt
from test.accelerator import C, assert_no_races, unavailable
from test.accelerator.ranks import on_device, on_ranks
from test.accelerator.runner import DEVICE
from test.support.harness import assert_bitwise
from zero_opt.placement.worker.arena_shard import ArenaShard

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))

NUMEL, COUNT, STEPS = 512, 4, 4
LATE = zero_opt.WorkerOffload(delay=1, threads=1)
OFFLOADS = (
    zero_opt.WorkerOffload(threads=1),
    LATE,
    zero_opt.WorkerOffload(delay=1, threads=1, warmup_steps=2, prediction=1.0),
)


class Training:
    """One rank's training on a device in buckets of one parameter, beside the plain optimizer on the CPU."""

    def __init__(self, rank: int, offload: Any = LATE, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        self.rank, self.dtype = rank, dtype
        self.size = torch.distributed.get_world_size()
        self.params = self._made(torch.device(DEVICE, rank))
        options.setdefault("reduction", zero_opt.Overlapped(bucket_mb=NUMEL * dtype.itemsize / 2**20))
        self.optimizer = zero_opt.ShardedOptimizer(
            self.params, torch.optim.AdamW, lr=0.25, fused=True, offload=offload, **options
        )
        self.plain = self._made(torch.device("cpu"))
        self.reference = zero_opt.CPUAdamW(self.plain, lr=0.25, state=zero_opt.AdamState(master="float32"))
        engine: Any = self.optimizer._engine
        self.placement: Any = engine.placement

    def _made(self, device: torch.device) -> list[torch.nn.Parameter]:
        return [torch.nn.Parameter(torch.ones(NUMEL, device=device, dtype=self.dtype)) for _ in range(COUNT)]

    def backward(self, step: int) -> list[float]:
        """Return the mean of each parameter's gradient, a small integer or half of one."""
        values = [[(1 + rank + i) * (1 + step) for i in range(COUNT)] for rank in range(self.size)]
        used = self.params[:COUNT]
        grads = [torch.full_like(param, value) for param, value in zip(used, values[self.rank], strict=True)]
        torch.autograd.backward(used, grads)
        return [sum(of_param) / self.size for of_param in zip(*values, strict=True)]

    def step(self, means: Sequence[float]) -> None:
        """Take a step, and the one that it is to be."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        for param, mean in zip(self.plain, means, strict=True):
            param.grad = torch.full_like(param, mean)
        self.reference.step()

    def arrived(self) -> list[Tensor]:
        """Return what the worker would read now, per bucket; a view."""
        C.synchronize()
        return [shard.grads for shard in self.placement._shards.values()]

    @property
    def worker_pid(self) -> int:
        return int(self.placement._worker._handles.child.pid)

    def copied(self) -> list[bool]:
        """Return of each bucket whether its gradient has left."""
        return [shard.reduced.copied for shard in self.placement._shards.values()]

    def end(self) -> None:
        """Compare the parameters with those of the plain optimizer, and close."""
        self.optimizer.flush()
        found = [param.detach().cpu() for param in self.params]
        self.optimizer.close()
        assert_bitwise(found, [param.detach() for param in self.plain])
        assert_no_races()


def on_one_and_two(fn: Callable[[int], None]) -> None:
    on_device(lambda: fn(0))
    on_ranks(fn)


def _leave_in_backward(rank: int, offload: Any, dtype: torch.dtype) -> None:
    training = Training(rank, offload, dtype)
    for step in range(STEPS):
        means = training.backward(step)
        if step > 1:  # reductions of the second backward may wait for the step, in which ranks agree on their order
            found = training.arrived()
            by_bucket = [means[bucket.layout.params[0]] for bucket in _buckets(training)]
            assert_bitwise(found, [torch.full_like(one, mean) for one, mean in zip(found, by_bucket, strict=True)])
            for one in found:  # what is copied again would not be halved
                one.mul_(0.5)
            means = [mean / 2 for mean in means]
        training.step(means)
    training.end()


def _buckets(training: Training) -> list[Any]:
    return [shard.bucket for shard in training.placement._shards.values()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offload", OFFLOADS, ids=["now", "late", "predicted"])
def test_gradients_leave_in_backward_and_not_in_the_step(offload: Any, dtype: torch.dtype) -> None:
    on_one_and_two(lambda rank: _leave_in_backward(rank, offload, dtype))


@contextmanager
def _stopped(training: Training) -> Iterator[None]:
    """Stop the worker meanwhile."""
    pid = training.worker_pid
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def _pending(rank: int) -> None:
    training = Training(rank)
    for step in range(0, STEPS, 2):
        means = training.backward(step)
        with _stopped(training):
            training.step(means)
            means = training.backward(step + 1)
            if step:
                arrived = {float(value) for found in training.arrived() for value in found[:1]}
                assert arrived == set(means)
        training.step(means)
        training.optimizer.flush()  # the next step is submitted at once: it waits for none
    training.end()


def test_the_worker_reads_the_gradients_of_a_pending_step_while_the_next_ones_arrive() -> None:
    on_one_and_two(_pending)


def _changed(rank: int, offload: Any) -> None:
    """Between backward and step(), what was copied is made void in every way."""
    training = Training(rank, offload)
    optimizer = training.optimizer
    engine: Any = optimizer._engine
    steps = count()

    def copied() -> list[float]:
        """Take a step like others, after which each first backward is copied; return what the next one leaves."""
        training.step(training.backward(next(steps)))
        means = training.backward(next(steps))
        assert all(training.copied())
        return means

    training.step(training.backward(next(steps)))  # ranks agree on the order of buckets
    means = copied()
    training.step([one + two for one, two in zip(means, training.backward(next(steps)), strict=True)])
    copied()
    optimizer.zero_grad()
    training.step(training.backward(next(steps)))
    means = copied()
    assert float(optimizer.clip_grad_norm_(1e9)) > 0
    engine.reduction.scale(torch.tensor(-0.25))
    training.step([mean / -4 for mean in means])
    means = copied()
    optimizer.zero_grad(set_to_none=False)
    training.step([0.0 * mean for mean in means])
    training.step(copied())
    training.end()


@pytest.mark.parametrize("offload", OFFLOADS[:2], ids=["now", "late"])
def test_gradients_that_change_after_they_have_left(offload: Any) -> None:
    on_one_and_two(lambda rank: _changed(rank, offload))


def _multiplied(rank: int) -> None:
    training = Training(rank)
    engine: Any = training.optimizer._engine
    for step in range(STEPS):
        means = training.backward(step)
        assert step < 2 or not any(training.copied())
        training.optimizer.clip_grad_norm_(1e9)  # gradients are reduced, and not changed
        engine.reduction.scale(torch.tensor(-0.25))
        training.step([mean / -4 for mean in means])
    for step in range(STEPS, STEPS + 2):
        means = training.backward(step)
        assert set(training.copied()) == {step > STEPS}
        training.step(means)
    training.end()


def test_gradients_leave_in_the_step_where_those_of_the_last_one_were_multiplied() -> None:
    on_one_and_two(_multiplied)


def _interrupted(rank: int, offload: Any) -> None:
    """Copies count for a step that fails at first, or comes after the state has left the device and is back."""
    training = Training(rank, offload)
    optimizer = training.optimizer
    group = optimizer.param_groups[0]
    for step in range(STEPS):
        means = training.backward(step)
        assert step < 2 or all(training.copied())
        lr, group["lr"] = group["lr"], "much"
        with pytest.raises(zero_opt.errors.ConfigTypeError):
            optimizer.step()
        group["lr"] = lr
        optimizer.offload_state()
        optimizer.reload_state()
        training.step(means)
        optimizer.offload_state()
        optimizer.reload_state()
    training.end()


@pytest.mark.parametrize("offload", OFFLOADS[:2], ids=["now", "late"])
def test_a_step_that_fails_and_is_repeated(offload: Any) -> None:
    on_one_and_two(lambda rank: _interrupted(rank, offload))


def _killed(rank: int) -> None:
    training = Training(rank)
    for step in range(2 * STEPS):
        means = training.backward(step)
        if step % 3 == 2:
            assert all(training.copied())
            os.kill(training.worker_pid, signal.SIGKILL)
        training.step(means)
    training.end()


def test_a_worker_that_is_killed_while_a_step_is_pending_and_gradients_have_left() -> None:
    on_one_and_two(_killed)


def _arena_moves(rank: int) -> None:
    training = Training(rank)
    training.step(training.backward(0))
    means = training.backward(1)
    added, plain = (
        torch.nn.Parameter(torch.ones(NUMEL, device=torch.device(device))) for device in (f"{DEVICE}:{rank}", "cpu")
    )
    training.optimizer.add_param_group({"params": [added]})
    training.step(means)
    training.reference.add_param_group({"params": [plain]})
    training.params.append(added)
    training.plain.append(plain)
    for step in (2, 3):
        means = [*training.backward(step), 1.0]
        added.backward(torch.ones_like(added))
        training.step(means)
    training.end()


def test_gradients_that_have_left_before_the_arena_moves() -> None:
    on_one_and_two(_arena_moves)


def _without_copies(rank: int, prepare: Callable[[Training], None]) -> None:
    training = Training(rank)
    prepare(training)
    for step in range(STEPS):
        means = training.backward(step)
        assert not any(training.copied())
        training.step(means)
    training.end()


def _fail(training: Training) -> None:
    def fail(_: ArenaShard) -> None:
        raise RuntimeError("the device refuses")

    ArenaShard.copy_reduced = fail  # type: ignore[method-assign]


def _refuse(training: Training) -> None:
    training.placement._mapped.refused = True


@pytest.mark.parametrize("prepare", [_fail, _refuse])
def test_the_step_copies_what_cannot_leave_early(prepare: Callable[[Training], None]) -> None:
    """A copy fails, or would keep the thread of backward waiting, as from and to memory that is not locked."""
    on_one_and_two(lambda rank: _without_copies(rank, prepare))


def _copies_per_step(rank: int) -> None:
    training, copied = Training(rank), list[int]()
    copy: Any = ArenaShard.copy_reduced

    def noted(shard: ArenaShard) -> None:
        copied.append(shard.bucket.layout.index)
        copy(shard)

    ArenaShard.copy_reduced = noted  # type: ignore[method-assign]
    counts = []
    for step in range(STEPS):
        copied.clear()
        means = [training.backward(3 * step + turn) for turn in range(3)]
        training.step([sum(of_param) for of_param in zip(*means, strict=True)])
        counts.append(len(copied))
    training.end()
    assert counts[0] == 3 * COUNT and set(counts[1:]) == {COUNT}


def test_of_several_backwards_the_last_one_leaves() -> None:
    on_one_and_two(_copies_per_step)


def _closed_at_once(rank: int) -> None:
    training = Training(rank)
    for step in range(2):
        training.step(training.backward(step))
    before = training.placement._copies
    C.delays(0, 20000, 0, 1)
    training.backward(2)
    assert all(training.copied())
    assert any(event not in before for event in training.placement._copies), "close() waits for what has been enqueued"
    training.optimizer.close()
    C.delays(0, 0, 0, 0)
    C.synchronize()
    assert_no_races()


def test_an_optimizer_that_closes_while_gradients_leave() -> None:
    on_device(lambda: _closed_at_once(0))


def _held(rank: int, offload: Any, reduction: Any, dtype: torch.dtype) -> None:
    training = Training(rank, offload, dtype, reduction=reduction)
    for _ in range(2):
        torch.stack([param.sum() for param in training.params]).sum().backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
    told = zero_opt.estimate(
        [torch.empty(NUMEL, dtype=dtype, device="meta").requires_grad_() for _ in range(COUNT)],
        training.size,
        torch.optim.AdamW,
        device=DEVICE,
        reduction=reduction,
        offload=offload,
        fused=True,
    ).on_rank(rank)
    copies = sum(row.nbytes for row in told.rows if row.name == "copies of gradients")
    arrays = (shard._arrays for shard in training.placement._shards.values())
    places = [array for of_shard in arrays for role, array in of_shard.items() if role.startswith("grad")]
    assert copies == sum(place.nbytes for place in places)
    early = offload.delay and not isinstance(reduction, zero_opt.AlreadyReduced)
    assert copies == (1 + early) * COUNT * NUMEL * dtype.itemsize // training.size
    training.optimizer.close()


@pytest.mark.parametrize("reduction", [zero_opt.Overlapped(), zero_opt.AlreadyReduced()], ids=["early", "in the step"])
@pytest.mark.parametrize("offload", OFFLOADS[:2], ids=["now", "late"])
def test_the_estimate_counts_a_second_place_where_a_step_may_be_pending(offload: Any, reduction: Any) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        on_one_and_two(lambda rank, dtype=dtype: _held(rank, offload, reduction, dtype))  # type: ignore[misc]
