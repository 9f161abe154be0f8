"""An optimizer that ends in another way than close(), and ranks that fail or end while the others go on."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import zero_opt
from test.support.actors import rank_actor
from test.support.failures import PATIENCE_S
from test.support.harness import assert_bitwise, run_processes
from test.support.scenario import BUCKET_MB
from zero_opt.system.threads import BackgroundThreads
from zero_opt.system.waiting import until


def _fork_between_steps(rank: int, world_size: int, forks: bool, exchange: str) -> list[Tensor]:
    actor = rank_actor(rank, zero_opt.Overlapped(BUCKET_MB, exchange=exchange))
    for number in range(3):
        actor.backward(number, everyone=True)
        actor.optimizer.step()
        actor.optimizer.zero_grad()
        pid = os.fork() if forks else None
        if pid == 0:
            signal.alarm(100)  # should it hang, nobody else would end it
            del actor
            gc.collect()
            os._exit(0)
        if pid is not None:
            assert os.waitpid(pid, 0)[1] == 0
    return [param.detach().clone() for param in actor.params]


def test_a_forked_child_that_drops_it_does_not_disturb_the_parent() -> None:
    for exchange in ("auto", "backend"):
        plain = run_processes(2, _fork_between_steps, False, exchange)
        for ours, theirs in zip(run_processes(2, _fork_between_steps, True, exchange), plain, strict=True):
            assert_bitwise(ours, theirs)


def _train_in_child(optimizer: Any, backward: Callable[[], None]) -> None:
    """Write to state, reduce gradients, begin rounds and void them, step."""
    for entry in optimizer.state.values():
        for value in entry.values():
            if value.dim():
                value.mul_(3)
    for _ in range(2):
        backward()
    with contextlib.suppress(zero_opt.ZeroOptError):
        optimizer.step()
    for _ in range(2):
        optimizer.zero_grad()
        backward()
    optimizer.zero_grad()


def _fork_a_trainer(rank: int, world_size: int, at: int | None, options: dict[str, Any]) -> list[Tensor]:
    actor = rank_actor(rank, cls=zero_opt.CPUAdamW, **options)
    for number in range(3):
        actor.backward(number, everyone=True)
        if at == number:
            pid = os.fork()
            if pid == 0:
                signal.alarm(100)  # should it hang, nobody else would end it
                _train_in_child(actor.optimizer, lambda: actor.backward(7, everyone=True))
                os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0
        actor.optimizer.step()
        actor.optimizer.zero_grad()
    actor.optimizer.flush()
    return [param.detach().clone() for param in actor.params]


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"reduction": zero_opt.Overlapped()}, id="one bucket"),
        pytest.param({"reduction": zero_opt.Overlapped(BUCKET_MB)}, id="buckets"),
        pytest.param({"reduction": zero_opt.Overlapped(BUCKET_MB, exchange="backend")}, id="backend"),
        pytest.param({"offload": zero_opt.WorkerOffload(threads=1)}, id="worker"),
        pytest.param({"offload": zero_opt.WorkerOffload(threads=1, speculate=True)}, id="speculate"),
        pytest.param({"offload": zero_opt.NVMeOffload(".", threads=1)}, id="nvme"),
    ],
)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_forked_child_that_trains_does_not_disturb_the_ranks(
    world_size: int, options: dict[str, Any], at: int
) -> None:
    plain = run_processes(world_size, _fork_a_trainer, None, options)
    for ours, theirs in zip(run_processes(world_size, _fork_a_trainer, at, options), plain, strict=True):
        assert_bitwise(ours, theirs)


def _collected_in(collect: Callable[[], object]) -> None:
    """Drop an optimizer that refers to itself, and collect it; its threads end, with those of its groups."""
    gc.collect()
    tasks = len(os.listdir("/proc/self/task"))
    gc.disable()
    param = nn.Parameter(torch.ones(8))
    optimizer: Any = zero_opt.ShardedOptimizer([param], torch.optim.AdamW)
    param.sum().backward()
    optimizer.step()
    optimizer.itself, dropped = optimizer, weakref.ref(optimizer)
    del optimizer
    assert len(os.listdir("/proc/self/task")) > tasks
    collect()
    gc.enable()
    assert dropped() is None
    assert until(lambda: len(os.listdir("/proc/self/task")) <= tasks, 300.0)


def _collected_in_modes(rank: int, world_size: int) -> None:
    dist.barrier()  # the first collective of the default group, whose threads last
    _collected_in(gc.collect)
    _collected_in(lambda: torch.func.grad(lambda x: (gc.collect(), x.sum())[1])(torch.ones(2)))
    with FakeTensorMode() as mode:
        pass

    def faked() -> None:
        with mode:
            gc.collect()

    _collected_in(faked)

    def functionalized(x: Tensor) -> Tensor:
        gc.collect()
        return x + 1

    _collected_in(lambda: torch.func.functionalize(functionalized)(torch.ones(2)))
    _collected_in(lambda: torch.jit.trace(functionalized, torch.ones(2)))


def test_a_dropped_optimizer_ends_wherever_it_is_collected() -> None:
    """The garbage collector may run inside a mode of torch's, which would take the messages of its end."""
    run_processes(2, _collected_in_modes)


