"""CPUSGD and CPUAdagrad are torch's fused classes, CPULion a loop in torch: same bits, same state, same interface."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import zero_opt
from test.support.harness import assert_bitwise
from zero_opt import CPUSGD, AdamState, CPUAdagrad, CPUAdamW, CPULion
from zero_opt.errors import ConfigError, ConfigTypeError, StateDictError, StateDictTypeError, UnsupportedParam

MASTERS = AdamState(master="float32")


class LionLoop(torch.optim.Optimizer):
    """Chen et al. 2023, algorithm 2, as CPULion's docstring has it."""

    def __init__(
        self, params: Any, lr: float = 1e-4, betas: Any = (0.9, 0.99), weight_decay: float = 0.0, **more: Any
    ) -> None:
        options = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": False, "foreach": None}
        super().__init__(params, {**options, "fused": True, **more})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state, (beta1, beta2), lr = self.state[param], group["betas"], group["lr"]
                if not state:
                    state["exp_avg"] = torch.zeros_like(param)
                g = -param.grad if group["maximize"] else param.grad
                param.mul_(1 - lr * group["weight_decay"])
                param.add_((state["exp_avg"] * beta1 + g * (1 - beta1)).sign(), alpha=-lr)
                state["exp_avg"].mul_(beta2).add_(g * (1 - beta2))


CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "SGD": (CPUSGD, torch.optim.SGD, {"lr": 0.01}),
    "momentum": (CPUSGD, torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "dampening": 0.3}),
    "nesterov": (CPUSGD, torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "nesterov": True}),
    "Adagrad": (CPUAdagrad, torch.optim.Adagrad, {"lr": 0.02, "lr_decay": 0.01}),
    "filled": (CPUAdagrad, torch.optim.Adagrad, {"initial_accumulator_value": 0.3, "maximize": True}),
    "Lion": (CPULion, LionLoop, {"lr": 1e-3, "weight_decay": 0.1}),
}
every = pytest.mark.parametrize("case", CASES)


