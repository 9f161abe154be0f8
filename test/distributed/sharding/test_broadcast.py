"""broadcast_params(): what every rank has afterwards, and what is refused."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from test.support.failures import PATIENCE_S
from test.support.harness import run_processes, run_threads
from zero_opt.comm import process_identity, rendezvous, short_lived
from zero_opt.comm.groups import Group
from zero_opt.errors import ConfigError, ConfigTypeError, PeerLost, RankMismatch, UnsupportedParam, ZeroOptError
from zero_opt.policies import Checks
from zero_opt.sharding.broadcast import broadcast_params
from zero_opt.system.waiting import until

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


def _broadcast_in_inference_mode(rank: int, world_size: int, made: bool, called: bool) -> list[torch.Tensor]:
    with torch.inference_mode(made):
        model = torch.nn.BatchNorm2d(3)
        for tensor in model.state_dict().values():
            tensor.fill_(rank + 1)
    with torch.inference_mode(called):
        broadcast_params(model, src=1)
    return [tensor.clone() for tensor in model.state_dict().values()]


@pytest.mark.parametrize(("made", "called"), [(True, False), (True, True), (False, True)])
def test_tensors_of_inference_mode_become_the_sources_too(made: bool, called: bool) -> None:
    for tensors in run_threads(2, _broadcast_in_inference_mode, made, called):
        assert all(bool((tensor == 2).all()) for tensor in tensors)


DTYPES = [torch.int16, torch.uint16, torch.float8_e4m3fn, torch.bool, torch.bfloat16, torch.complex64, torch.int64]


def _broadcast_dtypes(rank: int, world_size: int) -> list[object]:
    model = torch.nn.Module()
    for index, dtype in enumerate(DTYPES):
        model.register_buffer(f"buffer{index}", torch.full((3, 2), float(rank)).to(dtype))
    model.register_buffer("scalar", torch.tensor(rank, dtype=torch.int16))
    model.register_buffer("empty", torch.zeros(0, dtype=torch.uint32))
    model.register_buffer("lazy", torch.full((2,), complex(rank, rank)).conj())
    model.register_buffer("stride 5", torch.full((10,), float(rank))[::5][:1])
    broadcast_params(model, src=1)
    return [buffer.to(torch.complex64).tolist() for buffer in model.buffers()]


def test_buffers_of_every_dtype() -> None:
    for buffers in run_processes(2, _broadcast_dtypes):
        assert buffers == [*[[[1, 1]] * 3] * len(DTYPES), 1, [], [1 - 1j] * 2, [1]]


def _stays(*_: Any, **__: Any) -> None:
    time.sleep(PATIENCE_S)


def _ends_in_it(how: str, where: str) -> None:
    """Have this rank leave before it comes to the next broadcast, or in the middle of it."""
    leave = {
        "killed": lambda *_: os.kill(os.getpid(), signal.SIGKILL),
        "stopped": lambda *_: os.kill(os.getpid(), signal.SIGSTOP),
        "silent": _stays,
        "interrupted": lambda *_: signal.setitimer(signal.ITIMER_REAL, 0.5),
    }[how]
    if where == "before":
        leave()
    else:
        _leaves_within(leave)


def _leaves_within(leave: Callable[..., object]) -> None:
    """Have this rank call ``leave`` in the second broadcast from here."""
    broadcast, left = Group.broadcast, [1]

    def leaves(group: Group, tensor: torch.Tensor, src: int) -> None:
        if not left[0]:
            leave()
        left[0] -= 1
        broadcast(group, tensor, src)

    Group.broadcast = leaves  # type: ignore[method-assign]


def _beside_one_that_leaves(rank: int, world_size: int, how: str, where: str, near: bool) -> Any:
    """What is said while the last rank leaves, and of what the user's group can do afterwards."""
    if not near:
        process_identity.host_if_known = lambda: f"host {rank}"  # type: ignore[attr-defined]
    short_lived.Checks = lambda: Checks(hang_timeout=0.5)  # type: ignore[attr-defined,assignment,misc]
    model = torch.nn.Sequential(*(torch.nn.Linear(50, 50) for _ in range(4)))
    broadcast_params(model)
    pids: list[Any] = [None] * world_size
    dist.all_gather_object(pids, os.getpid())
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    if rank == world_size - 1:
        _ends_in_it(how, where)
    begun = time.monotonic()
    with pytest.raises((PeerLost, KeyboardInterrupt)) as caught:
        broadcast_params(model)
    if rank == 0 and how == "stopped":
        os.kill(pids[-1], signal.SIGCONT)
    if how in ("stopped", "interrupted"):
        numbers: list[Any] = [None] * world_size
        dist.all_gather_object(numbers, rank)
        assert numbers == list(range(world_size))
    return type(caught.value).__name__, str(caught.value), time.monotonic() - begun


def _said_by_others(world_size: int, how: str, where: str, near: bool, **options: Any) -> list[Any]:
    arguments = (_beside_one_that_leaves, how, where, near)
    return run_processes(world_size, *arguments, expect_errors=True, **options)[:-1]


