"""The shared-memory exchange between real processes: bits, fallbacks, a peer that dies."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zero_opt
from test.support.descriptors import open_files
from test.support.failures import PATIENCE_S
from test.support.harness import assert_bitwise, run_processes
from zero_opt.comm import backend_exchanges, pairwise_exchange, process_identity, shared_memory_exchange
from zero_opt.comm.exchange import Ident, Run
from zero_opt.comm.pairwise_exchange import PairwiseExchange
from zero_opt.comm.shared_memory_exchange import HostExchange
from zero_opt.comm.shared_ranks import _LEFT_AT as LEFT_AT
from zero_opt.comm.shared_ranks import SharedPeer, SharedRanks, native_bucket
from zero_opt.system import extension, shared_memory

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64]


def gradient(step: int, rank: int, param: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(step * 97 + rank * 11 + param.numel())
    return torch.randn(param.shape, generator=generator).to(param.dtype)


def train(opt: zero_opt.ShardedOptimizer, params: list[Tensor], rank: int, steps: int) -> None:
    for step in range(steps):
        for _ in range(1 + step % 2):
            torch.stack([(p * gradient(step, rank, p)).sum().abs().float() for p in params]).sum().backward()
        opt.step()
        opt.zero_grad()


def make(dtype: torch.dtype, exchange: str, bucket_mb: float = 0.004) -> tuple[Any, list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    sizes = [(33, 9), (65,), (1000,), (), (7, 64)]
    params = [torch.nn.Parameter(torch.randn(size, generator=generator).to(dtype)) for size in sizes]
    policy = zero_opt.Overlapped(bucket_mb=bucket_mb, exchange=exchange)
    return zero_opt.ShardedOptimizer(params, torch.optim.SGD, lr=0.1, momentum=0.9, reduction=policy), params


def exchange_of(opt: zero_opt.ShardedOptimizer) -> Any:
    return opt._engine.parts.exchanges["cpu"]  # type: ignore[union-attr]


def test_a_peer_that_publishes_just_before_it_leaves_is_added_once(monkeypatch: pytest.MonkeyPatch) -> None:
    arenas = [shared_memory.Arena.create("test", 3 * shared_memory.PAGE) for _ in range(2)]
    group: Any = SimpleNamespace(
        timeout_s=PATIENCE_S,
        exchanging=contextlib.nullcontext,
        lookout=lambda: lambda: None,
        awaits=lambda rank: None,
        explain=lambda *_: None,
    )
    process: Any = SimpleNamespace(pid=0, has_ended=lambda: False)
    ranks = [
        SharedRanks(
            SimpleNamespace(rank=rank, **vars(group)), arenas[rank], [SharedPeer(other, process, arenas[other])]
        )  # type: ignore[arg-type]
        for rank, other in ((0, 1), (1, 0))
    ]
    grads, shards = [torch.full((16,), 1.0 + rank) for rank in range(2)], [torch.full((8,), 100.0) for _ in range(2)]
    buckets = [native_bucket([Run(0, 16, grad, True)], [0, 8, 16], torch.float32) for grad in grads]
    left = list[int]()

    def leave_first(peer: SharedPeer) -> bool:
        if not left:
            left.append(peer.rank)
            ranks[1]._native.reduce((0, 0, 0), buckets[1], shards[1].data_ptr(), 0, 0.0)
            ranks[1].leave()
        return peer.rank in left

    monkeypatch.setattr(SharedPeer, "gone", leave_first)
    assert ranks[0].reduce(Ident(0, 0, 0), buckets[0], shards[0].data_ptr())
    assert_bitwise(shards[0], torch.full((8,), 101.5))
    with pytest.raises(zero_opt.PeerLost, match=r"rank 1 .* has left, or died, before the exchange of step 1"):
        ranks[0].reduce(Ident(1, 0, 0), buckets[0], shards[0].data_ptr())
    assert arenas[0].bytes[LEFT_AT] == 1  # what it has published for that exchange is the last
    with pytest.raises(zero_opt.PeerLost, match="before the exchange of step 1"):
        ranks[0].reduce(Ident(2, 0, 0), buckets[0], shards[0].data_ptr())


def run_dtype(rank: int, world_size: int, dtype: torch.dtype, exchange: str) -> tuple[str, list[Tensor]]:
    # So that small parameters are messages by themselves too.
    pytest.MonkeyPatch().setattr(pairwise_exchange, "_LEAST_BYTES", 256)
    opt, params = make(dtype, exchange)
    kind = type(exchange_of(opt)).__name__
    train(opt, params, rank, 4)
    opt.close()
    return kind, [p.detach().clone() for p in params]


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_same_bits_as_the_gloo_exchange(world_size: int, dtype: torch.dtype) -> None:
    shared = run_processes(world_size, run_dtype, dtype, "auto")
    backend = run_processes(world_size, run_dtype, dtype, "backend")
    assert {kind for kind, _ in shared} == {"HostExchange"}
    assert {kind for kind, _ in backend} == {"PairwiseExchange"}
    for (_, ours), (_, theirs) in zip(shared, backend, strict=True):
        assert_bitwise(ours, theirs)
        assert_bitwise(ours, shared[0][1])


NEW_ARENA, MAP_PEERS = shared_memory_exchange._new_arena, shared_memory_exchange._map_peers
# Files that a descriptor may name where its number is looked up in another process.
FOREIGN: dict[str, Callable[[int], int]] = {
    "an empty file": lambda _: os.memfd_create("foreign"),
    "a pipe": lambda _: os.pipe()[0],
    "a file of the size": lambda nbytes: sized(os.open(tempfile.gettempdir(), os.O_TMPFILE | os.O_RDWR), nbytes),
    "memory that may be made shorter": lambda nbytes: sized(os.memfd_create("foreign"), nbytes),
    "another optimizer's memory": lambda nbytes: duplicate(NEW_ARENA(nbytes)),
}


def duplicate(arena: shared_memory.Arena) -> int:
    return os.dup(arena.fd)


def sized(fd: int, nbytes: int) -> int:
    os.truncate(fd, shared_memory.page_aligned(nbytes))
    return fd


def offering(other: Callable[[int], int]) -> Callable[[int], shared_memory.Arena]:
    """An arena whose descriptor names another file."""

    def new_arena(nbytes: int) -> shared_memory.Arena:
        arena, foreign = NEW_ARENA(nbytes), other(nbytes)
        os.dup2(foreign, arena.fd)
        os.close(foreign)
        return arena

    return new_arena


@contextlib.contextmanager
def limited(kind: int) -> Iterator[None]:
    """Within it, no file can be opened (RLIMIT_NOFILE), or none made longer (RLIMIT_FSIZE)."""
    limits = resource.getrlimit(kind)
    resource.setrlimit(kind, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, limits)


def with_limit(kind: int, call: Callable[..., Any]) -> Callable[..., Any]:
    def called(*arguments: Any) -> Any:
        with limited(kind):
            return call(*arguments)

    return called


def fall_back(rank: int, world_size: int, how: str) -> tuple[bool, list[str]]:
    records: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record.getMessage())

    logging.getLogger("zero_opt").addHandler(Keep())
    patch = pytest.MonkeyPatch()
    if how == "no memfd" and rank == 1:
        patch.setattr(os, "memfd_create", refuse)
    elif how == "no mapping" and rank == 1:
        patch.setattr(shared_memory.Arena, "of_peer", refuse)
    elif how == "no extension" and rank == 1:
        why = zero_opt.errors.NativeUnavailable("ZERO_OPT_ISA is 'v9'")
        patch.setattr(extension, "native", extension._Missing(why))
    elif how == "two hosts":
        patch.setattr(process_identity, "host_id", lambda: f"host {rank}")
    elif how == "not Linux":
        patch.setattr(sys, "platform", "darwin")
        patch.delattr(os, "memfd_create")
        patch.setattr(process_identity, "_BOOT_ID", "/proc/no such file")
    elif how == "no descriptors" and rank == 1:
        patch.setattr(
            backend_exchanges,
            "build_host_exchange",
            with_limit(resource.RLIMIT_NOFILE, shared_memory_exchange.build_host_exchange),
        )
    elif how == "no longer files" and rank == 1:
        patch.setattr(shared_memory_exchange, "_new_arena", with_limit(resource.RLIMIT_FSIZE, NEW_ARENA))
    elif how == "no descriptors to map by" and rank == 1:
        mapping = with_limit(resource.RLIMIT_NOFILE, lambda *given: list(MAP_PEERS(*given)))
        patch.setattr(shared_memory_exchange, "_map_peers", mapping)
    elif how in FOREIGN and rank == 1:
        patch.setattr(shared_memory_exchange, "_new_arena", offering(FOREIGN[how]))
    for _ in range(2):
        opt, params = make(torch.float32, "auto")
        fell_back = isinstance(exchange_of(opt), PairwiseExchange)
        train(opt, params, rank, 2)
        opt.close()
    return fell_back, records


def refuse(*_: object, **__: object) -> None:
    raise PermissionError(1, "Operation not permitted")


REASONS = {
    "no memfd": "rank 1 has no shared memory: .*not permitted",
    "no mapping": "rank 1 cannot map another rank's memory: .*not permitted",
    "no extension": "rank 1 has no shared memory: ZERO_OPT_ISA is 'v9'",
    "not Linux": "rank 0 has no shared memory: there is no memfd on darwin",
    "no descriptors": "rank 1 has no shared memory: .*Too many open files; .*'ulimit -n'",
    "no descriptors to map by": "rank 1 cannot map another rank's memory: .*Too many open files; .*'ulimit -n'",
    "no longer files": "rank 1 has no shared memory: File too large; .*'ulimit -f'",
    "an empty file": "rank 0 cannot map another rank's memory: .*it has 0 bytes",
    "a pipe": "rank 0 cannot map another rank's memory: .*is no shared memory",
    "a file of the size": "rank 0 cannot map another rank's memory: .*is no shared memory",
    "memory that may be made shorter": "rank 0 cannot map another rank's memory: .*its size may change",
    "another optimizer's memory": "rank 0 cannot map another rank's memory: .*another rank's, or another program's",
}


@pytest.mark.parametrize("how", REASONS)
def test_falls_back_on_every_rank_and_says_why_once(how: str) -> None:
    results = run_processes(2, fall_back, how)
    assert [fell_back for fell_back, _ in results] == [True, True]
    assert all(len(records) == (rank == 0) for rank, (_, records) in enumerate(results)), results
    assert "torch.distributed" in results[0][1][0]
    assert re.search(REASONS[how], results[0][1][0]), results[0][1][0]


def test_ranks_on_two_hosts_fall_back_without_a_word() -> None:
    assert run_processes(2, fall_back, "two hosts") == [(True, []), (True, [])]


def test_importing_needs_nothing_that_only_linux_has() -> None:
    code = "import sys; sys.modules['fcntl'] = None; import zero_opt"
    subprocess.run([sys.executable, "-c", code], check=True)


def add_larger_group(rank: int, world_size: int) -> list[Tensor]:
    opt, params = make(torch.float32, "auto", bucket_mb=0.001)
    assert isinstance(exchange_of(opt), HostExchange)
    train(opt, params, rank, 1)
    added = torch.nn.Parameter(torch.ones(5000))
    opt.add_param_group({"params": [added], "lr": 0.5})
    train(opt, [*params, added], rank, 3)
    opt.close()
    return [p.detach().clone() for p in [*params, added]]


def test_a_bucket_larger_than_those_at_construction() -> None:
    results = run_processes(2, add_larger_group)
    assert_bitwise(results[0], results[1])


def lose_a_peer(rank: int, world_size: int) -> str:
    opt, params = make(torch.float32, "auto")
    train(opt, params, rank, 1)
    pids: list[int] = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    reduction = opt._engine.reduction  # type: ignore[union-attr]
    torch.stack([(p * gradient(1, rank, p)).sum() for p in params]).sum().backward()
    for future in reduction._futures:
        try:
            future.result(30)
        except zero_opt.PeerLost as lost:
            return str(lost)
    return "no error"


def test_a_dead_peer_is_named() -> None:
    results = run_processes(2, lose_a_peer, expect_errors=True)
    assert re.match(r"rank 1 \(pid \d+\) has ended while step 1 waits for it", str(results[0]))


def skip_exchanges(rank: int, world_size: int, exchange: str) -> list[Tensor]:
    """Rank 0 leaves a backward early; every rank then gives that window up."""
    pytest.MonkeyPatch().setattr(pairwise_exchange, "_LEAST_BYTES", 256)
    opt, params = make(torch.float32, exchange, bucket_mb=0.001)
    train(opt, params, rank, 1)
    for attempt in range(3):
        loss = torch.stack([(p * gradient(attempt, rank, p)).sum() for p in params]).sum()
        if rank == attempt % 2:
            handle = params[2].register_hook(raise_here)
            with pytest.raises(ZeroDivisionError):
                loss.backward()
            handle.remove()
        else:
            loss.backward()
        opt.zero_grad()
    train(opt, params, rank, 3)
    opt.close()
    return [p.detach().clone() for p in params]


def raise_here(grad: Tensor) -> None:
    raise ZeroDivisionError("on purpose")


def without_failures(rank: int, world_size: int) -> list[Tensor]:
    opt, params = make(torch.float32, "auto", bucket_mb=0.001)
    train(opt, params, rank, 1)
    train(opt, params, rank, 3)
    opt.close()
    return [p.detach().clone() for p in params]


@pytest.mark.parametrize("exchange", ["auto", "backend"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_backward_left_early_is_void_and_leaves_no_trace(world_size: int, exchange: str) -> None:
    failed = run_processes(world_size, skip_exchanges, exchange)
    clean = run_processes(world_size, without_failures)
    for ours, theirs in zip(failed, clean, strict=True):
        assert_bitwise(ours, theirs)


def held(what: str) -> int:
    """How many descriptors of this process are of that kind."""
    return sum(what in target for _, target in open_files())


def drop(rank: int, world_size: int, how: str) -> list[int]:
    counts = []
    for _ in range(2):
        opt, params = make(torch.float32, "auto")
        train(opt, params, rank, 2)
        if how == "close":
            opt.close()
            assert held("zero_opt exchange") == 0
        else:
            assert held("zero_opt exchange") > 0
        del opt
        gc.collect()
        for thread in threading.enumerate():
            if thread.name == "zero_opt exchange":
                thread.join()
        counts.append(held("zero_opt exchange"))
    return counts


@pytest.mark.parametrize("how", ["close", "drop"])
def test_nothing_is_held_when_the_optimizer_is_gone(how: str) -> None:
    for counts in run_processes(2, drop, how):
        assert counts == [0, 0]
