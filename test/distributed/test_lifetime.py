"""An optimizer that ends in another way than close(): dropped in a forked child, at interpreter exit, with an error."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from torch import Tensor

import zero_opt
from test.distributed.actors import rank_actor
from test.distributed.harness import assert_bitwise, run_processes
from test.distributed.scenario import BUCKET_MB


def _fork_between_steps(rank: int, world_size: int, forks: bool, exchange: str) -> list[Tensor]:
    actor = rank_actor(rank, zero_opt.Overlapped(BUCKET_MB, exchange=exchange))
    for number in range(3):
        actor.backward(number, everyone=True)
        actor.optimizer.step()
        actor.optimizer.zero_grad()
        pid = os.fork() if forks else None
        if pid == 0:
            signal.alarm(10)  # should it hang, nobody else would end it
            del actor
            gc.collect()
            os._exit(0)
        if pid is not None:
            assert os.waitpid(pid, 0)[1] == 0
    return [param.detach().clone() for param in actor.params]


def test_a_forked_child_that_drops_it_does_not_disturb_the_parent() -> None:
    for exchange in ("auto", "backend"):
        plain = run_processes(2, _fork_between_steps, False, exchange)
        for ours, theirs in zip(run_processes(2, _fork_between_steps, True, exchange, timeout=20), plain, strict=True):
            assert_bitwise(ours, theirs)


_SCRIPT = """
import os, sys
import torch, torch.distributed as dist, zero_opt
from zero_opt import serial_thread
from test.distributed.scenario import BUCKET_MB
serial_thread._PATIENCE_S = {patience}
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
        return [rank.communicate(timeout=60) and rank.returncode for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


@pytest.mark.parametrize("exchange", ["auto", "backend"])
def test_a_survivor_of_a_peers_exception_exits_in_order(exchange: str, tmp_path: Path) -> None:
    assert _exits(tmp_path, exchange=exchange, peer="raise ValueError", last="optimizer.step()") == [1, 1]


@pytest.mark.parametrize("exchange", ["auto", "backend"])
def test_a_peer_that_does_not_come_does_not_keep_a_process_from_exiting(exchange: str, tmp_path: Path) -> None:
    assert _exits(tmp_path, exchange=exchange, peer="sys.exit(len(sys.stdin.read()))", last="", patience=0.01) == [0, 0]
