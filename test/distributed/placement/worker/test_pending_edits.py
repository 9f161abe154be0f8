"""What the user changes while a step is pending: noticed on every rank, and never a mixture of what ranks have."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_opt
from test.support.harness import assert_bitwise, run_processes
from test.support.late_params import as_they_are
from test.support.worker_training import LATER, backward, make, make_params

Params = list[nn.Parameter]
Edit = Callable[[zero_opt.ShardedOptimizer, Params], Any]
Seen = tuple[list[Tensor], list[float]]


@contextmanager
def _one_pending(rank: int, dtype: torch.dtype = torch.float32, last: int = 3) -> Iterator[Any]:
    """An optimizer after two steps, the last of which is pending; number 3 does not use parameter 3. Its parameters."""
    params = make_params(dtype)
    optimizer = make(params, offload=LATER)
    for step in (1, last):
        optimizer.zero_grad()
        backward(params, step, rank)
        optimizer.step()
    yield optimizer, params
    optimizer.close()


def _go_on(optimizer: zero_opt.ShardedOptimizer, params: Params, rank: int) -> Seen:
    """Take two more steps; return the parameters, and step counts as users see them."""
    for step in (4, 5):
        optimizer.zero_grad()
        backward(params, step, rank)
        optimizer.step()
        optimizer.flush()
    counts = [float(optimizer.state[param]["step"]) for param in params]
    return [param.detach() for param in params], counts


# -- state ------------------------------------------------------------------------------------------------------------


def _replace(key: str, make_value: Callable[[Tensor], Any]) -> Edit:
    return lambda optimizer, params: [optimizer.state[param].update({key: make_value(param)}) for param in params]


EDITS: dict[str, Edit] = {
    "value replaced": _replace("exp_avg", torch.zeros_like),
    "step replaced": _replace("step", lambda _: torch.tensor(0.0)),
    "value added": _replace("mine", lambda _: 3),
    "value dropped": lambda optimizer, params: [optimizer.state[param].pop("exp_avg") for param in params],
    "entry replaced": lambda optimizer, params: optimizer.state.update({p: dict(optimizer.state[p]) for p in params}),
    "entry of another type": lambda optimizer, params: optimizer.state.update({params[0]: 5}),
    "entry dropped": lambda optimizer, params: optimizer.state.pop(params[0]),
    "all dropped": lambda optimizer, _: optimizer.state.clear(),
    "state replaced": lambda optimizer, _: setattr(optimizer, "state", defaultdict(dict)),
}


@as_they_are
def _edit_state(rank: int, world_size: int, name: str | None, by_step: bool, ranks: tuple[int, ...]) -> Seen:
    with _one_pending(rank) as (optimizer, params):
        if name is not None and rank in ranks:
            EDITS[name](optimizer, params)
        if name is None or by_step:
            optimizer.zero_grad()
            backward(params, 4, rank)
        if name is None:
            optimizer.flush()
        elif by_step:
            with pytest.raises(zero_opt.StepPending, match=r"opt\.state of parameter \d .*call opt\.flush\(\) before"):
                optimizer.step()
            optimizer.flush()  # its advice works at the first try
        else:
            with pytest.raises(zero_opt.StepPending, match=r"opt\.state of parameter \d .*make it again then"):
                optimizer.flush()
        return _go_on(optimizer, params, rank)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("name", "by_step"), [*((name, False) for name in EDITS), ("value replaced", True), ("all dropped", True)]
)
def test_an_edit_of_entries_is_refused_and_undone_on_every_rank(name: str, by_step: bool) -> None:
    plain, edited = (run_processes(2, _edit_state, edit, by_step, (0, 1)) for edit in (None, name))
    assert plain[0][1] == plain[1][1] == [4.0, 4.0, 4.0, 3.0]
    assert_bitwise(edited, plain)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_edit_of_entries_on_one_rank_is_refused_on_every_rank(rank: int) -> None:
    plain, edited = (run_processes(2, _edit_state, edit, False, (rank,)) for edit in (None, "all dropped"))
    assert_bitwise(edited, plain)


@as_they_are
def _edit_compact(rank: int, world_size: int, edit: Edit) -> None:
    params = make_params()
    form = zero_opt.AdamState("bfloat16")
    optimizer = zero_opt.ShardedOptimizer(params, zero_opt.CPUAdamW, offload=LATER, state=form)
    for step in (1, 2):
        optimizer.zero_grad()
        backward(params, step, rank)
        optimizer.step()
    edit(optimizer, params)
    with pytest.raises(zero_opt.StepPending):
        optimizer.flush()
    assert all(optimizer.state[param]["exp_avg"].any() for param in params if optimizer.state[param]["exp_avg"].numel())
    optimizer.flush()
    optimizer.close()


@pytest.mark.parametrize(
    "edit",
    [
        _replace("exp_avg", torch.zeros_like),
        EDITS["all dropped"],
        lambda optimizer, params: [optimizer.state[param]["exp_avg"].zero_() for param in params],
    ],
)
def test_an_edit_of_compact_state_is_refused(edit: Edit) -> None:
    run_processes(2, _edit_compact, edit)


@as_they_are
def _edit_first(rank: int, world_size: int) -> list[float]:
    params = make_params()
    optimizer = make(params, offload=LATER)
    backward(params, 1, rank)
    optimizer.step()
    for param in params:
        optimizer.state[param] = {"step": torch.tensor(7.0)}
    with pytest.raises(zero_opt.StepPending, match=r"opt\.state of parameter 0"):
        optimizer.flush()
    counts = [float(optimizer.state[param]["step"]) for param in params if optimizer.state[param]]
    optimizer.close()
    return counts


def test_entries_that_are_added_while_the_first_step_is_pending() -> None:
    assert run_processes(2, _edit_first) == [[1.0] * 4, [1.0] * 4]


@as_they_are
def _drop_after_flush(rank: int, world_size: int) -> Seen:
    with _one_pending(rank) as (optimizer, params):
        optimizer.flush()
        optimizer.state.clear()
        return _go_on(optimizer, params, rank)


def test_state_that_is_dropped_with_no_step_pending_starts_afresh() -> None:
    first, second = run_processes(2, _drop_after_flush)
    assert first[1] == second[1] == [2.0, 2.0, 2.0, 2.0]
    assert_bitwise(first, second)


@as_they_are
def _count_in_place(rank: int, world_size: int) -> None:
    with _one_pending(rank) as (optimizer, params):
        optimizer.state[params[1]]["step"].zero_()
        with pytest.raises(zero_opt.StepPending, match=r"opt\.state was written to while"):
            optimizer.flush()


def test_a_step_count_that_is_written_to_in_place_is_noticed() -> None:
    run_processes(2, _count_in_place)


@as_they_are
def _add_group(rank: int, world_size: int, edit: Edit) -> None:
    with _one_pending(rank) as (optimizer, params):
        edit(optimizer, params)
        with pytest.raises(zero_opt.StepPending):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(7))]})
        optimizer.flush()
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(7))]})


@pytest.mark.parametrize(
    "edit", [EDITS["all dropped"], lambda optimizer, params: optimizer.state[params[0]]["exp_avg"].zero_()]
)
def test_a_group_that_is_added_hides_no_edit(edit: Edit) -> None:
    run_processes(2, _add_group, edit)


# -- parameters -------------------------------------------------------------------------------------------------------


def _edit_params(params: Params, index: int) -> None:
    with torch.no_grad():
        params[index].zero_()


@as_they_are
def _edit_on_one(rank: int, world_size: int, index: int, writer: int, dtype: torch.dtype) -> list[Tensor]:
    with _one_pending(rank, dtype) as (optimizer, params):
        before = params[index].detach().clone()
        if rank == writer:
            _edit_params(params, index)
        named = rf"values of parameter {index} .* on rank {writer} alone; call zero_opt\.broadcast_params"
        with pytest.raises(zero_opt.RankMismatch, match=named):
            optimizer.flush()
        mine = torch.zeros_like(before) if rank == writer else before
        assert_bitwise(params[index].detach(), mine)  # no mixture
        optimizer.flush()
        optimizer.zero_grad()
        backward(params, 4, rank)
        with pytest.raises(zero_opt.RankMismatch, match=rf"values of parameter {index} .*broadcast_params"):
            optimizer.step()
        assert_bitwise(params[index].detach(), mine)
        zero_opt.broadcast_params(nn.ParameterList(params))
        return _go_on(optimizer, params, rank)[0]


@pytest.mark.parametrize(
    ("index", "writer", "dtype"),
    [(index, writer, torch.float32) for index in range(4) for writer in (0, 1)] + [(0, 1, torch.bfloat16)],
)
def test_a_parameter_written_to_on_one_rank_is_named(index: int, writer: int, dtype: torch.dtype) -> None:
    """Cut over both ranks, or on one of them, which may be the other one; one that the pending step does not use."""
    first, second = run_processes(2, _edit_on_one, index, writer, dtype)
    assert_bitwise(first, second)


@as_they_are
def _step_after(rank: int, world_size: int, index: int) -> list[Tensor]:
    with _one_pending(rank) as (optimizer, params):
        if rank == 1:
            _edit_params(params, index)
        optimizer.zero_grad()
        backward(params, 4, rank)
        with pytest.raises((zero_opt.StepPending, zero_opt.RankMismatch)) as raised:
            optimizer.step()
        if raised.type is zero_opt.StepPending:
            with pytest.raises(zero_opt.RankMismatch, match="broadcast_params"):
                optimizer.flush()
        assert f"parameter {index} " in str(raised.value)
        zero_opt.broadcast_params(nn.ParameterList(params))
        return _go_on(optimizer, params, rank)[0]


@pytest.mark.parametrize("index", [0, 1, 2, 3])
def test_each_error_of_a_step_after_that_says_what_to_call_next(index: int) -> None:
    first, second = run_processes(2, _step_after, index)
    assert_bitwise(first, second)


@as_they_are
def _edit_on_all(rank: int, world_size: int, by_step: bool) -> list[Tensor]:
    with _one_pending(rank) as (optimizer, params):
        _edit_params(params, 1)
        if by_step:
            optimizer.zero_grad()
            backward(params, 4, rank)
            with pytest.raises(zero_opt.StepPending, match=r"parameter 1 .* To go on, call it on every rank"):
                optimizer.step()
            optimizer.flush()  # its advice works at the first try
        else:
            with pytest.raises(zero_opt.StepPending, match="keeps the change"):
                optimizer.flush()
        assert not params[1].any()
        optimizer.flush()
        return _go_on(optimizer, params, rank)[0]


def test_a_parameter_written_to_on_every_rank_keeps_the_change() -> None:
    first, by_step = (run_processes(2, _edit_on_all, by_step) for by_step in (False, True))
    assert_bitwise(first[0], first[1])
    assert_bitwise(by_step, first)


@as_they_are
def _same_values(rank: int, world_size: int, index: int, writer: int) -> list[Tensor]:
    """One rank loads values, and they reach the other through ``.data``, which raises no counter."""
    with _one_pending(rank, last=2) as (optimizer, params):
        target = params[index] if rank == writer else params[index].data
        with torch.no_grad():
            target.fill_(0.25)
        with pytest.raises(zero_opt.StepPending, match=rf"parameter {index} .*keeps the change"):
            optimizer.flush()
        assert (params[index] == 0.25).all()
        return _go_on(optimizer, params, rank)[0]


@pytest.mark.parametrize("writer", [0, 1])
@pytest.mark.parametrize("index", [0, 3])
def test_a_parameter_that_has_the_same_new_values_on_all_ranks_keeps_them(index: int, writer: int) -> None:
    """Cut over both ranks; or stepped on rank 0 alone, whose counter may show nothing."""
    first, second = run_processes(2, _same_values, index, writer)
    assert_bitwise(first, second)
