"""Parameters that are replaced in ``param_groups``: followed before the first step, refused on every rank after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

import zero_opt
from test.support.harness import assert_bitwise, run_processes
from test.support.scenario import AT_STEP, OVERLAPPED

STEPS = 3
ALREADY = zero_opt.AlreadyReduced()
SHAPES = ((130, 7), (65,), (1,), (65,), (300,), ())
OFFLOADS = {"host": zero_opt.CPUOffload(), "worker": zero_opt.WorkerOffload()}

Groups = list[dict[str, Any]]


def _params(seed: int = 7) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def _groups(params: list[nn.Parameter]) -> Groups:
    return [{"params": params[:4], "lr": 0.02}, {"params": params[4:], "lr": 0.01, "weight_decay": 0.1}]


def _made(params: list[nn.Parameter], cls: Any = torch.optim.AdamW, **options: Any) -> zero_opt.ShardedOptimizer:
    fused = {"fused": True} if cls is torch.optim.AdamW else {}
    return zero_opt.ShardedOptimizer(_groups(params), cls, **fused, **options)


def _assign(opt: torch.optim.Optimizer, params: list[nn.Parameter]) -> None:
    opt.param_groups[0]["params"], opt.param_groups[1]["params"] = params[:4], params[4:]


def _backward(params: list[nn.Parameter], step: int, rank: int) -> None:
    generator = torch.Generator().manual_seed(100 * step + rank)
    grads = [torch.randn(param.shape, generator=generator) for param in params]
    torch.autograd.backward(params, grads)


def _step(opt: torch.optim.Optimizer, params: list[nn.Parameter], step: int, rank: int) -> None:
    opt.zero_grad()
    _backward(params, step, rank)
    opt.step()


def _trained(opt: torch.optim.Optimizer, params: list[nn.Parameter], rank: int, first: int = 0) -> list[Tensor]:
    for step in range(first, STEPS):
        _step(opt, params, step, rank)
    return [param.detach().clone() for param in params]


# ---------------------------------------------------------------------------------------------------------------------
# followed


def _follows(rank: int, world_size: int, options: dict[str, Any], before: str) -> None:
    data_rank = 0 if options.get("reduction") == ALREADY else rank
    wanted_params = _params(8)
    plain = _made(wanted_params, **options)
    wanted = _trained(plain, wanted_params, data_rank)
    plain.consolidate_state_dict(to=0)
    wanted_state = plain.state_dict() if rank == 0 else None
    plain.close()

    old, new = _params(7), _params(8)
    opt = _made(old, **options)
    groups = opt.param_groups
    for group in groups:
        for position in range(len(group["params"])):  # in place, and not at once, as accelerate does
            group["params"][position] = torch.empty(1)
    if before == "backward":  # which is void
        _backward(old, 9, rank)
        for param in old:
            param.grad = None
    _assign(opt, new)
    assert opt.state_dict()["state"] == {}
    if before == "load":
        opt.load_state_dict(opt.state_dict())
    if before == "clip":
        _backward(new, 0, data_rank)
        opt.clip_grad_norm_(1e9)
        opt.zero_grad()
    if before == "consolidate":
        opt.consolidate_state_dict(to=0)
    if before == "sharded_state_dict":
        zero_opt.sharded_state_dict(opt)
    if before == "add_param_group":
        more = nn.Parameter(torch.zeros(3))
        opt.add_param_group({"params": [more]})
        more.requires_grad_(False)
    found = _trained(opt, new, data_rank)
    assert opt.param_groups is groups
    assert_bitwise(found, wanted)
    assert_bitwise([param.detach() for param in old], [param.detach() for param in _params(7)], "those before")
    assert before == "add_param_group" or {id(param) for param in opt.state} == {id(param) for param in new}
    opt.consolidate_state_dict(to=0)
    if rank == 0 and before != "add_param_group":
        assert_bitwise(opt.state_dict(), wanted_state, "state")
    opt.close()


@pytest.mark.parametrize("reduction", [OVERLAPPED, AT_STEP, ALREADY], ids=lambda policy: type(policy).__name__)
def test_parameters_replaced_before_the_first_step_are_trained(reduction: Any) -> None:
    run_processes(2, _follows, {"reduction": reduction}, "")


@pytest.mark.parametrize("before", ["backward", "load", "clip", "consolidate", "sharded_state_dict", "add_param_group"])
def test_they_are_followed_by_whatever_comes_first(before: str) -> None:
    options = {"reduction": AT_STEP if before == "clip" else OVERLAPPED}
    run_processes(2, _follows, options, before)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("offload", ["host", "worker"])
def test_offloads_follow(world_size: int, offload: str) -> None:
    run_processes(world_size, _follows, {"offload": OFFLOADS[offload]}, "")


def _parts_replaced(rank: int, world_size: int) -> None:
    """Only some parameters; a class that has state from the start; the order of two that are alike."""
    wanted_params = _params(7)
    wanted_params[1], wanted_params[3] = wanted_params[3], nn.Parameter(torch.ones(65))
    plain = _made(wanted_params, torch.optim.Adagrad, reduction=ALREADY)
    wanted = _trained(plain, wanted_params, 0)
    old = _params(7)
    new = [*old]
    new[1], new[3] = old[3], nn.Parameter(torch.ones(65))
    opt = _made(old, torch.optim.Adagrad, reduction=ALREADY)
    _assign(opt, new)
    assert_bitwise(_trained(opt, new, 0), wanted)
    assert set(map(id, opt.state)) == set(map(id, new))
    opt.close()
    plain.close()


def test_some_alone() -> None:
    run_processes(2, _parts_replaced)


def _without_inputs(rank: int, world_size: int) -> None:
    """Rank 1 has no inputs at all, so the first step that it takes part in is the one that plans anew."""
    found = []
    for replaced in (False, True):
        params, new = _params(7), _params(8)
        opt = _made(params if replaced else new, reduction=OVERLAPPED)
        if replaced:
            _assign(opt, new)
        with Join([opt]):
            for step in range(STEPS if rank == 0 else 0):
                _step(opt, new, step, rank)
        found.append([param.detach().clone() for param in new])
        opt.close()
    assert_bitwise(found[1], found[0])
    assert not torch.equal(found[0][0], _params(8)[0])


def test_ranks_without_inputs_follow() -> None:
    run_processes(2, _without_inputs)


def test_one_rank_without_an_offload_is_as_torch() -> None:
    """The wrapped class's own groups: it steps what is in them at any time."""
    for step in (0, 1):
        old, new, wanted = _params(7), _params(8), _params(8)
        opt, plain = _made(old), torch.optim.AdamW(_groups(_params(7)), fused=True)
        if step:
            _step(opt, old, 0, 0)
        _assign(opt, new)
        _assign(plain, wanted)
        assert_bitwise(_trained(opt, new, 0), _trained(plain, wanted, 0))


