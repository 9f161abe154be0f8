"""ShardedOptimizer at world size 1, and what it does before any rank talks to another."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import Parameter

import zero_opt
from test.support.harness import assert_bitwise, run_threads


def stepped() -> zero_opt.ShardedOptimizer:
    """Two groups, one step taken."""
    params = [Parameter(torch.full((shape,), 2.0)) for shape in (3, 5)]
    groups = [{"params": params[:1], "lr": 0.1}, {"params": params[1:]}]
    optimizer = zero_opt.ShardedOptimizer(groups, torch.optim.AdamW, max_grad_norm=1.0)
    step(optimizer, 0.5)
    return optimizer


def step(optimizer: torch.optim.Optimizer, grad: float) -> None:
    """One step with this gradient everywhere."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.full_like(param, grad)
    optimizer.step()


def _save(optimizer: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(optimizer, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda optimizer: pickle.loads(pickle.dumps(optimizer)),
    "torch.save": _save,
}


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_goes_on_by_itself_as_a_copy_of_the_wrapped_class_does(how: str) -> None:
    original = stepped()
    copied = COPIES[how](original)
    params = [[group["params"][0].detach().clone() for group in opt.param_groups] for opt in (original, copied)]
    assert_bitwise(params[0], params[1])
    before = copy.deepcopy(original.state_dict())
    step(copied, 0.25)
    assert_bitwise(original.state_dict(), before)
    step(original, 0.25)
    assert_bitwise(copied.state_dict(), original.state_dict())
    for ours, theirs in zip(copied.param_groups, original.param_groups, strict=True):
        assert torch.equal(ours["params"][0], theirs["params"][0])
    copied.zero_grad()
    copied.add_param_group({"params": [Parameter(torch.ones(2))]})
    copied.load_state_dict(copied.state_dict())
    assert len(original.param_groups) == 2
    copied.close()
    with pytest.raises(zero_opt.OptimizerClosed):
        COPIES[how](copied).step()


MISTAKES: list[tuple[Callable[[], Any], dict[str, Any], type[Exception]]] = [
    (lambda: [{"lr": 1}], {}, zero_opt.ConfigError),
    (list, {}, zero_opt.ConfigError),
    (lambda: None, {}, zero_opt.ConfigTypeError),
    (lambda: [None], {}, zero_opt.ConfigTypeError),
    (lambda: [{"params": {Parameter(torch.ones(2))}}], {}, zero_opt.ConfigTypeError),
    (lambda: [Parameter(torch.ones(2)) * 2], {}, zero_opt.ConfigError),
    (lambda: [Parameter(torch.ones(2))], {"foreach": True, "fused": True}, zero_opt.ConfigConflict),
    (lambda: [Parameter(torch.ones(2, dtype=torch.complex64))], {"fused": True}, zero_opt.ConfigConflict),
    (
        lambda: [Parameter(torch.ones(2, dtype=torch.complex64))],
        {"fused": True, "offload": zero_opt.CPUOffload()},
        zero_opt.ConfigConflict,
    ),
    (lambda: [Parameter(torch.ones(2))], {"lr": -1.0}, zero_opt.ConfigError),
    (lambda: [Parameter(torch.ones(2))], {"lr": "fast"}, zero_opt.ConfigTypeError),
    (lambda: [Parameter(torch.ones(2))], {"rate": 1.0}, zero_opt.ConfigTypeError),
    (
        lambda: [Parameter(torch.ones(2))],
        {
            "reduction": zero_opt.AlreadyReduced(),
            "precision": zero_opt.MixedPrecision(between_hosts_dtype=torch.bfloat16),
        },
        zero_opt.ConfigConflict,
    ),
]


def _make(rank: int, world_size: int, mistake: int) -> Exception:
    params, options, _ = MISTAKES[mistake]
    with pytest.raises(zero_opt.ZeroOptError) as caught:
        zero_opt.ShardedOptimizer(params(), torch.optim.Adam, **options)
    return caught.value


@pytest.mark.parametrize("mistake", range(len(MISTAKES)))
def test_a_mistake_is_an_error_of_the_same_type_and_text_at_any_world_size(mistake: int) -> None:
    errors = [*run_threads(1, _make, mistake), *run_threads(2, _make, mistake)]
    assert {type(error) for error in errors} == {MISTAKES[mistake][2]}
    assert len({str(error).removeprefix("rank 0: ") for error in errors}) == 1


APART: dict[str, dict[str, Any]] = {
    "with an offload": {"offload": zero_opt.CPUOffload()},
    "with masters": {"state": zero_opt.AdamState("float32", "split")},
    "with masters ": {"precision": zero_opt.MixedPrecision(master_dtype=torch.float32)},
    "over several ranks": {},
}


def _copy_and_pickle(rank: int, world_size: int, cause: str) -> None:
    cls = zero_opt.CPUAdamW if "state" in APART[cause] else torch.optim.AdamW
    optimizer = zero_opt.ShardedOptimizer([Parameter(torch.ones(4, dtype=torch.bfloat16))], cls, **APART[cause])
    for how in COPIES.values():
        with pytest.raises(zero_opt.ConfigTypeError, match=f"a ShardedOptimizer {cause.strip()} cannot be copied"):
            how(optimizer)
    with pytest.raises(zero_opt.ConfigTypeError, match=rf"__setstate__\(\) {cause.strip()}: use"):
        optimizer.__setstate__({"state": {}, "param_groups": []})
    optimizer.close()


@pytest.mark.parametrize("cause", APART)
def test_why_an_optimizer_cannot_be_copied(cause: str) -> None:
    run_threads(2 if "ranks" in cause else 1, _copy_and_pickle, cause)


def test_params_in_every_form_are_as_in_the_wrapped_class() -> None:
    a, b = Parameter(torch.ones(2)), Parameter(torch.ones(3))
    forms: list[Callable[[], Any]] = [
        lambda: [a, b],
        lambda: iter([("a", a), ("b", b)]),
        lambda: ({"params": p} for p in (a, b)),
        lambda: [{"params": [("a", a)], "lr": 1.0}, {"params": iter([("b", b)])}],
        lambda: {"first": a, "second": b}.values(),
        lambda: [{"params": dict.fromkeys([a, b]).keys()}],
        lambda: [{"params": []}, {"params": b}],
    ]
    for form in forms:
        ours, plain = zero_opt.ShardedOptimizer(form(), torch.optim.AdamW), torch.optim.AdamW(form())
        for group, expected in zip(ours.param_groups, plain.param_groups, strict=True):
            assert all(p is q for p, q in zip(group.pop("params"), expected.pop("params"), strict=True))
            assert group == expected


def test_an_added_group_that_has_no_params_is_named() -> None:
    optimizer = stepped()
    with pytest.raises(zero_opt.ConfigError, match="group 2 has no 'params'"):
        optimizer.add_param_group({"lr": 1.0})
    assert len(optimizer.param_groups) == 2


def _add_complex(rank: int, world_size: int, options: dict[str, Any]) -> None:
    real, pairs = Parameter(torch.ones(4)), Parameter(torch.ones(4, dtype=torch.complex64))
    optimizer = zero_opt.ShardedOptimizer([real], torch.optim.Adam, fused=True, **options)
    with pytest.raises(zero_opt.ConfigConflict, match=r"parameter 1 \(group 1, .*complex64.*fused=False"):
        optimizer.add_param_group({"params": [pairs]})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [pairs], "fused": False})
    (real.sum() + pairs.abs().sum()).backward()
    optimizer.step()
    saved = torch.optim.Adam([{"params": real}, {"params": pairs}], fused=True).state_dict()
    with pytest.raises(zero_opt.StateDictError, match=r"in the state dict, parameter 1 .*fused=False"):
        optimizer.load_state_dict(saved)
    optimizer.close()


