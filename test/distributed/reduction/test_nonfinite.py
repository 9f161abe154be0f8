"""What Checks(nonfinite=...) does on every rank when a gradient of any has an inf or NaN."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_opt
from test.support.harness import assert_bitwise, run_processes, run_threads
from test.support.late_params import as_they_are
from test.support.scenario import BUCKET_MB, values

SHAPES = ((130, 7), (65,), (300,))
BAD_STEPS = {1: "nan", 3: "inf"}
REDUCTIONS = [zero_opt.Overlapped(BUCKET_MB), zero_opt.AtStep(BUCKET_MB), zero_opt.AlreadyReduced()]


def _params() -> list[nn.Parameter]:
    return [nn.Parameter(values(9, 0, 0, i, shape).clone()) for i, shape in enumerate(SHAPES)]


def _grads(number: int, rank: int, bad: bool) -> list[Tensor]:
    grads = [values(number, 0, rank, i, shape).clone() for i, shape in enumerate(SHAPES)]
    if bad and number in BAD_STEPS and rank == 1:
        grads[1][-1] = float(BAD_STEPS[number])
    return grads


@as_they_are
def _train(rank: int, world_size: int, reduction: Any, options: dict[str, Any]) -> tuple[Any, list[int], int]:
    """Parameters and state, at which steps those were touched, and what has been counted."""
    params = _params()
    opt = zero_opt.ShardedOptimizer(params, torch.optim.Adam, lr=0.1, reduction=reduction, **options)
    touched = []
    for number in range(5):
        opt.zero_grad()
        whose = 1 if isinstance(reduction, zero_opt.AlreadyReduced) else rank
        before = [param.detach().clone() for param in params]
        torch.autograd.backward(params, _grads(number, whose, bad=True))
        if number == 3:
            opt.clip_grad_norm_(1.0)
        opt.step()
        if not all(torch.equal(param, old) for param, old in zip(params, before, strict=True)):
            touched.append(number)
    opt.consolidate_state_dict()
    state = opt.state_dict() if rank == 0 else None
    opt.close()
    return ([param.detach() for param in params], state), touched, opt.skipped_steps


def _expected(reduction: Any, world_size: int, max_grad_norm: float | None) -> tuple[list[Tensor], Any]:
    """The plain class, stepped with the mean of the finite steps."""
    params = _params()
    plain = torch.optim.Adam(params, lr=0.1)
    for number in (n for n in range(5) if n not in BAD_STEPS):
        ranks = [1] * world_size if isinstance(reduction, zero_opt.AlreadyReduced) else range(world_size)
        per_rank = [_grads(number, rank, bad=False) for rank in ranks]
        for index, param in enumerate(params):
            total = per_rank[0][index].clone()
            for grads in per_rank[1:]:
                total += grads[index]
            param.grad = total / world_size
        plain.step()
    return [param.detach() for param in params], plain.state_dict()


@pytest.mark.parametrize("reduction", REDUCTIONS, ids=lambda policy: type(policy).__name__)
def test_a_skipped_step_leaves_everything_and_is_counted(reduction: Any) -> None:
    options = {"checks": zero_opt.Checks(nonfinite="skip")}
    params, state = _expected(reduction, 2, None)
    for rank, (found, touched, skipped) in enumerate(run_processes(2, _train, reduction, options)):
        assert touched == [0, 2, 4] and skipped == 2
        assert_bitwise(found[0], params)
        if rank == 0:
            assert_bitwise(found[1], state)


@pytest.mark.parametrize("offload", [zero_opt.WorkerOffload(), zero_opt.WorkerOffload(delay=1)], ids=["0", "1"])
def test_steps_are_skipped_with_a_worker_too(offload: Any) -> None:
    options = {"checks": zero_opt.Checks(nonfinite="skip"), "offload": offload, "fused": True}
    outcomes = run_processes(2, _train, zero_opt.Overlapped(BUCKET_MB), options)
    assert [skipped for *_, skipped in outcomes] == [2, 2]
    for (params, _), *_ in outcomes:
        assert_bitwise(params, outcomes[0][0][0])
        assert all(bool(param.isfinite().all()) for param in params)


def _raise(rank: int, world_size: int, reduction: Any, max_grad_norm: float | None) -> tuple[str, Any, Any]:
    params = _params()
    checks = zero_opt.Checks(nonfinite="raise")
    named = [(f"layer{i}", param) for i, param in enumerate(params)]
    opt = zero_opt.ShardedOptimizer(
        named, torch.optim.Adam, reduction=reduction, checks=checks, max_grad_norm=max_grad_norm
    )
    messages, errors = [], []
    for number in range(5):
        opt.zero_grad()
        torch.autograd.backward(params, _grads(number, rank, bad=True))
        try:
            opt.clip_grad_norm_(1.0) if number == 3 else opt.step()
        except zero_opt.NonFiniteGradient as error:
            messages.append(str(error))
            errors.append((number, error.rank, error.param))
    opt.close()
    return messages[0], errors, [param.detach() for param in params]


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
@pytest.mark.parametrize("reduction", REDUCTIONS[:2], ids=lambda policy: type(policy).__name__)
def test_every_rank_names_the_owner_and_the_parameter_and_goes_on(reduction: Any, max_grad_norm: float | None) -> None:
    (message, errors, params), *others = run_threads(3, _raise, reduction, max_grad_norm)
    assert [number for number, *_ in errors] == [1, 3]
    owner = errors[0][1]
    assert all(error[1:] == (owner, 1) for error in errors)
    assert f"parameter 1 (layer1) (group 0, position 1) has an inf or NaN in the part that rank {owner} owns" in message
    for other in others:
        assert other[:2] == (message, errors)
        assert_bitwise(other[2], params)


def _alone(nonfinite: str, **options: Any) -> Any:
    checks = zero_opt.Checks(nonfinite=nonfinite)
    return zero_opt.ShardedOptimizer(_params(), torch.optim.Adam, lr=0.1, checks=checks, **options)


@pytest.mark.parametrize("with_closure", [False, True])
@pytest.mark.parametrize("copies", [lambda opt: opt, copy.deepcopy, lambda opt: pickle.loads(pickle.dumps(opt))])
def test_a_rank_alone_skips_and_raises_too(with_closure: bool, copies: Any) -> None:
    plain_params = _params()
    plain = torch.optim.Adam(plain_params, lr=0.1)
    skips, raises = copies(_alone("skip")), copies(_alone("raise"))
    for number in range(5):
        for opt in (skips, raises, plain):
            params = opt.param_groups[0]["params"]
            opt.zero_grad()
            losses = []

            def closure(params: Any = params, number: int = number, losses: list[int] = losses) -> int:
                losses.append(number)
                torch.autograd.backward(params, _grads(number, 1, bad=True))
                return number

            if not with_closure:
                closure()
            if number in BAD_STEPS and opt is plain:
                continue
            if number in BAD_STEPS and opt is raises:
                with pytest.raises(zero_opt.NonFiniteGradient, match=r"parameter 1 .* rank 0 owns") as caught:
                    opt.step(closure if with_closure else None)
                assert (caught.value.rank, caught.value.param) == (0, 1)
                continue
            found = opt.step(closure if with_closure else None)
            assert found == (number if with_closure else None) and len(losses) == 1
    assert (skips.skipped_steps, raises.skipped_steps) == (2, 0)
    for opt in (skips, raises):
        assert_bitwise([p.detach() for p in opt.param_groups[0]["params"]], [p.detach() for p in plain_params])


def test_a_rank_alone_does_not_clip_what_it_will_not_step_with() -> None:
    for nonfinite in ("ignore", "skip"):
        opt = _alone(nonfinite)
        params = opt.param_groups[0]["params"]
        torch.autograd.backward(params, _grads(1, 1, bad=True))
        before = [param.grad.clone() for param in params]
        assert not bool(opt.clip_grad_norm_(1.0).isfinite())
        same = [
            torch.equal(param.grad.nan_to_num(), grad.nan_to_num()) for param, grad in zip(params, before, strict=True)
        ]
        assert all(same) == (nonfinite == "skip")


def test_a_class_that_evaluates_within_its_step_cannot_skip_it() -> None:
    with pytest.raises(zero_opt.UnsupportedOptimizer, match=r"LBFGS .* use Checks\(nonfinite=\"raise\"\)"):
        zero_opt.ShardedOptimizer(_params(), torch.optim.LBFGS, checks=zero_opt.Checks(nonfinite="skip"))


@pytest.mark.parametrize("value", ["Raise", None, True])
def test_policies_that_are_none_are_quoted(value: Any) -> None:
    with pytest.raises(zero_opt.ConfigError, match=f"Checks.nonfinite must be one of .*, got {value!r}"):
        zero_opt.Checks(nonfinite=value)