# ---------------------------------------------------------------------------------------------------------------------
# refused, on every rank


def _drop(groups: Groups) -> None:
    del groups[0]["params"][1]


def _append(groups: Groups) -> None:
    groups[0]["params"].append(nn.Parameter(torch.zeros(5)))


def _empty(groups: Groups) -> None:
    groups[0]["params"].clear()


def _double(groups: Groups) -> None:
    groups[1]["params"].append(groups[1]["params"][0])


def _reorder(groups: Groups) -> None:
    groups[0]["params"].reverse()


def _swap_alike(groups: Groups) -> None:
    params = groups[0]["params"]
    params[1], params[3] = params[3], params[1]


def _swap_groups(groups: Groups) -> None:
    groups.reverse()


def _move_boundary(groups: Groups) -> None:
    groups[1]["params"].insert(0, groups[0]["params"].pop())


def _drop_group(groups: Groups) -> None:
    del groups[1]


def _append_group(groups: Groups) -> None:
    groups.append({**groups[0], "params": [nn.Parameter(torch.zeros(5))]})


def _clone_all(groups: Groups) -> None:
    groups[0]["params"] = [nn.Parameter(param.detach().clone()) for param in groups[0]["params"]]


def _clone_one(groups: Groups) -> None:
    """A single element, of equal value: it is another parameter all the same."""
    groups[0]["params"][2] = nn.Parameter(groups[0]["params"][2].detach().clone())


def _reshape(groups: Groups) -> None:
    groups[0]["params"][0] = nn.Parameter(torch.zeros(7, 130))


def _iterator(groups: Groups) -> None:
    groups[0]["params"] = iter(groups[0]["params"])


def _number(groups: Groups) -> None:
    groups[0]["params"][0] = 3


EDITS: dict[str, Callable[[Groups], None]] = {
    edit.__name__.strip("_"): edit
    for edit in (
        _drop,
        _empty,
        _double,
        _append,
        _reorder,
        _swap_alike,
        _swap_groups,
        _move_boundary,
        _drop_group,
        _append_group,
        _clone_all,
        _clone_one,
        _reshape,
        _iterator,
        _number,
    )
}
# What is the same as before another way round, or alike.
LATE = {"swap_alike", "clone_all", "clone_one"}
# What has the planned parameters alone.
REARRANGED = {"drop", "reorder", "swap_alike", "swap_groups", "move_boundary", "drop_group", "empty", "double"}
PUT_BACK = r"put those back, in their order; or, on every rank, construct a new optimizer .* and load a state dict"
SAYS = r"construct the optimizer after prepare\(\), fully_shard\(\) and whatever else replaces parameters"


