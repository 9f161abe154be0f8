"""The order in which gathers over a mesh's groups bring the ranks, and which groups of a process break together."""

from __future__ import annotations

import weakref
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from hypothesis import given
from hypothesis import strategies as st

from zero_opt.comm.parent import Parent
from zero_opt.optimizer.dtensors import mesh_group
from zero_opt.optimizer.dtensors.mesh_group import MeshGroup, _order_of_arrival, sharing_a_process_group


@st.composite
def meshes(draw: st.DrawFn) -> torch.Tensor:
    """The ranks of a mesh, some of all ranks, in any order."""
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    count = int(torch.tensor(shape).prod())
    ranks = draw(st.permutations(range(count + 2)))[:count]
    return torch.tensor(ranks).view(shape)


def members(mesh: torch.Tensor, place: tuple[int, ...], dim: int) -> list[tuple[int, ...]]:
    """The places of a process group, in the order that torch gives its ranks."""
    group = [(*place[:dim], at, *place[dim + 1 :]) for at in range(mesh.shape[dim])]
    return sorted(group, key=lambda there: int(mesh[there]))


def gathered(mesh: torch.Tensor) -> dict[tuple[int, ...], list[int]]:
    """By place in the mesh, the ranks in the order in which gathers bring them, simulated."""
    places = list(product(*map(range, mesh.shape)))
    rows = {place: [int(mesh[place])] for place in places}
    for dim in reversed(range(mesh.ndim)):
        rows = {place: [rank for there in members(mesh, place, dim) for rank in rows[there]] for place in places}
    return rows


@given(meshes())
def test_the_order_is_that_of_gathers_over_one_dimension_after_the_other(mesh: torch.Tensor) -> None:
    for place, order in gathered(mesh).items():
        one: Any = SimpleNamespace(
            mesh=mesh, ndim=mesh.ndim, size=lambda dim: mesh.shape[dim], get_coordinate=lambda place=place: [*place]
        )
        assert _order_of_arrival(one) == order


class ProcessGroup:
    """What a weak reference can refer to."""


def connected_over(*process_groups: ProcessGroup) -> MeshGroup:
    """A group of a mesh that has these process groups, without connections."""
    references: Any = [(weakref.ref(each), range(2)) for each in process_groups]
    group = MeshGroup.__new__(MeshGroup)
    group._parent = Parent("", (0, 1), 0, "cpu:gloo", 1.0, references)
    return group


def test_groups_of_meshes_that_share_a_process_group_break_together() -> None:
    rows, columns, others = ProcessGroup(), ProcessGroup(), ProcessGroup()
    both, one, apart = connected_over(rows, columns), connected_over(rows), connected_over(others)
    with mock.patch.object(mesh_group, "_connected", {both, one, apart}):
        assert {*sharing_a_process_group([one])} == {both, one}
        assert sharing_a_process_group([apart]) == [apart]


def test_groups_whose_process_groups_are_destroyed_break_by_themselves() -> None:
    rows, columns = ProcessGroup(), ProcessGroup()
    both, one, apart = connected_over(rows, columns), connected_over(rows), connected_over(columns)
    with mock.patch.object(mesh_group, "_connected", {both, one, apart}):
        del rows
        assert {*sharing_a_process_group([both])} == {both, apart}
        assert sharing_a_process_group([one]) == [one]
