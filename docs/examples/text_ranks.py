"""The few things the example asks of the other ranks; on one process without a launcher, of nobody."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist


def start() -> tuple[int, int]:
    """Join the launcher's ranks, if there is one: this rank and how many there are."""
    torch.set_num_threads(1)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def this_rank() -> int:
    """The number of this rank."""
    return dist.get_rank() if dist.is_initialized() else 0


def stop() -> None:
    """Leave the other ranks."""
    if dist.is_initialized():
        dist.destroy_process_group()


def add_up(numbers: list[float]) -> list[float]:
    """Each number's sum over the ranks, on every rank."""
    total = torch.tensor(numbers, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(total)
    return [float(x) for x in total]


def gather(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Every rank's tensor, in rank order, on every rank."""
    if not dist.is_initialized():
        return [tensor]
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor.contiguous())
    return gathered


def mean(tensor: torch.Tensor) -> torch.Tensor:
    """The ranks' mean as zero_opt takes it: summed in tree order, then divided."""
    parts = gather(tensor)
    return tree_sum(parts) / len(parts) if len(parts) > 1 else tensor.clone()


def tree_sum(parts: list[torch.Tensor]) -> torch.Tensor:
    """The sum, split at the largest power of two below the number of ranks: ((0 + 1) + (2 + 3)) + (4 + 5) of six."""
    if len(parts) == 1:
        return parts[0]
    middle = 1 << (len(parts) - 1).bit_length() - 1
    return tree_sum(parts[:middle]) + tree_sum(parts[middle:])


def barrier() -> None:
    """Wait until every rank is here."""
    if dist.is_initialized():
        dist.barrier()
