"""One norm over several optimizers: the bits of one optimizer of all parameters, on every rank, and its errors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zero_opt
from test.support.harness import assert_bitwise, run_processes, run_threads
from test.support.scenario import BUCKET_MB, mean, values

SHAPES = ((40, 30), (64, 5), (5, 64), (77,), (130,))
MATRICES = 3
LIMIT = 2.0
REDUCTIONS = (zero_opt.Overlapped(BUCKET_MB), zero_opt.AtStep(BUCKET_MB), zero_opt.AlreadyReduced())
EACH = pytest.mark.parametrize("reduction", REDUCTIONS, ids=lambda policy: type(policy).__name__)


def start() -> list[nn.Parameter]:
    return [nn.Parameter(values(7, 0, 0, index, shape).clone()) for index, shape in enumerate(SHAPES)]


def grad_of(step: int, rank: int, index: int) -> Tensor:
    return values(step, 1, rank, index, SHAPES[index])


def mean_of(step: int, world_size: int, index: int) -> Tensor:
    found = mean([grad_of(step, rank, index) for rank in range(world_size)])
    assert found is not None
    return found


def backward(params: list[nn.Parameter], step: int, rank: int, world_size: int, reduction: Any = None) -> None:
    if isinstance(reduction, zero_opt.AlreadyReduced):
        for index, param in enumerate(params):
            param.grad = mean_of(step, world_size, index)
    else:
        torch.autograd.backward(params, [grad_of(step, rank, index) for index in range(len(params))])


def pair(params: list[nn.Parameter], **options: Any) -> tuple[Any, Any]:
    muon = zero_opt.ShardedOptimizer(params[:MATRICES], torch.optim.Muon, lr=0.1, **options)
    return muon, zero_opt.ShardedOptimizer(params[MATRICES:], torch.optim.AdamW, lr=0.1, **options)


def close(*optimizers: Any) -> None:
    for optimizer in optimizers:
        optimizer.close()


def train(rank: int, world_size: int, reduction: Any) -> tuple[list[Tensor], list[Tensor]]:
    params, norms = start(), []
    optimizers = pair(params, reduction=reduction)
    for step in range(3):
        backward(params, step, rank, world_size, reduction)
        norms.append(zero_opt.clip_grad_norm_(optimizers, LIMIT))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    close(*optimizers)
    return norms, [param.detach() for param in params]


def given(norms: list[Tensor], world_size: int) -> list[Tensor]:
    """The plain classes, their gradients scaled by the coefficient that follows from these norms."""
    params = start()
    plain = torch.optim.Muon(params[:MATRICES], lr=0.1), torch.optim.AdamW(params[MATRICES:], lr=0.1)
    for step, norm in enumerate(norms):
        factor = torch.clamp(LIMIT / (norm + 1e-6), max=1.0)
        for index, param in enumerate(params):
            param.grad = mean_of(step, world_size, index) * factor
        for optimizer in plain:
            optimizer.step()
    return [param.detach() for param in params]


def exact_norm(step: int, world_size: int) -> Tensor:
    grads = [mean_of(step, world_size, index).double() for index in range(len(SHAPES))]
    return torch.tensor(math.sqrt(math.fsum(float(x) for grad in grads for x in (grad * grad).flatten())))


@EACH
def test_ranks_clip_by_the_norm_over_all_optimizers(reduction: Any) -> None:
    """Sums of squares in fp64, rounded to fp32 once: these are the bits of the exact norm."""
    results = run_threads(3, train, reduction)
    for norms, params in results:
        assert_bitwise(norms, [exact_norm(step, 3) for step in range(3)])
        assert min(norms) > LIMIT
        assert_bitwise(params, given(norms, 3))


def test_processes_have_the_same_bits() -> None:
    for norms, params in run_processes(2, train, zero_opt.Overlapped(BUCKET_MB)):
        assert_bitwise(norms, [exact_norm(step, 2) for step in range(3)])
        assert_bitwise(params, given(norms, 2))


def messages(rank: int, world_size: int) -> tuple[int, int]:
    """Return how many messages over all ranks two clips of one optimizer take, and one of two."""
    params = start()
    optimizers = pair(params)
    groups = [optimizer._engine.group for optimizer in optimizers]
    found = []
    for step, together in enumerate((False, False, True)):  # the first step agrees on more
        backward(params, step, rank, world_size)
        before = sum(group.calls for group in groups)
        for clipped in [optimizers] if together else [[one] for one in optimizers]:
            zero_opt.clip_grad_norm_(clipped, LIMIT)
        found.append(sum(group.calls for group in groups) - before)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    close(*optimizers)
    return found[1], found[2]


def test_one_message_carries_the_squares_of_all() -> None:
    for apart, together in run_processes(2, messages):
        assert apart - together == 1


def test_a_rank_alone_has_the_bits_of_torchs_function() -> None:
    params, plain = start(), start()
    optimizers = pair(params)
    backward(params, 0, 0, 1)
    backward(plain, 0, 0, 1)
    assert_bitwise(zero_opt.clip_grad_norm_(optimizers, LIMIT), torch.nn.utils.clip_grad_norm_(plain, LIMIT))
    assert_bitwise([param.grad for param in params], [param.grad for param in plain])


def test_a_rank_alone_adds_up_those_with_an_offload() -> None:
    params = start()
    muon = zero_opt.ShardedOptimizer(params[:MATRICES], torch.optim.Muon)
    adam = zero_opt.ShardedOptimizer(params[MATRICES:], torch.optim.AdamW, offload=zero_opt.CPUOffload())
    backward(params, 0, 0, 1)
    assert_bitwise(zero_opt.clip_grad_norm_([muon, adam], LIMIT), exact_norm(0, 1))
    assert_bitwise(params[0].grad, grad_of(0, 0, 0) * torch.clamp(LIMIT / (exact_norm(0, 1) + 1e-6), max=1.0))
    close(adam)


def nonfinite(rank: int, world_size: int, policy: str, bad: float) -> tuple[str, list[int], list[Tensor]]:
    """Have a gradient of the second optimizer's that is not finite on one rank; go on with a good step."""
    params = start()
    optimizers = pair(params, checks=zero_opt.Checks(nonfinite=policy))
    grads = [grad_of(0, rank, index).clone() for index in range(len(params))]
    if rank == 1:
        grads[-1][3] = bad
    torch.autograd.backward(params, grads)
    said = ""
    try:
        zero_opt.clip_grad_norm_(optimizers, LIMIT)
        for optimizer in optimizers:
            optimizer.step()
    except zero_opt.NonFiniteGradient as error:
        said = str(error)
    assert_bitwise([param.detach() for param in params], [param.detach() for param in start()])
    skipped = [optimizer.skipped_steps for optimizer in optimizers]
    for optimizer in optimizers:
        optimizer.zero_grad()
    backward(params, 1, rank, world_size)
    zero_opt.clip_grad_norm_(optimizers, LIMIT)
    for optimizer in optimizers:
        optimizer.step()
    close(*optimizers)
    return said, skipped, [param.detach() for param in params]


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize(("policy", "skipped"), [("raise", [0, 0]), ("skip", [1, 1])])
def test_a_gradient_that_is_not_finite_stops_all_optimizers(policy: str, skipped: list[int], bad: float) -> None:
    results = run_threads(2, nonfinite, policy, bad)
    for said, counts, params in results:
        assert counts == skipped
        named = said.startswith("optimizer 1 (AdamW): the mean gradient of parameter 1 ")
        assert named == (policy == "raise")
        assert_bitwise(params, results[0][2])


