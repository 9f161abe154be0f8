"""Ranks that run out of inputs while the others train on, under torch's ``Join``."""

from __future__ import annotations

import os
import signal
import time
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import zero_opt
from test.support.harness import assert_bitwise, run_processes
from test.support.scenario import AT_STEP, BUCKET_MB, OVERLAPPED, Case, add, backwards, case, gradient, mean
from test.support.worker_training import end_workers
from zero_opt.sharding.late_params import Unwatched

ADAM = case(torch.optim.Adam, {"lr": 0.02, "betas": (0.8, 0.95)}, lr=0.01)
# Whole parameters, each stepped by one rank.
MUON = Case(torch.optim.Muon, (("lr", 0.01),), (("lr", 0.02),), ((130, 7), (40, 3), (5, 9), (8, 8)))


def _inputs(rank: int, world_size: int) -> int:
    """How many steps a rank has inputs for: none, 3, 6, ... but rank 1 the most."""
    return 3 * world_size if rank == 1 else 3 * rank


def _grad(case: Case, step: int, turn: int, rank: int, index: int, world_size: int) -> Tensor | None:
    if step >= _inputs(rank, world_size):
        return None
    return gradient(step, turn, rank, index, case.shapes[index])


def _oracle(case: Case, world_size: int, max_norm: float | None, *, at_step: bool, clipped: list[float]) -> Any:
    """The plain class fed the mean over all ranks, those without inputs counting as zero."""
    params = case.params()
    optimizer = case.plain(params)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in range(3 * world_size):
        for index, param in enumerate(params):
            found = [
                [_grad(case, step, turn, rank, index, world_size) for rank in range(world_size)]
                for turn in range(backwards(step))
            ]
            param.grad = None
            if at_step:
                sums: list[Tensor | None] = [None] * world_size
                for parts in found:
                    sums = [add(total, part) for total, part in zip(sums, parts, strict=True)]
                param.grad = mean(sums)
            else:
                for parts in found:
                    param.grad = add(param.grad, mean(parts))
        if max_norm is not None:
            factor = min(1.0, max_norm / (clipped[step] + 1e-6))
            for param in params:
                if param.grad is not None:
                    param.grad *= torch.tensor(factor)
        optimizer.step()
        scheduler.step()
    return [param.detach() for param in params], optimizer.state_dict()


def _train(rank: int, world_size: int, case: Case, options: dict[str, Any], max_norm: float | None) -> Any:
    params = case.params()
    optimizer = case.sharded(params, **options)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    norms = []
    with Join([optimizer]):
        for step in range(_inputs(rank, world_size)):
            optimizer.zero_grad()
            for turn in range(backwards(step)):
                found = [_grad(case, step, turn, rank, index, world_size) for index in range(len(params))]
                pairs = [(param, grad) for param, grad in zip(params, found, strict=True) if grad is not None]
                torch.autograd.backward([param for param, _ in pairs], [grad for _, grad in pairs])
            if max_norm is not None:
                norms.append(float(optimizer.clip_grad_norm_(max_norm)))
            optimizer.step()
            scheduler.step()
    optimizer.flush()
    optimizer.consolidate_state_dict(to=1)
    state = optimizer.state_dict() if rank == 1 else None
    optimizer.close()
    return [param.detach().clone() for param in params], state, norms


@pytest.mark.parametrize("reduction", [OVERLAPPED, AT_STEP], ids=["Overlapped", "AtStep"])
@pytest.mark.parametrize("case", [ADAM, MUON], ids=lambda case: case.cls.__name__)
def test_ranks_without_inputs_count_as_zero(case: Case, reduction: Any) -> None:
    found = run_processes(3, _train, case, {"reduction": reduction}, None)
    params, state = _oracle(case, 3, None, at_step=reduction is AT_STEP, clipped=[])
    assert_bitwise(found[1][1]["state"], state["state"])
    for rank in range(3):
        assert_bitwise(found[rank][0], params, f"rank {rank}")


