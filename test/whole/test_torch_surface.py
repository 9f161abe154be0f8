"""At world size 1 a ShardedOptimizer is the wrapped class, for every class and input that torch itself tests."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import zero_opt
from test.support.harness import assert_bitwise
from test.support.torch_variants import (
    INFOS,
    OTHER_DTYPES,
    SCHEDULES,
    Make,
    OptimizerErrorEnum,
    Variant,
    error_inputs,
    plain,
    scheduled,
    variants,
)
from zero_opt.sharding import late_params

STEPS = 4


def sharded(variant: Variant) -> Make:
    """Makes ours."""
    return lambda params, kwargs: zero_opt.ShardedOptimizer(params, variant.cls, **kwargs)


def facts(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> list[Any]:
    """Everything that a program can see of an optimizer, apart from its class."""
    groups = [{**group, "params": len(group["params"])} for group in optimizer.param_groups]
    # Not by asking: a defaultdict would answer.
    live = [dict(optimizer.state)[param] if param in optimizer.state else None for param in params]
    return [params, optimizer.state_dict(), optimizer.defaults, groups, live, len(optimizer.state)]


def outcome(variant: Variant, make: Make) -> list[Any] | Exception:
    """What several steps, and reading everything, end in."""
    params, returned = variant.params(), []
    try:
        optimizer = make(params, variant.arguments())
        for number in range(STEPS):
            returned.append(variant.step(optimizer, params, number))
            optimizer.zero_grad(set_to_none=number % 2 == 0)
    except Exception as error:
        return error
    return [returned, [param.grad for param in params], *facts(optimizer, params)]


@pytest.mark.sampled(8)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of torch's own code
@pytest.mark.parametrize("name", INFOS)
def test_every_variant_is_the_plain_class(name: str) -> None:
    worked = 0
    for variant in variants(name, OTHER_DTYPES):
        expected, found = outcome(variant, plain(variant)), outcome(variant, sharded(variant))
        if isinstance(expected, Exception):
            assert variant.sparse or variant.dtype in OTHER_DTYPES, variant.label
            assert isinstance(found, type(expected)) and str(found) == str(expected), variant.label
        else:
            assert not isinstance(found, Exception), (variant.label, found)
            assert_bitwise(found, expected, variant.label)
            worked += 1
    assert worked >= 4


@pytest.mark.parametrize("name", INFOS)
def test_a_mistake_is_the_plain_classs_error(name: str) -> None:
    def complaint(made: Callable[..., Any], mistake: Any) -> Any:
        given = mistake.optimizer_error_input
        params = [nn.Parameter(torch.ones(2, 3))] if given.params is None else given.params
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                optimizer = made(params, **given.kwargs)
                if mistake.error_on is not OptimizerErrorEnum.CONSTRUCTION_ERROR:
                    optimizer.step()
            except Exception as error:
                return error
        return [str(warning.message) for warning in warned]

    cls = INFOS[name].optim_cls
    for mistake in error_inputs(name):
        expected = complaint(cls, mistake)
        found = complaint(lambda params, **kwargs: zero_opt.ShardedOptimizer(params, cls, **kwargs), mistake)
        if isinstance(expected, Exception):
            assert isinstance(expected, mistake.error_type)
            assert isinstance(found, type(expected)) and str(found) == str(expected)
        else:
            assert expected and found == expected, mistake.optimizer_error_input.desc


def first_variant(name: str) -> Variant:
    """The class with no arguments."""
    return next(iter(variants(name)))


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda pair: pickle.loads(pickle.dumps(pair)),
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("name", [name for name in INFOS if name != "LBFGS"])  # a copy of torch's cannot step
def test_a_copy_with_its_params_goes_on_as_that_of_the_plain_class(name: str, how: str) -> None:
    variant, results = first_variant(name), []
    for make in (plain(variant), sharded(variant)):
        params = variant.params()
        optimizer = make(params, variant.arguments())
        variant.step(optimizer, params, 0)
        copied_params, copied = COPIES[how]([params, optimizer])
        variant.step(copied, copied_params, 1)
        variant.step(optimizer, params, 2)
        assert all(param in copied.state for param in copied_params) or not copied.state
        results.append([facts(copied, copied_params), facts(optimizer, params)])
    assert_bitwise(results[1], results[0])


@pytest.mark.parametrize("name", INFOS)
def test_a_state_dict_moves_between_the_two(name: str) -> None:
    variant, results = first_variant(name), []
    makers = (plain(variant), sharded(variant))
    for make_source in makers:
        for make_target in makers:
            params = variant.params()
            source = make_source(params, variant.arguments())
            variant.step(source, params, 0)
            target = make_target(params, variant.arguments())
            target.load_state_dict(source.state_dict())
            variant.step(target, params, 1)
            results.append(facts(target, params))
    for found in results[1:]:
        assert_bitwise(found, results[0])


@pytest.mark.parametrize("through", ["load_state_dict", "__setstate__"])
@pytest.mark.parametrize("name", INFOS)
def test_what_an_older_version_wrote_is_completed(name: str, through: str) -> None:
    variant, results = first_variant(name), []
    for make in (plain(variant), sharded(variant)):
        params = variant.params()
        optimizer = make(params, variant.arguments())
        variant.step(optimizer, params, 0)
        saved: Any = optimizer.state_dict() if through == "load_state_dict" else optimizer_form(optimizer)
        for group in saved["param_groups"]:
            for flag in INFOS[name].not_og_supported_flags:
                group.pop(flag, None)
        for state in saved["state"].values():
            if isinstance(state.get("step"), Tensor):
                state["step"] = state["step"].item()
        getattr(optimizer, through)(saved)
        variant.step(optimizer, params, 1)
        results.append(facts(optimizer, params))
    assert_bitwise(results[1], results[0])


def optimizer_form(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What ``__setstate__`` of a plain optimizer takes."""
    groups = [dict(group) for group in optimizer.param_groups]
    return {"state": defaultdict(dict, {p: dict(s) for p, s in optimizer.state.items()}), "param_groups": groups}