@pytest.mark.parametrize("where", ["before", "within"])
@pytest.mark.parametrize("near", [True, False])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_killed_rank_is_named(world_size: int, near: bool, where: str) -> None:
    killed = rf"rank {world_size - 1} (\(pid \d+\) )?has ended(, or its host does not answer,)? while .* in broadcast"
    within = rf"rank {world_size - 1} (\(pid \d+\) )?has ended(, or its host does not answer,)? while broadcast_params"
    for name, text, _ in _said_by_others(world_size, "killed", where, near):
        assert name == "PeerLost" and re.match(f"{killed}|{within}", text), text


def _once_another_leaves(watch: short_lived.CallWatch, error: RuntimeError, waited: float) -> PeerLost | None:
    """Explain an error once rank 2 has left, without knowing why."""
    assert until(lambda: bool(watch._store.check(["left/2"])), PATIENCE_S)
    return _EXPLAIN(watch, error, waited)


_EXPLAIN = short_lived.CallWatch._explain_error


def _where_one_knows(rank: int, world_size: int, lost: int) -> str:
    """Rank 2, on another host, cannot tell which of the other two is killed, and the one that lives can."""
    process_identity.host_if_known = lambda: f"host {rank // 2}"  # type: ignore[attr-defined]
    rendezvous.ranks_gone = lambda _: []  # as of a process group that is not gloo's
    short_lived._SAYING_S = 60.0
    if rank == 1 - lost:
        short_lived.CallWatch._explain_error = _once_another_leaves  # type: ignore[method-assign,assignment]
    model = torch.nn.Sequential(*(torch.nn.Linear(50, 50) for _ in range(4)))
    if rank == lost:
        _ends_in_it("killed", "within")
    with pytest.raises(PeerLost) as caught:
        broadcast_params(model)
    return str(caught.value)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_killed_rank_is_named_on_other_hosts_where_one_of_its_own_knows(lost: int) -> None:
    found = run_processes(3, _where_one_knows, lost, expect_errors=True)
    on_its_host, elsewhere = found[1 - lost], found[2]
    assert re.match(rf"rank {lost} \(pid \d+\) has ended while broadcast_params\(\) waits", on_its_host), on_its_host
    assert elsewhere.startswith(f"rank {lost} has ended, or its host does not answer, while broadcast_params()")


def _beside_a_stopped_and_a_killed_one(rank: int, world_size: int) -> tuple[str, str]:
    """Rank 1, on the host of rank 0, is stopped, and rank 2, on another one, killed."""
    process_identity.host_if_known = lambda: f"host {rank // 2}"  # type: ignore[attr-defined]
    model = torch.nn.Sequential(*(torch.nn.Linear(50, 50) for _ in range(4)))
    broadcast_params(model)
    pids: list[Any] = [None] * world_size
    dist.all_gather_object(pids, os.getpid())
    if rank == 1:
        _ends_in_it("stopped", "within")
    if rank == 2:
        stopped = process_identity.ProcessIdentity("", pids[1], process_identity._stat(pids[1])[1])
        _leaves_within(
            lambda: until(lambda: stopped.state() in "Tt", PATIENCE_S) and os.kill(os.getpid(), signal.SIGKILL)
        )
    with pytest.raises(PeerLost) as caught:
        broadcast_params(model)
    return type(caught.value).__name__, str(caught.value)


def test_a_killed_rank_is_named_beside_a_stopped_one() -> None:
    found = run_processes(3, _beside_a_stopped_and_a_killed_one, expect_errors=True, may_hang={1})
    name, text = found[0]
    assert name == "PeerLost"
    assert text.startswith("rank 2 has ended, or its host does not answer, while broadcast_params() waits for it"), text


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_that_is_stopped_within_it_is_named_after_hang_timeout(world_size: int) -> None:
    for name, text, seconds in _said_by_others(world_size, "stopped", "within", True):
        assert name == "PeerSilent" and seconds < PATIENCE_S / 2
        named = rf"rank {world_size - 1} \(pid \d+\) has been stopped (for \d+ s )?while broadcast_params\(\)"
        assert re.match(named, text), text


@pytest.mark.parametrize("where", ["before", "within"])
def test_a_rank_that_does_not_come_in_time_is_named(where: str) -> None:
    for name, text, _ in _said_by_others(3, "silent", where, True, group_timeout=4.0, may_hang={2}):
        assert name == "PeerSilent" and "broadcast_params()" in text and "init_process_group(timeout=...)" in text, text
        assert re.match(
            r"rank 2 (\(pid \d+\) )?(did not come to|has not come to|has not gone on in) broadcast_params\(\)", text
        ), text


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_that_is_interrupted_is_named_and_the_group_stays(world_size: int) -> None:
    """Its wait is that for rank 0's tensors, which come late."""
    found = run_processes(world_size, _interrupted_receiver)
    assert found[-1] == "KeyboardInterrupt"
    for said in found[:-1]:
        assert said.startswith(f"an exception on rank {world_size - 1} "), said


