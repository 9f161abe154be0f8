"""Ranks that do not hold the same are told so, all of them, before anything is corrupted."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_opt
from test.support.harness import assert_bitwise, run_processes, run_threads
from test.support.scenario import values


def _params(rank: int) -> list[tuple[str, nn.Parameter]]:
    shapes = {"first.weight": (4, 6), "first.bias": (4,), "last.weight": (3, 4), "scale": ()}
    return [(name, nn.Parameter(values(1, 0, 0, i, shape).clone())) for i, (name, shape) in enumerate(shapes.items())]


def _replace(index: int, tensor: Tensor, requires_grad: bool = True) -> Callable[[dict[str, Any]], None]:
    def change(what: dict[str, Any]) -> None:
        params = what["params"]
        params[index] = (params[index][0], nn.Parameter(tensor, requires_grad=requires_grad))

    return change


def _set(**options: Any) -> Callable[[dict[str, Any]], None]:
    return lambda what: what.update(options)


def _rename(what: dict[str, Any]) -> None:
    what["params"][1] = ("first.offset", what["params"][1][1])


def _drop_last(what: dict[str, Any]) -> None:
    del what["params"][-1]


def _swap(what: dict[str, Any]) -> None:
    what["params"][0], what["params"][2] = what["params"][2], what["params"][0]


def _regroup(sizes: tuple[int, int]) -> Callable[[dict[str, Any]], None]:
    def change(what: dict[str, Any]) -> None:
        params = what["params"]
        what["params"] = [{"params": params[: sizes[0]]}, {"params": params[sizes[0] :]}]

    return change


def _extra_key(what: dict[str, Any]) -> None:
    what["params"] = [{"params": what["params"], "lr_scale": 0.1}]


def _same_value(index: int) -> Tensor:
    return _params(0)[index][1].detach().clone()


Change = Callable[[dict[str, Any]], None]

# What rank 1 does otherwise, and what the message must contain: the thing, rank 0's value, rank 1's.
DIFFERENCES: dict[str, tuple[Change, list[str]]] = {
    "name": (_rename, ["first.bias", "first.offset"]),
    "order": (_swap, ["first.weight", "last.weight"]),
    "shape": (_replace(0, torch.zeros(6, 4)), ["parameter 0 (first.weight)", "shape", "[4, 6]", "[6, 4]"]),
    "number of elements": (_replace(1, torch.zeros(5)), ["parameter 1 (first.bias)", "[4]", "[5]"]),
    "stride order": (
        _replace(0, _same_value(0).t().contiguous().t()),
        ["parameter 0 (first.weight)", "strides", "[6, 1]", "[1, 4]"],
    ),
    "dtype": (_replace(2, _same_value(2).double()), ["last.weight", "dtype", "torch.float32", "torch.float64"]),
    "requires_grad": (_replace(3, _same_value(3), False), ["scale", "requires_grad", "True", "False"]),
    "values": (_replace(2, _same_value(2) + 1), ["last.weight", "values", "broadcast_params"]),
    "one bit of a value": (_replace(3, -(-_same_value(3) * (1 + 2**-23))), ["scale", "values", "broadcast_params"]),
    "number of params": (_drop_last, ["number of parameters in group 0", "4", "3"]),
    "groups": (_regroup((2, 2)), ["number of parameters in group 0", "4", "2"]),
    "hyperparameter keys": (_extra_key, ["hyperparameters of group 0", "lr_scale"]),
    "lr": (_set(lr=0.5), ["hyperparameter lr of group 0", "0.001", "0.5"]),
    "lr as a tensor": (_set(lr=torch.tensor(0.5), foreach=False), ["hyperparameter"]),
    "betas": (_set(betas=(0.9, 0.99)), ["hyperparameter betas of group 0", "(0.9, 0.999)", "(0.9, 0.99)"]),
    "amsgrad": (_set(amsgrad=True), ["hyperparameter amsgrad of group 0", "False", "True"]),
    "foreach": (_set(foreach=True), ["hyperparameter foreach of group 0", "None", "True"]),
    "class": (_set(cls=torch.optim.Adamax), ["optimizer class", "Adam", "Adamax"]),
    "reduction": (_set(reduction=zero_opt.AtStep()), ["reduction", "Overlapped", "AtStep"]),
    "bucket_mb": (_set(reduction=zero_opt.Overlapped(1)), ["reduction", "bucket_mb=None", "bucket_mb=1"]),
    "precision": (
        _set(precision=zero_opt.MixedPrecision(reduce_dtype=torch.float64)),
        ["precision", "None", "torch.float64"],
    ),
    "max_grad_norm": (_set(max_grad_norm=1.0), ["max_grad_norm", "None", "1.0"]),
}


def _construct(rank: int, world_size: int, change: Change, who: int) -> str:
    what: dict[str, Any] = {"params": _params(rank), "cls": torch.optim.Adam}
    if rank == who:
        change(what)
    params, cls = what.pop("params"), what.pop("cls")
    try:
        zero_opt.ShardedOptimizer(params, cls, **what)
    except zero_opt.RankMismatch as error:
        return str(error)
    return "agreed"


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_a_difference_is_named_with_both_values_on_every_rank(difference: str) -> None:
    change, parts = DIFFERENCES[difference]
    messages = run_threads(3, _construct, change, 1)
    assert len(set(messages)) == 1
    for part in parts:
        assert part in messages[0], messages[0]


def _construct_all_ways(rank: int, world_size: int) -> list[str]:
    return [_construct(rank, world_size, change, who) for change, _ in DIFFERENCES.values() for who in (0, 1)]


def test_in_real_processes_too_and_one_after_the_other() -> None:
    first, second = run_processes(2, _construct_all_ways)
    assert first == second
    assert "agreed" not in first


# ---------------------------------------------------------------------------------------------------------------------
# mistakes of one rank


def _fails(params: Any = None, error: type[Exception] = ValueError, **options: Any) -> Callable[[int, int], str]:
    """A rank function: rank 1 passes what is wrong, and every rank gets an error of the same type."""

    def construct(rank: int, world_size: int) -> str:
        given: Any = _params(rank) if rank != 1 or params is None else params()
        with pytest.raises(error) as caught:
            zero_opt.ShardedOptimizer(given, torch.optim.Adam, **(options if rank == 1 else {}))
        assert isinstance(caught.value, zero_opt.ZeroOptError)
        return str(caught.value)

    return construct


def _explode() -> Any:
    yield nn.Parameter(torch.ones(3))
    raise KeyError("no such layer")


@pytest.mark.parametrize(
    ("construct", "what"),
    [
        (_fails(list, ValueError), "empty parameter list"),
        (_fails(lambda: [{"lr": 1}], ValueError), "group 0 has no 'params'"),
        (_fails(lambda: [None], TypeError), "group 0, position 0"),
        (_fails(lambda: [{"params": {torch.ones(3)}}], TypeError), "no order"),
        (_fails(None, RuntimeError, foreach=True, fused=True), "foreach"),
        (_fails(lambda: [1, 2], TypeError), "int"),
        (_fails(lambda: torch.ones(3), TypeError), "iterable"),
        (_fails(lambda: [torch.ones(3).to_sparse().requires_grad_()], TypeError), "parameter 0"),
        (_fails(lambda: [nn.Parameter(torch.ones(1).expand(3))], TypeError), "parameter 0"),
        (_fails(None, TypeError, momentun=0.9), "momentun"),
        (_fails(None, ValueError, lr=-1.0), "-1.0"),
        (_fails(None, ValueError, differentiable=True), "differentiable"),
        (_fails(None, ValueError, capturable=True), "capturable"),
    ],
)
def test_a_mistake_of_one_rank_is_an_error_of_the_same_type_on_all(construct: Any, what: str) -> None:
    messages = run_threads(2, construct)
    assert all(what in message for message in messages), messages
    assert messages[0].startswith("rank 1: ")


def _iterate_badly(rank: int, world_size: int) -> str:
    with pytest.raises((KeyError, zero_opt.ZeroOptError)) as caught:
        zero_opt.ShardedOptimizer(_explode() if rank == 1 else _params(rank), torch.optim.Adam)
    return str(caught.value)


def test_an_error_of_the_users_own_code_reaches_every_rank() -> None:
    for message in run_processes(2, _iterate_badly):
        assert "no such layer" in message


# ---------------------------------------------------------------------------------------------------------------------
# later


def _add_differing_groups(rank: int, world_size: int) -> list[str]:
    params = [param for _, param in _params(rank)]
    optimizer = zero_opt.ShardedOptimizer(params, torch.optim.Adam)
    messages = []
    wrong: list[Any] = [
        {"params": [nn.Parameter(torch.ones(5 + rank))]},
        {"params": [nn.Parameter(torch.full((5,), float(rank)))]},
        {"params": [nn.Parameter(torch.ones(5))], **({"key": 1} if rank else {})},
        {"params": [nn.Parameter(torch.ones(5)) if rank else params[0]]},
        {"params": [nn.Parameter(torch.ones(1).expand(5) if rank else torch.ones(5))]},
        {"params": "weights" if rank else [nn.Parameter(torch.ones(5))]},
        {"params": [nn.Parameter(torch.ones(5))], "capturable": bool(rank)},
        {"params": [nn.Parameter(torch.ones(5))], "lr": 0.1 * (1 + rank)},
        {"params": [nn.Parameter(torch.ones(5))], "differentiable": True},
        {"lr": 1},
        {"params": {nn.Parameter(torch.ones(5))}},
    ]
    for group in wrong:
        with pytest.raises(zero_opt.ZeroOptError) as caught:
            optimizer.add_param_group(group)
        messages.append(str(caught.value))
        assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(5))]})
    params.append(optimizer.param_groups[1]["params"][0])
    torch.autograd.backward(params, [torch.ones_like(param) for param in params])
    optimizer.step()
    optimizer.consolidate_state_dict()
    if rank == 0:
        assert len(optimizer.state_dict()["state"]) == 5
    optimizer.close()
    return messages


def test_groups_added_differently_are_refused_and_leave_everything_as_it_was() -> None:
    first, second = run_processes(2, _add_differing_groups)
    for mine, other in zip(first, second, strict=True):  # the rank at fault raises its own error, without its number
        assert re.sub("^rank [01]: ", "", mine) == re.sub("^rank [01]: ", "", other)
    assert "[5]" in first[0] and "[6]" in first[0]
    assert "broadcast_params" in first[1]
    assert "key" in first[2]


def _freeze_on_one_rank(rank: int, world_size: int, reduction: Any) -> str:
    params = [param for _, param in _params(rank)]
    optimizer = zero_opt.ShardedOptimizer(params, torch.optim.Adam, reduction=reduction)
    before = [param.detach().clone() for param in params]
    params[1].requires_grad_(rank == 0)
    for param in params:
        if param.requires_grad:
            param.sum().backward()
    with pytest.raises(zero_opt.RankMismatch) as caught:
        optimizer.step()
    assert_bitwise([param.detach() for param in params], before)
    params[1].requires_grad_(False)
    optimizer.zero_grad()
    for param in params:
        if param.requires_grad:
            param.sum().backward()
    optimizer.step()
    optimizer.close()
    return str(caught.value)


@pytest.mark.parametrize("reduction", [zero_opt.Overlapped(), zero_opt.AtStep()], ids=lambda p: type(p).__name__)
def test_a_parameter_frozen_on_one_rank_is_named_at_the_step(reduction: Any) -> None:
    for message in run_processes(2, _freeze_on_one_rank, reduction):
        assert "parameter 1 " in message and "True on rank 0 and False on rank 1" in message


def _model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Conv2d(2, 3, 3))
    conv: Any = model[2]
    conv.to(memory_format=torch.channels_last)
    model.register_buffer("seen", torch.full((3,), float(seed)))
    return model


def _broadcast(rank: int, world_size: int, src: int) -> list[Tensor]:
    model = _model(rank)
    with pytest.raises(zero_opt.RankMismatch, match="broadcast_params"):
        zero_opt.ShardedOptimizer(model.parameters(), torch.optim.Adam)
    # Under DDP, which has the values of rank 0 taken over, they are not looked at.
    zero_opt.ShardedOptimizer(model.parameters(), torch.optim.Adam, reduction=zero_opt.AlreadyReduced()).close()
    where = [param.data_ptr() for param in model.parameters()]
    zero_opt.broadcast_params(model, src=src)
    assert where == [param.data_ptr() for param in model.parameters()]
    zero_opt.ShardedOptimizer(model.parameters(), torch.optim.Adam).close()
    return [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())]


@pytest.mark.parametrize("src", [0, 2])
def test_broadcast_params_is_the_way_out(src: int) -> None:
    model = _model(src)
    for tensors in run_processes(3, _broadcast, src):
        assert_bitwise(tensors, [tensor.detach() for tensor in (*model.parameters(), *model.buffers())])


class _Custom(torch.optim.SGD):
    """A class of the user's."""