# ---------------------------------------------------------------------------------------------------------------------
# options that are about how a step is run


@pytest.mark.parametrize("name", [name for name, info in INFOS.items() if info.has_capturable_arg])
def test_capturable_is_refused_on_the_cpu_in_the_same_words(name: str) -> None:
    variant = Variant(name, {"capturable": True, "foreach": False}, "capturable")
    expected, found = outcome(variant, plain(variant)), outcome(variant, sharded(variant))
    assert isinstance(expected, AssertionError) and isinstance(found, AssertionError)
    assert str(found) == str(expected)


@pytest.mark.parametrize("name", [n for n, info in INFOS.items() if "differentiable" in info.supported_impls])
def test_a_differentiable_step_is_differentiated_through(name: str) -> None:
    variant, results = Variant(name, {"differentiable": True}, "differentiable", dtype=torch.float64), []
    for make in (plain(variant), sharded(variant)):
        leaves = [param.detach().clone().requires_grad_() for param in variant.params()]
        grads = [variant.grad(0, index, leaf.shape).requires_grad_() for index, leaf in enumerate(leaves)]
        params = [leaf.clone() for leaf in leaves]
        optimizer = make(params, variant.arguments())
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        optimizer.step()
        loss = sum((param**2).sum() for param in params)
        results.append(torch.autograd.grad(loss, [*leaves, *grads], allow_unused=True))  # type: ignore[arg-type]
        assert results[-1][0] is not None and results[-1][len(leaves)] is not None
    assert_bitwise(results[1], results[0])


def test_a_step_takes_what_the_wrapped_classs_takes() -> None:
    class Noting(torch.optim.SGD):
        def step(self, closure: Any = None, *, note: list[Any] | None = None) -> str:  # type: ignore[override]
            super().step()
            assert note is not None
            note.append(closure)
            return "stepped"

    class Bare(torch.optim.SGD):
        def step(self) -> None:  # type: ignore[override]
            super().step()

    param, note = nn.Parameter(torch.ones(3)), []  # type: ignore[var-annotated]
    param.grad = torch.ones(3)
    assert zero_opt.ShardedOptimizer([param], Noting, lr=0.5).step(0, note=note) == "stepped"  # type: ignore[arg-type]
    assert note == [0]
    zero_opt.ShardedOptimizer([param], Bare, lr=0.25).step()
    assert torch.equal(param, torch.full((3,), 0.25))


def test_methods_of_the_wrapped_class_are_there() -> None:
    class Averaging(torch.optim.SGD):
        mode = "training"

        def eval(self) -> None:
            self.mode = "evaluating"

    optimizer = zero_opt.ShardedOptimizer([nn.Parameter(torch.ones(3))], Averaging)
    optimizer.eval()
    assert optimizer.mode == "evaluating"
    assert not hasattr(optimizer, "train")
    with pytest.raises(AttributeError, match="'ShardedOptimizer' object has no attribute '_private'"):
        _ = optimizer._private