def _refused(rank: int, world_size: int, editors: tuple[int, ...], offload: Any) -> None:
    """Every edit in turn, before the first step where it cannot be followed, and after it; each is undone again."""
    wanted_params, params = _params(), _params()
    plain = _made(wanted_params, offload=offload)
    wanted = _trained(plain, wanted_params, rank)
    plain.close()
    opt = _made(params, offload=offload)
    for step in range(STEPS):
        for name, edit in EDITS.items():
            if step == 0 and name in LATE and len(editors) == world_size:
                continue
            opt.zero_grad()
            groups, lists = [*opt.param_groups], [[*group["params"]] for group in opt.param_groups]
            _backward(params, step, rank)
            if rank in editors:
                edit(opt.param_groups)
            before = [param.detach().clone() for param in params]
            with pytest.raises(zero_opt.ConfigConflict, match=PUT_BACK if name in REARRANGED else SAYS) as caught:
                opt.step()
            if rank not in editors and (step or name not in LATE):
                assert str(caught.value).startswith(f"rank {editors[0]}: ")
            assert_bitwise([param.detach() for param in params], before, f"{name}, step {step}")
            opt.param_groups[:] = groups
            for group, kept in zip(groups, lists, strict=True):
                group["params"] = kept
        _step(opt, params, step, rank)
    assert_bitwise([param.detach() for param in params], wanted)
    opt.close()


@pytest.mark.parametrize("editors", [(0, 1), (1,), (0,)], ids=["both", "rank 1", "rank 0"])
def test_what_cannot_be_followed_is_refused_on_every_rank(editors: tuple[int, ...]) -> None:
    run_processes(2, _refused, editors, None)


@pytest.mark.parametrize("offload", ["host", "worker"])
def test_one_rank_with_an_offload_refuses_too(offload: str) -> None:
    run_processes(1, _refused, (0,), OFFLOADS[offload])


def _calls_refused(rank: int, world_size: int) -> None:
    params = _params()
    opt = _made(params, reduction=AT_STEP)
    _step(opt, params, 0, rank)
    saved = opt.state_dict()
    if rank == 1:
        opt.param_groups[0]["params"] = [nn.Parameter(param.detach().clone()) for param in params[:4]]
    for call in (
        lambda: opt.clip_grad_norm_(1.0),
        lambda: opt.consolidate_state_dict(to=0),
        lambda: opt.load_state_dict(saved),
        lambda: opt.add_param_group({"params": [nn.Parameter(torch.zeros(3))]}),
        lambda: zero_opt.sharded_state_dict(opt),
    ):
        with pytest.raises(zero_opt.ConfigConflict, match=SAYS):
            call()  # type: ignore[no-untyped-call]
    if rank == 1:
        with pytest.raises(zero_opt.ConfigConflict, match=SAYS):
            opt.state_dict()
        opt.param_groups[0]["params"] = tuple(params[:4])  # the same, in another list
    opt.param_groups = [dict(group) for group in opt.param_groups]
    _step(opt, params, 1, rank)
    assert int(opt.state[params[0]]["step"]) == 2
    opt.close()


def test_every_call_of_all_ranks_refuses() -> None:
    run_processes(2, _calls_refused)


def _gradient_reduced(rank: int, world_size: int) -> None:
    """A backward has moved gradients of some into buckets: too late, until they are dropped."""
    old, new = _params(7), _params(7)
    opt = _made(old, reduction=OVERLAPPED)
    _backward(old, 0, rank)
    _assign(opt, new)
    with pytest.raises(zero_opt.ConfigConflict, match="gradients reduced"):
        opt.step()
    for param in old:
        param.grad = None
    _step(opt, new, 0, rank)
    assert not torch.equal(new[0], old[0])
    opt.close()


def test_gradients_that_are_reduced_already() -> None:
    run_processes(2, _gradient_reduced)


def _state_loaded(rank: int, world_size: int) -> None:
    source = _params()
    plain = torch.optim.AdamW(_groups(source), fused=True)
    _step(plain, source, 0, 0)
    opt = _made(_params())
    opt.load_state_dict(plain.state_dict())
    _assign(opt, _params())
    with pytest.raises(zero_opt.ConfigConflict, match="state loaded"):
        opt.step()
    opt.close()