def refused(rank: int, world_size: int, how: str) -> str:
    params = start()
    muon, adam = pair(params)
    more = []
    if how == "other ranks":
        alone = [dist.new_group([one]) for one in range(world_size)][rank]
        more.append(zero_opt.ShardedOptimizer([nn.Parameter(torch.ones(3))], torch.optim.SGD, alone))
    elif how == "other checks":
        skips = zero_opt.Checks(nonfinite="skip")
        more.append(zero_opt.ShardedOptimizer([nn.Parameter(torch.ones(3))], torch.optim.SGD, checks=skips))
    elif how == "closed":
        adam.close()
    elif how == "twice":
        more.append(muon)
    elif how == "uneven inputs":
        adam._join_config = adam._join_config._replace(enable=True)
    elif how == "a plain one":
        more.append(torch.optim.SGD([nn.Parameter(torch.ones(3))]))
    if how != "closed":
        backward(params, 0, rank, world_size)
    limit: Any = 1.0 + rank if how == "other limits" else -1.0 if how == "no limit" and rank else 1.0
    with pytest.raises(zero_opt.ZeroOptError) as caught:
        zero_opt.clip_grad_norm_([muon, adam, *more], limit)
    close(muon, adam, *(one for one in more if how.startswith("other")))
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("other ranks", "ConfigConflict: .* those of optimizer 0 are [0, 1], those of optimizer 2"),
        ("other checks", "ConfigConflict: .* Checks(nonfinite='ignore') and Checks(nonfinite='skip')"),
        ("closed", "OptimizerClosed: "),
        ("uneven inputs", "ConfigConflict: zero_opt.clip_grad_norm_() cannot be called within Join"),
        ("twice", "ConfigError: zero_opt.clip_grad_norm_() was given the same optimizer twice"),
        ("a plain one", "ConfigTypeError: zero_opt.clip_grad_norm_() takes ShardedOptimizers, got a "),
        ("other limits", "RankMismatch: clip_grad_norm_() was given max_norm=1.0 on rank 0 and 2.0 on rank 1"),
        ("no limit", "ConfigError: "),
    ],
)
def test_what_cannot_be_clipped_together_is_refused_on_every_rank(how: str, message: str) -> None:
    kind, _, rest = message.partition(": ")
    for said in run_threads(2, refused, how):
        assert said.startswith(kind)
        for part in rest.split(".* "):
            assert part in said


