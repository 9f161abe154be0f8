"""What a load leaves in the wrapped class's state, whether the class has seen each value or not."""

from __future__ import annotations

import signal
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch.nn import Parameter

import zero_opt
from test.support.harness import assert_bitwise
from zero_opt.kernels import slots
from zero_opt.system.extension import native

NUMELS = (5, 3)
CASES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {}),
    "AdamW, fused": (torch.optim.AdamW, {"fused": True, "amsgrad": True}),
    "SGD": (torch.optim.SGD, {"momentum": 0.9}),
    "Adagrad": (torch.optim.Adagrad, {}),
    "NAdam": (torch.optim.NAdam, {}),
    "ASGD": (torch.optim.ASGD, {}),
}


class Doubling(torch.optim.AdamW):
    """Doubles what it loads."""

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state["exp_avg"] = state["exp_avg"] * 2


def _params(dtype: torch.dtype) -> list[Parameter]:
    return [Parameter(torch.arange(1, numel + 1, dtype=dtype)) for numel in NUMELS]


def _stepped(optimizer: torch.optim.Optimizer, params: list[Parameter]) -> torch.optim.Optimizer:
    for param in params:
        param.grad = torch.full_like(param, 0.5)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("saved_dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CASES)
def test_a_load_leaves_what_the_class_would(name: str, dtype: torch.dtype, saved_dtype: torch.dtype) -> None:
    cls, options = CASES[name]
    plain, ours = _params(dtype), _params(dtype)
    saved = _stepped(cls(plain, lr=0.25, **options), plain).state_dict()
    for state in saved["state"].values():
        state.update({key: value.to(saved_dtype) for key, value in state.items() if value.dim()})
    reference = cls(plain, lr=0.25, **options)
    reference.load_state_dict(deepcopy(saved))
    optimizer = zero_opt.ShardedOptimizer(ours, cls, lr=0.25, offload=zero_opt.CPUOffload(), **options)
    optimizer.load_state_dict(saved)
    for ours_state, plain_state in zip(map(optimizer.state.get, ours), map(reference.state.get, plain), strict=True):
        assert ours_state.keys() == plain_state.keys()
        for key, value in plain_state.items():
            assert ours_state[key].dtype is value.dtype and torch.equal(ours_state[key], value)
    with torch.no_grad():
        for a, b in zip(ours, plain, strict=True):
            a.copy_(b)
    _stepped(optimizer, ours)
    _stepped(reference, plain)
    assert_bitwise(ours, plain)
    optimizer.close()


def test_a_class_of_ones_own_loads_in_its_own_way() -> None:
    params = _params(torch.float32)
    zero_opt.register_elementwise(Doubling)
    optimizer = zero_opt.ShardedOptimizer(params, Doubling, lr=0.25, offload=zero_opt.CPUOffload())
    _stepped(optimizer, params)
    before = [state["exp_avg"].clone() for state in optimizer.state.values()]
    optimizer.load_state_dict(optimizer.state_dict())
    after = [state["exp_avg"] for state in optimizer.state.values()]
    assert all(torch.equal(new, 2 * old) for new, old in zip(after, before, strict=True))
    optimizer.close()


def _momentum_of(param: Parameter) -> zero_opt.ShardedOptimizer:
    options: dict[str, Any] = {"lr": 0.25, "momentum": 0.5, "dampening": 0.25}
    sharding: dict[str, Any] = {"offload": zero_opt.CPUOffload(), "reduction": zero_opt.AtStep()}
    return zero_opt.ShardedOptimizer([param], torch.optim.SGD, **options, **sharding)


@pytest.mark.parametrize("loads", [False, True])
@pytest.mark.parametrize("made", [False, True])
def test_a_first_step_that_is_interrupted_leaves_the_momentum_that_is_there(
    made: bool, loads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupting:
        def __getattr__(self, name: str) -> Any:
            return self.interrupted if name == "update_step" else getattr(native, name)

        def interrupted(self, *args: Any, **options: Any) -> None:
            if made:
                native.update_step(*args, **options)
            signal.raise_signal(signal.SIGINT)

    def step(param: Parameter, optimizer: zero_opt.ShardedOptimizer, grad: float) -> None:
        param.grad = torch.full_like(param, grad)
        optimizer.step()

    plain, param = (Parameter(torch.ones(64)) for _ in range(2))
    reference, optimizer = map(_momentum_of, (plain, param))
    if made or loads:
        step(plain, reference, 1.0)
    saved, values = deepcopy(reference.state_dict()), plain.detach().clone()
    with monkeypatch.context() as patched:
        patched.setattr(slots, "native", Interrupting())
        with pytest.raises(KeyboardInterrupt):
            step(param, optimizer, 1.0)
    if loads:
        optimizer.load_state_dict(saved)
        param.data.copy_(values)
    step(plain, reference, 4.0)
    step(param, optimizer, 4.0)
    assert_bitwise(param, plain)
    for one in (reference, optimizer):
        one.close()
