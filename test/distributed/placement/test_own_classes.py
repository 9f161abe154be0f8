"""Classes of the user's own: what their steps may rely on, and what is refused."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_opt
from test.support.harness import assert_bitwise, run_processes, run_threads

PLACES = {"two ranks": (2, None), "offload": (1, zero_opt.CPUOffload())}
places = pytest.mark.parametrize("place", PLACES)


class Own(torch.optim.Optimizer):
    """Gradient descent."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["lr"] * self.scale(param))
        return loss

    def scale(self, param: Tensor) -> float:
        """How much of the rate a parameter has."""
        return 1.0


class Elementwise(Own):
    """The same, which may be cut anywhere."""


zero_opt.register_elementwise(Elementwise)


def _params() -> list[nn.Parameter]:
    return [nn.Parameter(torch.full(shape, 0.5)) for shape in ((40, 3), (7,))]


def _train(
    pairs: Sequence[tuple[list[nn.Parameter], Any]], edit: Callable[[int, list[nn.Parameter]], None] = lambda *_: None
) -> list[list[Tensor]]:
    """Take steps with each optimizer; return what its parameters are then. ``edit`` comes before each step."""
    for step in range(3):
        for params, optimizer in pairs:
            edit(step, params)
            torch.autograd.backward([(param * param).sum() for param in params])
            optimizer.step()
            optimizer.zero_grad()
    return [[param.detach() for param in params] for params, _ in pairs]


def _scaled(rank: int, world_size: int, offload: Any, base: type[Own]) -> list[list[Tensor]]:
    class Scaled(base):  # type: ignore[misc,valid-type]
        def __init__(self, params: Any, lr: float = 0.1) -> None:
            super().__init__(params, lr)
            self.known = [getattr(param, "lr_scale", 1.0) for group in self.param_groups for param in group["params"]]

        def scale(self, param: Tensor) -> float:
            return float(getattr(param, "lr_scale", 1.0))

    if base is Elementwise:
        zero_opt.register_elementwise(Scaled)

    def edit(step: int, trained: list[nn.Parameter]) -> None:
        if step:
            trained[1].lr_scale = step  # type: ignore[attr-defined]
            trained[0].__dict__.pop("lr_scale", None)

    params, plain = _params(), _params()
    for pair in (params, plain):
        pair[0].lr_scale = 0.25  # type: ignore[attr-defined]
    optimizer = zero_opt.ShardedOptimizer(params, Scaled, offload=offload)
    found = _train([(params, optimizer), (plain, Scaled(plain))], edit)
    optimizer.close()
    return found


@places
@pytest.mark.parametrize("base", [Own, Elementwise])
def test_a_step_sees_the_attributes_that_parameters_have_by_then(base: type[Own], place: str) -> None:
    world_size, offload = PLACES[place]
    for found, expected in run_threads(world_size, _scaled, offload, base):
        assert_bitwise(found, expected)


class Twice(Own):
    """Evaluates the closure before and after its step, as sharpness-aware minimization does."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        return closure()


class Moving(Own):
    """Evaluates the closure once, where it has moved parameters to."""

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    param.add_(1.0)
        return super().step(closure)


class NoClosure(Own):
    """Takes none."""

    def step(self) -> Any:  # type: ignore[override]
        return super().step()


def _with_closure(rank: int, world_size: int, offload: Any, cls: type[Own]) -> str:
    params, calls = _params(), [0]
    optimizer = zero_opt.ShardedOptimizer(params, cls, offload=offload)

    def closure() -> Tensor:
        calls[0] += 1
        optimizer.zero_grad()
        loss = (params[0] * params[0]).sum()
        loss.backward()
        return loss

    try:
        assert isinstance(optimizer.step(closure), Tensor)
        said = ""
    except zero_opt.ZeroOptError as error:
        said = f"{type(error).__name__}: {error}"
    assert calls[0] == 1
    assert optimizer._engine.placement.loss == ()
    optimizer.close()
    return said


@places
def test_a_closure_is_evaluated_once(place: str) -> None:
    world_size, offload = PLACES[place]
    assert run_processes(world_size, _with_closure, offload, Own) == [""] * world_size
    assert run_processes(world_size, _with_closure, offload, NoClosure) == [""] * world_size


@places
@pytest.mark.parametrize("cls", [Twice, Moving])
def test_a_class_that_would_evaluate_it_elsewhere_is_refused(cls: type[Own], place: str) -> None:
    world_size, offload = PLACES[place]
    for said in run_processes(world_size, _with_closure, offload, cls):
        # A rank without a part of the parameters has moved none, and is told.
        assert "UnsupportedOptimizer" in said and f"{cls.__name__} evaluates the closure of step()" in said


class Keeping(Own):
    """Keeps a lock, and its momentum in attributes of parameters; saves itself in another way."""

    def __init__(self, params: Any, lr: float = 0.1, lock: Any = None) -> None:
        super().__init__(params, lr)
        self.lock = lock
        for group in self.param_groups:
            group["names"] = dict.fromkeys(group["params"], "a")
            for param in group["params"]:
                param.momentum = 0.0

    def scale(self, param: Tensor) -> float:
        param.momentum += 1.0  # type: ignore[attr-defined]
        return float(param.momentum)  # type: ignore[attr-defined]

    def state_dict(self) -> Any:
        raise NotImplementedError


class KeepingElementwise(Keeping):
    """The same, which may be cut anywhere."""


zero_opt.register_elementwise(KeepingElementwise)


def _kept(rank: int, world_size: int, offload: Any, cls: type[Keeping]) -> list[list[Tensor]]:
    params, plain = _params(), _params()
    optimizer = zero_opt.ShardedOptimizer(params, cls, lock=threading.Lock(), offload=offload)
    found = _train([(params, optimizer), (plain, cls(plain, lock=None))])
    optimizer.close()
    return found


@places
@pytest.mark.parametrize("cls", [Keeping, KeepingElementwise])
def test_what_a_class_keeps_in_attributes_stays_there(cls: type[Keeping], place: str) -> None:
    world_size, offload = PLACES[place]
    for found, expected in run_threads(world_size, _kept, offload, cls):
        assert_bitwise(found, expected)


class Writing(Own):
    """Begins from half of what parameters are."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    param.mul_(0.5)


