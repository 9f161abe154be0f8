"""Mistakes that one of two ranks makes, and the error that both of them get. ``docs/reliability.md`` lists them all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import zero_opt
from test.support.scenario import BUCKET_MB, values
from test.support.tripwire import Failed, Tripwire
from zero_opt import errors

SHAPES = {"first.weight": (40, 6), "first.bias": (40,), "last.weight": (3, 40), "scale": ()}

Error = type[zero_opt.ZeroOptError]


def make_params() -> list[tuple[str, nn.Parameter]]:
    """The same named parameters every time."""
    return [(name, nn.Parameter(values(1, 0, 0, i, shape).clone())) for i, (name, shape) in enumerate(SHAPES.items())]


class RankUnderTest:
    """A rank with an optimizer over a few parameters, one step after its construction."""

    def __init__(self, rank: int, **options: Any) -> None:
        self.rank = rank
        self.params = [param for _, param in make_params()]
        options = {"reduction": zero_opt.Overlapped(BUCKET_MB), **options}
        self.opt = zero_opt.ShardedOptimizer(self.params, torch.optim.Adam, lr=0.01, **options)
        self.step(0)

    def backward(self, number: int) -> None:
        """Gradients that differ between ranks; under AlreadyReduced, that do not."""
        rank = 0 if isinstance(self.opt._config.reduction, zero_opt.AlreadyReduced) else self.rank
        used = [param for param in self.params if param.requires_grad]
        grads = [values(number, 0, rank, i, tuple(param.shape)) for i, param in enumerate(used)]
        torch.autograd.backward(used, [grad.clone() for grad in grads])

    def step(self, number: int) -> None:
        """A whole step."""
        self.opt.zero_grad()
        self.backward(number)
        self.opt.step()

    def snapshot(self) -> list[Tensor]:
        """Parameters and this rank's part of the state."""
        found = [param.detach().clone() for param in self.params[: len(SHAPES)]]
        for param in self.params[: len(SHAPES)]:
            state = self.opt.state.get(param, {})
            found += [state[key].clone() for key in sorted(state) if isinstance(state[key], Tensor)]
        return found


Act = Callable[[RankUnderTest], object]


@dataclass(frozen=True)
class Fault:
    """One mistake.

    Attributes:
        error: what every rank gets. act: makes the mistake on rank 1, and does the right thing on rank 0.
        options: of the optimizer it is made with. mend: takes back what keeps a next step from being taken; ``None``
            if none can be taken.
    """

    error: Error
    act: Act
    options: Callable[[], dict[str, Any]] = dict
    mend: Act | None = lambda tested: None


Config, ConfigType, Mismatch = errors.ConfigError, errors.ConfigTypeError, errors.RankMismatch

# ---------------------------------------------------------------------------------------------------------------------
# a step


def _frozen(tested: RankUnderTest) -> None:
    tested.opt.zero_grad()
    tested.params[1].requires_grad_(tested.rank == 0)
    tested.backward(1)
    tested.opt.step()


def _hyper(key: str, value: Any) -> Act:
    def act(tested: RankUnderTest) -> None:
        if tested.rank:
            tested.opt.param_groups[0][key] = value
        tested.opt.zero_grad()
        tested.backward(1)
        tested.opt.step()

    return act


def _same_hypers(tested: RankUnderTest) -> None:
    tested.opt.param_groups[0].update(lr=0.01, betas=(0.9, 0.999), weight_decay=0)
    tested.opt.param_groups[0].pop("extra", None)


def _prepared(call: Act, other: Act) -> Act:
    """After a backward on both, rank 1 does one thing, and rank 0 the other."""

    def act(tested: RankUnderTest) -> None:
        tested.opt.zero_grad()
        tested.backward(1)
        (call if tested.rank else other)(tested)

    return act


def _step(tested: RankUnderTest) -> None:
    tested.opt.step()


