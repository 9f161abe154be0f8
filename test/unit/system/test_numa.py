"""What the system lists of NUMA nodes, and what is made of lists that it does not have."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from test.support.numa_nodes import stand_in_system
from zero_opt.system import numa
from zero_opt.system.numa import cores_by_node, node_of_device, parsed_ranges, ranges


@pytest.fixture(autouse=True)
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(numa, "SYSTEM", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        ({0: "0-7"}, {0: set(range(8))}),
        ({0: "0-3,8-11", 1: "4-7,12-15"}, {0: {0, 1, 2, 3, 8, 9, 10, 11}, 1: {4, 5, 6, 7, 12, 13, 14, 15}}),
        ({0: "0,4", 1: "1,5", 2: "2,6", 3: "3,7"}, {node: {node, node + 4} for node in range(4)}),
        ({0: "0-1", 1: "", 10: "2"}, {0: {0, 1}, 10: {2}}),  # memory alone; numbers may have gaps
        ({0: "0,2-3"}, {0: {0, 2, 3}}),  # one is offline
        ({}, {}),
        ({0: "0-3", 1: "?"}, {}),
    ],
)
def test_cores_of_nodes(listed: dict[int, str], expected: dict[int, set[int]], system: Path) -> None:
    stand_in_system(system, listed)
    assert cores_by_node() == expected


def test_a_system_that_is_not_mounted(system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa, "SYSTEM", system / "nothing")
    assert cores_by_node() == {}
    assert node_of_device("0000:3b:00.0") is None


def test_a_node_whose_list_cannot_be_read(system: Path) -> None:
    stand_in_system(system, {0: "0-3", 1: "4-7"})
    (system / "devices/system/node/node1/cpulist").unlink()
    assert cores_by_node() == {}


def test_nodes_of_devices(system: Path) -> None:
    stand_in_system(system, {}, {"0000:3b:00.0": 1, "0000:d8:00.0": -1})
    assert [node_of_device(at) for at in ("0000:3b:00.0", "0000:d8:00.0", "0000:00:00.0", None)] == [
        1,
        None,
        None,
        None,
    ]


@given(st.sets(st.integers(0, 40)))
def test_lists_of_ranges(numbers: set[int]) -> None:
    text = ranges(numbers)
    assert parsed_ranges(text) == parsed_ranges(text.replace(" ", "") + "\n") == numbers
    spans = [span.split("-") for span in text.split(", ") if span]
    assert all(int(one[-1]) + 1 < int(other[0]) for one, other in itertools.pairwise(spans))