@pytest.mark.parametrize("reset", ["assigned", "cleared", "edited"])
def test_what_is_done_to_state_and_groups_takes_effect(reset: str) -> None:
    variant, results = first_variant("Adam"), []
    for make in (plain(variant), sharded(variant)):
        params = variant.params()
        optimizer = make(params, variant.arguments())
        variant.step(optimizer, params, 0)
        if reset == "assigned":
            optimizer.state = defaultdict(dict)
            optimizer.param_groups = [{**group, "lr": 0.5} for group in optimizer.param_groups]
        elif reset == "cleared":
            optimizer.state.clear()
        else:
            optimizer.state[params[0]]["exp_avg"].mul_(2)
            optimizer.state[params[1]]["exp_avg_sq"] = torch.ones(5)
        optimizer.add_param_group({"params": [added := nn.Parameter(torch.ones(2))]})
        variant.step(optimizer, [*params, added], 1)
        results.append(facts(optimizer, [*params, added]))
    assert_bitwise(results[1], results[0])
    assert len(results[0][1]["param_groups"]) == 2


# ---------------------------------------------------------------------------------------------------------------------
# what programs hang on an optimizer


def hooked(make: Make, called: Counter[str], variant: Variant) -> list[Any]:
    """One step, one save and one load under every kind of hook."""
    params = variant.params()
    optimizer = make(params, {})
    handles = [
        register_optimizer_step_pre_hook(lambda opt, *_: called.update([f"global pre {opt is optimizer}"])),
        register_optimizer_step_post_hook(lambda opt, *_: called.update([f"global post {opt is optimizer}"])),
        optimizer.register_step_pre_hook(lambda opt, *_: called.update([f"pre {opt is optimizer}"])),
        optimizer.register_step_post_hook(lambda opt, *_: called.update([f"post {opt is optimizer}"])),
        optimizer.register_state_dict_pre_hook(lambda opt: called.update([f"before saving {opt is optimizer}"])),
        optimizer.register_state_dict_post_hook(lambda _, found: {**found, "more": 1}),
        optimizer.register_load_state_dict_pre_hook(
            lambda _, found: {"state": found["state"], "param_groups": [{**found["param_groups"][0], "lr": 0.125}]}
        ),
        optimizer.register_load_state_dict_post_hook(lambda opt: called.update([f"loaded {opt is optimizer}"])),
    ]
    try:
        variant.step(optimizer, params, 0)
        optimizer.load_state_dict(optimizer.state_dict())
    finally:
        for handle in handles:
            handle.remove()
    return facts(optimizer, params)


def test_hooks_run_exactly_once() -> None:
    variant, calls = first_variant("AdamW"), (Counter[str](), Counter[str]())
    results = [hooked(make(variant), called, variant) for make, called in zip((plain, sharded), calls, strict=True)]
    assert_bitwise(results[1], results[0])
    assert calls[0] == calls[1]
    assert set(calls[0].values()) == {1} and len(calls[0]) == 6


def test_step_hooks_may_replace_the_arguments() -> None:
    param, seen = nn.Parameter(torch.ones(2)), []
    param.grad = torch.ones(2)
    optimizer = zero_opt.ShardedOptimizer([param], torch.optim.SGD, lr=0.5)
    optimizer.register_step_pre_hook(lambda opt, args, kwargs: ((opt, lambda: 7.0), kwargs))
    optimizer.register_step_post_hook(lambda opt, args, kwargs: seen.append(len(args)))
    assert optimizer.step() == 7.0
    assert seen == [2]


def test_named_parameters_and_generators() -> None:
    model, results = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), []
    for make in (
        lambda groups: torch.optim.AdamW(groups),
        lambda groups: zero_opt.ShardedOptimizer(groups, torch.optim.AdamW),
    ):
        groups = [
            {"params": model[0].named_parameters(), "lr": 0.5},
            {"params": ((name, param) for name, param in model[1].named_parameters())},
        ]
        optimizer = make(groups)
        results.append([optimizer.state_dict(), [group["param_names"] for group in optimizer.param_groups]])
        text = repr(optimizer).splitlines()
        assert text[0] == f"{type(optimizer).__name__} ("
        results[-1].append(text[1:])
        made = make(model.parameters())
        made.load_state_dict(optimizer_of_one_group(optimizer.state_dict()))
        results[-1].append(made.state_dict())
    assert_bitwise(results[1], results[0])


