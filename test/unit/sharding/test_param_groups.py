"""Param groups that are compared with what was planned: by identity, and with a word for every edit."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import zero_opt
from zero_opt.sharding.param_groups import PlannedGroups, param_name


class _NoCalls(TorchFunctionMode):
    """Refuses every function of torch's."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was called")


def _planned() -> tuple[list[dict[str, Any]], PlannedGroups]:
    groups = [{"params": [nn.Parameter(torch.zeros(4, 3)), nn.Parameter(torch.zeros(1))]}, {"params": []}]
    planned = PlannedGroups(SimpleNamespace(param_groups=groups))
    planned.add()
    return groups, planned


def test_what_is_there_is_not_looked_into() -> None:
    groups, planned = _planned()
    groups[0]["params"] = tuple(groups[0]["params"])
    with _NoCalls():
        planned.require()
        assert planned.replacement() is None


@pytest.mark.parametrize(
    ("params", "fits", "text"),
    [
        ((torch.zeros(4, 3), torch.zeros(1)), True, "position 0 of .* another tensor of shape .4, 3. in place of"),
        ((torch.zeros(4, 3), torch.zeros(())), False, r"position 1 of .* of shape \(\) in place of"),
        ((torch.zeros(3, 4), torch.zeros(1)), False, "position 0"),
        ((torch.zeros(4, 3),), False, "has 1 parameters, but 2 were planned"),
        ((None, torch.zeros(1)), False, "holds a NoneType"),
        (None, False, "of type NoneType, not a list"),
        (iter([torch.zeros(4, 3)]), False, "iterator, not a list"),
    ],
)
def test_a_replacement_is_named(params: Any, fits: bool, text: str) -> None:
    groups, planned = _planned()
    groups[0]["params"] = list(params) if isinstance(params, tuple) else params
    replacement = planned.replacement()
    assert replacement is not None
    assert replacement.fits is fits
    with pytest.raises(zero_opt.ParamsReplaced, match=text):
        planned.require()
    with pytest.raises(zero_opt.ParamsReplaced, match=text):
        planned.require_replaceable(begun=True)
    if fits:
        planned.require_replaceable(begun=False)
    planned.require_replaced()


def test_groups_that_are_added_are_planned_with_the_next_call() -> None:
    groups, planned = _planned()
    groups.append({"params": [nn.Parameter(torch.zeros(2))]})
    with pytest.raises(zero_opt.ConfigConflict, match="has 3 groups, but 2 were planned"):
        planned.require()
    planned.add()
    planned.require()
    assert len(list(planned)) == 3
    with pytest.raises(zero_opt.ParamsReplaced, match="on another rank"):
        planned.require_replaced()


@pytest.mark.parametrize(
    ("groups", "text"),
    [
        (None, "opt.param_groups is of type NoneType, not a list"),
        (5, "opt.param_groups is of type int, not a list"),
        ((group for group in ()), "opt.param_groups is of type generator, not a list"),
        ({"params": []}, "opt.param_groups is of type dict, not a list"),
        ("ab", "opt.param_groups is of type str, not a list"),
        ([3, 4], "param group 0 is of type int, not a dict"),
        ([{"params": []}, []], "param group 1 is of type list, not a dict"),
    ],
)
def test_what_is_no_list_of_groups_is_named(groups: Any, text: str) -> None:
    planned = PlannedGroups(SimpleNamespace(param_groups=groups))
    for require in (planned.require, planned.require_groups, partial(planned.require_replaceable, begun=False)):
        with pytest.raises(zero_opt.ParamsReplaced, match=text):
            require()
    assert param_name(groups, 3) == "parameter 3"


@pytest.mark.parametrize(
    ("names", "found"), [(["a", "b"], " (b)"), (("a", "b"), " (b)"), (["a"], ""), ([], ""), (5, ""), (None, "")]
)
def test_a_parameter_has_its_name_where_there_is_one(names: Any, found: str) -> None:
    groups = [{"params": [1]}, {"params": [2, 3], "param_names": names}]
    assert param_name(groups, 2) == f"parameter 2{found} (group 1, position 1)"