class Saving(Own):
    """Has an entry of its own in its state dict."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "clock": 3}


class Zeroing(Own):
    """Has its own way to drop gradients."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)


class Marking(Own):
    """Saves a param group's key that its param groups lack."""

    def state_dict(self) -> dict[str, Any]:
        saved = super().state_dict()
        saved["param_groups"][0]["version"] = 2
        return saved


class Dividing(Own):
    """Gives every parameter a param group of its own."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__([{"params": [param]} for param in params], lr)


class LeavingOut(Own):
    """Leaves out what is frozen."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        groups = [group if isinstance(group, dict) else {"params": [group]} for group in params]
        trained = [{**group, "params": [param for param in group["params"] if param.requires_grad]} for group in groups]
        super().__init__(trained, lr)


def test_a_class_may_leave_out_what_is_frozen() -> None:
    params = _params()
    params[0].requires_grad_(False)
    optimizer = zero_opt.ShardedOptimizer([{"params": params}], LeavingOut, offload=zero_opt.CPUOffload())
    (params[1] * params[1]).sum().backward()
    optimizer.step()
    assert_bitwise(params[0].detach(), _params()[0].detach())
    assert not torch.equal(params[1], _params()[1])
    optimizer.close()


class Reordering(Own):
    """Steps the last parameter first."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__([*params][::-1], lr)


def _refused(rank: int, world_size: int, offload: Any, cls: type[Own]) -> str:
    params = _params()
    with pytest.raises(zero_opt.UnsupportedOptimizer) as caught:
        zero_opt.ShardedOptimizer(params, cls, offload=offload)
    assert_bitwise([param.detach() for param in params], [param.detach() for param in _params()])
    return str(caught.value)


@places
@pytest.mark.parametrize(
    ("cls", "words"),
    [
        (Writing, "Writing writes to its parameters when it is constructed"),
        (Saving, "Saving saves 'clock' in its state"),
        (Marking, "Marking saves 'version' in its state"),
        (Dividing, "Dividing makes other param groups"),
        (Reordering, "Reordering makes other param groups"),
    ],
)
def test_what_would_be_lost_is_refused_on_every_rank(cls: type[Own], words: str, place: str) -> None:
    world_size, offload = PLACES[place]
    assert all(words in said for said in run_threads(world_size, _refused, offload, cls))


class Completing(Own):
    """Has its own ways to complete param groups: late ones, and those of a checkpoint of an older version."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.__setstate__({})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("times", 2.0)

    def add_param_group(self, group: dict[str, Any]) -> None:
        for other in self.param_groups:
            other["lr"] /= 4
        super().add_param_group({"lr": self.defaults["lr"] / (1 + len(self.param_groups)), "times": 3.0, **group})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            group["lr"] /= 2

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] *= group["times"]
        return super().step(closure)


