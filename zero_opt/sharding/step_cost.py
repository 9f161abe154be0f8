"""What the step of a whole parameter costs, by its shape, so that ranks can be given equal work."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from ..errors import ConfigError, ConfigTypeError, quoted
from ..field_checks import check_number, plain_number
from .wrapped_class import check_wrapped_class, in_short

StepCost = Callable[[torch.Size], float]


def newton_schulz_cost(shape: torch.Size) -> float:
    """Return the multiply-adds of one Newton-Schulz iteration on a matrix.

    With m the smaller and n the larger side: the Gram matrix and its product with the matrix take m*m*n each, the
    square of the Gram matrix m*m*m.
    """
    rows = shape[0] if shape else 1
    small, large = sorted((rows, shape.numel() // rows))
    return float(small * small * (2 * large + small))


_costs: dict[type[torch.optim.Optimizer], StepCost] = {torch.optim.Muon: newton_schulz_cost}


def register_cost(cls: type[torch.optim.Optimizer], fn: StepCost) -> None:
    """Declare what the step of a parameter costs under an optimizer class that steps whole parameters.

    Each parameter goes to one rank, the most expensive first, to the rank with the least to do. Without a cost, a
    parameter costs its number of elements; ``torch.optim.Muon`` costs what its Newton-Schulz iteration multiplies.
    A subclass costs what its base does until it is registered itself. Classes that are cut anywhere (see
    :func:`register_elementwise`) are balanced to the element, whatever is registered.

    Every rank must call it, with a function that returns the same numbers, before it constructs an optimizer of the
    class. Optimizers that exist keep their layout. No checkpoint depends on it: state saved under one cost loads under
    any other.

    Args:
        cls: the optimizer class.
        fn: called with the ``torch.Size`` of every parameter that has elements, when an optimizer is made or a param
            group is added. Returns a positive, finite number, in any unit: only ratios count, within one optimizer.

    Raises:
        ConfigTypeError: not an optimizer class, or not callable.

    ``ShardedOptimizer()`` and ``add_param_group()`` raise, on every rank, ConfigError if the function raises or returns
    something else, and RankMismatch if one rank has no function or its numbers differ.
    """
    given: object = cls
    if not isinstance(given, type) or not issubclass(given, torch.optim.Optimizer):
        raise ConfigTypeError(f"register_cost() takes an optimizer class, got {in_short(given)}")
    check_wrapped_class(cls)
    if not callable(fn):
        raise ConfigTypeError(
            f"register_cost() takes a function of a shape, such as lambda shape: shape.numel(), got {in_short(fn)}"
        )
    _costs[cls] = fn


def step_cost_of(cls: type[torch.optim.Optimizer]) -> StepCost | None:
    """Return the function that is registered for a class, or for the nearest of its bases; ``None`` without one."""
    return next((_costs[base] for base in cls.__mro__ if base in _costs), None)


def cost_of_step(cls: type[torch.optim.Optimizer], shape: torch.Size) -> float:
    """Return what the step of a parameter costs: elements, unless the class has a cost. An empty one costs nothing.

    Raises:
        ConfigError: the registered function raises, or returns something else than a positive, finite number.
    """
    fn = step_cost_of(cls)
    if fn is None or not shape.numel():
        return float(shape.numel())
    told = f"the cost that register_cost() was given for {cls.__name__}, of shape {tuple(shape)},"
    try:
        cost = plain_number(fn(shape))
        check_number(told, cost)
    except Exception as error:  # whatever it is, the other ranks must hear of it
        raise ConfigError(f"{told} has none: {type(error).__name__}: {error}") from error
    if not 0 < cost <= sys.float_info.max:  # refuses NaN too
        raise ConfigError(f"{told} must be positive and finite, got {quoted(cost)}")
    return float(cost)
