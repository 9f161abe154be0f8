"""What a partition remembers of all parameters at once, and what makes it look at each again."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from zero_opt.comm.groups import Group
from zero_opt.errors import UnsupportedParam
from zero_opt.policies import MixedPrecision
from zero_opt.sharding.flat_param import own_writes
from zero_opt.sharding.partition import Partition


def planned(params: list[Tensor]) -> Partition:
    ranks = cast(Group, SimpleNamespace(rank=0, world_size=2))
    partition = Partition(ranks, "parameter {}".format, False, 25.0, MixedPrecision())
    partition.add([(index, 0, param) for index, param in enumerate(params)], {})
    assert partition.refresh() == []
    partition.accept_edits()
    assert partition.edits() == {}
    return partition


def squares() -> list[Tensor]:
    return [Parameter(torch.randn(4, 4)) for _ in range(3)]


def test_a_write_is_an_edit_until_it_is_accepted() -> None:
    params = squares()
    partition = planned(params)
    with torch.no_grad():
        params[1].add_(1)
    assert partition.edits() == {1: 1} == partition.edits()
    partition.accept_edits()
    assert partition.edits() == {}


def test_our_own_writes_are_no_edits() -> None:
    params = squares()
    partition = planned(params)
    with own_writes(partition.flats.values()):
        partition.flats[0].flat.add_(1)
    assert partition.edits() == {}
    with torch.no_grad():
        params[2].add_(1)
    assert partition.edits() == {2: 1}


def test_edits_that_are_accepted_in_the_middle_of_a_write_of_ours_are_accepted() -> None:
    params = squares()
    partition = planned(params)
    with own_writes(partition.flats.values()):  # as the exchange thread does, while the step ends
        partition.flats[0].flat.add_(1)
        partition.accept_edits()
    assert partition.edits() == {}


def test_no_thread_sees_a_write_of_ours_before_it_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    params = squares()
    partition = planned(params)
    raise_versions, seen = torch.autograd.graph.increment_version, list[dict[int, int]]()
    reader = Thread(target=lambda: seen.append(partition.edits()))

    def raise_and_let_others_read(tensors: Any) -> None:
        raise_versions(tensors)
        reader.start()
        reader.join(0.2)  # it has either read by now, or waits for the count

    monkeypatch.setattr(torch.autograd.graph, "increment_version", raise_and_let_others_read)
    with own_writes(partition.flats.values()):
        partition.flats[0].flat.add_(1)
    reader.join()
    assert seen == [{}]


def test_a_graph_notices_a_write_of_ours() -> None:
    params = squares()
    partition = planned(params)
    loss = (params[0] @ params[0]).sum()
    with own_writes(partition.flats.values()):
        partition.flats[0].flat.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    "repointed",
    [
        torch.clone,
        lambda values: values.view(2, 8),
        torch.t,
        lambda values: values.view(-1).view(torch.bfloat16)[:16].view(4, 4),
    ],
    ids=["elsewhere", "another shape", "other strides", "another dtype"],
)
def test_every_way_to_repoint_a_parameter_is_noticed(repointed: Callable[[Tensor], Tensor]) -> None:
    params = squares()
    partition = planned(params)
    before = params[1].data
    params[1].data = repointed(before)
    if params[1].data_ptr() != before.data_ptr():
        assert partition.refresh() == [1]
        assert partition.edits() == {1: 1}
    else:
        for _ in range(2):  # not the first time alone
            with pytest.raises(UnsupportedParam, match="parameter 1"):
                partition.refresh()
    params[1].data = before
    partition.refresh()
    assert partition.flats[1].flat.data_ptr() == before.data_ptr()
    assert partition.refresh() == []


def test_added_parameters_are_looked_at_and_dropped_ones_are_not() -> None:
    params: list[Any] = squares()
    partition = planned(params)
    late = Parameter(torch.randn(4))
    added = partition.add([(3, 0, late)], {})
    with torch.no_grad():
        late.add_(1)
    late.data = late.data.clone()
    assert partition.refresh() == [3]
    assert partition.edits() == {3: 2}
    partition.drop(added)
    partition.accept_edits()
    late.data = late.data.clone()
    assert partition.refresh() == []
