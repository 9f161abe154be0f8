"""A consumed gradient: nothing can read or edit it by accident, autograd can still add to it."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.dlpack
from torch import Tensor, nn
from torch.nn import Parameter
from torch.overrides import BaseTorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from test.support.failures import PATIENCE_S
from zero_opt.errors import GradientConsumed
from zero_opt.reduction.consumed_grad import ConsumedGrad, not_held_here

FIXES = ("opt.clip_grad_norm_", "AtStep()", "AlreadyReduced()")


class Owner:
    """Stands for the reduction that holds the values."""

    def __init__(self, found_inf: bool = False) -> None:
        self.zeroed: list[int] = []
        self.scales: list[float] = []
        self.found_inf = found_inf

    def zero_consumed(self, param: int) -> None:
        self.zeroed.append(param)

    def may_copy_pending(self, param: int, target: Tensor) -> bool:
        return False

    def unscale_consumed(self, inv_scale: Tensor) -> bool:
        self.scales.append(inv_scale.item())
        return self.found_inf


OWNER = Owner()  # stand-ins refer to it weakly


def consumed(owner: Owner, shape: tuple[int, ...] = (2, 3), index: int = 7) -> tuple[Parameter, ConsumedGrad]:
    """A parameter whose gradient has been taken."""
    param = Parameter(torch.ones(shape))
    grad = ConsumedGrad(param, owner, index, f"parameter {index}")
    param.grad = grad
    return param, grad


def test_it_has_the_params_metadata_and_no_memory() -> None:
    _, grad = consumed(OWNER)
    assert (grad.shape, grad.dtype, grad.device.type, grad.stride()) == ((2, 3), torch.float32, "cpu", (3, 1))
    assert grad.is_leaf
    assert not grad.requires_grad
    assert "parameter 7" in repr(grad)
    assert "(2, 3)" in str(grad)
    assert f"{grad}" == str(grad)


@pytest.mark.parametrize(
    "param",
    [
        torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.zeros(4, 3).t(),
        torch.zeros(3, 8)[:, ::2],
        torch.zeros(()),
        torch.zeros(0, 3),
    ],
    ids=["channels_last", "transposed", "gaps", "0-dim", "empty"],
)
def test_its_strides_are_those_autograd_gives_a_gradient(param: Tensor) -> None:
    """Otherwise accumulating into it would draw a warning about layouts, which is an error here."""
    leaf = Parameter(param)
    (leaf * 2).sum().backward()
    assert leaf.grad is not None
    owner = Owner()
    expected = leaf.grad.stride()
    leaf.grad = grad = ConsumedGrad(leaf, owner, 0, "p")
    assert grad.stride() == expected
    (leaf * 2).sum().backward()
    pending = grad.take_pending()
    assert pending is not None
    assert torch.equal(pending, torch.full_like(leaf, 2))


READS: dict[str, Callable[[Parameter], Any]] = {
    "norm": lambda p: p.grad.norm(),
    "sum": lambda p: p.grad.sum(),
    "item": lambda p: p.grad.item(),
    "tolist": lambda p: p.grad.tolist(),
    "numpy": lambda p: p.grad.numpy(),
    "bool": lambda p: bool(p.grad),
    "float": lambda p: float(p.grad),
    "index": lambda p: p.grad[0],
    "clone": lambda p: p.grad.clone(),
    "copy to": lambda p: torch.zeros(2, 3).copy_(p.grad),
    "compare": lambda p: torch.equal(p.grad, p.grad),
    "is nan": lambda p: torch.isnan(p.grad),
    "is finite": lambda p: torch.isfinite(p.grad),
    "data_ptr": lambda p: p.grad.data_ptr(),
    "format": lambda p: f"{p.grad:.3f}",
    "dlpack": lambda p: torch.from_dlpack(p.grad),
    "storage": lambda p: p.grad.untyped_storage(),
    "norm of all": lambda p: torch.nn.utils.get_total_norm([p.grad]),
    "clip norm": lambda p: torch.nn.utils.clip_grad_norm_([p], 1.0),
    "clip norm, one by one": lambda p: torch.nn.utils.clip_grad_norm_([p], 1.0, foreach=False),
    "clip value": lambda p: torch.nn.utils.clip_grad_value_([p], 1.0),
    "scale": lambda p: p.grad.mul_(2),
    "divide": lambda p: p.grad.div_(2),
    "add": lambda p: p.grad.add_(1),
    "add a tensor": lambda p: p.grad.add_(torch.ones(2, 3)),
    "fill": lambda p: p.grad.fill_(1),
    "copy in": lambda p: p.grad.copy_(torch.ones(2, 3)),
    "foreach": lambda p: torch._foreach_mul_([p.grad], 2),
    "another optimizer": lambda p: torch.optim.SGD([p], lr=0.1).step(),
    "another optimizer, fused": lambda p: torch.optim.AdamW([p], fused=True).step(),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_reading_or_editing_it_is_refused_by_name_with_the_ways_out(read: Callable[[Parameter], Any]) -> None:
    owner = Owner()
    param, grad = consumed(owner)
    with torch.no_grad(), pytest.raises(GradientConsumed) as caught:
        read(param)
    message = str(caught.value)
    assert "parameter 7" in message
    assert all(fix in message for fix in FIXES)
    assert torch.equal(param, torch.ones(2, 3))
    assert param.grad is grad
    assert grad.pending is None
    assert not owner.zeroed


CLIP, EDIT = "To clip, or to log the norm, call opt.clip_grad_norm_", "To read or edit gradients before step()"
FINITE, SCALE = "To look for inf and NaN", "To scale gradients, scale the loss"
STEP, REDUCE = "A parameter is stepped by one optimizer", "Gradients are averaged already"
LEADS = {
    "norm": CLIP,
    "norm of all": CLIP,
    "clip norm": CLIP,
    "clip norm, one by one": CLIP,
    "is nan": FINITE,
    "scale": SCALE,
    "divide": SCALE,
    "foreach": SCALE,
    "another optimizer": STEP,
    "another optimizer, fused": STEP,
    "clip value": EDIT,
    "item": EDIT,
    "clone": EDIT,
    "add a tensor": EDIT,
}


@pytest.mark.parametrize("what", LEADS)
def test_the_way_out_of_what_was_called_comes_first(what: str) -> None:
    param, _ = consumed(OWNER)
    with torch.no_grad(), pytest.raises(GradientConsumed) as caught:
        READS[what](param)
    assert str(caught.value).startswith(LEADS[what])


@pytest.mark.parametrize(
    "convert",
    [
        lambda model: model.double(),
        lambda model: model.bfloat16(),
        lambda model: model.to("meta"),
        lambda model: model.to_empty(device="cpu"),
        lambda model: model.share_memory(),
        lambda model: model.to(memory_format=torch.channels_last),
    ],
    ids=["double", "bfloat16", "device", "to_empty", "share_memory", "memory format"],
)
def test_the_way_out_of_moving_or_casting_the_model_is_to_do_so_before(convert: Callable[[Any], Any]) -> None:
    owner = Owner()
    param, _ = consumed(owner, (2, 3, 2, 2))
    model = torch.nn.ParameterList([param])
    with pytest.raises(GradientConsumed) as caught:
        convert(torch.nn.Sequential(model))
    assert str(caught.value).startswith("Move or cast the model before its optimizer is made; ")
    assert not any(fix in str(caught.value) for fix in FIXES)


@pytest.mark.parametrize(
    "convert",
    [
        lambda model: model.cpu(),
        lambda model: model.float(),
        lambda model: model.to("cpu", torch.float32),
        lambda model: model.requires_grad_(True),
        lambda model: model._apply(lambda tensor: tensor),
    ],
    ids=["cpu", "float", "to", "requires_grad", "apply"],
)
@pytest.mark.parametrize("swap", [False, True], ids=["data", "swap"])
def test_a_model_that_stays_where_it_is_keeps_it(convert: Callable[[Any], Any], swap: bool) -> None:
    """As Lightning moves models to the CPU when training has ended."""
    param, grad = consumed(OWNER)
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        convert(torch.nn.Sequential(torch.nn.ParameterList([param])))
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    assert param.grad is grad and grad.owner() is OWNER and grad.pending is None


def test_the_way_out_of_an_all_reduce_is_to_leave_it_out() -> None:
    _, grad = consumed(OWNER)
    with pytest.raises(GradientConsumed) as caught:
        ConsumedGrad.__torch_dispatch__(torch.ops.c10d.allreduce_.default, (ConsumedGrad,), ([grad],))
    assert str(caught.value).startswith(REDUCE)


def test_autograd_accumulates_into_what_is_pending() -> None:
    param, grad = consumed(OWNER)
    (param * 2).sum().backward()
    (param * 3).sum().backward()
    assert param.grad is grad
    pending = grad.take_pending()
    assert pending is not None
    assert torch.equal(pending, torch.full((2, 3), 5.0))
    assert grad.take_pending() is None


def test_accumulation_with_a_graph_is_pending_too() -> None:
    param, grad = consumed(OWNER)
    with pytest.warns(UserWarning, match="create_graph"):
        (param**2).sum().backward(create_graph=True)
    assert param.grad is grad
    pending = grad.take_pending()
    assert pending is not None
    assert not pending.requires_grad
    assert torch.equal(pending, torch.full((2, 3), 2.0))


class Passing(TorchDispatchMode):
    """A mode of the user's, which has a method of its own."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.call(func, args, kwargs or {})

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)