def test_they_clip_along() -> None:
    found = run_processes(3, _train, ADAM, {"reduction": OVERLAPPED}, 0.5)
    for rank in (0, 2):
        assert_bitwise(found[rank][0], found[1][0], f"rank {rank}")
    within = run_processes(3, _train, ADAM, {"reduction": OVERLAPPED, "max_grad_norm": 0.5}, None)
    for rank in range(3):
        assert_bitwise(within[rank][0], found[1][0], f"rank {rank}, max_grad_norm")
    assert len(found[1][2]) == 9 and max(found[1][2]) > 0.5


def test_a_worker_steps_their_shards() -> None:
    fused = case(torch.optim.AdamW, {"lr": 0.02}, lr=0.01, fused=True)
    here = run_processes(2, _train, fused, {"reduction": OVERLAPPED}, None)
    options = {"reduction": OVERLAPPED, "offload": zero_opt.WorkerOffload(threads=1)}
    there = run_processes(2, _train, fused, options, None)
    assert_bitwise([params for params, _, _ in there], [params for params, _, _ in here])


# -- under DistributedDataParallel ------------------------------------------------------------------------------------


def _ddp(rank: int, world_size: int, sharded: bool, max_grad_norm: float | None) -> Any:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 3)))
    kwargs: dict[str, Any] = {"lr": 0.01, "foreach": False}
    optimizer: Any = torch.optim.AdamW(model.parameters(), **kwargs)
    joined: list[Any] = [model]
    if sharded:
        kwargs.update(reduction=zero_opt.AlreadyReduced(), max_grad_norm=max_grad_norm)
        optimizer = zero_opt.ShardedOptimizer(model.parameters(), torch.optim.AdamW, **kwargs)
        joined.append(optimizer)
    generator = torch.Generator().manual_seed(rank)
    with Join(joined):
        for _ in range(2 + 3 * (rank == world_size - 1)):
            optimizer.zero_grad()
            model(torch.randn(4, 30, generator=generator)).square().sum().backward()
            optimizer.step()
    if sharded:
        optimizer.consolidate_state_dict(to=world_size - 1)
    state = optimizer.state_dict()["state"] if rank == world_size - 1 else None
    return [param.detach().clone() for param in model.parameters()], state


def test_under_ddp_they_are_sent_the_mean() -> None:
    sharded = run_processes(3, _ddp, True, None)
    plain = run_processes(3, _ddp, False, None)
    assert_bitwise([params for params, _ in sharded], [params for params, _ in plain])
    assert_bitwise(sharded[2][1], plain[2][1])


def test_under_ddp_they_clip_along() -> None:
    clipped = run_processes(3, _ddp, True, 0.1)
    for params, _ in clipped[:2]:
        assert_bitwise(params, clipped[2][0])
    moments = [entry["exp_avg"] for entry in clipped[2][1].values()]
    assert torch.stack([moment.norm() for moment in moments]).norm() < 0.1  # of means of gradients of norm 0.1 at most


def _delayed(rank: int, world_size: int, edit: int, selective: zero_opt.Selective | None = None) -> list[Tensor]:
    """Under DDP, whose last rank sends its parameters to all at the end, while a step is pending."""
    torch.manual_seed(7)
    net = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 5))
    ddp = DistributedDataParallel(net)
    optimizer = zero_opt.ShardedOptimizer(
        ddp.parameters(),
        zero_opt.CPUAdamW,
        lr=0.01,
        reduction=zero_opt.AlreadyReduced(),
        offload=zero_opt.WorkerOffload(delay=1, threads=1, selective=selective),
    )
    with Join([ddp, optimizer]):
        for step in range(2 + rank):
            optimizer.zero_grad()
            inputs = torch.randn(4, 20, generator=torch.Generator().manual_seed(10 * step + rank))
            ddp(inputs).square().mean().backward()
            optimizer.step()
        if edit and rank == 1:  # which is the last
            with torch.no_grad():
                net[edit - 1].bias.zero_()
    with Unwatched():
        before = [param.detach().clone() for param in net.parameters()]
    if edit:
        with pytest.raises(zero_opt.StepPending, match="was changed while a step for it was pending"):
            optimizer.flush()
    else:
        optimizer.flush()
        late = [
            (param, was) for param, was in zip(net.parameters(), before, strict=True) if not selective or was.dim() > 1
        ]
        assert not any(torch.equal(param, was) for param, was in late)
    optimizer.close()
    return [param.detach() for param in net.parameters()]


