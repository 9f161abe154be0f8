"""Gradients that were dropped or zeroed although they are part of a sum, on some ranks or on all."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import zero_opt
from test.support.harness import assert_bitwise, run_processes
from test.support.scenario import BUCKET_MB


def _drop_after_backward(rank: int, world_size: int, droppers: tuple[int, ...], clips: bool) -> tuple[str, list[Any]]:
    """Some ranks drop a gradient once it is reduced; then all repeat the step. What it said, and the parameters."""
    params = [torch.nn.Parameter(torch.zeros(70)) for _ in range(3)]
    optimizer = zero_opt.ShardedOptimizer(params, torch.optim.SGD, lr=1.0, reduction=zero_opt.Overlapped(BUCKET_MB))
    said, seen = "", list[Any]()
    for turn in range(2):
        (params[0].sum() * (rank + 1) + params[1].sum() + params[2].sum() * (rank == 0)).backward()
        if rank in droppers and not turn:
            params[0].grad = None
        try:
            if clips:
                optimizer.clip_grad_norm_(1e9)
            optimizer.step()
        except zero_opt.GradientConflict as error:
            said = str(error)
        optimizer.zero_grad()
        seen.append([float(param.detach()[0]) for param in params])
    optimizer.close()
    return said, seen


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("dropper", [0, 1, 2])
def test_a_gradient_that_one_rank_drops_after_its_backward_is_refused_on_every_rank(dropper: int, clips: bool) -> None:
    other = 1 if dropper == 0 else 0
    for said, seen in run_processes(3, _drop_after_backward, (dropper,), clips):
        assert f"p.grad was dropped or zeroed on rank {dropper}, and not on rank {other}, so" in said
        assert seen == [[0.0] * 3, [-2.0, -1.0, pytest.approx(-1 / 3)]]


def test_a_gradient_that_every_rank_drops_after_its_backward_is_dropped() -> None:
    for said, seen in run_processes(3, _drop_after_backward, (0, 1, 2), False):
        assert not said
        assert [found[0] for found in seen] == [0.0, -2.0]


def _zero_after_backward(rank: int, world_size: int, zeroing: tuple[int, ...], which: tuple[int, ...]) -> list[Any]:
    """Some ranks zero gradients after the only backward, the first of which is cut; what step() said, and did."""
    params = [torch.nn.Parameter(torch.zeros(numel)) for numel in (900, 70, 70)]
    optimizer = zero_opt.ShardedOptimizer(params, torch.optim.SGD, lr=1.0, reduction=zero_opt.Overlapped(BUCKET_MB))
    sum(param.sum() * (rank + 1) for param in params).backward()  # type: ignore[union-attr]
    for index in which if rank in zeroing else ():
        params[index].grad.zero_()  # type: ignore[union-attr]
    said = ""
    try:
        optimizer.step()
    except zero_opt.GradientConflict as error:
        said = str(error)
    optimizer.close()
    return [said, *([float(param.detach()[at]) for at in (0, -1)] for param in params)]


@pytest.mark.parametrize("which", [(0,), (1,), (2,), (0, 1, 2)], ids=str)
@pytest.mark.parametrize(("world_size", "zeroing"), [(2, (0,)), (2, (1,)), (3, (1,)), (3, (0, 2))], ids=str)
def test_a_gradient_that_some_ranks_zero_after_the_only_backward_is_refused_with_their_name(
    world_size: int, zeroing: tuple[int, ...], which: tuple[int, ...]
) -> None:
    """Whichever rank owns it."""
    other = min({*range(world_size)}.difference(zeroing))
    for said, *moved in run_processes(world_size, _zero_after_backward, zeroing, which):
        words = f"p.grad was dropped or zeroed on rank {zeroing[0]}, and not on rank {other}, so"
        assert said.startswith(f"parameter {which[0]} ") and words in said
        assert moved == [[0.0, 0.0]] * 3


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_gradient_that_all_ranks_zero_after_the_only_backward_is_zero(world_size: int) -> None:
    mean = (world_size + 1) / 2
    for said, *moved in run_processes(world_size, _zero_after_backward, tuple(range(world_size)), (0, 2)):
        assert not said
        assert moved == [[0.0, 0.0], [-mean, -mean], [0.0, 0.0]]


def _play(rank: int, world_size: int, script: str, exchange: str) -> list[str]:
    """Play backward (``n``: inside no_sync()), step, drops (``0``, ``1``: of one, ``a``: of all), a write (``g``)."""
    param = torch.nn.Parameter(torch.zeros(4))
    reduction = zero_opt.Overlapped(exchange=exchange)
    optimizer = zero_opt.ShardedOptimizer([param], torch.optim.SGD, lr=1.0, reduction=reduction)
    said = []
    for act in script:
        if act == "b":
            (param.sum() * (1 + rank)).backward()
        elif act == "n":
            with optimizer.no_sync():
                (param.sum() * (1 + rank)).backward()
        elif act in ("a", str(rank)):
            param.grad = None
        elif act == "z" or (act == "Z" and rank == 0):
            param.grad.zero_()  # type: ignore[union-attr]
        elif act == "g":
            param.grad = torch.ones_like(param)
        elif act == "s":
            before = param.detach().clone()
            try:
                optimizer.step()
                said.append(f"{float((param.detach() - before)[0]):g}")
            except zero_opt.GradientConflict as error:
                said.append(str(error))
    optimizer.close()
    return said


def _withdraw(rank: int, world_size: int, user: int, how: str, then: str, exchange: str) -> list[Any]:
    """A bucket that one rank alone completes, gradients zeroed or dropped on all; the norm, and what the step does."""
    model = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.zeros(300)) for name in "ae"})
    reduction = zero_opt.Overlapped(exchange=exchange)
    optimizer = zero_opt.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=1.0, reduction=reduction)
    (model["e"].sum() * 2 + (model["a"].sum() if rank == user else 0)).backward()
    {
        "tensor": lambda: model["e"].grad.zero_(),  # type: ignore[union-attr]
        "foreach": lambda: torch._foreach_zero_([model["e"].grad]),
        "model": lambda: model.zero_grad(set_to_none=False),
        "optimizer": lambda: optimizer.zero_grad(set_to_none=False),
        "drop": lambda: setattr(model["e"], "grad", None),
    }[how]()
    if then == "backward":
        (model["e"].sum() * 4 + model["a"].sum()).backward()
    try:
        norm = float(optimizer.clip_grad_norm_(1e9))
    except zero_opt.GradientConflict as error:
        return [str(error)]
    optimizer.step()
    optimizer.close()
    return [round(norm, 3), *(float(param.detach()[-1]) for param in (model["a"], model["e"]))]


@pytest.mark.parametrize("exchange", ["auto", "backend"])
@pytest.mark.parametrize("then", ["step", "backward"])
@pytest.mark.parametrize("how", ["tensor", "foreach", "optimizer", "drop"])
def test_what_is_zeroed_on_all_ranks_is_gone_though_one_has_sent_its_bucket_already(
    how: str, then: str, exchange: str
) -> None:
    a = 0.5 * (how != "optimizer") + (then == "backward")
    e = 4.0 * (then == "backward")
    for user in (0, 1):
        for found in run_processes(2, _withdraw, user, how, then, exchange):
            assert found == [round((300 * (a * a + e * e)) ** 0.5, 3), -a, -e]


@pytest.mark.parametrize("then", ["step", "backward"])
def test_what_is_zeroed_where_it_has_been_used_is_refused_if_its_owner_has_not_used_it(then: str) -> None:
    """Rank 1 owns what is zeroed."""
    for found in run_processes(2, _withdraw, 0, "model", then, "auto"):
        assert len(found) == 1 and "call opt.zero_grad() on every rank instead of model.zero_grad()" in found[0]
    for _, *moved in run_processes(2, _withdraw, 1, "model", then, "auto"):
        assert moved == ([0.0, 0.0] if then == "step" else [-1.0, -4.0])


@pytest.mark.parametrize("exchange", ["auto", "backend"])
@pytest.mark.parametrize("script", ["b0bs", "bs0bs", "bs0s", "bZbs", "bsZbs", "bs0bbs", "b0ns"])
def test_a_sum_that_one_rank_alone_begins_anew_is_refused(script: str, exchange: str) -> None:
    """Also where that rank owns the whole parameter, and where the sum is of backwards before the last step."""
    for said in run_processes(2, _play, script, exchange):
        assert said[:-1] == ["-1.5"] * (len(said) - 1)
        assert "on rank 0" in said[-1] and "not on rank 1" in said[-1] and "opt.zero_grad()" in said[-1], said[-1]


@pytest.mark.parametrize("script", ["b0b1bs", "bab0bs", "bzb0bs", "b0b1s", "babZs"])
def test_a_sum_that_ranks_begin_anew_after_unequal_rounds_is_refused(script: str) -> None:
    """Each has done so, and the last one alone keeps nothing of what another has summed since."""
    last = max("01".find(act.replace("Z", "0")) for act in script)
    for (said,) in run_processes(2, _play, script, "auto"):
        assert f"on rank {last}, and not on rank {1 - last}" in said, said


@pytest.mark.parametrize(
    ("script", "steps"),
    [
        ("babs", ["-1.5"]),
        ("bsabs", ["-1.5", "-1.5"]),
        ("bsbs", ["-1.5", "-3"]),
        ("bszbs", ["-1.5", "-1.5"]),
        ("bans", ["-1.5"]),
        ("banbs", ["-3"]),
        ("bsbans", ["-1.5", "-1.5"]),
    ],
)
def test_a_sum_that_all_ranks_begin_anew(script: str, steps: list[str]) -> None:
    assert run_processes(2, _play, script, "auto") == [steps, steps]


def test_a_gradient_that_is_set_after_its_reduction_is_a_conflict_after_no_sync_too() -> None:
    for said in run_processes(2, _play, "nbgs", "auto"):
        assert "p.grad was set again after it had been reduced" in said[0]


def _given_up_after_no_sync(rank: int, world_size: int) -> list[float]:
    """``zero_grad()`` after a backward in ``no_sync``; the next one does not use a parameter on rank 0."""
    params = [torch.nn.Parameter(torch.zeros(4)) for _ in range(2)]
    optimizer = zero_opt.ShardedOptimizer(params, torch.optim.SGD, lr=1.0, reduction=zero_opt.Overlapped())
    (params[0].sum() + params[1].sum()).backward()
    with optimizer.no_sync():
        (params[0].sum() + params[1].sum() * 3).backward()
    optimizer.zero_grad()
    (params[0].sum() + params[1].sum() * rank).backward() if rank else params[0].sum().backward()
    optimizer.clip_grad_norm_(1e9)
    optimizer.step()
    optimizer.close()
    return [float(param.detach()[0]) for param in params]


def test_what_no_sync_has_gathered_goes_with_zero_grad() -> None:
    assert run_processes(2, _given_up_after_no_sync) == [[-1.0, -0.5]] * 2


def _drop_where_the_owner_cannot_see_it(rank: int, world_size: int) -> str:
    """Rank 0 alone uses a parameter that rank 1 owns, and drops its gradient between two backwards."""
    params = [torch.nn.Parameter(torch.ones(64)), torch.nn.Parameter(torch.ones(64))]
    optimizer = zero_opt.ShardedOptimizer(params, torch.optim.SGD, lr=1.0, reduction=zero_opt.Overlapped(BUCKET_MB))
    owner_of_first = int(not optimizer._engine.partition.owner_of_start(0))  # type: ignore[union-attr]
    used = [0, 1] if rank == owner_of_first else [1]
    model = torch.nn.ParameterList(params)
    for _ in range(2):
        model.zero_grad()
        torch.autograd.backward([params[i] for i in used], [torch.ones(64) for _ in used])
    with pytest.raises(zero_opt.GradientConflict) as caught:
        optimizer.step()
    optimizer.zero_grad()
    torch.autograd.backward([params[i] for i in used], [torch.ones(64) for _ in used])
    optimizer.step()
    optimizer.close()
    assert_bitwise([param.detach() for param in params], [torch.full((64,), 0.5), torch.zeros(64)])
    return str(caught.value)


def test_a_drop_that_the_owner_cannot_see_is_refused() -> None:
    for message in run_processes(2, _drop_where_the_owner_cannot_see_it):
        assert "parameter 0 " in message and "opt.zero_grad()" in message


def _play_at_random(rank: int, world_size: int, seed: int) -> tuple[bool, list[float], list[float]]:
    """Backwards of some ranks, and gradients that some drop or zero; whether step() refused, what it did, and ought to.

    The first parameter is cut. The last has a gradient in every backward, so that all ranks have had equal rounds.
    """
    chance = random.Random(seed)
    params = [torch.nn.Parameter(torch.zeros(numel)) for numel in (900, 70, 5)]
    optimizer = zero_opt.ShardedOptimizer(params, torch.optim.SGD, lr=1.0, reduction=zero_opt.Overlapped(BUCKET_MB))
    sums: list[list[float | None]] = [[None] * 3 for _ in range(world_size)]
    for act in "b" + "".join(chance.choice("bzd") for _ in range(4)):
        everyone = chance.random() < 0.6
        for other in range(world_size):
            among = [index for index in range(3) if chance.random() < 0.6 or (act == "b" and index == 2)]
            if act != "b":
                among = [
                    index for index in among if (everyone or chance.random() < 0.5) and sums[other][index] is not None
                ]
            value = chance.randint(1, 9)
            for index in among:
                sums[other][index] = {"b": (sums[other][index] or 0.0) + value, "z": 0.0, "d": None}[act]
            if other == rank and act == "b":
                sum(params[index].sum() * value for index in among).backward()  # type: ignore[union-attr]
            for param in [params[index] for index in among] if other == rank and act != "b" else ():
                param.grad = None if act == "d" else param.grad.zero_()  # type: ignore[union-attr]
    try:
        optimizer.step()
        refused = False
    except zero_opt.GradientConflict:
        refused = True
    optimizer.close()
    moved = [float(param.detach()[at]) for param in params for at in (0, -1)]
    means = [-sum(known[index] or 0.0 for known in sums) / world_size for index in range(3)]
    return refused, moved, [mean for mean in means for _ in range(2)]


def _play_seeds(rank: int, world_size: int, seeds: range) -> list[tuple[bool, list[float], list[float]]]:
    return [_play_at_random(rank, world_size, seed) for seed in seeds]


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_step_has_the_mean_of_what_ranks_have_or_is_refused_on_all(world_size: int) -> None:
    by_rank = run_processes(world_size, _play_seeds, range(30))
    for turns in zip(*by_rank, strict=True):
        assert len({refused for refused, *_ in turns}) == 1
        for refused, moved, expected in turns:
            assert moved == ([0.0] * 6 if refused else pytest.approx(expected))
    assert 0 < sum(refused for refused, *_ in by_rank[0]) < 30
