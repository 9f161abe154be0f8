"""Which process group is meant, and small things every rank must send alike."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import zero_opt
from test.support.harness import run_processes, run_threads
from zero_opt.comm.connecting import made_by_all
from zero_opt.comm.groups import Group, connect, tensor_bytes
from zero_opt.comm.rendezvous import resolve_group
from zero_opt.errors import ConfigError, ConfigTypeError, PeerLost, ProcessGroupError
from zero_opt.sharding.broadcast import broadcast_params


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whoever runs the tests may have been launched."""
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert not dist.is_initialized()
    yield
    assert not dist.is_initialized()


# -- which group ------------------------------------------------------------------------------------------------------


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
    with pytest.raises(ConfigTypeError, match=r"process_group is a 2-D DeviceMesh; pass one dimension"):
        resolve_group(mesh)
    group = resolve_group(mesh["dp"])
    assert group is not None
    return dist.get_process_group_ranks(group)


def test_a_mesh_must_have_one_dimension() -> None:
    assert run_threads(4, _meshes) == [[0, 1], [0, 1], [2, 3], [2, 3]]


# -- small things -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32, torch.bfloat16])
def test_bytes_of_a_tensor(dtype: torch.dtype) -> None:
    values = torch.tensor([1, 2, 3]).to(dtype)
    assert tensor_bytes(values) == bytes(values.view(torch.uint8).tolist())
    assert tensor_bytes(values[1:]) == bytes(values.view(torch.uint8).tolist())[dtype.itemsize :]
    assert tensor_bytes(torch.zeros(0)) == b""


def _group(rank: int, world_size: int) -> list[object]:
    assert dist.group.WORLD is not None
    group = Group(dist.group.WORLD, 30, "test", connect(dist.group.WORLD, groups=1))
    assert (group.rank, group.world_size) == (rank, world_size)
    gathered = group.all_gather_bytes(b"x" * (rank * 3))
    tensors = [int(t) for t in group.all_gather(torch.tensor([rank * rank]))]
    value = torch.tensor([float(rank)])
    group.broadcast(value, 2)
    into = torch.full((4,), 10.0 + rank) if rank in (1, 2) else None
    work = group.move(into, 1, 2, 4, torch.float32)
    if work is not None:
        work.wait()
    group.close()
    group.close()
    return [gathered, tensors, value.item(), None if into is None else into.tolist()]


def test_what_a_group_of_ours_does() -> None:
    results = run_threads(3, _group)
    for rank, (gathered, tensors, value, moved) in enumerate(results):
        assert gathered == [b"", b"xxx", b"xxxxxx"]
        assert tensors == [0, 1, 4]
        assert value == 2
        assert moved == (None if rank == 0 else [11.0] * 4)


def _timeouts(rank: int, world_size: int) -> list[float]:
    assert dist.group.WORLD is not None
    found = []
    for parent in (dist.group.WORLD, dist.new_group([0, 1], timeout=timedelta(seconds=55))):
        for timeout in (None, 7.5):
            connecting = connect(parent, groups=1)
            with made_by_all(connecting):
                group = Group(parent, timeout, "test", connecting)
            found.append(group.timeout_s)
            group.close()
    return found


def test_the_timeout_is_the_groups_own_unless_one_is_given() -> None:
    assert run_processes(2, _timeouts, group_timeout=77) == [[77.0, 7.5, 55.0, 7.5]] * 2
    [found, _] = run_threads(2, _timeouts)  # its groups have none
    assert found[1] == 7.5 and found[0] == found[2] > 60


@pytest.mark.parametrize("given", [[torch.nn.Parameter(torch.ones(1))], None])
def test_what_is_no_module_has_nothing_to_broadcast(given: object) -> None:
    with pytest.raises(ConfigTypeError, match=r"broadcast_params\(\) takes a module, got a "):
        broadcast_params(given)  # type: ignore[arg-type]


# -- broadcast_params -------------------------------------------------------------------------------------------------


def _broadcast(rank: int, world_size: int) -> list[torch.Tensor]:
    model = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last), torch.nn.BatchNorm2d(3))
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.fill_(rank + 1)
    strides = [param.stride() for param in model.parameters()]
    broadcast_params(model, src=1)
    assert [param.stride() for param in model.parameters()] == strides
    return list(model.state_dict().values())


def test_params_and_buffers_become_the_sources() -> None:
    for tensors in run_threads(3, _broadcast):
        assert all(bool((tensor == 2).all()) for tensor in tensors)


DTYPES = [torch.int16, torch.uint16, torch.float8_e4m3fn, torch.bool, torch.bfloat16, torch.complex64, torch.int64]


def _broadcast_dtypes(rank: int, world_size: int) -> list[object]:
    model = torch.nn.Module()
    for index, dtype in enumerate(DTYPES):
        model.register_buffer(f"buffer{index}", torch.full((3, 2), float(rank)).to(dtype))
    model.register_buffer("scalar", torch.tensor(rank, dtype=torch.int16))
    model.register_buffer("empty", torch.zeros(0, dtype=torch.uint32))
    model.register_buffer("lazy", torch.full((2,), complex(rank, rank)).conj())
    broadcast_params(model, src=1)
    return [buffer.to(torch.complex64).tolist() for buffer in model.buffers()]


def test_buffers_of_every_dtype() -> None:
    for buffers in run_processes(2, _broadcast_dtypes):
        assert buffers == [*[[[1, 1]] * 3] * len(DTYPES), 1, [], [1 - 1j] * 2]


def _broadcast_beside_a_killed_rank(rank: int, world_size: int) -> str:
    """The last rank is killed: of two the other knows which it is, of three nobody does."""
    model = torch.nn.Linear(50, 50)
    broadcast_params(model)
    if rank == world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)

    def broadcast_often() -> None:  # a source does not wait for receivers
        for _ in range(1000):
            broadcast_params(model)

    with pytest.raises(PeerLost) as caught:
        broadcast_often()
    return str(caught.value)


@pytest.mark.parametrize(("world_size", "who"), [(2, "rank 1"), (3, "another rank")])
def test_a_broadcast_names_no_rank_that_lives(world_size: int, who: str) -> None:
    said = run_processes(world_size, _broadcast_beside_a_killed_rank, timeout=300, expect_errors=True, group_timeout=30)
    assert all(text.startswith(f"{who} has ended or does not answer") for text in said[:-1]), said


def _bad_source(rank: int, world_size: int) -> None:
    model = torch.nn.Linear(2, 2)
    for src, kind in ((2, ConfigError), (-1, ConfigError), ("0", ConfigTypeError), (True, ConfigTypeError)):
        with pytest.raises(kind, match=rf"src must be a rank of the group, 0 to 1, got {src!r}"):
            broadcast_params(model, src=src)  # type: ignore[arg-type]


def test_a_source_that_is_no_rank_is_quoted() -> None:
    run_threads(2, _bad_source)


def test_alone_there_is_nothing_to_broadcast() -> None:
    model = torch.nn.Linear(2, 2)
    before = model.weight.detach().clone()
    broadcast_params(model)
    assert torch.equal(model.weight, before)
    with pytest.raises(ConfigError, match="src must be a rank of the group, 0 to 0, got 3"):
        broadcast_params(model, src=3)
