"""The relay through host memory, with CPU tensors standing in for an accelerator's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import zero_opt
from test.distributed.harness import assert_bitwise, run_processes
from zero_opt import collectives
from zero_opt.exchange import Exchange
from zero_opt.relay_exchange import RelayExchange

build = collectives.build_exchange


def relayed(*arguments: object, host_bytes: int) -> Exchange:
    pool = arguments[2]
    return RelayExchange(build(*arguments, host_bytes=host_bytes), pool)  # type: ignore[arg-type]


def train(rank: int, world_size: int, exchange: str, relay: bool) -> list[Tensor]:
    if relay:
        pytest.MonkeyPatch().setattr("zero_opt.wiring.build_exchange", relayed)
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(n, generator=generator)) for n in (100, 3, 700, 64)]
    policy = zero_opt.Overlapped(bucket_mb=0.001, exchange=exchange)
    opt = zero_opt.ShardedOptimizer(params, torch.optim.AdamW, reduction=policy, lr=0.1)
    for step in range(4):
        for _ in range(1 + step % 2):
            torch.stack([(p * (step - rank + 0.3) * p).sum() for p in params]).sum().backward()
        opt.step()
        opt.zero_grad()
    opt.close()
    return [p.detach().clone() for p in params]


@pytest.mark.parametrize("exchange", ["auto", "backend"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_same_bits_as_without_the_relay(exchange: str, world_size: int) -> None:
    direct = run_processes(world_size, train, exchange, False)
    relayed_bits = run_processes(world_size, train, exchange, True)
    for ours, theirs in zip(relayed_bits, direct, strict=True):
        assert_bitwise(ours, theirs)
