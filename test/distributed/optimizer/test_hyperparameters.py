"""Hyperparameters that cannot work: the same typed error on every rank, before anything changes."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

import zero_opt
from test.support.harness import run_processes


def _edited(rank: int, world_size: int, value: Any, edits: list[int], offload: Any) -> str:
    param = torch.nn.Parameter(torch.ones(200))
    optimizer = zero_opt.ShardedOptimizer([param], torch.optim.AdamW, lr=0.1, fused=True, offload=offload)
    param.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    before = param.detach().clone()
    param.sum().backward()
    if rank in edits:
        optimizer.param_groups[0]["lr"] = value
    with pytest.raises(zero_opt.ConfigError if value != value else zero_opt.ConfigTypeError) as caught:
        optimizer.step()
    assert torch.equal(param, before)
    optimizer.flush()
    assert optimizer.state_dict()["param_groups"]  # what was edited stays readable
    optimizer.flush()
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.step()
    assert not torch.equal(param, before)
    optimizer.close()
    return str(caught.value)


@pytest.mark.parametrize("offload", [None, zero_opt.CPUOffload(), zero_opt.WorkerOffload()])
@pytest.mark.parametrize("value", ["0.1", None, float("nan")])
def test_a_learning_rate_that_cannot_work(value: Any, offload: Any) -> None:
    for message in run_processes(2, _edited, value, [0, 1], offload):
        assert "'lr' of param group 0" in message


def test_a_learning_rate_that_cannot_work_on_one_rank() -> None:
    first, second = run_processes(2, _edited, "0.1", [1], None)
    assert first == f"rank 1: {second}" and second == "'lr' of param group 0 must be a number, got '0.1'"


def _made(rank: int, world_size: int, wrong: dict[str, Any], ranks: list[int]) -> list[str]:
    wrong = wrong if rank in ranks else {}
    found = []
    for group, defaults in (({}, wrong), (wrong, {})):
        param = torch.nn.Parameter(torch.ones(200))
        with pytest.raises(zero_opt.ConfigTypeError) as caught:
            zero_opt.ShardedOptimizer([{"params": [param], **group}], torch.optim.AdamW, **defaults)
        found.append(str(caught.value))
    optimizer = zero_opt.ShardedOptimizer([torch.nn.Parameter(torch.ones(200))], torch.optim.AdamW)
    with pytest.raises(zero_opt.ConfigTypeError) as caught:
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(200))], **wrong})
    optimizer.close()
    return [*found, str(caught.value)]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"lr": "1e-3"}, "must be a number, got '1e-3'"),
        ({"lr": None}, "must be a number, got None"),
        ({"betas": 0.9}, "must be 2 numbers, got 0.9"),
        ({"betas": (0.9,)}, "must be 2 numbers, got (0.9,)"),
        ({"weight_decay": "0"}, "must be a number, got '0'"),
    ],
)
def test_a_type_that_cannot_work_is_named_when_it_is_given(wrong: dict[str, Any], words: str) -> None:
    """torch's own words name neither argument nor value, and param groups are looked at by their first step alone."""
    key = next(iter(wrong))
    expected = [f"{key!r}{group} {words}" for group in ("", " of param group 0", " of param group 1")]
    first, second = run_processes(2, _made, wrong, [1])
    assert second == expected and first == [f"rank 1: {message}" for message in expected]
    with pytest.raises(zero_opt.ConfigTypeError, match=f"'{key}' must be"):
        zero_opt.ShardedOptimizer([torch.nn.Parameter(torch.ones(2))], torch.optim.AdamW, **wrong)


def test_a_class_of_ones_own_may_take_any_type() -> None:
    class Own(torch.optim.SGD):
        def __init__(self, params: Any, lr: Any = 0.1) -> None:
            super().__init__(params, lr=0.1 if lr is None else lr)

    zero_opt.ShardedOptimizer([torch.nn.Parameter(torch.ones(2))], Own, lr=None, offload=zero_opt.CPUOffload()).close()


@pytest.mark.parametrize("option", [{"amsgrad": np.zeros(2)}, {"foreach": torch.zeros(2)}], ids=["amsgrad", "foreach"])
def test_an_option_without_a_truth_value_is_named_when_it_is_given(option: dict[str, Any]) -> None:
    key = next(iter(option))
    first, second = run_processes(2, _made, option, [1])
    assert first == [f"rank 1: {message}" for message in second]
    assert all(message.startswith(f"{key!r}") and "must be True or False" in message for message in second)


def _without_truth(rank: int, world_size: int, cls: Any, key: str, offload: Any) -> str:
    param = torch.nn.Parameter(torch.ones(200))
    optimizer = zero_opt.ShardedOptimizer([param], cls, lr=0.1, offload=offload)
    for edited in (False, True):
        param.square().sum().backward()
        before = param.detach().clone()
        if edited and rank == 0:
            optimizer.param_groups[0][key] = np.ones(2)
        try:
            optimizer.step()
        except zero_opt.ConfigTypeError as error:
            assert edited and torch.equal(param, before)
            optimizer.close()
            return str(error)
        optimizer.zero_grad()
    raise AssertionError("an array of two was stepped with")


@pytest.mark.parametrize("offload", [None, zero_opt.CPUOffload(), zero_opt.WorkerOffload()])
@pytest.mark.parametrize(
    ("cls", "key"),
    [(torch.optim.AdamW, "amsgrad"), (torch.optim.AdamW, "maximize"), (torch.optim.SGD, "momentum")],
)
def test_an_option_without_a_truth_value_is_named_before_anything_changes(cls: Any, key: str, offload: Any) -> None:
    first, second = run_processes(2, _without_truth, cls, key, offload)
    assert first.startswith(f"{key!r} of param group 0 must be") and second == f"rank 0: {first}"