@pytest.mark.parametrize("ratio", [None, 0.0, 0.3])
def test_a_pending_step_outlives_what_ddp_sends_at_the_end(ratio: float | None) -> None:
    """Of all columns, of those that are not selected, or of the parameters as a whole."""
    selective = None if ratio is None else zero_opt.Selective(ratio, update_interval=1)
    first, second = run_processes(2, _delayed, 0, selective)
    assert_bitwise(first, second)


def test_a_pending_step_does_not_undo_an_edit_before_the_end() -> None:
    for edit in (1, 3):  # of parameters of either rank's shard
        run_processes(2, _delayed, edit)


def _gathered_late(rank: int, world_size: int) -> list[Tensor]:
    """The gathers of the last step take a while on rank 1, which is the last, and whose parameters DDP sends to all."""
    torch.manual_seed(7)
    net = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 5))
    ddp = DistributedDataParallel(net)
    optimizer = zero_opt.ShardedOptimizer(
        ddp.parameters(), torch.optim.AdamW, lr=0.1, reduction=zero_opt.AlreadyReduced(overlap_param_gather=ddp)
    )
    gather = optimizer._engine.gather
    complete, steps = gather._gather, 2 + rank

    def late(bucket: Any, ident: Any, *rest: Any, **options: Any) -> Any:
        if (rank, ident.step) == (1, steps - 1):
            time.sleep(0.3)
        return complete(bucket, ident, *rest, **options)

    gather._gather = late
    with Join([ddp, optimizer]):
        for step in range(steps):
            optimizer.zero_grad()
            inputs = torch.randn(4, 20, generator=torch.Generator().manual_seed(10 * step + rank))
            ddp(inputs).square().mean().backward()
            optimizer.step()
    sent = [param.detach().clone() for param in net.parameters()]
    optimizer.flush()
    assert_bitwise([param.detach() for param in net.parameters()], sent)
    optimizer.close()
    return sent


def test_what_ddp_sends_at_the_end_has_been_gathered() -> None:
    first, second = run_processes(2, _gathered_late)
    assert_bitwise(first, second)


def _first_group_is_empty(rank: int, world_size: int) -> list[str]:
    param, said = nn.Parameter(torch.ones(3)), []
    groups: list[dict[str, Any]] = [{"params": []}, {"params": [param]}]
    optimizer = zero_opt.ShardedOptimizer(groups, torch.optim.SGD, lr=0.1, reduction=AT_STEP)
    assert optimizer.join_device == param.device
    kept = optimizer.param_groups
    for broken in ([], [{"lr": 0.1}], None):
        optimizer.param_groups = broken  # type: ignore[assignment]
        with pytest.raises(zero_opt.ParamsReplaced) as caught, Join([optimizer]):
            pass
        said.append(str(caught.value))
    optimizer.param_groups = kept
    optimizer.close()
    return said


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_device_of_join_is_that_of_any_parameter(world_size: int) -> None:
    assert all(len(said) == 3 for said in run_processes(world_size, _first_group_is_empty))


def _differing_calls(rank: int, world_size: int) -> str:
    params = ADAM.params()
    optimizer = ADAM.sharded(params, OVERLAPPED)
    torch.autograd.backward(params[:2], [torch.ones_like(param) for param in params[:2]])
    with pytest.raises(zero_opt.RankMismatch) as caught:
        optimizer.step() if rank else optimizer.clip_grad_norm_(1.0)
    optimizer.close()
    return str(caught.value)


