"""State dicts: stock torch.optim format, from any world size to any other, and nothing half loaded."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_opt
from test.support.actors import Actor, two_groups
from test.support.harness import assert_bitwise, run_processes, run_threads
from test.support.lion import Lion
from test.support.scenario import AT_STEP, OVERLAPPED, values

# (130, 7) is cut, (3, 5, 7, 2) has its own strides, and there are an empty and a 0-dim parameter.
SHAPES = ((130, 7), (65,), (), (300,), (64,), (3, 5, 7, 2), (1000,))
BEFORE, AFTER = 3, 3

CLASSES: dict[str, tuple[Any, dict[str, Any]]] = {
    "Adam": (torch.optim.Adam, {"amsgrad": True}),
    "SGD": (torch.optim.SGD, {"momentum": 0.9}),
    "Adagrad": (torch.optim.Adagrad, {}),
    "Adafactor": (torch.optim.Adafactor, {}),
    "Lion": (Lion, {}),
}


def _params(saved: list[Tensor] | None = None) -> list[nn.Parameter]:
    tensors = saved or [values(2, 0, 0, index, shape) for index, shape in enumerate(SHAPES)]
    params = [nn.Parameter(tensor.clone()) for tensor in tensors]
    params[5].data = params[5].data.to(memory_format=torch.channels_last)
    return params


def _groups(params: list[nn.Parameter]) -> Any:
    first, second = two_groups(params)
    second.pop("weight_decay")
    return [first, second]


Saved = tuple[list[Tensor], dict[str, Any]]


def _go_on(actor: Actor, numbers: range) -> None:
    for number in numbers:
        actor.optimizer.zero_grad()
        actor.backward(number)
        actor.optimizer.step()


def _run_sharded(rank: int, world_size: int, name: str, saved: Saved | None, to: int) -> Saved | None:
    """Train from the start, or from a saved state; bring the state to one rank."""
    cls, kwargs = CLASSES[name]
    params = _params(saved and saved[0])
    optimizer = zero_opt.ShardedOptimizer(_groups(params), cls, reduction=OVERLAPPED, **kwargs)
    if saved is not None:
        before, pointers = copy.deepcopy(saved[1]), _pointers(saved[1])
        optimizer.load_state_dict(saved[1])
    _go_on(Actor(params, optimizer, [rank]), range(BEFORE) if saved is None else range(BEFORE, BEFORE + AFTER))
    if saved is not None:
        assert_bitwise(saved[1], before)
        assert _pointers(saved[1]) == pointers
    optimizer.consolidate_state_dict(to=to)
    result = None
    if rank == to:
        result = [param.detach().clone() for param in params], optimizer.state_dict()
    elif world_size > 1 and torch.distributed.get_backend() != "gloo":
        with pytest.raises(zero_opt.StateNotConsolidated, match="consolidate_state_dict"):
            optimizer.state_dict()
    optimizer.close()
    return result


def _pointers(state_dict: Any) -> list[int]:
    return [v.data_ptr() for entry in state_dict["state"].values() for v in entry.values() if isinstance(v, Tensor)]


def _run_plain(world_size: int, name: str, saved: Saved | None) -> Saved:
    cls, kwargs = CLASSES[name]
    params = _params(saved and saved[0])
    optimizer = cls(_groups(params), **kwargs)
    if saved is not None:
        optimizer.load_state_dict(copy.deepcopy(saved[1]))  # torch steps in the given tensors
    _go_on(
        Actor(params, optimizer, range(world_size)), range(BEFORE) if saved is None else range(BEFORE, BEFORE + AFTER)
    )
    return [param.detach().clone() for param in params], optimizer.state_dict()


def _the_one(results: list[Saved | None]) -> Saved:
    (result,) = [found for found in results if found is not None]
    return result


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_a_run_goes_on_at_any_world_size_and_in_plain_torch(world_size: int, name: str) -> None:
    plain = _run_plain(world_size, name, None)
    saved = _the_one(run_threads(world_size, _run_sharded, name, None, world_size - 1))
    assert_bitwise(saved, plain)
    for other in (1, 2, 3, 4):
        expected = _run_plain(other, name, plain)
        assert_bitwise(_run_plain(other, name, saved), expected, "in plain torch")
        assert_bitwise(_the_one(run_threads(other, _run_sharded, name, saved, 0)), expected, f"on {other} ranks")


@pytest.mark.parametrize("name", CLASSES)
def test_from_two_processes_to_three(name: str) -> None:
    saved = _the_one(run_processes(2, _run_sharded, name, None, 1))
    assert_bitwise(saved, _run_plain(2, name, None))
    resumed = _the_one(run_processes(3, _run_sharded, name, saved, 2))
    assert_bitwise(resumed, _run_plain(3, name, saved))


def _consolidate_to_each(rank: int, world_size: int) -> list[Any]:
    params = _params()
    optimizer = zero_opt.ShardedOptimizer(_groups(params), torch.optim.Adam, reduction=AT_STEP)
    optimizer.consolidate_state_dict(to=0)
    found: list[Any] = [optimizer.state_dict()["state"] if rank == 0 else {}]
    _go_on(Actor(params, optimizer, [rank]), range(2))
    pulled = optimizer.state_dict()  # the step made what was brought to rank 0 old
    for to in range(world_size):
        optimizer.consolidate_state_dict(to=to)
        found.append(optimizer.state_dict() if rank == to else None)
    assert_bitwise(found[1 + rank], pulled)
    for bad, error in (
        (-1, ValueError),
        (world_size, ValueError),
        (0.0, TypeError),
        (True, TypeError),
        (None, TypeError),
    ):
        with pytest.raises(error, match="to must be a rank of the group"):
            optimizer.consolidate_state_dict(to=bad)  # type: ignore[arg-type]
    if rank == world_size - 1:  # what was brought here is still here, and is a copy
        again = optimizer.state_dict()
        again["state"][0]["exp_avg"].zero_()
        assert_bitwise(optimizer.state_dict(), found[-1])
    optimizer.close()
    return found


def test_every_rank_can_be_the_one() -> None:
    runs = run_processes(3, _consolidate_to_each)
    assert runs[0][0] == {}
    for rank in range(3):
        assert_bitwise(runs[rank][1 + rank], runs[0][1])


# ---------------------------------------------------------------------------------------------------------------------
# what does not fit

Spoil = Callable[[dict[str, Any]], Any]


def _in_state(index: int, key: str, value: Any) -> Spoil:
    def spoil(state_dict: dict[str, Any]) -> None:
        state_dict["state"][index][key] = value

    return spoil


def _without(*path: Any) -> Spoil:
    def spoil(state_dict: Any) -> None:
        for key in path[:-1]:
            state_dict = state_dict[key]
        del state_dict[path[-1]]

    return spoil


def _with(value: Any, *path: Any) -> Spoil:
    def spoil(state_dict: Any) -> None:
        for key in path[:-1]:
            state_dict = state_dict[key]
        state_dict[path[-1]] = value

    return spoil


def _of_another_class(stepped: bool) -> Spoil:
    def spoil(_: Any) -> Any:
        params = _params()
        optimizer = torch.optim.RMSprop(_groups(params))
        if stepped:
            torch.autograd.backward(params, [torch.ones_like(param) for param in params])
            optimizer.step()
        return optimizer.state_dict()

    return spoil


SPOILT: dict[str, tuple[Spoil, str]] = {
    "not a dict": (lambda _: [1, 2], "list"),
    "no state": (_without("state"), "'state'"),
    "no param_groups": (_without("param_groups"), "'param_groups'"),
    "state is None": (_with(None, "state"), "NoneType"),
    "param_groups is None": (_with(None, "param_groups"), "NoneType"),
    "a group is missing": (_without("param_groups", 1), "1 param groups, the optimizer 2"),
    "a group without params": (_without("param_groups", 1, "params"), "param group 1"),
    "a param is missing": (_without("param_groups", 1, "params", -1), "param group 1 has 2 parameters"),
    "state of an unknown param": (_with({}, "state", 99), "99"),
    "another shape": (_in_state(1, "exp_avg", torch.zeros(64)), "'exp_avg' of parameter 1 has shape (64,)"),
    "a shard": (_in_state(0, "exp_avg_sq", torch.zeros(455)), "'exp_avg_sq' of parameter 0 has shape (455,)"),
    "flat": (_in_state(0, "exp_avg", torch.zeros(910)), "'exp_avg' of parameter 0"),
    "no dict per param": (_with(torch.zeros(3), "state", 4), "state of parameter 4"),
    "a value is missing": (_without("state", 3, "exp_avg_sq"), "'exp_avg_sq' of parameter 3"),
    "all of one kind are missing": (
        lambda sd: [entry.pop("step") for entry in sd["state"].values()] and None,
        "'step' of parameter 0",
    ),
    "one element": (_in_state(1, "exp_avg", torch.zeros(1)), "'exp_avg' of parameter 1 has shape (1,)"),
    "0-dim": (_in_state(0, "exp_avg_sq", torch.zeros(())), "'exp_avg_sq' of parameter 0 has shape ()"),
    "a list": (_in_state(1, "exp_avg", [0.0] * 65), "'exp_avg' of parameter 1 is a list"),
    "a string": (_in_state(1, "exp_avg", "zeros"), "'exp_avg' of parameter 1 is a str"),
    "None": (_in_state(1, "exp_avg", None), "'exp_avg' of parameter 1 is a NoneType"),
    "a number": (
        _with({"step": 1, "exp_avg": 0.5, "exp_avg_sq": torch.tensor(0.5)}, "state", 2),
        "'exp_avg' of parameter 2 is a float",
    ),
    "a step with elements": (_in_state(0, "step", torch.zeros(3)), "'step' of parameter 0 has shape (3,)"),
    "a step as text": (_in_state(0, "step", "3"), "'step' of parameter 0 is a str"),
    "sparse": (_in_state(1, "exp_avg", torch.zeros(65).to_sparse()), "'exp_avg' of parameter 1 is torch.sparse_coo"),
    "meta": (_in_state(1, "exp_avg", torch.zeros(65, device="meta")), "'exp_avg' of parameter 1 is on the meta device"),
    "lr as text": (_with("fast", "param_groups", 1, "lr"), "'lr': 'fast'"),
    "betas too short": (_with((0.9,), "param_groups", 0, "betas"), "'betas': (0.9,)"),
    "a negative eps": (_with(-1.0, "param_groups", 0, "eps"), "'eps': -1.0"),
    "options that exclude each other": (
        lambda sd: sd["param_groups"][1].update(foreach=True, fused=True),
        "param group 1",
    ),
    "no lr": (_without("param_groups", 1, "lr"), "param group 1 of the state dict has no 'lr'"),
    "capturable on the CPU": (_with(True, "param_groups", 1, "capturable"), "capturable"),
    "of another class": (_of_another_class(stepped=True), "'betas'"),
    "of another class, before its first step": (_of_another_class(stepped=False), "'betas'"),
}


def _load_spoilt(rank: int, world_size: int, who: tuple[int, ...]) -> dict[str, str]:
    """Load what is wrong on some ranks; every rank must say so, and go on as if nothing had happened."""
    params = _params()
    optimizer = zero_opt.ShardedOptimizer(_groups(params), torch.optim.Adam, reduction=OVERLAPPED)
    actor, messages = Actor(params, optimizer, [rank]), {}
    good = _run_plain(1, "Adam", None)[1]
    for group in good["param_groups"]:
        group["amsgrad"] = False
    for entry in good["state"].values():
        del entry["max_exp_avg_sq"]
    _go_on(actor, range(2))
    for name, (spoil, _) in SPOILT.items():
        state_dict = copy.deepcopy(good)
        if rank in who:
            state_dict = spoil(state_dict) or state_dict
        with pytest.raises(zero_opt.StateDictError) as caught:
            optimizer.load_state_dict(state_dict)
        messages[name] = str(caught.value)
    _go_on(actor, range(2, 4))
    expected = _params()
    plain = torch.optim.Adam(_groups(expected))
    _go_on(Actor(expected, plain, range(world_size)), range(4))
    assert_bitwise(params, expected)
    optimizer.close()
    return messages


@pytest.mark.parametrize(("world_size", "who"), [(1, (0,)), (2, (0, 1)), (3, (1,))])
def test_a_state_dict_that_does_not_fit_is_refused_on_every_rank(world_size: int, who: tuple[int, ...]) -> None:
    for messages in run_threads(world_size, _load_spoilt, who):
        for name, (_, what) in SPOILT.items():
            assert what in messages[name], name


def _load_unshardable(rank: int, world_size: int) -> list[str]:
    messages = []
    optimizer = zero_opt.ShardedOptimizer(_params(), torch.optim.Adam)
    for option in ("capturable", "differentiable"):
        saved = torch.optim.Adam(_params()).state_dict()
        saved["param_groups"][0][option] = True
        with pytest.raises(zero_opt.StateDictError) as caught:
            optimizer.load_state_dict(saved)
        messages.append(str(caught.value))
        assert not optimizer.param_groups[0][option]
    optimizer.close()
    return messages


def test_options_that_cannot_be_sharded_are_not_loaded() -> None:
    for messages in run_threads(2, _load_unshardable):
        assert "capturable" in messages[0] and "differentiable=True cannot be sharded" in messages[1]


# ---------------------------------------------------------------------------------------------------------------------
# what else a state dict holds


def _steps_as_numbers(state_dict: Any) -> None:
    for entry in state_dict["state"].values():
        entry["step"] = int(entry["step"])


def _as_written_long_ago(state_dict: Any) -> None:
    _steps_as_numbers(state_dict)
    for group in state_dict["param_groups"]:
        for key in ("foreach", "maximize", "capturable", "differentiable", "fused", "decoupled_weight_decay"):
            del group[key]


LOADED: dict[str, tuple[Any, Spoil]] = {
    "steps as numbers": (torch.optim.Adam, _steps_as_numbers),
    "as written long ago": (torch.optim.Adam, _as_written_long_ago),
    "of Adam into AdamW": (torch.optim.AdamW, lambda _: None),
    "with a key that nobody reads": (torch.optim.Adam, _in_state(0, "note", 7)),
    "with weight decay": (torch.optim.AdamW, lambda sd: sd["param_groups"][0].update(weight_decay=0.5)),
}


def _load_changed(rank: int, world_size: int, name: str) -> None:
    """What torch takes is taken, and does the same."""
    cls, change = LOADED[name]
    saved = _run_plain(1, "Adam", None)[1]
    change(saved)
    results = []
    for make in (zero_opt.ShardedOptimizer, lambda groups, cls: cls(groups)):
        params = _params()
        optimizer: Any = make(_groups(params), cls)
        optimizer.load_state_dict(copy.deepcopy(saved))
        for step in range(2):
            torch.autograd.backward(params, [values(step, 1, 0, i, s) for i, s in enumerate(SHAPES)])
            optimizer.step()
            optimizer.zero_grad()
        if isinstance(optimizer, zero_opt.ShardedOptimizer):
            optimizer.consolidate_state_dict(to=rank if world_size == 1 else 0)
        results.append([params, optimizer.state_dict() if rank == 0 else None])
    assert_bitwise(results[0], results[1])


@pytest.mark.parametrize("name", LOADED)
@pytest.mark.parametrize("world_size", [1, 2])
def test_what_torch_takes_is_taken_and_does_the_same(world_size: int, name: str) -> None:
    run_threads(world_size, _load_changed, name)


def _tensor_lr(rank: int, world_size: int) -> None:
    """A scheduler that writes a tensor lr in place must not reach into the caller's dict."""
    saved = torch.optim.Adam([{"params": _params()[:2], "lr": torch.tensor(0.5)}], foreach=False).state_dict()
    params = _params()[:2]
    optimizer = zero_opt.ShardedOptimizer(
        [{"params": params, "lr": torch.tensor(0.1)}], torch.optim.Adam, foreach=False
    )
    optimizer.load_state_dict(saved)
    assert float(optimizer.param_groups[0]["lr"]) == 0.5
    optimizer.param_groups[0]["lr"].fill_(0.25)
    assert float(saved["param_groups"][0]["lr"]) == 0.5
    plain_params = _params()[:2]
    plain = torch.optim.Adam(plain_params, lr=torch.tensor(0.25), foreach=False)
    for opt, ours in ((optimizer, params), (plain, plain_params)):
        torch.autograd.backward(ours, [torch.ones_like(param) for param in ours])
        opt.step()
    assert_bitwise(params, plain_params)
    optimizer.close()