class Weighted(torch.optim.SGD):
    """Takes an array, of which its step uses one number."""

    def __init__(self, params: Any, weights: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        self.defaults["weights"] = weights
        for group in self.param_groups:
            group.setdefault("weights", weights)

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] = float(group["weights"][0])
        return super().step(closure)


def _arrays(rank: int, world_size: int, offload: Any) -> None:
    """Train beside the class itself, every rank with the same data, with arrays in place of numbers and options."""
    given: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
        (torch.optim.AdamW, {}, {"betas": np.array([0.75, 0.875])}),
        (torch.optim.AdamW, {"betas": np.array([0.75, 0.875])}, {"betas": np.array([0.5, 0.75])}),
    ]
    native = isinstance(offload, zero_opt.WorkerOffload)
    if not native:  # torch's fused step takes no list
        given.append((torch.optim.AdamW, {}, {"amsgrad": []}))
        given.append((Weighted, {"weights": np.array([0.5, 0.75])}, {"weights": np.array([0.25, 0.5])}))
    for cls, first, edits in given:
        form = {"fused" if native else "foreach": True} if cls is torch.optim.AdamW else {}
        param, plain_param = (torch.nn.Parameter(torch.linspace(0.5, 1.5, 200)) for _ in range(2))
        plain = cls([plain_param], **first, **form)
        sharded = zero_opt.ShardedOptimizer([param], cls, offload=offload, **first, **form)
        for step in range(4):
            for optimizer, stepped in ((plain, plain_param), (sharded, param)):
                if step == 1:
                    optimizer.param_groups[0].update(edits)
                elif step == 3:
                    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
                stepped.square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        sharded.flush()
        assert torch.equal(param, plain_param)
        sharded.close()


@pytest.mark.parametrize("offload", [None, zero_opt.CPUOffload(), zero_opt.WorkerOffload()])
@pytest.mark.parametrize("world_size", [1, 2])
def test_arrays_are_taken_where_the_class_takes_them(world_size: int, offload: Any) -> None:
    run_processes(world_size, _arrays, offload)


def _arrays_that_differ(rank: int, world_size: int) -> str:
    param = torch.nn.Parameter(torch.ones(200))
    optimizer = zero_opt.ShardedOptimizer([param], torch.optim.AdamW)
    optimizer.param_groups[0]["betas"] = np.array([0.75, 0.5 + 0.25 * rank])
    param.sum().backward()
    with pytest.raises(zero_opt.RankMismatch) as caught:
        optimizer.step()
    optimizer.close()
    return str(caught.value)


def test_arrays_that_differ_between_ranks_are_noticed() -> None:
    assert all("betas" in message for message in run_processes(2, _arrays_that_differ))


def _named(rank: int, world_size: int) -> str:
    model = torch.nn.Linear(3, 2)
    params = model.named_parameters() if rank == 0 else model.parameters()
    with pytest.raises(zero_opt.RankMismatch) as caught:
        zero_opt.ShardedOptimizer(params, torch.optim.AdamW)
    return str(caught.value)


def test_names_on_one_rank_alone_are_what_differs() -> None:
    words = "'as named_parameters() gives' on rank 0, 'none, as parameters() gives' on rank 1"
    assert run_processes(2, _named) == [f"names of parameters in group 0: {words}"] * 2


class Counting(torch.optim.Optimizer):
    """Each element by itself. Its step counts in its param group, in place."""

    def __init__(self, params: Any, counter: Any) -> None:
        super().__init__(params, {"counter": counter})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            counter = group["counter"]
            if isinstance(counter, torch.Tensor):
                counter += 1
                count = int(counter)
            else:
                counter["steps"][0] += 1
                count = counter["steps"][0]
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=0.1 / count)


zero_opt.register_elementwise(Counting)
COUNTERS = {"tensor": torch.tensor(0.0), "dict": {"steps": [0]}}


def _counted(rank: int, world_size: int, counter: str, bucket_mb: float) -> None:
    shapes = ((40,), (3, 5), (7,))
    params, plain = ([torch.nn.Parameter(torch.ones(shape)) for shape in shapes] for _ in range(2))
    optimizer = zero_opt.ShardedOptimizer(
        params, Counting, counter=copy.deepcopy(COUNTERS[counter]), reduction=zero_opt.Overlapped(bucket_mb=bucket_mb)
    )
    reference = Counting(plain, copy.deepcopy(COUNTERS[counter]))
    for _ in range(4):
        for each in (params, plain):
            torch.autograd.backward([(param * param).sum() for param in each])
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
        reference.zero_grad()
    assert optimizer.param_groups[0]["counter"] == reference.param_groups[0]["counter"]
    assert all(map(torch.equal, params, plain))
    optimizer.close()


@pytest.mark.parametrize("bucket_mb", [25, 0.0001])
@pytest.mark.parametrize("counter", COUNTERS)
def test_what_a_class_counts_in_its_group_it_counts_once_per_step(counter: str, bucket_mb: float) -> None:
    run_processes(2, _counted, counter, bucket_mb)


def _differing(rank: int, world_size: int) -> str:
    param = torch.nn.Parameter(torch.ones(200))
    optimizer = zero_opt.ShardedOptimizer([param], Counting, counter={"steps": [0]})
    optimizer.param_groups[0]["counter"]["steps"][0] += rank
    param.sum().backward()
    with pytest.raises(zero_opt.RankMismatch) as caught:
        optimizer.step()
    optimizer.close()
    return str(caught.value)


def test_what_is_within_a_hyperparameter_is_compared() -> None:
    first, second = run_processes(2, _differing)
    assert "hyperparameter counter of group 0" in first and first == second
