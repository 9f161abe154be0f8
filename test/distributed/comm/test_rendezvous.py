"""Ranks that are passed different process groups, or none: all hear of it, and what they have is usable afterwards."""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zero_opt
from test.support.failures import PATIENCE_S
from test.support.harness import assert_bitwise, run_processes
from zero_opt.comm import meeting_places, process_exit, process_identity, rendezvous, store
from zero_opt.comm.connecting import Connecting, _Addresses
from zero_opt.comm.groups import Group
from zero_opt.comm.process_identity import ProcessIdentity

MOST_SECONDS = 60


def _train(group: Any, rank: int) -> Tensor:
    param = torch.nn.Parameter(torch.ones(300))
    opt = zero_opt.ShardedOptimizer([param], torch.optim.Adam, group)
    (param * (rank + 1)).sum().backward()
    opt.step()
    opt.close()
    return param.detach()


def _refused(group: Any) -> tuple[str, str]:
    begin = time.monotonic()
    with pytest.raises(zero_opt.ZeroOptError) as caught:
        zero_opt.ShardedOptimizer([torch.nn.Parameter(torch.ones(3))], torch.optim.Adam, group)
    assert time.monotonic() - begin < MOST_SECONDS
    return type(caught.value).__name__, str(caught.value)


def _afterwards(rank: int, world_size: int) -> Tensor:
    """The user's own calls in the groups are matched as before."""
    for group in dist.distributed_c10d._world.pg_map:
        numbers = torch.tensor([rank])
        dist.all_reduce(numbers, group=group)
        assert numbers.item() == sum(dist.get_process_group_ranks(group))
    return _train(None, rank)


def _wrong_in_turn(rank: int, world_size: int) -> tuple[list[tuple[str, str]], Tensor]:
    """Each rank by itself, twice, with a good construction between, then all; late, too."""
    found = []
    for wrong in (0, 1, 1, 2):
        found.append(_refused("gloo" if rank == wrong else None))
        _train(None, rank)
    if rank == 0:
        time.sleep(rendezvous.LOOK_AFTER_S + 0.2)
    found.append(_refused("gloo" if rank == 1 else None))
    _refused("nccl")
    return found, _afterwards(rank, world_size)


def test_a_wrong_group_of_one_rank_is_its_error_on_all_and_all_can_go_on() -> None:
    outcomes = run_processes(3, _wrong_in_turn)
    for turn, wrong in enumerate((0, 1, 1, 2, 1)):
        for rank, (found, _) in enumerate(outcomes):
            name, message = found[turn]
            assert name == "ConfigTypeError"
            assert message.startswith(
                "process_group must be" if rank == wrong else f"rank {wrong}: process_group must be"
            )
    for _, param in outcomes:
        assert_bitwise(param, outcomes[0][1])


def _with_a_destroyed_group(rank: int, world_size: int) -> tuple[list[tuple[str, str]], Tensor]:
    """On one rank alone, then on all."""
    twin = dist.new_group([0, 1])
    dist.destroy_process_group(twin)
    return [_refused(twin if rank == 1 else None), _refused(twin)], _afterwards(rank, world_size)


def test_a_group_that_was_destroyed() -> None:
    said = "process_group was destroyed"
    for rank, (found, _) in enumerate(run_processes(2, _with_a_destroyed_group)):
        assert [name for name, _ in found] == ["ConfigError"] * 2
        assert [message.startswith(said if rank else f"rank 1: {said}") for _, message in found[:1]] == [True]
        assert found[1][1].startswith(said) or found[1][1].startswith(f"rank {1 - rank}: {said}")


def _apart(rank: int, world_size: int) -> tuple[list[tuple[str, str]], Tensor]:
    """One rank in another group of the same ranks; then in one of fewer, of which a third rank is no member."""
    twin, pair = dist.new_group([0, 1, 2]), dist.new_group([0, 1])
    found = [_refused(twin if rank == 2 else None), _refused(pair if rank == 1 else None)]
    return found, _afterwards_without(pair, rank, world_size)


def _afterwards_without(pair: Any, rank: int, world_size: int) -> Tensor:
    if rank < 2:
        _train(pair, rank)
    return _train(None, rank)