class Decorated(Passing):
    """One whose method torch's decorator wraps."""

    __torch_dispatch__ = torch.no_grad()(Passing.__torch_dispatch__)


class Wrapped(Passing):
    """One whose method is a function without its name."""

    __torch_dispatch__ = lambda self, func, types, args=(), kwargs=None: func(*args, **(kwargs or {}))  # noqa: E731


BACKWARDS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "engine": lambda loss, _: torch.autograd.Variable._execution_engine.run_backward(
        (loss,), (torch.ones_like(loss),), True, True, (), allow_unreachable=True, accumulate_grad=True
    ),
    "operator": lambda loss, param: torch.ops.aten._backward(loss, [param], None, True, True),
}


@pytest.mark.parametrize("backward", BACKWARDS)
@pytest.mark.filterwarnings("ignore:Using backward")
def test_autograd_accumulates_with_a_graph_however_it_is_called(backward: str) -> None:
    param, grad = consumed(OWNER)
    BACKWARDS[backward]((param**2).sum(), param)
    assert param.grad is grad and grad.pending is not None


PROGRAM = """
from test.unit.reduction.test_consumed_grad import BACKWARDS, OWNER, consumed

for backward in BACKWARDS.values():
    param, grad = consumed(OWNER)
    backward((param**2).sum(), param)
    assert param.grad is grad and grad.pending is not None
"""


