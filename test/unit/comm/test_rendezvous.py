"""Which process group is meant."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zero_opt
from test.support.harness import run_threads
from zero_opt.comm.connecting import require_descriptors
from zero_opt.comm.rendezvous import require_same, resolve_group
from zero_opt.errors import ConfigError, ConfigTypeError, ProcessGroupError, RankMismatch

pytestmark = pytest.mark.usefixtures("no_launcher")


@pytest.mark.parametrize("launched", [None, "1", "", "many"])
def test_without_a_group_it_is_world_size_1(monkeypatch: pytest.MonkeyPatch, launched: str | None) -> None:
    if launched is not None:
        monkeypatch.setenv("WORLD_SIZE", launched)
    assert resolve_group(None) is None


def test_a_launcher_that_started_several_ranks_must_not_be_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ProcessGroupError, match=r"WORLD_SIZE is 4 but .* call torch\.distributed\.init_process_group"):
        resolve_group(None)
    param = torch.nn.Parameter(torch.ones(1))
    with pytest.raises(ProcessGroupError, match="init_process_group"):
        zero_opt.ShardedOptimizer([param], torch.optim.SGD, lr=0.1)


@pytest.mark.parametrize("bad", [0, "gloo", [0, 1]])
def test_what_is_no_group_is_named(bad: object) -> None:
    with pytest.raises(ConfigTypeError, match=f"process_group must be .*, got {type(bad).__name__}"):
        resolve_group(bad)


@pytest.mark.parametrize("third", [3e-4, zero_opt.AtStep()])
def test_what_goes_by_name_is_no_third_argument(third: object) -> None:
    with pytest.raises(ConfigTypeError, match=r"by name, as in lr=\.\.\., reduction=\.\.\.$"):
        zero_opt.ShardedOptimizer([torch.nn.Parameter(torch.ones(1))], torch.optim.SGD, third)


def test_not_being_a_member_is_named() -> None:
    with pytest.raises(ProcessGroupError, match="this rank is not a member"):
        resolve_group(dist.GroupMember.NON_GROUP_MEMBER)


def _resolve(rank: int, world_size: int) -> None:
    assert resolve_group(None) is dist.group.WORLD
    assert resolve_group(dist.group.WORLD) is dist.group.WORLD
    pair = dist.new_group([0, 1])
    if rank < 2:
        assert resolve_group(pair) is pair
    else:
        with pytest.raises(ProcessGroupError, match="not a member"):
            resolve_group(pair)


def test_groups_are_taken_as_they_are() -> None:
    run_threads(3, _resolve)


def _meshes(rank: int, world_size: int) -> list[int]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "dp"))
    assert resolve_group(mesh) is dist.group.WORLD
    with pytest.raises(ConfigTypeError, match=r"process_group is a 3-D DeviceMesh; pass one dimension"):
        resolve_group(DeviceMesh("cpu", [[[0, 1], [2, 3]]], _init_backend=False))
    for ranks in ([[0, 2], [1, 3]], [[3, 2], [1, 0]], [[0], [1]]):
        with pytest.raises(ConfigError, match=r"must have all ranks of the default group in order"):
            resolve_group(DeviceMesh("cpu", ranks, _init_backend=False))
    group = resolve_group(mesh["dp"])
    assert group is not None
    return dist.get_process_group_ranks(group)


def test_a_mesh_has_one_dimension_or_is_one_of_hosts() -> None:
    assert run_threads(4, _meshes) == [[0, 1], [0, 1], [2, 3], [2, 3]]


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        (["step()", "opt.flush()"], r"rank 0 called step\(\) where rank 1 called opt.flush\(\); "),
        (["", "step()"], r"rank 0 is in the middle of a call where rank 1 called step\(\): an exception .* of rank 1,"),
        (["step()", "step()", ""], r"rank 2 is in the middle of a call where rank 0 called step\(\): .* of rank 0,"),
    ],
)
def test_calls_that_differ_are_named(calls: list[str], message: str) -> None:
    require_same([calls[0]] * 3)
    with pytest.raises(RankMismatch, match=message):
        require_same(calls)


def test_a_sandbox_without_devices_has_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.devnull", "/nowhere/null")
    require_descriptors(10, "a test needs")