def _end_while_forking(rank: int, world_size: int, closes: bool) -> None:
    """Children have the connections open for a while, as those of a DataLoader or of subprocess do.

    A fork has all pages copied again that are written to: after a few rounds there are forks only as an optimizer ends.
    """
    warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)
    forks, forked, over = (threading.Event() for _ in range(3))

    def fork() -> None:
        while forks.wait(PATIENCE_S) and not over.is_set():
            child = os.fork()
            if child == 0:
                time.sleep(0.02)
                os._exit(0)
            forked.set()
            os.waitpid(child, 0)

    forking = threading.Thread(target=fork)
    forking.start()
    for number in range(12):
        if number < 3:
            forks.set()
        param = nn.Parameter(torch.ones(8))
        optimizer = zero_opt.ShardedOptimizer([param], torch.optim.AdamW)
        param.sum().backward()
        optimizer.step()
        forked.clear()
        forks.set()
        assert forked.wait(PATIENCE_S)
        if closes:
            optimizer.close()
        del optimizer
        gc.collect()
        dist.barrier()
        forks.clear()
    over.set()
    forks.set()
    forking.join()


@pytest.mark.parametrize("closes", [False, True])
def test_optimizers_end_while_children_have_their_connections(closes: bool) -> None:
    run_processes(3, _end_while_forking, closes)


_SCRIPT = """
import os, sys
import torch, torch.distributed as dist, zero_opt
from zero_opt.comm import process_exit
from zero_opt.system import background_thread
from test.support.scenario import BUCKET_MB
background_thread._PATIENCE_S = {patience}
process_exit._EXIT_S = 0.5
rank, world_size = int(sys.argv[1]), 2
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[2], world_size), rank=rank, world_size=world_size)
params = [torch.nn.Parameter(torch.ones(100)) for _ in range(4)]
policy = zero_opt.Overlapped(BUCKET_MB, exchange={exchange!r})
optimizer = zero_opt.ShardedOptimizer(params, torch.optim.Adam, reduction=policy)
def backward():
    torch.stack([param.sum() for param in params]).sum().backward()
backward(); optimizer.step(); optimizer.zero_grad()
if rank == 1:
    {peer}
backward()
{last}
"""