def _clip(max_norm: Any) -> Act:
    return lambda tested: tested.opt.clip_grad_norm_(max_norm)


def _before_step(change: Act) -> Act:
    """Rank 1 does something between backward and step()."""
    return _prepared(lambda tested: (change(tested), tested.opt.step()), _step)


def _zero_grad_alone(tested: RankUnderTest) -> None:
    tested.opt.zero_grad()
    tested.backward(1)


def _broken_backward(tested: RankUnderTest) -> None:
    tested.opt.zero_grad()
    value = tested.params[2]
    loss = (Tripwire.apply(tested.params[0]) if tested.rank else tested.params[0]).sum() + value.sum()  # type: ignore[no-untyped-call]
    with contextlib.suppress(Failed):
        loss.backward()
    tested.opt.step()


def _only_no_sync(tested: RankUnderTest) -> None:
    tested.opt.zero_grad()
    with tested.opt.no_sync() if tested.rank else contextlib.nullcontext():
        tested.backward(1)
    tested.opt.step()


def _set_grad(tested: RankUnderTest) -> None:
    tested.params[0].grad = torch.ones_like(tested.params[0])


def _nan(tested: RankUnderTest) -> None:
    tested.opt.zero_grad()
    tested.params[2].grad = None
    weight = torch.full_like(tested.params[2], torch.nan if tested.rank else 1.0)
    tested.params[2].backward(weight)
    tested.opt.step()


def _grow(tested: RankUnderTest) -> None:
    tested.params[1].data = torch.zeros(41)


def _edit_after_clip(tested: RankUnderTest) -> None:
    tested.opt.zero_grad()
    tested.backward(1)
    tested.opt.clip_grad_norm_(1.0)
    if tested.rank:
        tested.params[0].grad += 1  # type: ignore[operator]
    tested.opt.step()


def _one_has_none(tested: RankUnderTest) -> None:
    tested.opt.zero_grad()
    tested.backward(1)
    if tested.rank:
        tested.params[0].grad = None
    tested.opt.step()


def _not_reduced(tested: RankUnderTest) -> None:
    fresh = zero_opt.ShardedOptimizer([p for _, p in make_params()], torch.optim.Adam, reduction=ALREADY)
    try:
        for param in fresh.param_groups[0]["params"]:
            param.grad = torch.full_like(param, tested.rank + 1.0)
        fresh.step()
    finally:
        fresh.close()


ALREADY = zero_opt.AlreadyReduced()


def _with(**options: Any) -> Callable[[], dict[str, Any]]:
    return lambda: options


def _add(tested: RankUnderTest) -> None:
    tested.opt.add_param_group({"params": [nn.Parameter(torch.ones(3))]})


def _good_state() -> dict[str, Any]:
    plain = torch.optim.Adam([p for _, p in make_params()], lr=0.01)
    for group in plain.param_groups:
        for param in group["params"]:
            param.grad = torch.ones_like(param)
    plain.step()
    return plain.state_dict()


def _load(tested: RankUnderTest) -> None:
    tested.opt.load_state_dict(_good_state())


def _consolidate(tested: RankUnderTest) -> None:
    tested.opt.consolidate_state_dict()