class Twins:
    """Params in two optimizers; multiples of 64, for torch's kernels have another path for a ragged tail."""

    def __init__(self, case: str, sizes: tuple[int, ...] = (64, 4096), **more: Any) -> None:
        ours, theirs, options = CASES[case]
        torch.manual_seed(7)
        self.mine = [Parameter(torch.randn(size)) for size in sizes]
        self.plain = [Parameter(param.detach().clone()) for param in self.mine]
        self.a = ours(self.mine, **options, **more)
        self.b = theirs(self.plain, fused=True, **options)

    def step(self, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        for p, q in zip(self.mine, self.plain):
            p.grad = torch.randn(p.shape, generator=generator) * 10.0 ** (number % 5 - 3)
            q.grad = p.grad.clone()
        self.a.step()
        self.b.step()

    def states(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        for p, q in zip(self.mine, self.plain):
            yield self.a.state.get(p, {}), self.b.state.get(q, {})

    def same(self) -> bool:
        values = all(torch.equal(p, q) for p, q in zip(self.mine, self.plain))
        return values and all(
            list(one) == list(other)
            and all(torch.equal(one[key], other[key]) and one[key].dtype is other[key].dtype for key in one)
            for one, other in self.states()
        )


@every
def test_a_thousand_steps_with_changing_hyperparameters(case: str) -> None:
    twins = Twins(case)
    assert twins.same()
    for number in range(1000):
        for group in (twins.a.param_groups[0], twins.b.param_groups[0]):
            group["lr"] = 1e-3 * (1 + number % 11)
            group["weight_decay"] = 0.01 * (number % 3)
            group["maximize"] = number % 17 == 3
            if group.get("momentum"):
                group["momentum"] = 0.5 + 0.04 * (number % 10)
        twins.step(number)
        if number % 100 == 0:
            assert twins.same()
    assert twins.same()


@every
def test_hyperparameters_count_however_they_are_edited(case: str) -> None:
    """What a step has made of them is not used again after one was replaced, written to in place or loaded."""
    twins, rates = Twins(case), (torch.tensor(0.01), torch.tensor(0.01))
    edits: list[Callable[[Any, Tensor], object]] = [
        lambda optimizer, rate: optimizer.param_groups[0].update(lr=rate),
        lambda optimizer, rate: rate.mul_(0.5),
        lambda optimizer, rate: optimizer.param_groups[0].update(lr=0.003),
        lambda optimizer, rate: optimizer.load_state_dict(
            optimizer.state_dict() | {"param_groups": _slower(optimizer)}
        ),
    ]
    for number, edit in enumerate(edits):
        for repeat in range(2):
            twins.step(2 * number + repeat)
        for optimizer, rate in zip((twins.a, twins.b), rates, strict=True):
            edit(optimizer, rate)
    twins.step(8)
    assert twins.same()


def _slower(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [group | {"lr": 0.001} for group in optimizer.state_dict()["param_groups"]]


@every
def test_state_dicts_are_torchs_before_and_after_a_step(case: str) -> None:
    twins = Twins(case)
    for number in range(2):
        mine, theirs = twins.a.state_dict(), twins.b.state_dict()
        assert mine["param_groups"] == theirs["param_groups"]
        assert {key: list(value) for key, value in mine["state"].items()} == {
            key: list(value) for key, value in theirs["state"].items()
        }
        twins.step(number)
    other = Twins(case)
    other.a.load_state_dict(copy.deepcopy(twins.b.state_dict()))
    other.b.load_state_dict(copy.deepcopy(twins.a.state_dict()))
    other.step(5)
    assert other.same()


@every
@pytest.mark.parametrize("clone", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["copy", "pickle"])
def test_copies_go_on_alike(case: str, clone: Callable[[Any], Any]) -> None:
    twins = Twins(case, (64,))
    twins.step(0)
    other = clone(twins.a)
    (copied,) = other.param_groups[0]["params"]
    copied.grad = twins.mine[0].grad
    other.step()
    twins.a.step()
    assert torch.equal(copied, twins.mine[0])


@every
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fp32_masters_of_halves_through_a_state_dict(case: str, dtype: torch.dtype) -> None:
    ours, theirs, options = CASES[case]
    half = Parameter(torch.randn(640).to(dtype))
    full = Parameter(half.detach().float())
    a, b = ours([half], **options, state=MASTERS), theirs([full], fused=True, **options)
    for number in range(4):
        half.grad = torch.randn(640).to(dtype)
        full.grad = half.grad.float()
        a.step()
        b.step()
        assert torch.equal(a.state[half]["master"], full)
        assert torch.equal(half, full.to(dtype))
        if number == 1:
            saved = a.state_dict()
            a = ours([half], **options, state=MASTERS)
            a.load_state_dict(saved)
    assert {value.dtype for value in a.state[half].values()} == {torch.float32}


def test_momentum_begins_where_it_is_switched_on_and_stays_where_it_is_off() -> None:
    twins = Twins("SGD")
    for number, momentum in enumerate((0, 0.9, 0.9, 0, 0, 0.5)):
        for optimizer in (twins.a, twins.b):
            optimizer.param_groups[0]["momentum"] = momentum
            optimizer.param_groups[0]["dampening"] = 0.4 * (momentum > 0)
        twins.step(number)
        assert twins.same()


def test_params_of_one_group_may_begin_at_different_steps() -> None:
    first, second = Parameter(torch.ones(64)), Parameter(torch.ones(64))
    optimizer = CPUSGD([first, second], lr=0.1, momentum=0.9, dampening=0.5)
    first.grad = torch.ones(64)
    optimizer.step()
    second.grad = torch.ones(64)
    optimizer.step()
    assert torch.equal(optimizer.state[second]["momentum_buffer"], torch.ones(64))
    assert torch.equal(optimizer.state[first]["momentum_buffer"], torch.full((64,), 0.9) + 0.5)


def test_a_momentum_of_none_is_made_by_the_next_step() -> None:
    twins = Twins("momentum")
    saved = twins.b.state_dict()
    saved["state"] = {0: {"momentum_buffer": None}, 1: {"momentum_buffer": None}}
    for optimizer in (twins.a, twins.b):
        optimizer.load_state_dict(copy.deepcopy(saved))
    twins.step(0)
    assert twins.same()


@every
def test_a_step_that_is_refused_changes_nothing(case: str) -> None:
    twins = Twins(case)
    before = {key: list(value) for key, value in twins.a.state_dict()["state"].items()}
    twins.mine[0].grad = torch.ones(64)
    twins.mine[1].grad = torch.ones(4096, dtype=torch.float32).to_sparse()
    with pytest.raises(UnsupportedParam, match="dense"):
        twins.a.step()
    assert {key: list(value) for key, value in twins.a.state_dict()["state"].items()} == before
    assert torch.equal(twins.mine[0], twins.plain[0])
    twins.step(0)
    assert twins.same()


@every
def test_what_is_not_there_is_refused_with_a_reason(case: str) -> None:
    ours, _, options = CASES[case]
    param = Parameter(torch.ones(64))
    for form in (AdamState("block8"), AdamState("bfloat16"), AdamState(master="split")):
        with pytest.raises(ConfigError, match="compact forms are of Adam's state"):
            ours([param], **options, state=form)
    with pytest.raises(UnsupportedParam, match="master"):
        ours([Parameter(torch.ones(64).bfloat16())], **options)
    with pytest.raises(ConfigError, match="fused=False"):
        ours([param], **options, fused=False)
    optimizer = ours([param], **options)
    optimizer.param_groups[0]["lr"] = "fast"
    param.grad = torch.ones(64)
    with pytest.raises(ConfigTypeError, match="lr must be a number"):
        optimizer.step()


@pytest.mark.parametrize("wrong", [{"lr": -1.0}, {"betas": (1.0, 0.9)}, {"weight_decay": -0.1}])
def test_lions_hyperparameters_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="must not be negative"):
        CPULion([Parameter(torch.ones(2))], **wrong)


def test_a_state_of_another_shape_or_sign_is_refused() -> None:
    twins = Twins("Adagrad", (64,))
    for wrong, match in ((torch.ones(63), "shape"), (-torch.ones(64), "below 0")):
        saved = copy.deepcopy(twins.a.state_dict())
        saved["state"][0]["sum"] = wrong
        with pytest.raises(StateDictError, match=match):
            twins.a.load_state_dict(saved)


@pytest.mark.parametrize("wrong", [None, 3, [torch.ones(2)]], ids=str)
@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (CPUAdamW, {}),
        (CPUAdamW, {"state": AdamState("block8", "split")}),
        (CPUAdamW, {"state": MASTERS}),
        (CPUSGD, {"momentum": 0.9}),
        (CPULion, {"state": MASTERS}),
    ],
)
def test_an_entry_that_is_no_dict_is_refused_before_anything_changes(cls: Any, options: Any, wrong: object) -> None:
    dtype = torch.bfloat16 if options.get("state") else torch.float32
    params = [Parameter(torch.linspace(-1, 1, 64).to(dtype)) for _ in range(2)]
    optimizer = cls(params, lr=0.1, **options)

    def step() -> None:
        for param in params:
            param.grad = torch.linspace(1, 2, 64).to(dtype)
        optimizer.step()

    step()
    saved, before = copy.deepcopy(optimizer.state_dict()), [param.detach().clone() for param in params]
    with pytest.raises(
        StateDictTypeError, match=f"the state saved for {cls.__name__} param 1 of group 0 must be a dict"
    ):
        optimizer.load_state_dict({**saved, "state": {**saved["state"], 1: wrong}})
    assert_bitwise(optimizer.state_dict(), saved)
    optimizer.state[params[1]] = wrong
    for call in (step, optimizer.state_dict):
        with pytest.raises(StateDictTypeError, match=f"opt.state of {cls.__name__} param 1 of group 0 must be a dict"):
            call()
    assert all(map(torch.equal, params, before))
    del optimizer.state[params[1]]
    step()
    assert sorted(optimizer.state_dict()["state"]) == [0, 1]


