"""The exchange in two stages between real processes, on hosts that are told apart by a patched name."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
from torch import Tensor

import zero_opt
from test.support.harness import assert_bitwise, run_processes
from zero_opt.comm import process_identity, shared_memory_exchange
from zero_opt.comm.hierarchical_exchange import HierarchicalExchange
from zero_opt.comm.lazy_gloo import partners
from zero_opt.comm.pairwise_exchange import PairwiseExchange
from zero_opt.comm.process_identity import ProcessIdentity
from zero_opt.comm.shared_memory_exchange import HostExchange
from zero_opt.tools.estimate import estimate

SIZES = [(33, 9), (65,), (1000,), (), (7, 64)]


FULL = zero_opt.MixedPrecision()
ROUNDED = zero_opt.MixedPrecision(between_hosts_dtype=torch.bfloat16)


def make(
    exchange: str, dtypes: list[torch.dtype], precision: zero_opt.MixedPrecision = FULL
) -> tuple[Any, list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    params: list[Tensor] = [
        torch.nn.Parameter(torch.randn(size, generator=generator).to(dtypes[i % len(dtypes)]))
        for i, size in enumerate(SIZES)
    ]
    policy = zero_opt.Overlapped(bucket_mb=0.001, exchange=exchange)
    opt = zero_opt.ShardedOptimizer(
        params, torch.optim.SGD, lr=0.1, momentum=0.9, reduction=policy, precision=precision
    )
    return opt, params


def on_hosts_of(count: int, rank: int) -> None:
    """Have every so many ranks say that they are on a host of their own."""
    pytest.MonkeyPatch().setattr(process_identity, "host_id", lambda: f"host {rank // count}")


def backward(params: list[Tensor], rank: int, step: int) -> None:
    generator = torch.Generator().manual_seed(step * 97 + rank * 11)
    losses = [(p * torch.randn(p.shape, generator=generator).to(p.dtype)).sum().abs().float() for p in params]
    torch.stack(losses).sum().backward()


def train(opt: Any, params: list[Tensor], rank: int, steps: int) -> None:
    for step in range(steps):
        for part in range(1 + step % 2):
            backward(params, rank, 2 * step + part)
        opt.step()
        opt.zero_grad()


def exchange_of(opt: Any) -> Any:
    return opt._engine.parts.exchanges["cpu"]


def trained(
    rank: int, world_size: int, exchange: str, count: int, dtypes: list[torch.dtype], leave: bool
) -> tuple[str, list[Tensor]]:
    """``leave``: ranks leave three backwards early, which every rank then gives up."""
    on_hosts_of(count, rank)
    opt, params = make(exchange, dtypes)
    train(opt, params, rank, 1)
    for attempt in range(3 if leave else 0):
        if rank in (attempt, 3 - attempt):
            handle = params[2].register_hook(raise_here)
            with pytest.raises(ZeroDivisionError):
                backward(params, rank, 50)
            handle.remove()
        else:
            backward(params, rank, 50)
        opt.zero_grad()
    train(opt, params, rank, 3)
    kind = type(exchange_of(opt)).__name__
    opt.close()
    return kind, [p.detach().clone() for p in params]


def raise_here(grad: Tensor) -> None:
    raise ZeroDivisionError("on purpose")


FLOATS, MIXED = [torch.float32], [torch.float32, torch.bfloat16, torch.complex64]


@pytest.mark.parametrize("leave", [False, True])
@pytest.mark.parametrize("dtypes", [FLOATS, MIXED], ids=["float32", "mixed"])
def test_same_bits_as_in_one_stage(dtypes: list[torch.dtype], leave: bool) -> None:
    ours = run_processes(4, trained, "auto", 2, dtypes, leave)
    flat = run_processes(4, trained, "backend", 2, dtypes, False)
    for (kind, params), (other, theirs) in zip(ours, flat, strict=True):
        assert (kind, other) == (HierarchicalExchange.__name__, PairwiseExchange.__name__)
        assert_bitwise(params, theirs)


def on_hosts(rank: int, world_size: int, hosts: str) -> tuple[str, list[Tensor]]:
    pytest.MonkeyPatch().setattr(process_identity, "host_id", lambda: f"host {hosts[rank]}")
    opt, params = make("auto", MIXED)
    train(opt, params, rank, 3)
    kind = type(exchange_of(opt)).__name__
    opt.close()
    return kind, [p.detach().clone() for p in params]


UNEVEN = {4: ["aabc", "abba"], 6: ["aaabbb"], 8: ["aaaabbcc", "aaaaaabb", "aaaabbbb"]}


@pytest.mark.parametrize("world_size", UNEVEN)
def test_the_bits_do_not_tell_how_ranks_are_spread_over_hosts(world_size: int) -> None:
    one_host = run_processes(world_size, on_hosts, "a" * world_size)
    for hosts in UNEVEN[world_size]:
        expected = HierarchicalExchange if hosts == "aaaabbbb" else PairwiseExchange
        for (kind, params), (other, theirs) in zip(run_processes(world_size, on_hosts, hosts), one_host, strict=True):
            assert (kind, other) == (expected.__name__, HostExchange.__name__)
            assert_bitwise(params, theirs)


def test_a_backward_left_early_on_one_host_with_params_that_go_through_messages() -> None:
    ours, flat = [run_processes(4, trained, exchange, 4, MIXED, exchange == "auto") for exchange in ("auto", "backend")]
    for (kind, params), (_, theirs) in zip(ours, flat, strict=True):
        assert kind == HostExchange.__name__
        assert_bitwise(params, theirs)


def staging(rank: int, world_size: int, count: int, precision: zero_opt.MixedPrecision) -> tuple[int, int]:
    on_hosts_of(count, rank)
    opt, params = make("auto", MIXED, precision)
    like = [torch.nn.Parameter(p.detach().clone()) for p in params]
    given: Any = {"momentum": 0.9, "reduction": zero_opt.Overlapped(bucket_mb=0.001), "precision": precision}
    estimated = estimate(like, world_size, torch.optim.SGD, **given).on_rank(rank)
    train(opt, params, rank, 1)
    found = opt.memory_report()["staging"]
    opt.close()
    return found, estimated.on_hosts_of(count).nbytes("staging")


@pytest.mark.parametrize("precision", [FULL, ROUNDED], ids=["fp32", "bf16 between hosts"])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_estimate_knows_its_memory(count: int, precision: zero_opt.MixedPrecision) -> None:
    for found, estimated in run_processes(4, staging, count, precision):
        assert found == estimated


def rounded(rank: int, world_size: int, exchange: str, count: int, precision: zero_opt.MixedPrecision) -> list[Tensor]:
    on_hosts_of(count, rank)
    opt, params = make(exchange, MIXED, precision)
    train(opt, params, rank, 3)
    opt.close()
    return [p.detach().clone() for p in params]


@pytest.mark.parametrize(("exchange", "count"), [("auto", 2), ("auto", 3), ("backend", 2)])
def test_gradients_in_bf16_between_hosts_are_the_same_on_all_ranks_and_in_each_run(exchange: str, count: int) -> None:
    first, second = [run_processes(4, rounded, exchange, count, ROUNDED) for _ in range(2)]
    (plain, *_) = run_processes(4, rounded, exchange, count, FULL)
    for params in (*first, *second):
        assert_bitwise(params, first[0])
    differs = [not torch.equal(ours, theirs) for ours, theirs in zip(first[0], plain, strict=True)]
    assert differs == [dtype is torch.float32 for dtype in (*MIXED, *MIXED)][: len(SIZES)]
    for ours, theirs in zip(first[0], plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("exchange", ["auto", "backend"])
def test_nothing_is_rounded_on_one_host(exchange: str) -> None:
    ours, plain = [run_processes(4, rounded, exchange, 4, given) for given in (ROUNDED, FULL)]
    assert_bitwise(ours, plain)


def bucket_count(rank: int, world_size: int, count: int, exchange: str, bucket_mb: float | None) -> int:
    """Buckets of ten parameters of 1 MiB each."""
    on_hosts_of(count, rank)
    params = [torch.nn.Parameter(torch.zeros(1 << 18)) for _ in range(10)]
    reduction = zero_opt.AtStep(bucket_mb, exchange)
    opt: Any = zero_opt.ShardedOptimizer(params, torch.optim.SGD, lr=0.1, reduction=reduction)
    found = len(opt._engine.partition.buckets)
    opt.close()
    return found


@pytest.mark.parametrize(
    ("count", "exchange", "bucket_mb", "expected"),
    [
        (2, "auto", None, 1),
        (1, "auto", None, 2),
        (2, "backend", None, 1),
        (1, "backend", None, 2),
        (1, "auto", 2, 5),
        (2, "auto", 2, 5),
    ],
)
def test_the_size_of_buckets_goes_by_how_they_travel(
    count: int, exchange: str, bucket_mb: float | None, expected: int
) -> None:
    assert run_processes(2, bucket_count, count, exchange, bucket_mb) == [expected] * 2


def refuse(*_: object) -> Any:
    raise PermissionError(1, "Operation not permitted")


def cannot_map(rank: int, world_size: int) -> str:
    on_hosts_of(2, rank)
    if rank == 3:
        pytest.MonkeyPatch().setattr(shared_memory_exchange, "_map_peers", refuse)
    opt, params = make("auto", FLOATS)
    train(opt, params, rank, 2)
    kind = type(exchange_of(opt)).__name__
    opt.close()
    return kind


def test_a_rank_that_cannot_map_its_hosts_memory_makes_all_use_messages() -> None:
    assert run_processes(4, cannot_map) == [PairwiseExchange.__name__] * 4


def ends_slowly(seconds: float) -> None:
    """Have the other processes of this host seem to run for so long after they have ended."""
    has_ended, seen = ProcessIdentity.has_ended, dict[int, float]()

    def later(process: ProcessIdentity) -> bool:
        return has_ended(process) and time.monotonic() - seen.setdefault(process.pid, time.monotonic()) > seconds

    ProcessIdentity.has_ended = later  # type: ignore[method-assign]


def lose(rank: int, world_size: int, lost: int, ending_s: float) -> str:
    on_hosts_of(2, rank)
    ends_slowly(ending_s)
    opt, params = make("auto", FLOATS)
    train(opt, params, rank, 2)
    if rank == lost:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(zero_opt.PeerLost) as caught:
        train(opt, params, rank, 2)
    return str(caught.value)


@pytest.mark.parametrize(("lost", "ending_s"), [(0, 0.0), (3, 0.0), (0, 1.0)])
def test_a_rank_that_is_killed_is_named_on_every_host(lost: int, ending_s: float) -> None:
    """Also where its connections are closed long before its process has ended, as on a busy host."""
    results = run_processes(4, lose, lost, ending_s, expect_errors=True)
    unnamed = [
        f"rank {rank}: {text}" for rank, text in enumerate(results) if rank != lost and f"rank {lost} " not in text
    ]
    assert not unnamed, "\n".join(unnamed)


class Stumbles(torch.optim.SGD):
    """Fails in its third step, on one rank."""

    __module__ = "torch.optim"  # whose classes step one bucket after the other
    left = 0

    def step(self, closure: Any = None) -> Any:
        type(self).left -= 1
        if type(self).left == 0:
            raise MemoryError("no more of it")
        return super().step(closure)


def stumble(rank: int, world_size: int, count: int, failing: int) -> tuple[str, str, set[int]]:
    """Return the exchange, what the third step raises, and to whom the rank is connected."""
    on_hosts_of(count, rank)
    zero_opt.register_elementwise(Stumbles)
    param = torch.nn.Parameter(torch.ones(3000))
    opt = zero_opt.ShardedOptimizer([param], Stumbles, lr=0.5)
    exchange = exchange_of(opt)
    for step in range(3):
        (param * rank).sum().backward()
        if step < 2:
            opt.step()
            opt.zero_grad()
    Stumbles.left = int(rank == failing)
    with pytest.raises((zero_opt.StepFailed, MemoryError)) as caught:
        opt.step()
    used = set(exchange._messages._gather._used)
    opt.close()
    return type(exchange).__name__, f"{type(caught.value).__name__}: {caught.value}", used


@pytest.mark.parametrize("failing", [1, 11])
def test_a_failed_step_is_heard_of_on_all_hosts_without_connections_to_all(failing: int) -> None:
    found = run_processes(12, stumble, 2, failing)
    for rank, (kind, text, used) in enumerate(found):
        assert kind == HierarchicalExchange.__name__
        assert text.startswith("MemoryError: " if rank == failing else f"StepFailed: rank {failing}")
        assert used == partners(rank, 12) | {other for other in range(rank % 2, 12, 2) if other != rank}
