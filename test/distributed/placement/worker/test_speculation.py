"""WorkerOffload(speculate=True): the bits of the synchronous step, whatever becomes of what was begun in backward."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_opt
from test.support.failures import PATIENCE_S
from test.support.harness import assert_bitwise, run_processes
from test.support.late_results import slowly
from test.support.sampling import EVERY_CASE
from test.support.scenario import BUCKET_MB, values
from test.support.tripwire import Failed, Tripwire
from test.support.worker_training import (
    DTYPES,
    NOW,
    SHAPES,
    assert_as_simulated,
    make,
    make_params,
    simulate,
    stillborn_workers,
    train_ranks,
    worker_of,
)
from zero_opt.reduction.grad_norm import square_sum

SPECULATING = zero_opt.WorkerOffload(speculate=True, max_deaths=50)
STEPS = 500 if EVERY_CASE else 200
LIMIT = 4.0
# What may happen in a step, and how often. In the middle part there is a loss scale.
KINDS = {
    "plain": 40,
    "clipped": 12,
    "clip call": 6,
    "overflow": 6,
    "skipped": 6,
    "lr": 6,
    "twice": 6,
    "no_sync": 6,
    "param": 4,
    "state": 4,
    "unused": 6,
    "again": 4,
    "raises": 4,
    "kept grad": 6,
}
SCALED = range(STEPS // 3, 2 * STEPS // 3)


def placement_of(optimizer: zero_opt.ShardedOptimizer) -> Any:
    engine: Any = optimizer._engine
    return engine.placement


class _Held(nn.Module):
    """Its forward gives its parameter."""

    def __init__(self, param: nn.Parameter) -> None:
        super().__init__()
        self.param = param

    def forward(self) -> Tensor:
        return self.param


class _Mixed:
    """One rank's training, in which a step's kind decides what happens."""

    def __init__(self, rank: int, offload: Any, kills: float, late: bool, dtype: torch.dtype) -> None:
        self.rank, self.kills = rank, kills
        self.params = make_params(dtype)
        self.model = nn.ModuleList(map(_Held, self.params))
        groups = [{"params": self.params[:2]}, {"params": self.params[2:], "lr": 0.02, "weight_decay": 0.3}]
        groups[1]["amsgrad"] = True
        checks = zero_opt.Checks(nonfinite="skip")
        reduction = zero_opt.Overlapped(BUCKET_MB, overlap_param_gather=self.model if late else None)
        self.optimizer = make(groups, offload=offload, max_grad_norm=LIMIT, lr=0.01, checks=checks, reduction=reduction)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=40)

    def backward(self, step: int, kind: str, *, part: int = 0) -> None:
        used = [i for i in range(len(SHAPES)) if kind != "unused" or i != step % len(SHAPES)]
        size = 10.0 if kind == "clipped" else 0.02
        factor = float(self.scaler.scale(torch.ones(()))) if step in SCALED else 1.0
        params = [self.model[i]() for i in used]
        noise = [values(step, part, self.rank, i, SHAPES[i]).to(params[0].dtype) for i in used]
        grads = [(value + 0.5 * param.detach()) * size for value, param in zip(noise, params, strict=True)]
        if kind == "overflow" and self.rank == 0:
            grads[0].view(-1)[3] = float("inf")
        if kind == "raises" and part == 0:
            params[0] = Tripwire.apply(params[0])
        torch.autograd.backward(params, [grad * factor for grad in grads])

    def before(self, step: int, kind: str) -> None:
        """Backwards that are not the last, or are void."""
        if kind == "no_sync":
            with self.optimizer.no_sync():
                self.backward(step, kind, part=1)
        elif kind == "twice":
            self.backward(step, kind, part=1)
        elif kind == "skipped":
            self.backward(step, kind, part=1)
            self.optimizer.zero_grad()
        elif kind == "raises":
            with pytest.raises(Failed):
                self.backward(step, kind)
            self.optimizer.zero_grad()

    def between(self, step: int, kind: str) -> None:
        """Between backward and step()."""
        if kind == "lr":
            self.optimizer.param_groups[step % 2]["lr"] *= 0.9
        elif kind == "param":
            with torch.no_grad():
                self.params[step % 3].mul_(0.9)
        elif kind == "state":
            for state in self.optimizer.state.values():
                state["exp_avg"].mul_(0.5)
        elif kind == "clip call" and step not in SCALED:
            self.optimizer.clip_grad_norm_((0.05, LIMIT)[step % 2])

    def step(self, step: int) -> None:
        chance = random.Random(step)
        kind = chance.choices(list(KINDS), list(KINDS.values()))[0]
        self.before(step, kind)
        self.backward(step, kind, part=2)
        child = worker_of(self.optimizer)._handles.child
        if child is not None and random.Random(f"{step} {self.rank}").random() < self.kills:
            os.kill(child.pid, signal.SIGKILL)
        self.between(step, kind)
        if step in SCALED:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
            if kind == "again":
                self.optimizer.step()
        if kind != "kept grad":
            self.optimizer.zero_grad()

    def values(self, step: int) -> list[Tensor]:
        """The parameters, read in one of the ways in which they may be read."""
        if step % 3 == 0:
            return [module().detach().clone() for module in self.model]
        if step % 3 == 1:
            return [value.clone() for value in self.model.state_dict().values()]
        self.optimizer.flush()
        return [param.detach().clone() for param in self.params]


def _train_mixed(
    rank: int,
    world_size: int,
    offload: Any,
    kills: float = 0.0,
    late: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Any:
    """Parameters and what a dict held from the beginning shows, after every step; state at the end; and counts."""
    mixed, seen = _Mixed(rank, offload, kills, late, dtype), []
    held: Any = None
    for step in range(STEPS):
        mixed.step(step)
        held = held or mixed.optimizer.state[mixed.params[2]]
        state = [value.clone() for value in held.values()]
        seen.append([*mixed.values(step), *state] if step % 5 else state)
    mixed.optimizer.consolidate_state_dict()
    state = mixed.optimizer.state_dict()["state"] if rank == 0 else None
    placement, deaths = placement_of(mixed.optimizer), worker_of(mixed.optimizer).deaths
    counts = (getattr(placement, "kept", 0), getattr(placement, "redone", 0), len(placement._shards), deaths)
    mixed.optimizer.close()
    return seen, state, counts


def _train_late(rank: int, world_size: int, dtype: torch.dtype) -> Any:
    """As :func:`_train_mixed`; parameters arrive so late after step() that whoever does not wait reads old ones."""
    slowly(pytest.MonkeyPatch())
    return _train_mixed(rank, world_size, SPECULATING, 0.06, True, dtype)


def _train_speculating(rank: int, world_size: int, dtype: torch.dtype) -> Any:
    return _train_mixed(rank, world_size, SPECULATING, 0.06, False, dtype)


@pytest.mark.parametrize(
    ("world_size", "train", "dtype"),
    [
        (1, _train_speculating, torch.float32),
        (2, _train_speculating, torch.float32),
        (1, _train_late, torch.bfloat16),
        (2, _train_late, torch.float32),
    ],
)
def test_the_bits_of_synchronous_steps_with_workers_killed(world_size: int, train: Any, dtype: torch.dtype) -> None:
    """Clipped, unclipped, overflowing, skipped, edited, accumulated: hundreds of steps, the state included."""
    plain = run_processes(world_size, _train_mixed, NOW, 0.0, False, dtype)
    found = run_processes(world_size, train, dtype)
    for (seen, state, _), (plain_seen, plain_state, _) in zip(found, plain, strict=True):
        assert_bitwise(seen, plain_seen)
        assert_bitwise(state, plain_state)
    for _, _, (kept, redone, buckets, deaths) in found:
        assert kept > STEPS / 3 * buckets, "most are what was begun"
        assert redone > STEPS / 20 * buckets
        assert deaths > STEPS / 50


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(dtype: torch.dtype) -> None:
    def run(rank: int, world_size: int) -> Any:
        return train_ranks(rank, world_size, 12, dtype, offload=SPECULATING)

    assert_as_simulated(run_processes(2, run), simulate(2, 12, 0, dtype))


@pytest.mark.parametrize("exchange", ["backend", "auto"])
def test_gradients_that_are_not_reduced_into_the_arena(exchange: str) -> None:
    """In fp64 they are copied at step(), and nothing is begun before."""

    def run(rank: int, world_size: int, offload: Any) -> Any:
        params = make_params()
        precision = zero_opt.MixedPrecision(reduce_dtype=torch.float64)
        reduction = zero_opt.Overlapped(BUCKET_MB, exchange)
        optimizer = make(params, offload=offload, precision=precision, reduction=reduction)
        for step in range(4):
            _backward(params, step, rank)
            optimizer.step()
            optimizer.zero_grad()
        drafts = getattr(placement_of(optimizer), "kept", 0)
        optimizer.close()
        return [param.detach() for param in params], drafts

    plain, found = (run_processes(2, run, offload) for offload in (NOW, SPECULATING))
    assert_bitwise(found, plain)


# -- when a step is begun ---------------------------------------------------------------------------------------------


def _backward(params: list[nn.Parameter], step: int, rank: int = 0, size: float = 1.0) -> None:
    torch.autograd.backward(params, [values(step, 1, rank, i, tuple(p.shape)) * size for i, p in enumerate(params)])


def _after_backward(optimizer: zero_opt.ShardedOptimizer) -> Any:
    """The placement, once all buckets that have been sent are reduced."""
    engine: Any = optimizer._engine
    for future in engine.reduction._futures:
        future.result(PATIENCE_S)
    return placement_of(optimizer)


def _alone(act: Callable[[list[nn.Parameter], zero_opt.ShardedOptimizer], Any], **options: Any) -> Any:
    """What ``act`` returns, given an optimizer after a step."""
    params = make_params()
    optimizer = make(params, offload=SPECULATING, **options)
    try:
        _backward(params, 0, size=0.01)
        optimizer.step()
        optimizer.zero_grad()
        return act(params, optimizer)
    finally:
        optimizer.close()


def test_a_step_is_begun_in_backward_and_only_committed_by_step() -> None:
    def act(params: list[nn.Parameter], optimizer: zero_opt.ShardedOptimizer) -> None:
        before, state = [param.detach().clone() for param in params], optimizer.state_dict()
        made = placement_of(optimizer)._worker.control.drafted
        _backward(params, 1)
        placement = _after_backward(optimizer)
        placement._worker.wait_drafts(placement._worker.control.drafted)
        drafted, buckets = placement._worker.control.drafted, len(placement._shards)
        assert drafted - made == len(placement._drafts) == buckets > 1
        assert_bitwise([param.detach() for param in params], before)
        assert_bitwise(optimizer.state_dict(), state)
        views = dict(optimizer.state[params[0]])
        optimizer.step()
        assert (placement._worker.control.drafted, placement.kept, placement.redone) == (drafted, buckets, 0)
        assert optimizer.state[params[0]]["exp_avg"].data_ptr() != views["exp_avg"].data_ptr()
        assert optimizer.state[params[0]]["step"] == 2

    _alone(act)


def test_what_was_begun_is_thrown_away_with_the_gradient() -> None:
    def act(params: list[nn.Parameter], optimizer: zero_opt.ShardedOptimizer) -> None:
        _backward(params, 1)
        placement = _after_backward(optimizer)
        before = [param.detach().clone() for param in params]
        optimizer.zero_grad()
        optimizer.step()
        assert_bitwise([param.detach() for param in params], before)
        assert (placement.kept, placement.redone) == (0, 0)
        assert all(state["step"] == 1 for state in optimizer.state.values())

    _alone(act)


def test_only_the_last_backward_of_a_window_is_begun() -> None:
    """After one window with two, the next one waits for the second."""

    def act(params: list[nn.Parameter], optimizer: zero_opt.ShardedOptimizer) -> None:
        for part in (1, 2):
            _backward(params, part)
        optimizer.step()
        placement, counts = placement_of(optimizer), []
        optimizer.zero_grad()
        for part in (3, 4):
            _backward(params, part)
            counts.append(len(_after_backward(optimizer)._drafts))
        assert counts == [0, len(placement._shards)]
        kept = placement.kept
        optimizer.step()
        assert placement.kept == kept + counts[1]

    _alone(act)


def test_steps_are_not_begun_while_most_are_clipped() -> None:
    """More than half of the last eight; each step is looked at, begun or not."""

    def act(params: list[nn.Parameter], optimizer: zero_opt.ShardedOptimizer) -> None:
        begun = []
        for step, size in enumerate([100.0] * 7 + [0.01] * 8):
            _backward(params, step, size=size)
            begun.append(bool(_after_backward(optimizer)._drafts))
            optimizer.step()
            optimizer.zero_grad()
        assert begun == [True] * 5 + [False] * 6 + [True] * 4

    _alone(act, max_grad_norm=1.0)


def _sums(placement: Any) -> list[Tensor | None]:
    """What is known of the norm, once the worker has nothing to do."""
    placement._worker.wait_drafts(placement._worker.control.drafted)
    return [sums for shard in placement._shards.values() for sums in shard.bucket.squares()]


def test_a_norm_that_is_asked_for_is_summed_before_step() -> None:
    """With the bits that a sum in step() has; also of steps that are not begun, and never of another gradient."""

    def act(params: list[nn.Parameter], optimizer: zero_opt.ShardedOptimizer) -> None:
        engine: Any = optimizer._engine
        begun = []
        for step, backwards in enumerate([1] * 6 + [2, 1]):
            for part in range(backwards):
                _backward(params, step + part, size=100.0)
            placement = _after_backward(optimizer)
            begun.append(bool(placement._drafts))
            known = _sums(placement)
            if step == 7:
                assert known == [None] * len(known), "this may be the first backward of two"
                return
            grads = [grad for shard in engine.reduce()[1] for grad in shard.grads]
            assert square_sum(grads, known) == square_sum(grads) > 0
            assert all(sums is not None for sums in known)
            assert float(optimizer.clip_grad_norm_(1.0)) > 1.0
            assert _sums(placement) == [None] * len(known), "gradients were multiplied"
            optimizer.step()
            optimizer.zero_grad()
            assert begun == [number < 5 for number in range(step + 1)]

    _alone(act, max_grad_norm=1e9)


def test_nobody_waits_for_sums() -> None:
    def act(params: list[nn.Parameter], optimizer: zero_opt.ShardedOptimizer) -> None:
        child = placement_of(optimizer)._worker._handles.child
        os.kill(child.pid, signal.SIGSTOP)
        _backward(params, 1)
        placement = _after_backward(optimizer)
        assert len(placement._summed) == len(placement._shards)
        assert all(sums is None for shard in placement._shards.values() for sums in shard.bucket.squares())
        assert float(optimizer.clip_grad_norm_(1e9)) > 0
        os.kill(child.pid, signal.SIGCONT)
        optimizer.step()
        assert placement.kept > 0

    _alone(act, max_grad_norm=1e9)


def test_no_sums_where_no_norm_is_asked_for() -> None:
    def act(params: list[nn.Parameter], optimizer: zero_opt.ShardedOptimizer) -> None:
        _backward(params, 1)
        assert not _after_backward(optimizer)._summed

    _alone(act)


def test_a_loss_scale_is_expected_once_it_has_been_seen_twice() -> None:
    def act(params: list[nn.Parameter], optimizer: zero_opt.ShardedOptimizer) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6, growth_interval=1000)
        placement, kept = placement_of(optimizer), []
        for step in range(5):
            _backward(params, step, size=float(scaler.scale(torch.ones(()))))
            before = placement.kept
            scaler.step(optimizer)
            scaler.update()
            kept.append(placement.kept > before)
            optimizer.zero_grad()
        assert kept == [False, False, True, True, True]

    _alone(act)


@pytest.mark.parametrize("dtype", DTYPES)
def test_parameters_and_state_are_added_and_loaded_meanwhile(dtype: torch.dtype) -> None:
    """The state without the parameters, which are no longer what its masters round to."""

    def run(offload: Any) -> Any:
        params = make_params(dtype)
        optimizer = make(params, offload=offload)
        saved: dict[str, Any] = {}
        for step in range(9):
            if step == 4:
                optimizer.load_state_dict(saved)
            _backward(params, step)
            if step == 3:
                saved = optimizer.state_dict()
            if step == 5:
                optimizer.load_state_dict(saved)
            if step == 6:
                params.append(nn.Parameter(torch.ones(300)))
                optimizer.add_param_group({"params": params[-1:], "lr": 0.05})
            optimizer.step()
            optimizer.zero_grad()
        state = optimizer.state_dict()["state"]
        optimizer.close()
        return [param.detach() for param in params], state

    assert_bitwise(run(SPECULATING), run(NOW))


def test_state_takes_twice_the_memory() -> None:
    def state_bytes(offload: Any) -> int:
        params = make_params()
        optimizer = make(params, offload=offload)
        _backward(params, 0)
        optimizer.step()
        found = optimizer.memory_report()["state"]
        optimizer.close()
        return found

    numel = sum(param.numel() for param in make_params())
    assert state_bytes(SPECULATING) - state_bytes(NOW) >= 3 * 4 * numel


@pytest.mark.parametrize("reduction", [zero_opt.AtStep(), zero_opt.AlreadyReduced()])
def test_reductions_that_do_not_reduce_in_backward_are_refused(reduction: Any) -> None:
    with pytest.raises(zero_opt.ConfigConflict, match=r"use reduction=zero_opt\.Overlapped"):
        make(make_params(), offload=SPECULATING, reduction=reduction)


def test_a_worker_that_cannot_be_had_leaves_the_step_pending(tmp_path: Path) -> None:
    def act(params: list[nn.Parameter], optimizer: zero_opt.ShardedOptimizer) -> None:
        placement = placement_of(optimizer)
        before = [param.detach().clone() for param in params]
        _backward(params, 1, size=100.0)
        _after_backward(optimizer)
        placement._worker._policy = zero_opt.WorkerOffload(speculate=True, max_deaths=2)
        os.kill(placement._worker._handles.child.pid, signal.SIGSTOP)
        optimizer.param_groups[0]["lr"] = 0.5  # what was begun is void
        os.kill(placement._worker._handles.child.pid, signal.SIGKILL)
        with stillborn_workers(tmp_path), pytest.raises(zero_opt.WorkerDied):
            optimizer.step()
        assert_bitwise([param.detach() for param in params], before)
        optimizer.flush()
        assert not torch.equal(params[0], before[0])
        assert optimizer.state[params[0]]["step"] == 2

    _alone(act)