ODD_COUNTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "NaN": lambda state: state.update(step=torch.nan),
    "NaN in place": lambda state: state["step"].fill_(torch.nan),
    "inf": lambda state: state.update(step=torch.tensor(torch.inf)),
    "too large": lambda state: state.update(step=1e39),
    "below 0": lambda state: state.update(step=-7.0),
    "-7 in place": lambda state: state["step"].fill_(-7.0),
    "-1 in place": lambda state: state["step"].fill_(-1.0),
    "one of a dimension": lambda state: state.update(step=torch.tensor([-1.0])),
}


@pytest.mark.parametrize("odd", ODD_COUNTS)
@pytest.mark.parametrize(
    ("cls", "form"),
    [
        (CPUAdamW, AdamState()),
        (CPUAdamW, AdamState("bfloat16")),
        (CPUAdamW, AdamState("block8", "split")),
        (CPUAdagrad, MASTERS),
    ],
    ids=str,
)
def test_a_step_count_that_is_none_is_refused_before_anything_changes(cls: Any, form: AdamState, odd: str) -> None:
    dtype = torch.bfloat16 if form.master else torch.float32
    params = [Parameter(torch.linspace(-1, 1, 64).to(dtype)) for _ in range(3)]
    optimizer = cls([{"params": params[:1]}, {"params": params[1:], "lr": 0.5}], lr=0.1, state=form)

    def step(count: int) -> None:
        for param in params[:count]:
            param.grad = torch.linspace(1, 2, 64).to(dtype)
        optimizer.step()

    step(2)
    saved, before = copy.deepcopy(optimizer.state_dict()), [param.detach().clone() for param in params]
    ODD_COUNTS[odd](optimizer.state[params[1]])
    with pytest.raises(StateDictError, match=r"step of .* param 0 of group 1 must be a number of steps, got"):
        step(3)  # the third has no state yet
    assert_bitwise([param.detach() for param in params], before)
    optimizer.state[params[1]]["step"] = torch.tensor(1.0)
    assert_bitwise(optimizer.state_dict(), saved)
    step(3)
    assert [float(optimizer.state[param]["step"]) for param in params] == [2.0, 2.0, 1.0]


