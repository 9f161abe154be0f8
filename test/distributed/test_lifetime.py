"""An optimizer that ends in another way than close(): dropped in a forked child, at interpreter exit, with an error."""

from __future__ import annotations

import gc
import os
import signal

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