@pytest.mark.parametrize("how", [["program.py"], ["-m", "program"], ["-c", PROGRAM]], ids=["file", "module", "text"])
def test_autograd_accumulates_with_a_graph_however_the_program_is_started(how: list[str], tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    paths = {"PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, "-W", "ignore", *how]
    subprocess.run(command, cwd=tmp_path, env={**os.environ, **paths}, check=True, timeout=PATIENCE_S)


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize(
    "mode",
    [Passing, Decorated, Wrapped, lambda: FlopCounterMode(display=False), BaseTorchFunctionMode],
    ids=["own", "decorated", "wrapped", "flops", "function"],
)
@pytest.mark.filterwarnings("ignore:Using backward")
def test_autograd_accumulates_where_a_mode_is_active(mode: Callable[[], Any], create_graph: bool) -> None:
    param, grad = consumed(OWNER)
    with mode():
        (param**2).sum().backward(create_graph=create_graph)
    assert param.grad is grad and grad.pending is not None
    assert torch.equal(grad.pending, torch.full((2, 3), 2.0))


HOOK_READS: dict[str, Callable[[Any], Any]] = {
    "a tensor": lambda p: p.grad + torch.ones_like(p),
    "to a tensor": lambda p: torch.ones_like(p) + p.grad,
    "a number": lambda p: p.grad + 1,
    "a sum": lambda p: sum([p.grad]),
    "a larger tensor": lambda p: p.grad + torch.ones(2, 2, 3),
    "detached": lambda p: p.grad.detach() + torch.ones_like(p),
    "in place, a number": lambda p: p.grad.add_(1),
    "in place, a row": lambda p: p.grad.add_(torch.ones(3)),
    "in place, a larger tensor": lambda p: p.grad.add_(torch.ones(2, 2, 3)),
    "in place, complex": lambda p: p.grad.add_(torch.ones(2, 3, dtype=torch.complex64)),
}


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("pending", [False, True])
@pytest.mark.parametrize("read", HOOK_READS.values(), ids=HOOK_READS.keys())
@pytest.mark.filterwarnings("ignore:Using backward")
def test_what_a_hook_adds_to_another_result_is_not_accumulated(
    read: Callable[[Parameter], Any], pending: bool, create_graph: bool
) -> None:
    param, grad = consumed(OWNER)
    kept: list[Any] = []

    def hook(param: Tensor) -> None:
        if not pending:
            grad.take_pending()
        with torch.set_grad_enabled(create_graph):
            kept.append(read(param))  # type: ignore[arg-type]

    param.register_post_accumulate_grad_hook(hook)
    with pytest.raises(GradientConsumed, match="parameter 7"):
        (param**2).sum().backward(create_graph=create_graph)
    assert not kept
    left = grad.take_pending()
    assert torch.equal(left, torch.full((2, 3), 2.0)) if pending and left is not None else left is None


def test_what_a_hook_adds_in_place_is_accumulated() -> None:
    param, grad = consumed(OWNER)

    def hook(param: Tensor) -> None:
        assert param.grad is grad
        grad.add_(torch.ones_like(param))

    param.register_post_accumulate_grad_hook(hook)
    (param**2).sum().backward()
    assert grad.pending is not None and torch.equal(grad.pending, torch.full((2, 3), 3.0))


def test_what_autograd_shares_is_not_written_to() -> None:
    """Autograd may give two nodes one tensor; adding to it in place would change the other's gradient."""
    a, grad_a = consumed(OWNER)
    b = Parameter(torch.ones(2, 3))
    (a + b).sum().backward()
    assert b.grad is not None
    (a * 10).sum().backward()
    assert torch.equal(b.grad, torch.ones(2, 3))
    pending = grad_a.take_pending()
    assert pending is not None
    assert torch.equal(pending, torch.full((2, 3), 11.0))


@pytest.mark.parametrize("zero", ["grad", "module", "optimizer", "optimizer, one by one"])
def test_zeroing_it_zeroes_the_held_gradient(zero: str) -> None:
    owner = Owner()
    param, grad = consumed(owner)
    (param * 2).sum().backward()
    if zero == "grad":
        assert param.grad is not None
        param.grad.zero_()
    elif zero == "module":
        module = torch.nn.Module()
        module.p = param
        module.zero_grad(set_to_none=False)
    else:
        torch.optim.SGD([param], foreach=zero == "optimizer").zero_grad(set_to_none=False)
    assert param.grad is grad
    assert grad.pending is None
    assert owner.zeroed == [7]


def test_setting_to_none_needs_no_one() -> None:
    param, _ = consumed(OWNER)
    torch.optim.SGD([param]).zero_grad()
    assert param.grad is None


@pytest.mark.parametrize("found", [False, True])
def test_the_owner_unscales_for_grad_scaler_once_for_all_its_gradients(found: bool) -> None:
    owner = Owner(found)
    grads = [consumed(owner, index=i)[1] for i in range(3)]
    plain = torch.full((2,), 8.0)
    found_inf = torch.zeros(1)
    torch._amp_foreach_non_finite_check_and_unscale_([*grads, plain], found_inf, torch.tensor(0.25))
    assert owner.scales == [0.25]
    assert plain.tolist() == [2.0, 2.0]
    assert found_inf.item() == float(found)


def test_unscaling_still_finds_what_is_wrong_in_plain_gradients() -> None:
    found_inf = torch.zeros(1)
    grads = [consumed(OWNER)[1], torch.tensor([torch.inf])]
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, torch.tensor(0.5))
    assert found_inf.item() == 1.0


def test_it_does_not_keep_its_owner_and_outlives_it() -> None:
    owner = Owner()
    _, grad = consumed(owner)
    del owner
    assert grad.owner() is None
    grad.zero_()


def test_a_copied_model_has_no_gradient() -> None:
    param, grad = consumed(OWNER)
    copied = copy.deepcopy(param)
    assert copied.grad is None
    assert torch.equal(copied, param)
    assert param.grad is grad


def test_a_copied_gradient_says_that_its_values_are_gone() -> None:
    _, grad = consumed(OWNER)
    copied = copy.deepcopy([grad, grad])
    assert copied[0] is copied[1] is not grad
    with pytest.raises(GradientConsumed, match="parameter 7 are gone"):
        copied[0].norm()


def test_detaching_it_is_no_way_around() -> None:
    param, _ = consumed(OWNER)
    assert param.grad is not None
    with pytest.raises(GradientConsumed):
        param.grad.detach().add_(1)
    with pytest.raises(GradientConsumed):
        param.grad.data.norm()


def test_a_pointer_without_an_operator_is_an_error() -> None:
    """It was null, which readers of the capsule follow."""
    param, _ = consumed(OWNER)
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        torch.utils.dlpack.to_dlpack(param.grad)


def test_a_voided_gradient_says_that_its_values_are_gone() -> None:
    param, grad = consumed(OWNER)
    grad.void()
    with pytest.raises(GradientConsumed, match=r"of parameter 7 are gone.*repeat the backward"):
        grad.norm()
    assert "parameter 7 are gone" in str(not_held_here(grad))
    grad.zero_()
    assert not OWNER.zeroed and param.grad is grad


@pytest.mark.parametrize(
    "convert", [nn.Module.half, nn.Module.cpu, lambda m: m.to("meta"), lambda m: m.to_empty(device="cpu")]
)
def test_a_voided_gradient_follows_a_model_that_is_converted(convert: Callable[[nn.Module], nn.Module]) -> None:
    model = nn.Linear(3, 2)
    model.weight.grad = grad = ConsumedGrad(model.weight, OWNER, 7, "parameter 7")
    grad.void()
    convert(model)
    moved = model.weight.grad
    assert isinstance(moved, ConsumedGrad) and (moved.dtype, moved.device) == (model.weight.dtype, model.weight.device)
    with pytest.raises(GradientConsumed, match="parameter 7 are gone"):
        moved.norm()


def test_setting_its_data_is_refused() -> None:
    _, grad = consumed(OWNER)
    assert grad.data.shape == grad.shape
    with pytest.raises(GradientConsumed, match="parameter 7"):
        grad.data = torch.ones(2, 3)
