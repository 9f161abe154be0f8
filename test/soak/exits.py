"""One rank of a program that trains for a few steps and ends as its last argument says; see test_exits.py."""

from __future__ import annotations

import logging
import sys

import torch
import torch.distributed as dist

import zero_opt

ENDINGS = (
    "returns",
    "closes",
    "destroys the group",
    "closes and destroys the group",
    "saves",
    "saves and closes",
    "forgets",
    "exits with 0",
)


def main(rank: int, world_size: int, store: str, ending: str, exchange: str) -> None:
    """Train, and end."""
    torch.set_num_threads(1)
    logging.getLogger("zero_opt").setLevel(logging.ERROR)  # that a wait takes long on busy cores is no failure
    dist.init_process_group("gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size)
    params = [torch.nn.Parameter(torch.ones(500)) for _ in range(3)]
    policy = zero_opt.Overlapped(exchange=exchange)  # type: ignore[arg-type]
    opt = zero_opt.ShardedOptimizer(params, torch.optim.AdamW, reduction=policy)
    for _ in range(3):
        torch.stack([param.sum() for param in params]).sum().backward()
        opt.step()
        opt.zero_grad()
    if ending.startswith("saves") and rank == 0:
        opt.state_dict()
    if "closes" in ending:
        opt.close()
    if "destroys" in ending:
        dist.all_reduce(torch.ones(4))  # whose tensor a thread of the group frees
        dist.destroy_process_group()
    if ending != "forgets":
        sys.modules["__main__"].opt = opt  # type: ignore[attr-defined]  # alive while the interpreter is finalized
    if ending == "exits with 0":
        sys.exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