def _interrupted_receiver(rank: int, world_size: int) -> str:
    model, broadcast = torch.nn.Linear(50, 50), Group.broadcast

    def late(group: Group, tensor: torch.Tensor, src: int) -> None:
        time.sleep(2 * (rank == 0))
        broadcast(group, tensor, src)

    Group.broadcast = late  # type: ignore[method-assign]
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    if rank == world_size - 1:
        signal.setitimer(signal.ITIMER_REAL, 1.0)
    try:
        broadcast_params(model)
    except KeyboardInterrupt:
        said = "KeyboardInterrupt"
    except PeerLost as error:
        said = str(error)
    dist.barrier()
    return said


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


def _with(**buffers: torch.Tensor) -> torch.nn.Module:
    model = torch.nn.Module()
    for name, buffer in buffers.items():
        model.register_buffer(name, buffer)
    return model


_ALIKE = torch.arange(6.0).view(3, 2)
_DIFFERENCES = {
    "dtype": (
        _with(a=_ALIKE.double()),
        r"buffer a: '.*32 of shape \(3, 2\) on cpu' on rank 0, 'torch.float64",
    ),
    "shape": (_with(a=_ALIKE.view(2, 3)), r"buffer a: .* of shape \(2, 3\) on cpu' on rank 1"),
    "smaller": (_with(a=_ALIKE[0]), r"buffer a: .* of shape \(2,\) on cpu' on rank 1"),
    "name": (_with(b=_ALIKE), "rank 0 has buffer a where rank 1 has buffer b"),
    "more": (_with(a=_ALIKE, b=_ALIKE.clone()), "buffer b exists on rank 1 alone"),
}
_UNSENDABLE = {
    "sparse": (_with(a=_ALIKE.to_sparse()), "buffer a is torch.sparse_coo; broadcast_params"),
    "expanded": (_with(a=torch.ones(1).expand(3)), "buffer a has elements that share memory"),
    "meta": (_with(a=_ALIKE.to("meta")), "buffer a is on the meta device; broadcast_params"),
    "lazy": (torch.nn.LazyLinear(2), "parameter weight is a UninitializedParameter without memory of its own"),
}


def _refused(rank: int, world_size: int) -> list[str]:
    said = []
    for theirs, _ in (_DIFFERENCES | _UNSENDABLE).values():
        mine = _with(a=_ALIKE.clone()) if rank == 0 else theirs
        with pytest.raises((RankMismatch, UnsupportedParam)) as caught:
            broadcast_params(mine)
        said.append(str(caught.value))
    assert rank or mine.get_buffer("a").equal(_ALIKE)
    return said


def test_models_that_differ_between_ranks_are_refused_on_all_before_anything_is_written() -> None:
    for said in run_processes(2, _refused):
        for text, (_, expected) in zip(said, (_DIFFERENCES | _UNSENDABLE).values(), strict=True):
            assert re.search(expected, text), text


_MODEL = torch.nn.Linear(2, 2)
_MISTAKES: dict[str, tuple[Callable[[], None], type[Exception], str]] = {
    "model": (lambda: broadcast_params(None), ConfigTypeError, "takes a module, got a NoneType"),  # type: ignore[arg-type]
    "src": (lambda: broadcast_params(_MODEL, src=7), ConfigError, "src must be a rank of the group, 0 to 1, got 7"),
    "group": (
        lambda: broadcast_params(_MODEL, process_group="x"),
        ConfigTypeError,
        "process_group must be a ProcessGroup, a DeviceMesh or None, got str",
    ),
    "another src": (lambda: broadcast_params(_MODEL, src=1), RankMismatch, "src: 0 on rank 0, 1 on rank 1"),
}


def _mistakes_of_the_last_rank(rank: int, world_size: int) -> None:
    for mistake, kind, text in _MISTAKES.values():
        with pytest.raises(kind, match=re.escape(text)) as caught:
            mistake() if rank == world_size - 1 else broadcast_params(_MODEL)
        assert kind is RankMismatch or str(caught.value).startswith("rank 1: ") is (rank == 0)
        broadcast_params(_MODEL)


def test_a_mistake_of_one_rank_is_an_error_on_all() -> None:
    run_processes(2, _mistakes_of_the_last_rank)


def _iterator_that_fails_on_the_last_rank(rank: int, world_size: int) -> None:
    class Odd(torch.nn.Module):
        def parameters(self, recurse: bool = True) -> Any:
            raise KeyError("weight")

    kind = KeyError if rank == world_size - 1 else ZeroOptError
    with pytest.raises(kind, match="weight") as caught:
        broadcast_params(Odd() if rank == world_size - 1 else _MODEL)
    assert type(caught.value) is kind
    broadcast_params(_MODEL)


def test_an_exception_of_one_ranks_model_is_an_error_on_all() -> None:
    run_processes(2, _iterator_that_fails_on_the_last_rank)