def test_ranks_in_different_groups_are_told_which() -> None:
    outcomes = run_processes(3, _apart)
    for found, param in outcomes:
        assert {name for name, _ in found} == {"RankMismatch"}
        assert all("pass the same one on every rank" in message for _, message in found)
        assert "of ranks [0, 1] on rank 1" in found[1][1]
        assert_bitwise(param, outcomes[0][1])


def _one_is_late(rank: int, world_size: int) -> Tensor:
    """Longer than the first looks are apart."""
    if rank:
        time.sleep(rendezvous.LOOK_AFTER_S + 4 * rendezvous._LOOK_APART_S)
    return _train(None, rank)


def test_a_late_rank_is_waited_for() -> None:
    first, second = run_processes(2, _one_is_late)
    assert_bitwise(first, second)


def _one_does_not_come(rank: int, world_size: int) -> Any:
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["told 0", "told 2"], timedelta(seconds=300))
        with pytest.raises(zero_opt.PeerSilent, match=r"rank [02] has given up .*: rank 1 did not come to Sharded"):
            _train(None, rank)
        return None
    rendezvous.WARN_AFTER_S = 1.5  # type: ignore[attr-defined]
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zero_opt").addHandler(handler)
    with pytest.raises(zero_opt.PeerLost) as caught:
        _train(None, rank)
    store.set(f"told {rank}", "")
    return type(caught.value).__name__, str(caught.value), logged


def test_a_rank_that_does_not_construct_is_named_in_a_warning_and_in_the_error() -> None:
    first, _, last = run_processes(3, _one_does_not_come, group_timeout=8)
    for name, text, logged in (first, last):
        assert name == "PeerSilent"
        assert text.startswith("rank 1 did not come to ShardedOptimizer() in "), text
        assert "must construct it" in text and "init_process_group(timeout=...)" in text
        (warning,) = logged
        assert "ShardedOptimizer() has waited" in warning and " s for rank 1; every rank" in warning


def _one_calls_something_else(rank: int, world_size: int) -> str:
    """Rank 0 waits for rank 1 in one call, and comes to another one once it has given up."""
    store, model = _store_of_ranks(), torch.nn.Linear(3, 3)
    if rank:
        store.wait(["told 0"], timedelta(seconds=PATIENCE_S))
    with pytest.raises(zero_opt.PeerSilent) as caught:
        zero_opt.ShardedOptimizer(model.parameters(), torch.optim.SGD) if rank else zero_opt.broadcast_params(model)
    store.set(f"told {rank}", "")
    return str(caught.value)


def test_a_rank_that_was_given_up_hears_in_which_call() -> None:
    first, second = run_processes(2, _one_calls_something_else, group_timeout=8)
    assert first.startswith("rank 1 did not come to broadcast_params() in ")
    assert second.startswith(f"rank 0 has given up waiting for this one: {first}")


def _one_of_a_subgroup_does_not_come(rank: int, world_size: int) -> str:
    group, store = dist.new_group([0, 2], timeout=timedelta(seconds=8)), _store_of_ranks()
    if rank != 0:
        store.wait(["told 0"], timedelta(seconds=PATIENCE_S))
        return ""
    with pytest.raises(zero_opt.PeerLost) as caught:
        _train(group, rank)
    store.set("told 0", "")
    return str(caught.value)


def test_a_rank_of_a_subgroup_has_its_global_rank_in_the_error() -> None:
    said, *_ = run_processes(3, _one_of_a_subgroup_does_not_come)
    assert said.startswith("rank 1 (global rank 2) did not come to ShardedOptimizer() in "), said


# -- calls that are left ----------------------------------------------------------------------------------------------

CALLS: dict[str, Any] = {
    "ShardedOptimizer()": lambda rank: _train(None, rank),
    "broadcast_params()": lambda rank: zero_opt.broadcast_params(torch.nn.Linear(3, 3)),
}
# Where a signal falls while a rank is in such a call; the first is before the others have come.
PLACES: dict[str, tuple[type, str]] = {
    "waiting": (rendezvous.Meeting, "_look_around"),
    "connecting": (Connecting, "meet"),
    "between messages": (Group, "broadcast"),
}