def test_clipping_on_one_rank_alone_is_told_from_a_step() -> None:
    for message in run_processes(2, _differing_calls):
        assert "rank 0 called clip_grad_norm_() where rank 1 called step()" in message


def _two_epochs(rank: int, world_size: int, reduction: Any, decay: bool) -> Any:
    """``zero_grad`` comes last, so ranks that have run out have not called it after the others' last step."""
    params = ADAM.params()
    optimizer = ADAM.sharded(params, reduction)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5 if decay else 1.0)
    for _ in range(2):
        with Join([optimizer]):
            for step in range(1 + rank):
                torch.autograd.backward(params, [torch.full_like(param, 1 + step - rank / 2) for param in params])
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    optimizer.flush()
    optimizer.close()
    return [param.detach().clone() for param in params]


@pytest.mark.parametrize("reduction", [OVERLAPPED, AT_STEP], ids=["Overlapped", "AtStep"])
def test_ranks_that_ran_out_go_on_in_another_epoch(reduction: Any) -> None:
    found = run_processes(2, _two_epochs, reduction, False)
    expected = _stepped_with([[1.0, 1.0 - 0.5], [0.0, 2.0 - 0.5]] * 2)
    assert_bitwise(found, [expected, expected])


def _stepped_with(contributions: list[list[float]]) -> list[Tensor]:
    """The plain class, fed in each step the mean of what every rank has in all elements of its gradients."""
    params = ADAM.params()
    optimizer = ADAM.plain(params)
    for parts in contributions:
        for param in params:
            param.grad = mean([torch.full_like(param, part) for part in parts])
        optimizer.step()
    return [param.detach().clone() for param in params]


def _left_inside_a_window(rank: int, world_size: int, reduction: Any) -> Any:
    """Two backwards per step; rank 0 runs out of inputs between them."""
    params = ADAM.params()
    optimizer = ADAM.sharded(params, reduction)
    with Join([optimizer]):
        for turn in range(3 if rank == 0 else 6):
            torch.autograd.backward(params, [torch.full_like(param, 1.0 + turn) for param in params])
            if turn % 2:
                optimizer.step()
                optimizer.zero_grad()
    optimizer.close()
    return [param.detach().clone() for param in params]


# A backward that was reduced counts, as under DDP; one that step() was to reduce does not.
LEFT = {
    "Overlapped": (OVERLAPPED, 3.0),
    "by messages": (zero_opt.Overlapped(BUCKET_MB, exchange="backend"), 3.0),
    "AtStep": (AT_STEP, 0.0),
}


@pytest.mark.parametrize("kind", LEFT)
def test_a_backward_without_its_step_counts_everywhere_or_nowhere(kind: str) -> None:
    reduction, left = LEFT[kind]
    expected = _stepped_with([[1.0 + 2.0, 1.0 + 2.0], [left, 3.0 + 4.0], [0.0, 5.0 + 6.0]])
    assert_bitwise(run_processes(2, _left_inside_a_window, reduction), [expected, expected])


def _numpy_schedule(rank: int, world_size: int, number: Any) -> Any:
    """Rank 0 has no inputs for the last two steps, whose learning rates its own loop does not set."""
    params = ADAM.params()
    optimizer = ADAM.sharded(params, AT_STEP)
    with Join([optimizer]):
        for step in range(2 + 2 * rank):
            optimizer.param_groups[0]["lr"] = number(0.1 * (step + 1))
            torch.autograd.backward(params, [torch.ones_like(param) for param in params])
            optimizer.step()
            optimizer.zero_grad()
    optimizer.close()
    return [param.detach().clone() for param in params]


def test_learning_rates_of_numpy_are_followed() -> None:
    found = run_processes(2, _numpy_schedule, np.float32)
    assert_bitwise(found, run_processes(2, _numpy_schedule, lambda lr: float(np.float32(lr))))


def test_a_scheduler_that_stood_still_is_noticed() -> None:
    with pytest.raises(zero_opt.RankMismatch, match=r"hyperparameter lr of group 0: '0.\d+' on rank 0"):
        run_processes(2, _two_epochs, OVERLAPPED, True)