def optimizer_of_one_group(state_dict: Any) -> Any:
    """The same with all parameters in the first group."""
    ids = [number for group in state_dict["param_groups"] for number in group["params"]]
    names = [name for group in state_dict["param_groups"] for name in group["param_names"]]
    return {**state_dict, "param_groups": [{**state_dict["param_groups"][0], "params": ids, "param_names": names}]}


def test_no_scheduler_is_forgotten() -> None:
    assert set(torch.optim.lr_scheduler.__all__) - {"LRScheduler"} == SCHEDULES.keys() - {"SWALR"}


@pytest.mark.parametrize("tensor_lr", [False, True])
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedulers(schedule: str, name: str, tensor_lr: bool) -> None:
    kwargs = {"lr": torch.tensor(0.05) if tensor_lr else 0.05, "foreach": False}
    variant = Variant(name, {**kwargs, "momentum": 0.9} if name == "SGD" else kwargs, schedule)
    results = [
        scheduled(schedule, variant, make(variant), lambda optimizer: optimizer.state_dict())
        for make in (plain, sharded)
    ]
    assert_bitwise(results[1], results[0])


def test_profiler_labels() -> None:
    variant = first_variant("SGD")
    params = variant.params()
    optimizer = zero_opt.ShardedOptimizer(params, torch.optim.SGD)
    with torch.profiler.profile() as profiled:
        variant.step(optimizer, params, 0)
        optimizer.zero_grad()
    labels = [event.name for event in profiled.events() if event.name.startswith("Optimizer.")]
    assert labels == [
        "Optimizer.step#ShardedOptimizer.step",
        "Optimizer.zero_grad#ShardedOptimizer.zero_grad",
    ]


@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler(fused: bool) -> None:
    """Scales are powers of two, so that it is the same whether the scaler or the kernel unscales."""
    results = []
    for make in (
        lambda params: torch.optim.AdamW(params, fused=fused),
        lambda params: zero_opt.ShardedOptimizer(params, torch.optim.AdamW, fused=fused),
    ):
        params = [nn.Parameter(torch.linspace(-1, 1, 8)), nn.Parameter(torch.ones(3, 2))]
        optimizer = make(params)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
        seen = []
        for number in range(6):
            optimizer.zero_grad()
            loss = params[0].square().sum() + params[1].square().sum() * (float("inf") if number == 2 else 1.0)
            scaler.scale(loss).backward()
            if number % 2:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(params, 1.0)
            scaler.step(optimizer)
            scaler.update()
            seen.append([scaler.get_scale(), [param.detach().clone() for param in params]])
        results.append([seen, optimizer.state_dict(), scaler.state_dict()])
    assert_bitwise(results[1], results[0])


def test_averaged_models() -> None:
    results = []
    for make in (
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        lambda params: zero_opt.ShardedOptimizer(params, torch.optim.SGD, lr=0.1, momentum=0.9),
    ):
        model = nn.Linear(3, 2)
        for param in model.parameters():
            nn.init.constant_(param, 0.5)
        optimizer = make(model.parameters())
        averages = [
            torch.optim.swa_utils.AveragedModel(model),
            torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)),
        ]
        scheduler = torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.01, anneal_epochs=3)
        for number in range(5):
            model(torch.full((2, 3), float(number))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            for average in averages:
                average.update_parameters(model)
        results.append([list(model.parameters()), *[list(average.parameters()) for average in averages]])
        results[-1] += [optimizer.state_dict(), scheduler.state_dict()["_last_lr"]]
    assert_bitwise(results[1], results[0])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own code
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_a_compiled_step(name: str) -> None:
    late_params._watch_transforms()  # as where parameters of some optimizer are late
    variant, results = Variant(name, {"foreach": False}, "compiled"), []
    for make in (plain(variant), sharded(variant)):
        torch._dynamo.reset()
        params = variant.params()
        optimizer = make(params, variant.arguments())

        def train(number: int, params: Any = params, optimizer: Any = optimizer) -> None:
            loss = sum((param * (number + 1.0)).square().sum() for param in params)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        compiled = torch.compile(train, backend="eager")
        for number in range(3):
            compiled(number)
        step = torch.compile(optimizer.step, backend="eager")
        variant.set_grads(params, 7)
        step()
        results.append(facts(optimizer, params))
    torch._dynamo.reset()
    assert_bitwise(results[1], results[0])