@pytest.mark.parametrize("world_size", [1, 2])
def test_tensors_in_param_groups_are_copied(world_size: int) -> None:
    run_threads(world_size, _tensor_lr)


def _convert(rank: int, world_size: int) -> list[Tensor]:
    """State saved in fp64 is cast to the parameters' dtype, as torch does."""
    wide = [nn.Parameter(param.detach().double()) for param in _params()]
    source = torch.optim.Adam(wide)
    _go_on_wide(source, wide)
    params = _params()
    optimizer = zero_opt.ShardedOptimizer(params, torch.optim.Adam)
    optimizer.load_state_dict(source.state_dict())
    plain_params = _params()
    plain = torch.optim.Adam(plain_params)
    plain.load_state_dict(source.state_dict())
    for opt, ours in ((optimizer, params), (plain, plain_params)):
        torch.autograd.backward(ours, [torch.ones_like(param) for param in ours])
        opt.step()
    optimizer.consolidate_state_dict()
    if rank == 0:
        assert_bitwise(optimizer.state_dict(), plain.state_dict())
    assert_bitwise(params, plain_params)
    optimizer.close()
    return params  # type: ignore[return-value]


def _go_on_wide(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> None:
    torch.autograd.backward(params, [torch.full_like(param, 0.3) for param in params])
    optimizer.step()
    optimizer.zero_grad()


def test_state_of_another_dtype_is_cast_as_torch_casts_it() -> None:
    run_threads(2, _convert)


def _hooks(rank: int, world_size: int) -> list[str]:
    params, called = _params(), []
    optimizer = zero_opt.ShardedOptimizer(params, torch.optim.Adam)
    optimizer.register_state_dict_pre_hook(lambda _: called.append("before saving"))
    optimizer.register_state_dict_post_hook(lambda _, sd: {**sd, "mine": 1})
    optimizer.register_load_state_dict_pre_hook(lambda _, sd: {k: v for k, v in sd.items() if k != "mine"})
    optimizer.register_load_state_dict_post_hook(lambda _: called.append("after loading"))
    optimizer.register_step_pre_hook(lambda *_: called.append("before step"))
    optimizer.register_step_post_hook(lambda *_: called.append("after step"))
    torch.autograd.backward(params, [torch.ones_like(param) for param in params])
    optimizer.step()
    for to in range(world_size):
        optimizer.consolidate_state_dict(to=to)
    saved = optimizer.state_dict() if rank == world_size - 1 else None
    if saved is not None:
        assert saved["mine"] == 1
    optimizer.load_state_dict({**torch.optim.Adam(_params()).state_dict(), "mine": 1})
    optimizer.close()
    return called


@pytest.mark.parametrize("world_size", [1, 2])
def test_hooks_run_once_as_in_torch(world_size: int) -> None:
    called = run_threads(world_size, _hooks)[-1]
    assert called == ["before step", "after step", "before saving", "after loading"]


def _reload(rank: int, world_size: int, cls: Any, options: dict[str, Any]) -> bool:
    """A state dict with masters goes back to where it is from, on ranks with and without a part of them."""
    layer = nn.Linear(16, 6).bfloat16()
    optimizer = zero_opt.ShardedOptimizer(layer.parameters(), cls, **options)
    for step in range(2):
        layer(torch.full((2, 16), rank + step + 1.0).bfloat16()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    now = optimizer.state_dict()["state"]
    assert all(
        torch.equal(now[index][key], value) for index, state in saved["state"].items() for key, value in state.items()
    )
    optimizer.close()
    return True


@pytest.mark.parametrize("cls", [zero_opt.CPUAdam, zero_opt.CPUAdamW])
@pytest.mark.parametrize("options", [
    {"offload": zero_opt.CPUOffload()},
    {"offload": zero_opt.WorkerOffload()},
    {"precision": zero_opt.MixedPrecision(master_dtype=torch.float32)},
], ids=["host", "worker", "device"])  # fmt: skip
def test_masters_load_where_they_are_from(cls: Any, options: dict[str, Any]) -> None:
    assert run_processes(3, _reload, cls, options) == [True] * 3


def _thaw(rank: int, world_size: int, reduction: Any, offload: Any) -> None:
    """Trained, then loaded with one parameter frozen, which is thawed later."""
    layers = [nn.Linear(12, 12, bias=False) for _ in range(2)]
    plain_layers = copy.deepcopy(layers)
    params, plain_params = ([layer.weight for layer in found] for found in (layers, plain_layers))
    options = {"lr": 0.1, "fused": True}
    saved = None
    for frozen in (False, True):
        params[0].requires_grad_(not frozen)
        plain_params[0].requires_grad_(not frozen)
        optimizer = zero_opt.ShardedOptimizer(
            params, torch.optim.AdamW, reduction=reduction, offload=offload, **options
        )
        plain = torch.optim.AdamW(plain_params, **options)
        if saved is not None:
            optimizer.load_state_dict(saved)
            plain.load_state_dict(copy.deepcopy(saved))
        assert params[0].requires_grad is not frozen
        for step in range(4):
            if frozen and step == 2:
                params[0].requires_grad_()
                plain_params[0].requires_grad_()
            for first, second, stepped in ((*layers, optimizer), (*plain_layers, plain)):
                second(first(torch.full((2, 12), step + 1.0))).square().mean().backward()
                stepped.step()
                stepped.zero_grad()
            assert_bitwise([param.detach() for param in params], [param.detach() for param in plain_params])
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer.close()


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("reduction", [OVERLAPPED, AT_STEP], ids=["overlapped", "at step"])
@pytest.mark.parametrize("offload", [None, zero_opt.CPUOffload()], ids=["device", "host"])
def test_state_of_a_frozen_parameter_loads(world_size: int, reduction: Any, offload: Any) -> None:
    run_processes(world_size, _thaw, reduction, offload)