def test_state_that_was_loaded_is_not_lost() -> None:
    run_processes(2, _state_loaded)


def _values_differ(rank: int, world_size: int) -> None:
    """What is compared at construction is compared again; there is no way back from there."""
    opt = _made(_params())
    _assign(opt, _params(rank))
    with pytest.raises(zero_opt.RankMismatch, match="values"):
        opt.step()
    with pytest.raises(zero_opt.OptimizerClosed):
        opt.step()
    opt.close()


def test_replacements_that_differ_between_ranks() -> None:
    run_processes(2, _values_differ)


def _unusable(rank: int, world_size: int, kind: str) -> str:
    """Rank 1 alone gives a parameter that nothing can be planned with."""
    params: list[Any] = [torch.nn.Parameter(torch.ones(3))]
    if rank == 1 and kind == "lazy":
        params = list(torch.nn.LazyLinear(3).parameters())
    elif rank == 1:
        quantized = torch.quantize_per_tensor(torch.ones(5), 0.1, 0, torch.qint8)
        params.insert(0, torch.nn.Parameter(quantized, requires_grad=False))
    with pytest.raises(zero_opt.UnsupportedParam) as caught:
        zero_opt.ShardedOptimizer(params, torch.optim.SGD, lr=0.1)
    return str(caught.value)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(
    ("kind", "said"), [("lazy", "has no shape yet, as a lazy module"), ("quantized", "is quantized")]
)
def test_a_parameter_of_one_rank_that_cannot_be_planned_is_refused_on_all(kind: str, said: str) -> None:
    mine, theirs = run_processes(2, _unusable, kind)
    assert said in mine and said in theirs and mine.startswith("rank 1: ")


# ---------------------------------------------------------------------------------------------------------------------
# no groups at all


_SWAPS: dict[str, Callable[[Groups], Any]] = {
    "None": lambda groups: None,
    "int": lambda groups: 5,
    "generator": lambda groups: (group for group in groups),
    "int, not a dict": lambda groups: [3, 4],
    "list, not a dict": lambda groups: [[], []],
    "str": lambda groups: "ab",
}
_CALLS: dict[str, Callable[[zero_opt.ShardedOptimizer, Any], Any]] = {
    "step": lambda opt, saved: opt.step(),
    "clip_grad_norm_": lambda opt, saved: opt.clip_grad_norm_(1.0),
    "load_state_dict": lambda opt, saved: opt.load_state_dict(saved),
    "consolidate_state_dict": lambda opt, saved: opt.consolidate_state_dict(),
    "sharded_state_dict": lambda opt, saved: zero_opt.sharded_state_dict(opt),
    "add_param_group": lambda opt, saved: opt.add_param_group({"params": [nn.Parameter(torch.zeros(3))]}),
}


def _no_groups(rank: int, world_size: int, options: dict[str, Any], swap: str) -> None:
    """Put something else in the place of ``param_groups`` on rank 1, make each call on every rank, and go on."""
    params, twins = _params(), _params()
    opt = _made(params, **options, checks=zero_opt.Checks(timeout=20.0))
    _step(opt, params, 0, rank)
    opt.flush()
    opt.consolidate_state_dict()
    saved = zero_opt.sharded_state_dict(opt)
    groups = opt.param_groups
    opt.zero_grad()
    _backward(params, 1, rank)
    for call in _CALLS.values():
        if rank == 1:
            opt.param_groups = _SWAPS[swap](groups)
        with pytest.raises(zero_opt.ParamsReplaced, match=f"is of type {swap}"):
            call(opt, saved)
        for local in (opt.zero_grad, opt.state_dict) if rank == 1 else ():
            with pytest.raises(zero_opt.ParamsReplaced, match=f"is of type {swap}"):
                local()
        opt.param_groups = groups
    opt.step()
    opt.flush()
    opt.close()
    plain = _made(twins, **options)
    _step(plain, twins, 0, rank)
    _step(plain, twins, 1, rank)
    plain.flush()
    plain.close()
    assert_bitwise([param.detach() for param in params], [param.detach() for param in twins])


@pytest.mark.parametrize("swap", _SWAPS)
def test_what_is_no_list_of_groups_is_refused_on_every_rank(swap: str) -> None:
    run_processes(2, _no_groups, {"reduction": AT_STEP}, swap)


@pytest.mark.parametrize("options", [{}, {"offload": zero_opt.WorkerOffload(delay=1)}], ids=["device", "delay"])
def test_it_is_refused_with_every_policy(options: dict[str, Any]) -> None:
    run_processes(2, _no_groups, options, "int, not a dict")