def _exits(folder: Path, **lines: object) -> list[int]:
    """What two processes that run the script exit with; the peer's input ends when the first has."""
    code, store = _SCRIPT.format(**{"patience": 5, **lines}), str(folder / "store")
    command = [sys.executable, "-c", code]
    ranks = [subprocess.Popen([*command, str(rank), store], stdin=subprocess.PIPE) for rank in range(2)]
    try:
        return [rank.communicate(timeout=300) and rank.returncode for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


@pytest.mark.parametrize("exchange", ["auto", "backend"])
def test_a_survivor_of_a_peers_exception_exits_in_order(exchange: str, tmp_path: Path) -> None:
    assert _exits(tmp_path, exchange=exchange, peer="raise ValueError", last="optimizer.step()") == [1, 1]


@pytest.mark.parametrize("exchange", ["auto", "backend"])
def test_a_peer_that_does_not_come_does_not_keep_a_process_from_exiting(exchange: str, tmp_path: Path) -> None:
    assert _exits(tmp_path, exchange=exchange, peer="sys.exit(len(sys.stdin.read()))", last="", patience=0.01) == [0, 0]


class Stumbles(torch.optim.Adam):
    """Fails once on one rank."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            type(self).fails = False
            raise MemoryError("no more of it")
        return super().step(closure)


def _fail_once(rank: int, world_size: int, call: str) -> tuple[str, list[Tensor]]:
    zero_opt.register_elementwise(Stumbles)
    params = [torch.nn.Parameter(torch.ones(300)) for _ in range(3)]
    optimizer = zero_opt.ShardedOptimizer(params, Stumbles, reduction=zero_opt.Overlapped(BUCKET_MB))

    def step() -> None:
        torch.stack([param.square().sum() for param in params]).sum().backward()
        try:
            optimizer.step()
        finally:
            optimizer.zero_grad()

    step()
    Stumbles.fails = rank == 1
    with pytest.raises(MemoryError if rank == 1 else zero_opt.StepFailed, match="no more of it") as caught:
        step()
    for _ in range(2 if call == "consolidate" else 0):  # until there is another step
        with pytest.raises(zero_opt.StepFailed, match="step 1 failed with MemoryError: no more of it"):
            optimizer.consolidate_state_dict()
    step()
    optimizer.consolidate_state_dict()
    optimizer.close()
    return str(caught.value), [param.detach() for param in params]


@pytest.mark.parametrize("call", ["step", "consolidate"])
def test_a_step_that_fails_on_one_rank_is_an_error_on_all_and_keeps_nobody_waiting(call: str) -> None:
    (here, ours), (there, others) = run_processes(2, _fail_once, call)
    assert "step 1 failed with MemoryError: no more of it" in here and here.startswith("rank 1: ")
    assert there == "no more of it"
    assert_bitwise(ours, others)


def _outlive(rank: int, world_size: int, exchange: str, moment: str) -> str:
    params = [torch.nn.Parameter(torch.ones(300))]
    optimizer = zero_opt.ShardedOptimizer(
        params,
        torch.optim.Adam,
        reduction=zero_opt.Overlapped(BUCKET_MB, exchange=exchange),
        checks=zero_opt.Checks(timeout=0.5 if moment == "never" else 60),
    )
    if rank == 1:
        if moment == "never":
            signal.pause()
        if moment == "step":
            params[0].sum().backward()
        os._exit(7)
    params[0].sum().backward()
    with pytest.raises(zero_opt.PeerLost) as caught:
        optimizer.step()
    return str(caught.value)


@pytest.mark.parametrize("exchange", ["auto", "backend"])
@pytest.mark.parametrize("moment", ["backward", "step", "never"])
def test_a_rank_that_has_ended_or_never_comes_is_a_typed_error(exchange: str, moment: str) -> None:
    never = (1,) if moment == "never" else ()
    message, _ = run_processes(2, _outlive, exchange, moment, timeout=30, expect_errors=True, may_hang=never)
    assert isinstance(message, str)
    assert re.search("rank 1|another rank", message)
    assert re.search("has died|has ended|does not answer|has not come", message)


@pytest.mark.parametrize("apart", ["offload", "masters"])
def test_a_fork_of_a_rank_alone_cannot_step(apart: str) -> None:
    """Its thread was not forked: what waits for that would wait for ever."""
    run_processes(1, _fork_alone, apart)


def _fork_alone(rank: int, world_size: int, apart: str) -> None:
    params = [nn.Parameter(torch.ones(70, dtype=torch.bfloat16))]
    options: dict[str, Any] = {"offload": zero_opt.CPUOffload()}
    if apart == "masters":
        options = {"precision": zero_opt.MixedPrecision(torch.float32)}
    optimizer = zero_opt.ShardedOptimizer(params, torch.optim.AdamW, **options)
    params[0].sum().backward()
    optimizer.step()
    child = os.fork()
    if not child:
        code = 1
        try:
            params[0].sum().backward()
            with pytest.raises(zero_opt.ProcessGroupError, match="forked"):
                optimizer.step()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    params[0].sum().backward()
    optimizer.step()
    optimizer.close()


def _cannot_serve(rank: int, world_size: int, which: str) -> tuple[str, str]:
    start = BackgroundThreads.start

    def refused(threads: BackgroundThreads, thread: threading.Thread) -> None:
        if rank == 1 and thread.name == which:
            raise zero_opt.OutOfResources("can't start new thread")
        start(threads, thread)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BackgroundThreads, "start", refused)
        with pytest.raises(zero_opt.OutOfResources) as caught:
            zero_opt.ShardedOptimizer([nn.Parameter(torch.ones(3))], torch.optim.SGD, lr=0.1)
    optimizer = zero_opt.ShardedOptimizer([nn.Parameter(torch.ones(3))], torch.optim.SGD, lr=0.1)
    optimizer.close()
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize("which", ["zero_opt ring", "zero_opt state at the end"])
def test_a_rank_without_threads_to_serve_its_state_is_an_error_on_all(which: str) -> None:
    found = run_processes(3, _cannot_serve, which)
    assert [text for _, text in found] == [
        "rank 1: can't start new thread",
        "can't start new thread",
        "rank 1: can't start new thread",
    ]


@pytest.mark.parametrize("where", ["none", "masters", "CPUOffload", "WorkerOffload", "NVMeOffload", "Selective"])
def test_state_of_a_rank_alone_can_be_read_after_close(where: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "none": {},
        "masters": {"precision": zero_opt.MixedPrecision(master_dtype=torch.float32)},
        "CPUOffload": {"offload": zero_opt.CPUOffload()},
        "WorkerOffload": {"offload": zero_opt.WorkerOffload()},
        "NVMeOffload": {"offload": zero_opt.NVMeOffload(tmp_path)},
        "Selective": {"offload": zero_opt.CPUOffload(selective=zero_opt.Selective())},
    }[where]
    params = [nn.Parameter(torch.ones(8, 40).bfloat16()), nn.Parameter(torch.ones(70).bfloat16())]
    optimizer = zero_opt.ShardedOptimizer(params, torch.optim.AdamW, fused=True, **options)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    assert len(before["state"]) == 2
    optimizer.close()
    assert_bitwise(optimizer.state_dict(), before)