def test_what_else_is_in_the_state_stays_the_users() -> None:
    param = Parameter(torch.ones(64))
    optimizer = CPUAdamW([param])
    optimizer.state["mine"] = 3  # type: ignore[index]
    param.grad = torch.ones(64)
    optimizer.step()
    assert optimizer.state_dict()["state"]["mine"] == 3


def test_any_layout_is_updated_in_place() -> None:
    for case, (ours, _, options) in CASES.items():
        param = Parameter(torch.empty(16, 8).t().normal_())
        flat = Parameter(param.detach().contiguous())
        a, b = ours([param], **options), ours([flat], **options)
        for _ in range(3):
            param.grad = torch.randn(8, 16)
            flat.grad = param.grad.clone()
            a.step()
            b.step()
            assert torch.equal(param, flat), case
        assert param.stride() == (1, 8)


def test_they_are_public() -> None:
    assert {"CPUSGD", "CPUAdagrad", "CPULion"} <= {*zero_opt.__all__}


def test_zero_elements_and_no_gradient() -> None:
    for ours, _, options in CASES.values():
        empty, idle = Parameter(torch.empty(0)), Parameter(torch.ones(3))
        empty.grad = torch.empty(0)
        ours([empty, idle], **options).step()
        assert torch.equal(idle, torch.ones(3))
        tensor: Tensor = empty
        assert tensor.numel() == 0


def test_a_split_master_at_a_tie_loads_into_an_fp32_one() -> None:
    master = torch.tensor([0x3F808000, 0x3F818000, 0x3F821234], dtype=torch.int32).view(torch.float32)
    (saved,), (loaded,) = (Parameter(master.bfloat16()),), (Parameter(torch.zeros(3, dtype=torch.bfloat16)),)
    split, whole = (
        CPUAdamW([p], lr=0.0, weight_decay=0.0, state=AdamState("float32", m))
        for p, m in ((saved, "split"), (loaded, "float32"))
    )
    saved.grad = torch.zeros(3, dtype=torch.bfloat16)
    split.step()
    state = split.state_dict()
    state["state"][0]["master"] = master
    split.load_state_dict(state)
    split.step()  # rounds
    loaded.data.copy_(saved)
    whole.load_state_dict(split.state_dict())
    loaded.grad = torch.zeros(3, dtype=torch.bfloat16)
    whole.step()
    assert torch.equal(whole.state_dict()["state"][0]["master"], split.state_dict()["state"][0]["master"])