def _register_on_rank_0(rank: int, world_size: int) -> str:
    if rank == 0:
        zero_opt.register_elementwise(_Custom)
    with pytest.raises(zero_opt.RankMismatch) as caught:
        zero_opt.ShardedOptimizer([nn.Parameter(torch.ones(5))], _Custom, lr=0.1)
    return str(caught.value)


def test_a_class_that_one_rank_alone_has_registered_is_refused() -> None:
    """Ranks would plan who owns what differently."""
    for message in run_processes(2, _register_on_rank_0):
        assert message.startswith("register_elementwise() of that class: True on rank 0, False on rank 1")


def _lbfgs(rank: int, world_size: int) -> str:
    with pytest.raises(zero_opt.UnsupportedOptimizer) as caught:
        zero_opt.ShardedOptimizer([nn.Parameter(torch.ones(3))], torch.optim.LBFGS)
    return str(caught.value)


def test_lbfgs_is_refused_with_the_reason() -> None:
    for message in run_threads(2, _lbfgs):
        assert "LBFGS" in message and "several times per step" in message and "world size 1" in message


def _calls_of_one_rank(rank: int, world_size: int, name: str) -> str:
    params = [torch.nn.Parameter(torch.ones(70))]
    optimizer = zero_opt.ShardedOptimizer(params, torch.optim.Adam)
    params[0].sum().backward()
    calls: dict[str, Any] = {
        "consolidate_state_dict()": optimizer.consolidate_state_dict,
        "load_state_dict()": lambda: optimizer.load_state_dict(torch.optim.Adam(params).state_dict()),
        "add_param_group()": lambda: optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]}),
    }
    with pytest.raises(zero_opt.RankMismatch, match="rank 0 called ") as caught:
        calls[name]() if rank == 1 else optimizer.step()
    optimizer.step()
    optimizer.close()
    assert len(optimizer.param_groups) == 1
    return str(caught.value)


@pytest.mark.parametrize("name", ["consolidate_state_dict()", "load_state_dict()", "add_param_group()"])
def test_ranks_in_different_calls_are_told_which_and_can_go_on(name: str) -> None:
    for message in run_processes(2, _calls_of_one_rank, name):
        assert f"rank 0 called step() or clip_grad_norm_() where rank 1 called {name}" in message
