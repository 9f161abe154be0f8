"""The simulated accelerator's communicator: NCCL's semantics, as far as they can be seen from outside."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from test import accelerator as sim
from test.accelerator.ranks import on_device, on_ranks

if sim.unavailable():
    pytest.skip(sim.unavailable() or "", allow_module_level=True)


def _values(rank: int, count: int = 4, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.arange(count, dtype=torch.float32) + rank).to("sim", dtype)


def _backend() -> Any:
    assert dist.group.WORLD is not None
    return dist.group.WORLD._get_backend(torch.device("sim"))


def test_collectives() -> None:
    def collect(rank: int) -> list[Any]:
        group: Any = _backend()
        seen: list[Any] = []
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            dist.all_reduce(x := _values(rank), op=op)
            seen.append(x.tolist())
        dist.reduce(x := _values(rank), 1)
        seen.append(x.tolist() if rank == 1 else None)
        dist.broadcast(x := _values(rank), 1)
        seen.append(x.tolist())
        group._reduce_scatter_base(x := torch.empty(2, device="sim"), _values(rank)).wait()
        seen.append(x.tolist())
        dist.all_gather(parts := [torch.empty(4, device="sim") for _ in range(2)], _values(rank))
        seen.append([part.tolist() for part in parts])
        dist.send(_values(rank), 1) if rank == 0 else dist.recv(x := torch.empty(4, device="sim"), 0)
        seen.append(x.tolist() if rank == 1 else None)
        dist.barrier()
        return [*seen, sim.races()]

    first, second = on_ranks(collect)
    total, ones, zeros = [1.0, 3.0, 5.0, 7.0], [1.0, 2.0, 3.0, 4.0], [0.0, 1.0, 2.0, 3.0]
    mean = [0.5, 1.5, 2.5, 3.5]
    assert first == [total, mean, None, ones, [1, 3], [zeros, ones], None, []]
    assert second == [total, mean, total, ones, [5, 7], [zeros, ones], zeros, []]


def test_a_gather_in_place() -> None:
    def gather(rank: int) -> tuple[list[float], list[str]]:
        whole = torch.full((8,), float("nan"), device="sim")
        part = whole[4 * rank : 4 * rank + 4]
        part.copy_(_values(rank))
        _backend()._allgather_base(whole, part).wait()
        return whole.tolist(), sim.races()

    assert on_ranks(gather) == [([0, 1, 2, 3, 1, 2, 3, 4], [])] * 2


def test_an_average_is_scaled_before_it_is_summed() -> None:
    def average(rank: int) -> tuple[float, float]:
        x = torch.full((1,), 60000.0, device="sim", dtype=torch.float16)
        total = x.clone()
        dist.all_reduce(x, op=dist.ReduceOp.AVG)
        dist.all_reduce(total)
        return x.item(), total.item()

    assert on_ranks(average) == [(60000, float("inf"))] * 2


@pytest.mark.parametrize(
    ("why", "call"),
    [
        ("only ReduceOp.SUM", lambda: dist.all_reduce(_values(0), op=dist.ReduceOp.MAX)),
        ("only ReduceOp.SUM", lambda: dist.all_reduce(_values(0), op=dist.ReduceOp.PRODUCT)),
        ("no ReduceOp.AVG", lambda: dist.all_reduce(_values(0, dtype=torch.int32), op=dist.ReduceOp.AVG)),
        ("contiguous", lambda: dist.all_reduce(torch.zeros(4, 4, device="sim").t())),
        ("as in NCCL", lambda: _backend().allreduce([torch.zeros(4, device="sim", dtype=torch.complex64)])),
        ("world_size times", lambda: _backend()._allgather_base(_values(0), _values(0, 3))),
    ],
)
def test_what_nccl_refuses(why: str, call: Any) -> None:
    def refused() -> str:
        with pytest.raises(RuntimeError) as error:
            call()
        return str(error.value)

    assert why in on_device(refused)


def test_what_is_not_waited_for_races() -> None:
    def reduce(rank: int) -> tuple[list[str], list[str], list[float]]:
        x = _values(rank)
        work = dist.all_reduce(x, async_op=True)
        y = x + 1
        early = sim.races()
        work.wait()
        y = x + 1
        return early, sim.races(), y.tolist()

    for early, late, values in on_ranks(reduce):
        assert "ALLREDUCE on the stream of communicator" in early[0] and "aten::add" in early[0]
        assert late == [] and values == [2, 4, 6, 8]


def test_a_call_returns_before_the_peers_come() -> None:
    def call(rank: int) -> tuple[float, bool, list[float]]:
        x = _values(rank)
        if rank == 1:
            time.sleep(0.5)
        begin = time.monotonic()
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        spent, done = time.monotonic() - begin, work.is_completed()
        return spent, done, x.tolist()

    (spent, done, values), other = on_ranks(call)
    assert spent < 0.4 and not done
    assert values == other[2] == [1, 3, 5, 7]


def test_tensors_live_until_they_are_waited_for() -> None:
    def drop(rank: int) -> tuple[int, int, list[str]]:
        work = dist.all_reduce(torch.zeros(1000, device="sim"), async_op=True)
        held = sim.live_bytes()
        work.wait()
        del work
        torch.zeros(1000, device="sim")
        return held, sim.live_bytes(), sim.races()

    assert on_ranks(drop) == [(4096, 0, [])] * 2


def test_an_abort_frees_who_waits_for_the_stream() -> None:
    def abort(rank: int) -> Any:
        if rank == 1:
            return None  # it never comes
        x = _values(rank)
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        y = x + 1
        time.sleep(0.3)  # until its kernel waits for the peer
        _backend().abort()
        values = y.tolist()
        with pytest.raises(dist.DistBackendError, match="aborted"):
            dist.all_reduce(x)
        return [value != value for value in values], work.is_success(), (x + 1).numel()

    assert on_ranks(abort) == [([True] * 4, False, 4), None]


def test_a_lost_peer_ends_the_communicator() -> None:
    def lose(rank: int) -> Any:
        dist.all_reduce(_values(rank))
        sim.synchronize()
        if rank == 1:
            os._exit(1)
        dist.all_reduce(x := _values(rank))
        values = x.tolist()
        with pytest.raises(dist.DistBackendError):
            dist.all_reduce(x)
        return [value != value for value in values]

    first, second = on_ranks(lose, expect_errors=True)
    assert first == [True] * 4 and second.type_name == "Died"


def test_collectives_that_do_not_match_are_named() -> None:
    def mismatch(rank: int) -> list[str]:
        x = _values(rank, 4 + rank)
        dist.all_reduce(x)
        sim.synchronize()
        return sim.races()

    for rank, races in enumerate(on_ranks(mismatch)):
        assert f"rank {rank} calls" in races[0] and "4 elements" in races[0] and "5 elements" in races[0]


def test_a_shutdown_waits_for_the_kernels() -> None:
    def shut_down(rank: int) -> tuple[bool, list[float]]:
        x = _values(rank)
        if rank == 1:
            time.sleep(0.3)
        work = dist.all_reduce(x, async_op=True)
        _backend().shutdown()
        done = work.is_completed()
        with pytest.raises(dist.DistBackendError, match="shut down"):
            dist.all_reduce(x)
        return done, x.tolist()

    assert on_ranks(shut_down) == [(True, [1, 3, 5, 7])] * 2