@pytest.mark.parametrize("options", [{}, {"offload": zero_opt.CPUOffload()}], ids=["none", "CPUOffload"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_complex_params_of_a_fused_group_are_refused_where_they_are_added_or_loaded(
    world_size: int, options: dict[str, Any]
) -> None:
    run_threads(world_size, _add_complex, options)


def _copy_sharded(rank: int, world_size: int) -> list[str]:
    params, messages = [Parameter(torch.full((3,), 2.0))], []
    optimizer = zero_opt.ShardedOptimizer(params, torch.optim.AdamW)
    for copied in COPIES.values():
        with pytest.raises(zero_opt.ConfigTypeError) as caught:
            copied(optimizer)
        messages.append(str(caught.value))
    optimizer.close()
    return messages


def test_a_sharded_one_is_not_copied_but_says_how_to_save() -> None:
    for messages in run_threads(2, _copy_sharded):
        assert all("consolidate_state_dict" in message for message in messages)


def test_a_state_dict_is_the_wrapped_classs_own() -> None:
    """CPUAdam keeps moments in codes, and saves numbers."""
    form = zero_opt.AdamState(moments="block8")
    optimizers = [
        make([Parameter(torch.linspace(0, 1, 100))])
        for make in (
            lambda params: zero_opt.ShardedOptimizer(params, zero_opt.CPUAdam, state=form),
            lambda params: zero_opt.CPUAdam(params, state=form),
        )
    ]
    for optimizer in optimizers:
        step(optimizer, 0.5)
    saved = [optimizer.state_dict() for optimizer in optimizers]
    assert_bitwise(saved[0], saved[1])
    for optimizer in (*optimizers, copy.deepcopy(optimizers[0])):
        optimizer.load_state_dict(saved[0])
        step(optimizer, 0.25)
        assert_bitwise(optimizer.state_dict(), optimizers[0].state_dict())


CLOSES_LATE = """
import torch, zero_opt
class Trainer:
    def __init__(self, offload):
        param = torch.nn.Parameter(torch.ones(4))
        self.opt = zero_opt.ShardedOptimizer([param], torch.optim.AdamW, fused=True, offload=offload)
        param.sum().backward()
        self.opt.step()
    def __del__(self): self.opt.close(); print("closed")
trainer = Trainer(zero_opt.{offload})
"""
LATE = {"None": "", "WorkerOffload()": "", "WorkerOffload(delay=1)": "close() has lost the update of a pending step"}


@pytest.mark.parametrize("offload", LATE)
def test_a_finalizer_that_the_end_of_the_interpreter_calls_may_close_it(offload: str) -> None:
    program = CLOSES_LATE.format(offload=offload).replace("zero_opt.None", "None")
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)
    assert (ended.returncode, ended.stdout) == (0, "closed\n")
    assert ended.stderr.startswith(LATE[offload]) and ended.stderr.count("\n") == bool(LATE[offload])
