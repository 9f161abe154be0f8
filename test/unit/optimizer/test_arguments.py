"""What is checked when an optimizer is made, before any rank talks to another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import zero_opt
from zero_opt import AdamState, CPUAdamW, register_elementwise
from zero_opt.errors import ConfigConflict, ConfigError, ConfigTypeError, UnsupportedOptimizer, UnsupportedParam
from zero_opt.optimizer.arguments import adopt_errors, checked_groups, template_of
from zero_opt.sharding.param_groups import normalized
from zero_opt.sharding.wrapped_class import check_wrapped_class, is_elementwise, needs_closure

ELEMENTWISE = ["Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]


def describe(index: int) -> str:
    return f"parameter {index}"


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_torchs_elementwise_classes_are_known(name: str) -> None:
    assert is_elementwise(getattr(torch.optim, name))


@pytest.mark.parametrize("name", ["Adafactor", "Muon", "LBFGS", "SparseAdam"])
def test_other_classes_are_not_assumed_to_be_elementwise(name: str) -> None:
    assert not is_elementwise(getattr(torch.optim, name))


def test_every_class_of_torch_is_in_one_of_the_lists() -> None:
    """A class that a new torch adds must be looked at, not guessed."""
    classes = {
        name
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    }
    assert classes - {*ELEMENTWISE, "Adafactor", "Muon", "LBFGS", "SparseAdam"} == set()


def test_a_subclass_is_not_assumed_to_be_like_its_base_until_registered() -> None:
    class Custom(torch.optim.SGD):
        pass

    assert not is_elementwise(Custom)
    assert register_elementwise(Custom) is Custom
    assert is_elementwise(Custom)


@pytest.mark.parametrize("bad", [None, "AdamW", torch.nn.Linear, torch.optim.SGD([Parameter(torch.ones(1))])])
def test_what_is_no_optimizer_class_is_quoted(bad: object) -> None:
    with pytest.raises(ConfigTypeError, match=r"optimizer_class must be a torch\.optim\.Optimizer subclass"):
        check_wrapped_class(bad)
    with pytest.raises(ConfigTypeError, match=r"register_elementwise\(\) takes an optimizer class, got "):
        register_elementwise(bad)  # type: ignore[arg-type]


def test_an_instance_that_is_registered_has_its_way_out() -> None:
    with pytest.raises(ConfigTypeError, match=r"write register_elementwise\(SGD\)$"):
        register_elementwise(torch.optim.SGD([Parameter(torch.ones(1))]))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            torch.optim.SGD([Parameter(torch.ones(1))]),
            r"not an instance: ShardedOptimizer\(params, SGD, lr=...\)$",
        ),
        ([Parameter(torch.ones(1000, 1000))], "got a list; parameters come first"),
        (torch.nn.Linear(2, 2), "Linear; parameters come first"),
        (zero_opt.ShardedOptimizer, "ShardedOptimizer shards an optimizer itself; pass the class to shard"),
    ],
)
def test_what_was_passed_for_the_class_has_its_way_out(given: object, message: str) -> None:
    with pytest.raises(ConfigTypeError, match=message) as caught:
        check_wrapped_class(given)
    assert len(str(caught.value)) < 300


def test_a_class_that_needs_a_closure() -> None:
    assert needs_closure(torch.optim.LBFGS)
    assert not needs_closure(torch.optim.AdamW)
    with pytest.raises(UnsupportedOptimizer, match="LBFGS evaluates the loss several times per step"):
        template_of(torch.optim.LBFGS, [Parameter(torch.ones(2))], {})


def test_torchs_complaints_are_ours_and_keep_their_cause() -> None:
    for raised, kind in (
        (TypeError("t"), ConfigTypeError),
        (ValueError("v"), ConfigError),
        (RuntimeError("r"), ConfigConflict),
    ):
        with pytest.raises(kind, match=str(raised)) as caught, adopt_errors():
            raise raised
        assert caught.value.__cause__ is raised
    with pytest.raises(torch.OutOfMemoryError), adopt_errors():
        raise torch.OutOfMemoryError("not about arguments")
    with pytest.raises(UnsupportedParam), adopt_errors():
        raise UnsupportedParam("ours stays as it is")


def test_every_iterator_is_run_once() -> None:
    a, b = Parameter(torch.ones(1)), Parameter(torch.ones(2))
    entries = normalized(group for group in ({"params": (p for p in [a])}, {"params": b, "lr": 0.5}))
    assert [entries[0]["params"], entries[1]["params"], entries[1]["lr"]] == [[a], b, 0.5]
    assert normalized(iter([a, b])) == [a, b]
    assert normalized(iter([("w", a)])) == [("w", a)]


def test_the_callers_groups_are_not_changed() -> None:
    group = {"params": iter([Parameter(torch.ones(1))]), "lr": 0.5}
    (entry,) = normalized([group])
    entry["lr"] = 7
    assert group["lr"] == 0.5


def a_param() -> Parameter:
    return Parameter(torch.ones(2))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (torch.nn.Linear(2, 2), "got torch.nn.modules.linear.Linear; pass its parameters()"),
        (torch.nn.Sequential(torch.nn.Linear(2, 2)), "Sequential; pass its parameters()"),
        (torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2)}), "ModuleDict; pass its parameters()"),
        ([torch.nn.Linear(2, 2)], "group 0, position 0 .*Linear; pass its parameters()"),
        ([{"params": torch.nn.Linear(2, 2)}], "params of group 0 .*Linear; pass its parameters()"),
        (torch.nn.Linear(2, 2).parameters, "with parentheses"),
        (torch.nn.Linear(2, 2).state_dict(), "OrderedDict, which would give its keys; pass model.parameters()"),
        (torch.optim.SGD, "parameters come first"),
        (torch.optim.SGD([Parameter(torch.ones(1))]), "parameters come first"),
    ],
)
def test_what_was_passed_for_the_parameters_has_its_way_out(params: Any, message: str) -> None:
    with pytest.raises(ConfigTypeError, match=message.replace("()", r"\(\)")):
        normalized(params)


def test_a_module_of_parameters_alone_is_an_iterable_of_them() -> None:
    held = torch.nn.ParameterList([Parameter(torch.ones(1)), Parameter(torch.ones(2))])
    assert normalized(held) == list(held)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (None, "params must be an iterable of tensors or dicts, got NoneType"),
        (3, "params must be an iterable of tensors or dicts, got int"),
        ([None], r"group 0, position 0 .* NoneType"),
        ([a_param(), "w"], r"group 0, position 1 .* str"),
        ([("w", a_param()), ("b", 3)], r"group 0, position 1 .* int"),
        ([("w",)], r"group 0, position 0 .* tuple"),
        ([{"params": [a_param()]}, {"params": [a_param(), None]}], r"group 1, position 1 .* NoneType"),
        ([{"params": [a_param()]}, {"params": None}], "params of group 1 must be an iterable of tensors, got NoneType"),
        ([{"params": [a_param()]}, a_param()], "group 1 must be a dict, got torch.FloatTensor"),
        ([{"params": {a_param()}}], "params of group 0 are a set, which has no order"),
        ([{"params": frozenset([a_param()])}], "params of group 0 are a frozenset, which has no order"),
        ({a_param()}, "params are a set, which has no order"),
    ],
)
def test_what_is_no_param_is_named_by_group_and_position(params: Any, message: str) -> None:
    with pytest.raises(ConfigTypeError, match=message):
        normalized(params)


def test_a_group_without_params_is_named() -> None:
    with pytest.raises(ConfigError, match=r"group 1 has no 'params'; it has \['lr'\]"):
        normalized([{"params": [a_param()]}, {"lr": 1}])


def test_a_tensor_or_nothing_is_refused() -> None:
    with pytest.raises(ConfigTypeError, match=r"should be an iterable of Tensors or dicts, but got torch\.FloatTensor"):
        normalized(torch.ones(3))
    with pytest.raises(ConfigError, match="empty parameter list"):
        normalized([])


def test_the_template_knows_all_defaults_and_weighs_nothing() -> None:
    params = [Parameter(torch.ones(1000)), Parameter(torch.ones(3), requires_grad=False)]
    template = template_of(torch.optim.AdamW, [{"params": params[:1]}, {"params": params[1], "lr": 2.0}], {"eps": 0.5})
    plain = torch.optim.AdamW([{"params": params[:1]}, {"params": params[1], "lr": 2.0}], eps=0.5)
    for ours, theirs in zip(template.param_groups, plain.param_groups, strict=True):
        assert {k: v for k, v in ours.items() if k != "params"} == {k: v for k, v in theirs.items() if k != "params"}
        assert all(p.device.type == "meta" for p in ours["params"])
    assert template.defaults == plain.defaults


def test_the_native_class_is_a_template_too() -> None:
    params = [Parameter(torch.ones(64))]
    assert template_of(CPUAdamW, params, {"threads": 1, "state": AdamState("block8")}).defaults["fused"] is True


def test_the_template_takes_names() -> None:
    named = [("w", Parameter(torch.ones(1))), ("b", Parameter(torch.ones(1)))]
    assert template_of(torch.optim.SGD, named, {}).param_groups[0]["param_names"] == ["w", "b"]


@pytest.mark.parametrize(
    ("defaults", "kind"),
    [({"lr": -1}, ValueError), ({"betas": (0.9, 1.5)}, ValueError), ({"learning_rate": 1e-3}, TypeError)],
)
def test_the_template_checks_arguments_as_the_class_does(defaults: dict[str, Any], kind: type[Exception]) -> None:
    with pytest.raises(kind):
        template_of(torch.optim.AdamW, [Parameter(torch.ones(1))], defaults)


@pytest.mark.parametrize("option", ["differentiable", "capturable"])
def test_options_that_cannot_be_sharded(option: str) -> None:
    param = Parameter(torch.ones(1))
    with pytest.raises(UnsupportedOptimizer, match=f"{option}=True cannot be sharded over several ranks"):
        template_of(torch.optim.AdamW, [param], {option: True})
    with pytest.raises(UnsupportedOptimizer, match=option):
        template_of(torch.optim.AdamW, [{"params": [param], option: True}], {})


def _freed() -> Tensor:
    param = torch.ones(3)
    param.untyped_storage().resize_(0)
    return param


@pytest.mark.parametrize(
    ("param", "message"),
    [
        (torch.ones(3).to_sparse(), r"parameter 1 is torch\.sparse_coo"),
        (torch.ones(3, device="meta"), "parameter 1 is on the meta device; materialize"),
        (torch.ones(3).expand(2, 3), "parameter 1 has elements that share memory"),
        (_freed(), "parameter 1 reaches beyond its storage of 0 bytes"),
    ],
    ids=["sparse", "meta", "expanded", "freed"],
)
def test_params_that_cannot_be_sharded_are_named(param: Tensor, message: str) -> None:
    groups = [{"params": [torch.ones(1)]}, {"params": [param]}]
    with pytest.raises(UnsupportedParam, match=message):
        checked_groups(groups, describe)


def test_a_complex_param_would_lose_its_imaginary_part_in_a_real_dtype() -> None:
    groups = [{"params": [torch.ones(1), torch.ones(1, dtype=torch.complex64)]}]
    checked_groups(groups, describe, None)
    with pytest.raises(UnsupportedParam, match=r"parameter 1 is torch\.complex64.*reduce_dtype=torch\.float32"):
        checked_groups(groups, describe, torch.float32)


def test_odd_but_sound_params_pass() -> None:
    odd = [torch.ones(()), torch.ones(0), torch.ones(0).expand(2, 0), torch.ones(4, 6)[:, ::2], torch.ones(2, 3).t()]
    checked_groups([{"params": odd}], describe)


def _as_shared(how: str) -> list[torch.nn.Parameter]:
    buffer = torch.ones(12, 4)
    twin = torch.nn.Parameter(buffer[:3])
    return {
        "twice": [twin, twin],
        "one storage": [twin, torch.nn.Parameter(buffer[2:5])],
        "columns": [torch.nn.Parameter(buffer[:, :2]), torch.nn.Parameter(buffer[:, 1:])],
        "apart": [
            torch.nn.Parameter(buffer[:, :2]),
            torch.nn.Parameter(buffer[:, 2:]),
            torch.nn.Parameter(torch.ones(0)),
        ],
    }[how]


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate:UserWarning")  # torch's
@pytest.mark.parametrize(
    ("how", "told"), [("twice", "are the same tensor"), ("one storage", "share memory"), ("columns", "share memory")]
)
def test_parameters_that_share_elements_are_named_when_made(how: str, told: str) -> None:
    with pytest.raises(zero_opt.UnsupportedParam, match=rf"parameter 0 .* and parameter 1 .* {told}"):
        zero_opt.ShardedOptimizer(_as_shared(how), torch.optim.SGD, offload=zero_opt.CPUOffload())


def test_parameters_that_lie_between_each_other_are_taken() -> None:
    zero_opt.ShardedOptimizer(_as_shared("apart"), torch.optim.SGD, offload=zero_opt.CPUOffload()).close()


@pytest.mark.parametrize(
    "call",
    [
        lambda huge: zero_opt.ShardedOptimizer([torch.nn.Parameter(torch.ones(1))], huge),
        lambda huge: zero_opt.ShardedOptimizer(
            [torch.nn.Parameter(torch.ones(1))], torch.optim.SGD, lr=0.1, reduction=huge
        ),
        lambda huge: zero_opt.ShardedOptimizer(
            [torch.nn.Parameter(torch.ones(1))], torch.optim.SGD, lr=0.1, offload=huge
        ),
        lambda huge: zero_opt.CPUOffload(threads=-huge),
        lambda huge: zero_opt.WorkerOffload(cores=(huge, huge)),
        lambda huge: zero_opt.CPUOffload(selective=huge),
        lambda huge: zero_opt.AdamState(moments=huge),
    ],
)
def test_a_number_that_python_does_not_write_is_quoted(call: Callable[[Any], object]) -> None:
    with pytest.raises((zero_opt.ConfigError, zero_opt.ConfigTypeError), match=r"got .*an object of type "):
        call(10**5000)
