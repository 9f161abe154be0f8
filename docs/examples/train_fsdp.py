"""Train with FSDP2 and the optimizer's state in another process, and prove that its bits are those of torch's AdamW.

    torchrun --nproc-per-node 2 docs/examples/train_fsdp.py

Two models are trained on the same data, one with torch.optim.AdamW(fused=True), one with a sharded optimizer that keeps
masters and moments in host memory and steps them in a worker. The exit code is 0 only if all parameters are the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import zero_opt

WIDTH, STEPS = 256, 20
Optimizers = Callable[[nn.Module], torch.optim.Optimizer]


def sharded_model() -> nn.Module:
    """The same on every rank and in every call; every rank's part of every parameter is a multiple of 16 elements."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
    for layer in (model[0], model[2]):
        fully_shard(layer)
    return fully_shard(model)  # type: ignore[no-any-return]


def train(optimizer_of: Optimizers) -> list[Tensor]:
    """This rank's parts of the parameters after some steps."""
    model = sharded_model()
    optimizer = optimizer_of(model)
    data = torch.Generator().manual_seed(dist.get_rank())
    for step in range(STEPS):
        inputs = torch.randn(16, WIDTH, generator=data)
        loss = (model(inputs) - inputs).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step in (0, STEPS - 1):
            print(f"{type(optimizer).__name__}, step {step}: loss {loss.item():.4f}")
    if isinstance(optimizer, zero_opt.ShardedOptimizer):
        optimizer.close()
    return [param.to_local() for param in model.parameters()]  # type: ignore[operator]


def plain(model: nn.Module) -> torch.optim.Optimizer:
    """As with torch alone."""
    return torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)


def offloaded(model: nn.Module) -> torch.optim.Optimizer:
    """Stepped by a process beside this one."""
    return zero_opt.ShardedOptimizer(
        model.parameters(), torch.optim.AdamW, lr=3e-4, fused=True, offload=zero_opt.WorkerOffload()
    )


def main() -> int:
    """0 if both have the same bits on this rank."""
    same = all(map(torch.equal, train(plain), train(offloaded)))
    print(f"rank {dist.get_rank()}: {'the same bits' if same else 'DIFFERENT'}")
    return 0 if same else 1


if __name__ == "__main__":
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    code = main()
    dist.destroy_process_group()
    sys.exit(code)