STEP: dict[str, Fault] = {
    "frozen on one rank": Fault(Mismatch, _frozen, mend=lambda tested: tested.params[1].requires_grad_(True)),
    "lr of a step": Fault(Mismatch, _hyper("lr", 0.5), mend=_same_hypers),
    "betas of a step": Fault(Mismatch, _hyper("betas", (0.5, 0.9)), mend=_same_hypers),
    "weight_decay of a step": Fault(Mismatch, _hyper("weight_decay", 0.1), mend=_same_hypers),
    "hyperparameter key of a step": Fault(Mismatch, _hyper("extra", 1), mend=_same_hypers),
    "zero_grad on one rank": Fault(errors.StepDesync, _before_step(_zero_grad_alone)),
    "backward that raised": Fault(errors.StepDesync, _broken_backward),
    "step after no_sync alone": Fault(errors.GradientsLocal, _only_no_sync),
    "gradient set after it was reduced": Fault(errors.GradientConflict, _before_step(_set_grad)),
    "non-finite gradient": Fault(errors.NonFiniteGradient, _nan, _with(checks=zero_opt.Checks(nonfinite="raise"))),
    "non-finite gradient of AtStep": Fault(
        errors.NonFiniteGradient,
        _nan,
        _with(checks=zero_opt.Checks(nonfinite="raise"), reduction=zero_opt.AtStep(), max_grad_norm=1.0),
    ),
    "parameter of another shape": Fault(errors.UnsupportedParam, _before_step(_grow), mend=None),
    "parameter of another dtype": Fault(
        errors.UnsupportedParam,
        _before_step(lambda tested: setattr(tested.params[1], "data", tested.params[1].data.double())),
        mend=None,
    ),
    "gradient edited after a clip": Fault(
        errors.GradientConflict, _edit_after_clip, _with(reduction=zero_opt.AtStep())
    ),
    "gradient on one rank": Fault(errors.GradientConflict, _one_has_none, _with(reduction=ALREADY)),
    "gradients that nobody has reduced": Fault(errors.GradientConflict, _not_reduced),
    "step and clip": Fault(Mismatch, _prepared(_clip(1.0), _step)),
    "step and consolidate": Fault(Mismatch, _prepared(_consolidate, _step)),
    "step and load": Fault(Mismatch, _prepared(_load, _step)),
    "step and add_param_group": Fault(Mismatch, _prepared(_add, _step)),
    "step and flush": Fault(
        Mismatch, _prepared(lambda tested: tested.opt.flush(), _step), _with(offload=zero_opt.WorkerOffload())
    ),
    "clip to a negative norm": Fault(Config, _prepared(_clip(-1.0), _clip(1.0))),
    "clip to no number": Fault(ConfigType, _prepared(_clip("1"), _clip(1.0))),
    "clip to another norm": Fault(Mismatch, _prepared(_clip(2.0), _clip(1.0))),
    "closed on all ranks": Fault(
        errors.OptimizerClosed, lambda tested: (tested.opt.close(), tested.opt.step()), mend=None
    ),
}

# ---------------------------------------------------------------------------------------------------------------------
# state


def _loads(change: Callable[[dict[str, Any]], object]) -> Act:
    """Rank 1 loads what ``change`` has made of the state dict."""

    def act(tested: RankUnderTest) -> None:
        state = _good_state()
        if tested.rank:
            change(state)
        tested.opt.load_state_dict(state)

    return act


def _entry(key: str, make: Callable[[Any], Any]) -> Act:
    def change(state: dict[str, Any]) -> None:
        state["state"][0][key] = make(state["state"][0][key])

    return _loads(change)


def _saved_hyper(key: str, value: Any) -> Act:
    return _loads(lambda state: state["param_groups"][0].update({key: value}))


def _adds(make: Callable[[RankUnderTest], Any]) -> Act:
    """Rank 1 adds another group than rank 0."""

    def act(tested: RankUnderTest) -> None:
        good = {"params": [nn.Parameter(torch.ones(5))]}
        tested.opt.add_param_group(make(tested) if tested.rank else good)

    return act


def _consolidates(to: Any) -> Act:
    return lambda tested: tested.opt.consolidate_state_dict(to if tested.rank else 0)


def _lost_group(state: dict[str, Any]) -> None:
    state["param_groups"][0]["params"] = state["param_groups"][0]["params"][:2]


Bad = errors.StateDictError