@pytest.mark.parametrize(
    ("cls", "methods"),
    [
        (Zeroing, ["zero_grad"]),
        (Completing, []),
        (Own, []),
        (torch.optim.SGD, []),
        (zero_opt.CPUAdamW, []),
    ],
)
def test_methods_that_are_not_called_are_logged(cls: Any, methods: list[str], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="zero_opt"):
        zero_opt.ShardedOptimizer(_params(), cls, offload=zero_opt.CPUOffload()).close()
    said = [record.message for record in caplog.records if "is not called" in record.message]
    assert [text.partition("()")[0] for text in said] == [f"{cls.__name__}.{method}" for method in methods]


def _completed(rank: int, world_size: int, offload: Any) -> None:
    """What late param groups and those of an old checkpoint become, beside the class alone."""
    whole, sharded = _params(), _params()
    plain = Completing(whole[:1], lr=0.1)
    optimizer = zero_opt.ShardedOptimizer(sharded[:1], Completing, lr=0.1, offload=offload)
    for late, each in ((whole, plain), (sharded, optimizer)):
        each.defaults["lr"] = 0.4
        each.add_param_group({"params": late[1:]})
    assert_bitwise(*_train([(whole, plain), (sharded, optimizer)]))
    saved = plain.state_dict()
    for group in saved["param_groups"]:
        del group["times"]
    plain.load_state_dict(saved)
    optimizer.load_state_dict(saved)
    assert_bitwise(*_train([(whole, plain), (sharded, optimizer)]))
    optimizer.close()


@places
def test_a_class_completes_param_groups_itself(place: str) -> None:
    world_size, offload = PLACES[place]
    run_threads(world_size, _completed, offload)


class Needing(Own):
    """Counts the parameters of each group as it takes a checkpoint, of which it needs the state at one rate."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group["count"] = len(group["params"])

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["seen"] = torch.ones(())
        return super().step(closure)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            assert group["lr"] != 0.3 or all(self.state[param]["seen"] for param in group["params"])


def _load_by_class(rank: int, world_size: int, offload: Any) -> list[Any]:
    optimizer = zero_opt.ShardedOptimizer(_params(), Needing, offload=offload)
    found, whole = [], _params()
    for lr in (0.2, 0.3):
        plain = Needing(whole, lr)
        _train([(whole, plain)])
        optimizer.load_state_dict(plain.state_dict())
        (group,) = optimizer.param_groups
        found.append((group["lr"], group.get("count")))
    optimizer.close()
    return found


@places
def test_a_class_that_cannot_complete_a_checkpoint_is_logged(place: str, caplog: pytest.LogCaptureFixture) -> None:
    world_size, offload = PLACES[place]
    with caplog.at_level(logging.WARNING, logger="zero_opt"):
        for found in run_threads(world_size, _load_by_class, offload):
            assert found == [(0.2, 2), (0.3, None)]
    said = [record.message for record in caplog.records if "Needing cannot complete" in record.message]
    assert len(said) == world_size and "(KeyError: 'seen')" in said[0]


class Scaled(Own):
    """Reads an attribute of its own in its step."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.factor = 1.0

    def scale(self, param: Tensor) -> float:
        return self.factor


def _set_attribute(rank: int, world_size: int, offload: Any) -> str:
    optimizer = zero_opt.ShardedOptimizer(_params(), Scaled, offload=offload)
    optimizer.note = "mine"
    del optimizer.note
    with pytest.raises(zero_opt.ConfigConflict) as caught:
        optimizer.factor = 0.5
    optimizer.close()
    return str(caught.value)


@places
def test_an_attribute_that_no_step_would_read_is_refused(place: str) -> None:
    world_size, offload = PLACES[place]
    said = run_threads(world_size, _set_attribute, offload)
    assert all("factor is an attribute of the wrapped class" in text for text in said)


def test_an_attribute_reaches_the_class_alone() -> None:
    whole, sharded = _params(), _params()
    plain, optimizer = Scaled(whole), zero_opt.ShardedOptimizer(sharded, Scaled)

    def edit(step: int, params: list[nn.Parameter]) -> None:
        each: Any = plain if params is whole else optimizer
        each.factor = 0.25 * step
        each.note = step
        assert (each.factor, each.note) == (0.25 * step, step)
        del each.note
        assert not hasattr(each, "note")

    assert_bitwise(*_train([(whole, plain), (sharded, optimizer)], edit))
    assert not torch.equal(whole[0], _params()[0])


def test_a_class_alone_is_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    """At world size 1, without an offload or masters."""
    for cls in (Writing, Saving, Marking, Dividing, Reordering, Zeroing, Completing, Twice):
        zero_opt.ShardedOptimizer(_params(), cls).close()
    assert not caplog.records