@pytest.mark.parametrize("cls", [CPUAdamW, CPUAdagrad, CPULion])
def test_a_frozen_param_may_be_what_the_kernel_does_not_step_until_it_is_thawed(cls: Any) -> None:
    frozen = [Parameter(torch.ones(4).to(dtype), requires_grad=False) for dtype in (torch.int8, torch.float64)]
    if cls is not CPUAdagrad:  # torch's makes state of it, and cannot
        frozen.append(Parameter(torch.ones(4).to_sparse(), requires_grad=False))
    param, twin = Parameter(torch.ones(64)), Parameter(torch.ones(64))
    optimizer, plain = cls([*frozen, param], lr=0.1), cls([twin], lr=0.1)
    optimizer.add_param_group({"params": [Parameter(torch.ones(3, dtype=torch.int64), requires_grad=False)]})
    for _ in range(2):
        param.grad, twin.grad = torch.ones(64), torch.ones(64)
        optimizer.step()
        plain.step()
        optimizer.load_state_dict(optimizer.state_dict())
    assert_bitwise(param.detach(), twin.detach())
    frozen[1].requires_grad_()
    frozen[1].grad = torch.ones_like(frozen[1])
    with pytest.raises(UnsupportedParam, match=r"param 1 of group 0 must be torch.float32, got torch.float64"):
        optimizer.step()
    assert_bitwise(param.detach(), twin.detach())


def _tied(value: float) -> tuple[Parameter, CPUAdamW]:
    """A split master loaded at the tie between the bf16 numbers 1 and 1 + 2^-7; the param is loaded after it."""
    param = Parameter(torch.ones(64, dtype=torch.bfloat16))
    param.grad = torch.zeros_like(param)
    optimizer = CPUAdamW([param], lr=0.0, weight_decay=0.0, state=AdamState(master="split"))
    optimizer.step()
    saved = optimizer.state_dict()
    saved["state"][0]["master"] = torch.full((64,), 1 + 2**-8)
    optimizer.load_state_dict(saved)
    param.data.fill_(value)
    return param, optimizer


@pytest.mark.parametrize("value", [1.0, 1 + 2**-7])
@pytest.mark.parametrize("clone", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
def test_a_copy_settles_a_loaded_tie_by_its_own_param(clone: Callable[[Any], Any], value: float) -> None:
    first = _tied(value)
    second = clone(first)
    for param, optimizer in (first, second):
        param.grad = torch.zeros_like(param)
        optimizer.step()
    masters = [optimizer.state_dict()["state"][0]["master"] for _, optimizer in (first, second)]
    assert torch.equal(*masters)
    assert masters[0].min() >= 1 + 2**-8 - 2**-23


def test_a_state_made_afresh_knows_no_tie_of_the_one_before() -> None:
    _, optimizer = _tied(1.0)
    optimizer.state.clear()
    optimizer.step()
    assert torch.equal(optimizer.state_dict()["state"][0]["master"], torch.ones(64))


@pytest.mark.parametrize("value", [1.0, 1 + 2**-7])
def test_a_copy_of_a_loaded_state_in_its_place_settles_its_tie(value: float) -> None:
    (kept, first), (copied, second) = _tied(value), _tied(value)
    second.state[copied] = copy.deepcopy(second.state[copied])
    for param, optimizer in ((kept, first), (copied, second)):
        param.grad = torch.zeros_like(param)
        optimizer.step()
    masters = [optimizer.state_dict()["state"][0]["master"] for optimizer in (first, second)]
    assert torch.equal(*masters)
