"""Many ranks as processes of one host, each with few descriptors: ZERO_OPT_RANKS of them, 256 in `make test-ranks`."""

from __future__ import annotations

import os
import resource
import socket
from datetime import timedelta

import torch
import torch.distributed as dist

import zero_opt
from test.support.harness import run_processes
from zero_opt.comm.shared_memory_exchange import HostExchange

WORLD_SIZE = int(os.environ.get("ZERO_OPT_RANKS", "24"))
# What many systems allow by default, and how many of those a program has open as it begins, at least.
_DESCRIPTORS, _AT_START = 1024, 16
_STEPS, _PATIENCE_S = 5, 600.0


def _join(rank: int, world_size: int, listening: int) -> None:
    """Make the user's group as torchrun does: rank 0 serves the store, and every two ranks have a connection."""
    patience, port = timedelta(seconds=_PATIENCE_S), socket.socket(fileno=os.dup(listening)).getsockname()[1]
    served = {"master_listen_fd": listening} if rank == 0 else {}
    store = dist.TCPStore("127.0.0.1", port, None, rank == 0, patience, wait_for_workers=False, **served)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=patience)


def _train(rank: int, world_size: int, listening: int) -> tuple[list[float], bool, int]:
    """Return the parameters' sums, whether ranks share memory, and the descriptors of this process.

    A rank has inherited three more for each that was forked before it, which the parent watches: those do not count.
    """
    inherited = len(os.listdir("/proc/self/fd")) - _AT_START
    limit = max(inherited, 0) + _DESCRIPTORS
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    _join(rank, world_size, listening)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 32))
    optimizer = zero_opt.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3, fused=True)
    for step in range(_STEPS):
        model(torch.full((2, 32), float(rank + step))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    taken = len(os.listdir("/proc/self/fd")) - inherited
    shared = isinstance(optimizer._engine.parts.exchanges["cpu"], HostExchange)  # type: ignore[attr-defined]
    optimizer.close()
    dist.barrier()
    dist.destroy_process_group()
    return [float(param.detach().double().sum()) for param in model.parameters()], shared, taken


def test_many_ranks_train_over_shared_memory_with_few_descriptors() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=WORLD_SIZE) as server:
        server.set_inheritable(True)
        found = run_processes(WORLD_SIZE, _train, server.fileno(), backend=None, timeout=_PATIENCE_S)
    assert len({tuple(sums) for sums, _, _ in found}) == 1
    assert all(shared for _, shared, _ in found)
    assert all(0 < taken < _DESCRIPTORS for _, _, taken in found)