def _leaves_a_call(rank: int, world_size: int, first: str, place: str, error: type[BaseException]) -> str:
    """Rank 0 leaves the call by its signal handler's exception; all repeat it then, and make the other one."""
    store = dist.distributed_c10d._get_default_store()
    if rank:
        if place == "waiting":
            store.wait(["left"], timedelta(seconds=PATIENCE_S))
        with pytest.raises(zero_opt.PeerLost) as caught:
            CALLS[first](rank)
    else:
        signal.signal(signal.SIGALRM, lambda *_: _raise(error))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(*PLACES[place], lambda *_: signal.raise_signal(signal.SIGALRM))
            with pytest.raises(error):
                CALLS[first](rank)
        store.set("left", "")
    for call in (first, *CALLS, first):  # the ranks have met equally often
        CALLS[call](rank)
    return str(caught.value) if rank else ""


def _raise(error: type[BaseException]) -> None:
    raise error("by a signal handler")


@pytest.mark.parametrize(
    ("first", "place", "error"),
    [
        *product(CALLS, ["waiting"], [KeyboardInterrupt, RuntimeError]),
        *product(CALLS, ["connecting"], [KeyboardInterrupt]),
        ("broadcast_params()", "between messages", RuntimeError),
    ],
)
def test_a_call_that_is_left_is_known_to_ranks_that_come_later(
    first: str, place: str, error: type[BaseException]
) -> None:
    for said in run_processes(2, _leaves_a_call, first, place, error)[1:]:
        what = f"an exception on rank 0 ({error.__name__}: by a signal handler) has ended {first} there; call it again"
        assert said.startswith(what), said


def _in_different_calls(rank: int, world_size: int) -> str:
    with pytest.raises(zero_opt.RankMismatch) as caught:
        list(CALLS.values())[rank](rank)
    for call in CALLS.values():
        call(rank)
    return str(caught.value)


def test_ranks_in_different_calls_hear_which() -> None:
    both = "rank 0 called ShardedOptimizer() where rank 1 called broadcast_params(); every rank must call both"
    assert all(said.startswith(both) for said in run_processes(2, _in_different_calls))


def _constructed_before_the_group(rank: int, world_size: int, folder: Path, offload: zero_opt.Offload) -> None:
    param = torch.nn.Parameter(torch.ones(3))
    opt = zero_opt.ShardedOptimizer([param], torch.optim.Adam, offload=offload)
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    param.sum().backward()
    if world_size == 1:
        opt.step()
        return
    with pytest.raises(zero_opt.ProcessGroupError, match=r"constructed before .*init_process_group"):
        opt.step()
    assert torch.equal(param, torch.ones(3))


@pytest.mark.parametrize("offload", [None, zero_opt.CPUOffload()])
@pytest.mark.parametrize("world_size", [1, 2])
def test_an_optimizer_that_was_constructed_before_the_process_group_takes_no_step(
    world_size: int, offload: zero_opt.Offload, tmp_path: Path
) -> None:
    run_processes(world_size, _constructed_before_the_group, tmp_path, offload, backend=None)


# -- ranks that are stopped, or end -----------------------------------------------------------------------------------


def _strikes_itself(rank: int, world_size: int, number: int, place: str, apart: bool = False) -> Any:
    """Rank 1 does while it waits for rank 2, which comes then; as the others connect to it, have done so, or wait."""
    if apart:
        process_identity.host_if_known = lambda: f"host {rank}"  # type: ignore[attr-defined]
    folder = dist.distributed_c10d._get_default_store()
    if rank == 1:

        def strike(*given: Any) -> Any:
            setattr(owner, place, method)
            folder.set("struck", str(os.getpid()))
            os.kill(os.getpid(), number)
            return method(*given)

        owners = {"_look_around": rendezvous.Meeting, "meet": Connecting, "wait": _Addresses, "all_gather": Group}
        owner: Any = owners.get(place, folder)
        method = getattr(owner, place, lambda: None)
        if place == "before it comes":
            strike()
        setattr(owner, place, strike)
    if rank == 2 and place == "_look_around":
        folder.wait(["struck"], timedelta(seconds=PATIENCE_S))
    with pytest.raises(zero_opt.PeerLost) as caught:
        _train_with(zero_opt.Checks(hang_timeout=2.0))
    folder.set(f"told {rank}", "")
    folder.wait(["told 0", "told 2"], timedelta(seconds=PATIENCE_S))
    if rank == 0 and number == signal.SIGSTOP:
        os.kill(int(folder.get("struck")), signal.SIGCONT)
        folder.wait(["told 1"], timedelta(seconds=PATIENCE_S))
    return type(caught.value).__name__, str(caught.value)