def _ends_early(rank: int, world_size: int, reduction: Any, clips: bool) -> Any:
    """Rank 1 has inputs for one step more, whose gradients are dropped when ``Join`` ends it on all ranks."""
    params = ADAM.params()
    optimizer = ADAM.sharded(params, reduction)

    def train(steps: range, **options: Any) -> None:
        with Join([optimizer], **options):
            for step in steps:
                torch.autograd.backward(params, [torch.full_like(param, 1 + step - rank / 2) for param in params])
                if clips:
                    optimizer.clip_grad_norm_(1e9)
                optimizer.step()
                optimizer.zero_grad()

    for first in (0, 2):
        with pytest.raises(RuntimeError, match="exhausted"):
            train(range(first, first + 2 + rank), throw_on_early_termination=True)
        optimizer.zero_grad()
    train(range(4, 5), enable=False)
    optimizer.consolidate_state_dict(to=0)
    state = optimizer.state_dict()["state"] if rank == 0 else None
    optimizer.close()
    return [param.detach().clone() for param in params], state


def _one_is_killed(rank: int, world_size: int) -> str:
    params = ADAM.params()
    optimizer = ADAM.sharded(params, OVERLAPPED)

    def train() -> None:
        with Join([optimizer], throw_on_early_termination=True):
            for step in range(3):
                torch.autograd.backward(params, [torch.full_like(param, 1.0) for param in params])
                if (rank, step) == (1, 2):
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.step()

    with pytest.raises(zero_opt.PeerLost) as caught:
        train()
    return str(caught.value)


def test_a_rank_that_is_killed_is_named_where_join_waits_for_it() -> None:
    first, _, last = run_processes(3, _one_is_killed, expect_errors=True)
    for text in (first, last):
        assert text.startswith("rank 1 (pid "), text


def _ends_never(rank: int, world_size: int) -> Any:
    params = ADAM.params()
    optimizer = ADAM.sharded(params, OVERLAPPED)
    for step in range(5):
        torch.autograd.backward(params, [torch.full_like(param, 1 + step - rank / 2) for param in params])
        optimizer.step()
        optimizer.zero_grad()
    optimizer.consolidate_state_dict(to=0)
    state = optimizer.state_dict()["state"] if rank == 0 else None
    optimizer.close()
    return [param.detach().clone() for param in params], state


@pytest.mark.parametrize("clips", [False, True], ids=["steps", "clips"])
@pytest.mark.parametrize("reduction", [OVERLAPPED, AT_STEP], ids=["Overlapped", "AtStep"])
def test_training_goes_on_after_join_has_ended_it_early_on_all_ranks(reduction: Any, clips: bool) -> None:
    found, expected = run_processes(2, _ends_early, reduction, clips), run_processes(2, _ends_never)
    assert_bitwise(found, expected)


def _fails_before_one_runs_out(rank: int, world_size: int) -> Any:
    """The worker of rank 1 cannot take a step; rank 0 has run out of inputs when it is made up for."""
    params = ADAM.params()
    optimizer = ADAM.sharded(params, OVERLAPPED, offload=zero_opt.WorkerOffload(max_deaths=1))
    failures = (zero_opt.WorkerDied, zero_opt.WorkerFailed, zero_opt.StepFailed)
    with Join([optimizer]), pytest.MonkeyPatch.context() as patch:
        for step in range(2 + rank):
            torch.autograd.backward(params, [torch.full_like(param, 1.0 + step) for param in params])
            if step == 1 and rank == 1:
                end_workers(patch, optimizer)
            with pytest.raises(failures) if step == 1 else nullcontext():
                optimizer.step()
            optimizer.zero_grad()
            patch.undo()
    optimizer.flush()
    optimizer.close()
    return [param.detach().clone() for param in params]


def test_a_failed_step_is_made_up_for_after_a_rank_has_run_out() -> None:
    found = run_processes(2, _fails_before_one_runs_out)
    assert_bitwise(found[0], found[1])
