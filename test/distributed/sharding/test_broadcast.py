"""broadcast_params(): what every rank has afterwards, and what is refused."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from test.support.harness import run_processes, run_threads
from zero_opt.errors import ConfigError, ConfigTypeError, PeerLost
from zero_opt.sharding.broadcast import broadcast_params

pytestmark = pytest.mark.usefixtures("no_launcher")


@pytest.mark.parametrize("given", [[torch.nn.Parameter(torch.ones(1))], None])
def test_what_is_no_module_has_nothing_to_broadcast(given: object) -> None:
    with pytest.raises(ConfigTypeError, match=r"broadcast_params\(\) takes a module, got a "):
        broadcast_params(given)  # type: ignore[arg-type]


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
    said = run_processes(world_size, _broadcast_beside_a_killed_rank, expect_errors=True, group_timeout=30)
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