def _train_with(checks: zero_opt.Checks) -> None:
    zero_opt.ShardedOptimizer([torch.nn.Parameter(torch.ones(3))], torch.optim.Adam, checks=checks)


@pytest.mark.parametrize("place", ["_look_around", "wait", "meet", "all_gather"])
def test_a_rank_that_is_stopped_in_construction_is_named_after_hang_timeout(place: str) -> None:
    ranks = 3, _strikes_itself, signal.SIGSTOP, place
    first, stopped, last = run_processes(*ranks, timeout=PATIENCE_S)
    for name, text in (first, last):
        assert name == "PeerSilent", text
        assert text.startswith("rank 1 (pid "), text
        assert ") has been stopped " in text and "kill -CONT" in text
    name, text = stopped
    assert name == "PeerSilent", text
    assert re.match(r"(rank \d has|the other ranks have) given up waiting for this one", text), text


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("place", ["before it comes", "_look_around", "wait", "meet", "all_gather"])
def test_a_rank_that_is_killed_in_construction_is_named(place: str, apart: bool) -> None:
    ranks = 3, _strikes_itself, signal.SIGKILL, place, apart
    first, _, last = run_processes(*ranks, expect_errors=True)
    for name, text in (first, last):
        assert name == "PeerLost", text
        assert text.startswith("rank 1 "), text
        assert "has ended" in text


def _program_ends(rank: int, world_size: int, call: str, failed: bool) -> str:
    """Rank 1 ends its program, as far as it says, and its process lives on, with all connections of the user's."""
    optimizer, said = zero_opt.ShardedOptimizer([torch.nn.Parameter(torch.ones(3))], torch.optim.Adam), ""
    if rank == 1:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(process_exit, "failed", lambda: failed)
            process_exit.serve_to_the_end()  # returns once the other ranks have closed, unless the program has failed
        _store_of_ranks().wait(["told 0", "told 2"], timedelta(seconds=PATIENCE_S))
    else:
        with pytest.raises(zero_opt.PeerLost) as caught:
            CALLS[call](rank)
        said = str(caught.value)
        _store_of_ranks().set(f"told {rank}", "")
    optimizer.close()
    return said


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(("failed", "how"), [(False, ""), (True, " with an exception")])
def test_a_rank_whose_program_has_ended_is_not_waited_for(call: str, failed: bool, how: str) -> None:
    first, _, last = run_processes(3, _program_ends, call, failed, group_timeout=60.0)
    for said in (first, last):
        assert said.startswith(f"rank 1 has ended its program{how} while another waited for it in {call};"), said


def _server_is_stopped(rank: int, world_size: int, folder: Path) -> str:
    store._ANSWER_S = 2.0
    if rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        (folder / "new").write_text(str(port))
        (folder / "new").rename(folder / "port")
    while not (folder / "port").exists():
        time.sleep(0.01)
    tcp = dist.TCPStore("127.0.0.1", int((folder / "port").read_text()), world_size, rank == 0)
    dist.init_process_group("gloo", store=tcp, rank=rank, world_size=world_size)
    if rank == 0:
        dist.barrier()
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.barrier()
    with pytest.raises(zero_opt.PeerLost) as caught:
        _train(None, rank)
    return str(caught.value)


