"""What the step of a parameter costs: by class, by shape, and what is no cost."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import Parameter
from torch.utils.flop_counter import FlopCounterMode

import zero_opt
from zero_opt import ConfigError, ConfigTypeError
from zero_opt.sharding.step_cost import cost_of_step, newton_schulz_cost, step_cost_of


def own_class() -> type[torch.optim.Optimizer]:
    class Own(torch.optim.SGD):
        pass

    return Own


@pytest.mark.parametrize("shape", [(512, 2048), (2048, 512), (7, 7), (1, 9), (9, 1)])
def test_muon_costs_what_its_iteration_multiplies(shape: tuple[int, int]) -> None:
    """The products of torch's own code, as torch counts their multiply-adds."""
    matrix = torch.empty(shape, device="meta")
    wide = matrix if shape[0] <= shape[1] else matrix.T
    counter: Any = FlopCounterMode(display=False)
    with counter:
        gram = wide @ wide.T
        torch.addmm(wide, torch.addmm(gram, gram, gram), wide)
    assert cost_of_step(torch.optim.Muon, torch.Size(shape)) == counter.get_total_flops() / 2


def test_other_classes_cost_their_elements() -> None:
    assert cost_of_step(torch.optim.Adafactor, torch.Size((3, 5))) == 15
    assert step_cost_of(torch.optim.Adafactor) is None


def test_any_shape_has_a_cost() -> None:
    assert newton_schulz_cost(torch.Size(())) == 3
    assert newton_schulz_cost(torch.Size((2, 3, 4))) == newton_schulz_cost(torch.Size((2, 12)))
    assert cost_of_step(torch.optim.Muon, torch.Size((0, 4))) == 0


def test_a_subclass_costs_what_its_base_does_until_it_is_registered() -> None:
    class Derived(torch.optim.Muon):
        pass

    shape = torch.Size((4, 8))
    assert cost_of_step(Derived, shape) == cost_of_step(torch.optim.Muon, shape)
    zero_opt.register_cost(Derived, lambda shape: 2 * shape[0])
    assert cost_of_step(Derived, shape) == 8
    assert cost_of_step(torch.optim.Muon, shape) == newton_schulz_cost(shape)


def test_a_cost_may_be_numpys_number() -> None:
    cls = own_class()
    zero_opt.register_cost(cls, np.prod)
    cost = cost_of_step(cls, torch.Size((3, 4)))
    assert cost == 12.0 and type(cost) is float


@pytest.mark.parametrize("cost", [0, -1.0, math.nan, math.inf, 10**400])
def test_a_cost_is_positive_and_finite(cost: float) -> None:
    cls = own_class()
    zero_opt.register_cost(cls, lambda shape: cost)
    with pytest.raises(ConfigError, match=r"register_cost\(\) was given for Own, of shape \(2,\), must be positive"):
        cost_of_step(cls, torch.Size((2,)))


def fails(shape: torch.Size) -> float:
    return shape.numel() / 0


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda shape: "much", "has none: ConfigTypeError: .* must be a number, got 'much'"),
        (lambda shape: True, "must be a number, got True"),
        (fails, r"of shape \(2,\), has none: ZeroDivisionError: division by zero"),
    ],
)
def test_what_a_function_gives_or_raises_is_told(fn: Callable[[torch.Size], Any], message: str) -> None:
    cls = own_class()
    zero_opt.register_cost(cls, fn)
    with pytest.raises(ConfigError, match=message):
        cost_of_step(cls, torch.Size((2,)))


@pytest.mark.parametrize("bad", [None, "Muon", torch.nn.Linear, torch.optim.SGD([Parameter(torch.ones(1))])])
def test_what_is_no_optimizer_class_is_quoted(bad: Any) -> None:
    with pytest.raises(ConfigTypeError, match=r"register_cost\(\) takes an optimizer class, got "):
        zero_opt.register_cost(bad, torch.Size.numel)


def test_what_is_no_function_is_quoted() -> None:
    with pytest.raises(ConfigTypeError, match=r"register_cost\(\) takes a function of a shape, .*, got 3$"):
        zero_opt.register_cost(own_class(), 3)  # type: ignore[arg-type]


def test_an_estimate_plans_as_the_optimizer_does() -> None:
    """By elements the first matrix would have a rank to itself; by cost each long one has."""
    cls = own_class()
    zero_opt.register_cost(cls, lambda shape: 1.0 if shape[0] == 64 else 100.0)
    params = [Parameter(torch.empty(shape, device="meta")) for shape in ((64, 64), (1, 64), (1, 64))]
    held = [
        zero_opt.estimate(params, 2, cls, lr=0.1, momentum=0.9, device="cpu").on_rank(rank).nbytes("state")
        for rank in (0, 1)
    ]
    assert held == [4 * 64 * 65, 4 * 64]
