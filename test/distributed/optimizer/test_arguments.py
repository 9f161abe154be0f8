"""Parameters that no optimizer over several ranks can have: refused by name when they are given, or used."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import zero_opt
from test.support.fsdp_models import mesh_of
from test.support.harness import assert_bitwise, run_processes


def _net() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def _backward(model: nn.Module, step: int, rank: int) -> None:
    inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
    model(inputs).square().mean().backward()


def _ones(dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.ones(64, dtype=torch.complex64 if dtype is torch.complex32 else torch.float32).to(dtype))


_ODD: dict[str, tuple[Callable[[], Tensor], str]] = {
    "float8_e4m3fn": (partial(_ones, torch.float8_e4m3fn), r"parameter 4 .* is torch\.float8_e4m3fn"),
    "float8_e5m2": (partial(_ones, torch.float8_e5m2), r"parameter 4 .* is torch\.float8_e5m2"),
    "complex32": (partial(_ones, torch.complex32), r"parameter 4 .* is torch\.complex32"),
    "conj": (lambda: nn.Parameter(torch.ones(64, dtype=torch.complex64).conj()), "parameter 4 .* conjugates"),
    "negative": (lambda: nn.Parameter(torch._neg_view(torch.ones(64))), "parameter 4 .* negates"),
    "nested": (
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], requires_grad=True),
        "nested tensor; only dense",
    ),
}


def _odd_param(rank: int, world_size: int, odd: str, offload: Any) -> None:
    make, text = _ODD[odd]
    model = _net()
    with pytest.raises(zero_opt.UnsupportedParam, match=text):
        zero_opt.ShardedOptimizer([*model.parameters(), make()], torch.optim.AdamW, lr=0.01, offload=offload)
    optimizer = zero_opt.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01, offload=offload)
    with pytest.raises(zero_opt.UnsupportedParam, match=text):
        optimizer.add_param_group({"params": [make()]})
    _backward(model, 0, rank)
    optimizer.step()
    optimizer.close()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:ComplexHalf support")
@pytest.mark.parametrize("odd", _ODD)
def test_parameters_that_cannot_be_added_up_are_refused_by_name(odd: str) -> None:
    run_processes(2, _odd_param, odd, None)
    run_processes(1, _odd_param, odd, zero_opt.CPUOffload())


def _frozen_odd_param(rank: int, world_size: int) -> None:
    """A frozen one may be of any kind; it is refused on every rank once it is thawed."""
    model, odd = _net(), _ones(torch.float8_e4m3fn).requires_grad_(False)
    optimizer = zero_opt.ShardedOptimizer([*model.parameters(), odd], torch.optim.AdamW, lr=0.01)
    _backward(model, 0, rank)
    optimizer.step()
    odd.requires_grad_()
    _backward(model, 1, rank)
    with pytest.raises(zero_opt.UnsupportedParam, match=r"parameter 4 .* or freeze it"):
        optimizer.step()
    odd.requires_grad_(False)
    optimizer.step()
    optimizer.close()


def test_a_frozen_parameter_may_be_of_any_dtype() -> None:
    run_processes(2, _frozen_odd_param)


def _dtensor_with_grad_dtype(rank: int, world_size: int) -> None:
    param = nn.Parameter(distribute_tensor(torch.ones(8, 4), mesh_of((2,)), [Shard(0)]))
    options: Any = {"lr": 0.1, "offload": zero_opt.CPUOffload()}
    param.grad_dtype = torch.float64
    with pytest.raises(zero_opt.UnsupportedParam, match=r"parameter 0 .* with grad_dtype=torch\.float64"):
        zero_opt.ShardedOptimizer([param], torch.optim.AdamW, **options)
    param.grad_dtype = torch.float32
    optimizer = zero_opt.ShardedOptimizer([param], torch.optim.AdamW, **options)
    for dtype in (torch.float32, torch.float64):
        param.grad = None
        param.grad_dtype = dtype
        local = torch.ones(4, 4, dtype=dtype)
        param.grad = DTensor.from_local(local, param.device_mesh, [Shard(0)])
        if dtype is torch.float32:
            optimizer.step()
            continue
        with pytest.raises(zero_opt.UnsupportedParam, match=r"parameter 0 .* with grad_dtype=torch\.float64"):
            optimizer.step()
    optimizer.close()


def test_a_dtensor_whose_gradients_have_another_dtype_is_refused() -> None:
    run_processes(2, _dtensor_with_grad_dtype)


def _late_option(rank: int, world_size: int, option: str, offload: Any, options: dict[str, Any]) -> None:
    model = _net()
    optimizer = zero_opt.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01, offload=offload, **options)
    _backward(model, 0, rank)
    optimizer.param_groups[0][option] = rank == 1
    with pytest.raises(zero_opt.UnsupportedOptimizer, match=f"{option}=True cannot be sharded"):
        optimizer.step()
    optimizer.param_groups[0][option] = False
    optimizer.step()
    optimizer.close()


@pytest.mark.parametrize("option", ["capturable", "differentiable"])
@pytest.mark.parametrize(
    ("offload", "options"), [(None, {}), (None, {"foreach": True}), (zero_opt.WorkerOffload(), {"fused": True})]
)
def test_an_option_that_cannot_be_sharded_is_refused_after_construction(
    option: str, offload: Any, options: dict[str, Any]
) -> None:
    run_processes(2, _late_option, option, offload, options)


def _wrong_calls(rank: int, world_size: int) -> None:
    model = _net()
    optimizer = zero_opt.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    _backward(model, 0, rank)
    wrong: list[Any] = [lambda: optimizer.step(5), lambda: optimizer.step("x"), lambda: optimizer.step(None, 3)]
    for call in wrong:
        with pytest.raises(zero_opt.ConfigTypeError, match=r"step\(\) takes"):
            call()
    for arguments, options in [((model.parameters(), 1.0), {}), ((1.0,), {"norm_type": 2.0})]:
        with pytest.raises(zero_opt.ConfigTypeError, match=r"takes the norm alone, as in opt\.clip_grad_norm_\(1\.0\)"):
            optimizer.clip_grad_norm_(*arguments, **options)
    words = r"^(rank 0: )?zero_opt\.clip_grad_norm_\(\) takes the norm alone, .*; got norm_type=1 too$"
    with pytest.raises(zero_opt.ConfigTypeError, match=words):
        zero_opt.clip_grad_norm_([optimizer], 1.0, norm_type=1)
    with pytest.raises(zero_opt.ConfigTypeError, match=r"takes the norm alone, .*; got 2\.0 too$"):
        zero_opt.clip_grad_norm_([optimizer], 1.0, 2.0)
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.close()


def test_arguments_of_other_functions_are_refused_by_calls() -> None:
    run_processes(2, _wrong_calls)


@pytest.mark.parametrize("fused", [None, True])
def test_split_masters_of_fp16_name_what_works(fused: bool | None) -> None:
    params = [nn.Parameter(torch.ones(64, dtype=torch.float16))]
    split = zero_opt.MixedPrecision(master_dtype="split")
    with pytest.raises(zero_opt.UnsupportedParam, match=r"float16 .*use .*\(master_dtype=torch\.float32\)"):
        zero_opt.ShardedOptimizer(params, torch.optim.AdamW, precision=split, fused=fused)


def _split_of_one_group(rank: int, world_size: int) -> None:
    def groups() -> list[dict[str, Any]]:
        halves = nn.Parameter(torch.linspace(-1, 1, 300).bfloat16())
        return [{"params": [nn.Parameter(torch.linspace(-1, 1, 200))]}, {"params": [halves], "fused": True}]

    ours, plain = groups(), groups()[0]
    optimizer = zero_opt.ShardedOptimizer(ours, torch.optim.AdamW, precision=zero_opt.MixedPrecision("split"))
    reference = torch.optim.AdamW([plain])
    for step in range(3):
        if step == 1:
            optimizer.load_state_dict(optimizer.state_dict())
        for group in (*ours, plain):
            group["params"][0].grad = torch.linspace(2, 1, group["params"][0].numel()).to(group["params"][0].dtype)
        optimizer.step()
        reference.step()
    assert_bitwise(ours[0]["params"][0].detach(), plain["params"][0].detach())
    optimizer.param_groups[1]["fused"] = None
    saved = optimizer.state_dict()
    with pytest.raises(zero_opt.StateDictError, match=r"does not step group 1 of AdamW \(fused=None\)"):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize("world_size", [1, 2])
def test_split_masters_ask_for_the_kernel_only_where_there_is_something_to_split(world_size: int) -> None:
    run_processes(world_size, _split_of_one_group)


def _fail_in(kind: str, model: nn.Module) -> Iterator[nn.Parameter]:
    yield next(model.parameters())
    if kind == "JSONDecodeError":
        json.loads("{")
    raise {"TypeError": TypeError, "RuntimeError": RuntimeError}[kind]("a mistake in the user's generator")


def _failing_iterable(rank: int, world_size: int, kind: str) -> None:
    model = _net()
    error = {"JSONDecodeError": json.JSONDecodeError, "TypeError": TypeError, "RuntimeError": RuntimeError}[kind]
    optimizer = zero_opt.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    others = nn.Linear(2, 2)
    for call in (
        lambda params: zero_opt.ShardedOptimizer(params, torch.optim.AdamW, lr=0.01),
        lambda params: optimizer.add_param_group({"params": params}),
    ):
        with pytest.raises((error, zero_opt.ZeroOptError)) as caught:
            call(_fail_in(kind, others) if rank == world_size - 1 else others.parameters())
        if rank == world_size - 1:
            assert type(caught.value) is error
        else:
            assert type(caught.value) is zero_opt.ZeroOptError
            assert f"rank {world_size - 1}: " in str(caught.value)
            assert f"({kind})" in str(caught.value)
    optimizer.close()


@pytest.mark.parametrize("kind", ["JSONDecodeError", "TypeError", "RuntimeError"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_what_the_users_iterable_raises_stays_what_it_is(world_size: int, kind: str) -> None:
    run_processes(world_size, _failing_iterable, kind)