def test_a_store_that_does_not_answer_ends_the_wait(tmp_path: Path) -> None:
    _, text = run_processes(2, _server_is_stopped, tmp_path, timeout=PATIENCE_S, backend=None, may_hang={0})
    assert text.startswith("the process group's store has not answered for 2 s; rank 0, or the launcher, serves it")


def _store_file_is_limited(rank: int, world_size: int, kind: int, limit: int, folder: Path) -> str:
    """Return the error of a rank that may write nothing to the store's file, or little, or may not open it."""
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    dist.barrier()
    limits = resource.getrlimit(kind)
    resource.setrlimit(kind, (limit, limits[1]))
    try:
        if limit:  # at 0 only the store is called: connections would meet the limit first
            _train_with(zero_opt.Checks())
        rendezvous.StoreCalls()(store.set, "key", "value")
    except zero_opt.OutOfResources as error:
        return str(error)
    finally:
        resource.setrlimit(kind, limits)
    return "no error"


@pytest.mark.parametrize(("kind", "limit"), [(resource.RLIMIT_FSIZE, "-f"), (resource.RLIMIT_NOFILE, "-n")])
def test_a_store_whose_file_a_limit_bounds_names_the_limit(kind: int, limit: str, tmp_path: Path) -> None:
    for text in run_processes(2, _store_file_is_limited, kind, 0, tmp_path, backend=None):
        assert text.startswith("the process group's store fails in this process (") and f"'ulimit {limit}'" in text


def test_a_store_whose_file_has_too_little_room_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    """No rank can read on from there."""
    for text in run_processes(2, _store_file_is_limited, resource.RLIMIT_FSIZE, 4096, tmp_path, backend=None):
        assert text.startswith("the process group's store is a file that may need ") and "'ulimit -f'" in text


def _earlier_group(rank: int, world_size: int) -> Tensor:
    """What a process has left there that has ended, and one that runs, is there before the ranks come."""
    group, members = dist.group.WORLD, tuple(range(world_size))
    assert group is not None
    place = meeting_places.meeting_place((group.group_name, members), 0)
    if rank == 0:
        ended = subprocess.Popen([sys.executable, "-c", ""])
        ended.wait(PATIENCE_S)
        left = ProcessIdentity.of_this_process()
        for other, pid in ((1, ended.pid), (2, left.pid)):
            place.set(f"came/{other}", json.dumps(["earlier", left._replace(pid=pid), "broadcast_params()"]))
        _store_of_ranks().set("left", "")
    elif rank == 1:
        _store_of_ranks().wait(["looked"], timedelta(seconds=PATIENCE_S))
    look = rendezvous.Meeting._stopped

    def looked(meeting: Any, waited: float) -> Any:
        if waited > 3.0:
            _store_of_ranks().set("looked", "")
        return look(meeting, waited)

    rendezvous.Meeting._stopped = looked  # type: ignore[method-assign]
    _store_of_ranks().wait(["left"], timedelta(seconds=PATIENCE_S))
    return _train(None, rank)


def _store_of_ranks() -> Any:
    return dist.distributed_c10d._get_default_store()


def test_what_an_earlier_group_has_left_in_the_store_is_taken_for_no_rank() -> None:
    first, *others = run_processes(3, _earlier_group)
    for param in others:
        assert_bitwise(param, first)


def _connection_timed_out(rank: int, world_size: int) -> str:
    dist.barrier()  # both are here: the limit is for what rank 1 leaves out
    group, said = dist.new_group([0, 1], timeout=timedelta(seconds=10)), ""
    dist.barrier(group)
    if rank == 0:
        with pytest.raises(RuntimeError, match="Timed out"):
            dist.all_reduce(torch.ones(1), group=group)
        with pytest.raises(zero_opt.PeerLost) as caught:
            zero_opt.ShardedOptimizer([torch.nn.Parameter(torch.ones(3))], torch.optim.SGD, group, lr=0.1)
        said = str(caught.value)
    dist.barrier()
    return said


def test_a_group_whose_connection_a_timeout_has_closed_is_not_a_rank_that_has_ended() -> None:
    said, _ = run_processes(2, _connection_timed_out)
    assert said.startswith("a call of the process group has waited too long for rank 1, and ShardedOptimizer()"), said
