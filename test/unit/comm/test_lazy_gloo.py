"""Whom a rank connects to, and an all-gather that needs no others."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor

from test.support.bitwise import assert_bitwise
from test.support.failures import PATIENCE_S
from zero_opt.comm.lazy_gloo import all_gather, partners

SIZES = [*range(2, 18), 31, 33]


@pytest.mark.parametrize("size", SIZES)
def test_partners_are_partners_of_each_other(size: int) -> None:
    for rank in range(size):
        assert rank not in partners(rank, size)
        assert all(rank in partners(other, size) for other in partners(rank, size))


def test_partners_are_as_many_as_the_logarithm() -> None:
    assert [len(partners(5, size)) for size in (8, 64, 256, 4096)] == [5, 11, 15, 23]


@pytest.mark.parametrize("size", SIZES)
def test_every_rank_has_all_tensors_in_rank_order_from_its_partners_alone(size: int) -> None:
    on_their_way: dict[tuple[int, int], queue.SimpleQueue[Tensor]] = defaultdict(queue.SimpleQueue)
    for sender in range(size):
        for receiver in range(size):
            on_their_way[sender, receiver] = queue.SimpleQueue()
    rounds, found = [0] * size, [torch.empty(0)] * size

    def run(rank: int) -> None:
        def exchange(out: Tensor, dst: int, into: Tensor, src: int) -> None:
            assert {dst, src} <= partners(rank, size)
            rounds[rank] += 1
            on_their_way[rank, dst].put(out.clone())
            into.copy_(on_their_way[src, rank].get(timeout=PATIENCE_S))

        found[rank] = all_gather(exchange, rank, torch.tensor([rank, -rank]), size)

    threads: list[Any] = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert rounds == [(size - 1).bit_length()] * size
    for rank in range(size):
        assert_bitwise(found[rank], torch.tensor([[other, -other] for other in range(size)]))