@pytest.mark.parametrize(
    ("given_to", "error", "message"),
    [
        ([], zero_opt.ConfigError, "was given no optimizer"),
        (None, zero_opt.ConfigTypeError, "takes a sequence of ShardedOptimizers"),
        (nn.Linear(2, 2).parameters(), zero_opt.ConfigTypeError, "got a Module.parameters"),
    ],
)
def test_what_is_no_list_of_optimizers_is_quoted(given_to: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        zero_opt.clip_grad_norm_(given_to, 1.0)


def _after_the_group_was_destroyed(rank: int, world_size: int) -> None:
    params = [nn.Parameter(torch.ones(40, 7)), nn.Parameter(torch.ones(9))]
    optimizers = [zero_opt.ShardedOptimizer([param], torch.optim.SGD, lr=0.1, momentum=0.9) for param in params]
    torch.distributed.destroy_process_group()
    for _ in range(2):
        sum((rank + 1) * param.sum() for param in params).backward()  # type: ignore[union-attr]
        norm = zero_opt.clip_grad_norm_(optimizers, 1e9)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        mean = (1 + world_size) / 2
        assert float(norm) == pytest.approx(mean * 289**0.5)
    with pytest.raises(zero_opt.ProcessGroupError, match="the process group was destroyed"):
        zero_opt.sharded_state_dict(optimizers[0])
    for optimizer in optimizers:
        optimizer.close()


def test_optimizers_go_on_after_their_group_was_destroyed() -> None:
    run_processes(2, _after_the_group_was_destroyed)


def _mistaken(rank: int, world_size: int, mistake: str) -> str:
    optimizers: list[Any] = [
        zero_opt.ShardedOptimizer([nn.Parameter(torch.ones(9))], torch.optim.SGD, lr=0.1) for _ in range(2)
    ]
    given = list(optimizers)
    if rank == 0:
        given = {"twice": [*given, given[0]], "plain": [given[0], torch.optim.SGD([nn.Parameter(torch.ones(1))])]}[
            mistake
        ]
    for optimizer in optimizers:
        optimizer.param_groups[0]["params"][0].sum().backward()
    with pytest.raises((zero_opt.ConfigError, zero_opt.ConfigTypeError)) as caught:
        zero_opt.clip_grad_norm_(given, 1.0)
    assert float(zero_opt.clip_grad_norm_(optimizers, 1e9)) == pytest.approx(18**0.5)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.close()
    return f"{type(caught.value).__name__} {caught.value}"


@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        ("twice", "ConfigError {}zero_opt.clip_grad_norm_() was given the same"),
        ("plain", "ConfigTypeError {}zero_opt.clip"),
    ],
)
def test_a_mistake_of_one_rank_in_the_list_is_raised_on_every_rank(mistake: str, says: str) -> None:
    for rank, said in enumerate(run_threads(2, _mistaken, mistake)):
        assert said.startswith(says.format("rank 0: " if rank else ""))