STATE: dict[str, Fault] = {
    "load no dict": Fault(Bad, lambda tested: tested.opt.load_state_dict(["state"] if tested.rank else _good_state())),
    "load without state": Fault(Bad, _loads(lambda state: state.pop("state"))),
    "load without param_groups": Fault(Bad, _loads(lambda state: state.pop("param_groups"))),
    "load state that is a list": Fault(Bad, _loads(lambda state: state.update(state=[1]))),
    "load another number of groups": Fault(Bad, _loads(lambda s: s["param_groups"].append(s["param_groups"][0]))),
    "load another number of parameters": Fault(Bad, _loads(_lost_group)),
    "load a group that is no dict": Fault(Bad, _loads(lambda state: state.update(param_groups=[1]))),
    "load a parameter twice": Fault(Bad, _saved_hyper("params", [0, 1, 2, 2])),
    "load state of an unknown parameter": Fault(Bad, _loads(lambda s: s["state"].update({9: s["state"][0]}))),
    "load state of a parameter that is a list": Fault(Bad, _loads(lambda s: s["state"].update({0: [1]}))),
    "load without a key": Fault(Bad, _loads(lambda s: s["state"][0].pop("exp_avg"))),
    "load another shape": Fault(Bad, _entry("exp_avg", lambda value: value[1:])),
    "load another kind of dtype": Fault(Bad, _entry("exp_avg", lambda value: value.long())),
    "load complex moments": Fault(Bad, _entry("exp_avg_sq", lambda value: value.to(torch.complex64))),
    "load a string for a tensor": Fault(Bad, _entry("exp_avg", lambda value: "momentum")),
    "load a string for a count": Fault(Bad, _entry("step", lambda value: "one")),
    "load None for a tensor": Fault(Bad, _entry("exp_avg", lambda value: None)),
    "load from meta": Fault(Bad, _entry("exp_avg", lambda value: value.to("meta"))),
    "load sparse state": Fault(Bad, _entry("exp_avg", lambda value: value.to_sparse())),
    "load without lr": Fault(Bad, _loads(lambda s: s["param_groups"][0].pop("lr"))),
    "load lr that is no number": Fault(Bad, _saved_hyper("lr", "fast")),
    "load betas out of range": Fault(Bad, _saved_hyper("betas", (0.9, 2.0))),
    "load capturable": Fault(Bad, _saved_hyper("capturable", True)),
    "load other values": Fault(Mismatch, _entry("exp_avg", lambda value: value + 1)),
    "load another lr": Fault(Mismatch, _saved_hyper("lr", 0.5)),
    "load less state": Fault(Mismatch, _loads(lambda state: state["state"].pop(0))),
    "consolidate to no rank": Fault(Config, _consolidates(5)),
    "consolidate to a string": Fault(ConfigType, _consolidates("0")),
    "consolidate to different ranks": Fault(Mismatch, _consolidates(1)),
    "add no dict": Fault(ConfigType, _adds(lambda tested: [torch.ones(3)])),
    "add without params": Fault(Config, _adds(lambda tested: {"lr": 1})),
    "add a set": Fault(ConfigType, _adds(lambda tested: {"params": {nn.Parameter(torch.ones(5))}})),
    "add a known parameter": Fault(Config, _adds(lambda tested: {"params": [tested.params[0]]})),
    "add an overlapping parameter": Fault(
        errors.UnsupportedParam, _adds(lambda tested: {"params": [nn.Parameter(torch.ones(1).expand(5))]})
    ),
    "add another shape": Fault(Mismatch, _adds(lambda tested: {"params": [nn.Parameter(torch.ones(6))]})),
    "add other values": Fault(Mismatch, _adds(lambda tested: {"params": [nn.Parameter(torch.zeros(5))]})),
    "add another lr": Fault(Mismatch, _adds(lambda tested: {"params": [nn.Parameter(torch.ones(5))], "lr": 0.5})),
    "add capturable": Fault(
        errors.UnsupportedOptimizer, _adds(lambda b: {"params": [nn.Parameter(torch.ones(5))], "capturable": True})
    ),
}
