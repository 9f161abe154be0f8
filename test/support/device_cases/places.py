"""Where a case runs: the devices of a rank, its streams, and how tensors reach the other ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Place:
    """The devices of one rank, and its way to the other ranks.

    Attributes:
        name: what messages call it.
        devices: parameters take turns on them.
        group: the process group; ``None`` at world size 1.
        direct: whether the group's backend moves tensors of the devices; else they pass through host memory.
        own_stream: whether training runs on a stream other than the default one.
        exchange: of the reduction policies.
        mesh: of the group's ranks, which the optimizer is given in its place.
    """

    name: str
    devices: tuple[torch.device, ...]
    group: Any
    direct: bool = True
    own_stream: bool = False
    exchange: str = "auto"
    mesh: Any = None

    @property
    def accelerated(self) -> bool:
        """Whether the devices have streams."""
        return self.devices[0].type != "cpu"

    @property
    def rank(self) -> int:
        """This rank in the group."""
        return 0 if self.group is None else dist.get_rank(self.group)

    @property
    def world_size(self) -> int:
        """The number of ranks in the group."""
        return 1 if self.group is None else dist.get_world_size(self.group)

    def device(self, index: int) -> torch.device:
        """Return the device of the parameter with this index."""
        return self.devices[index % len(self.devices)]

    def streams(self, count: int) -> list[torch.Stream]:
        """Make streams on the first device; none where there are no streams."""
        return [torch.Stream(self.devices[0]) for _ in range(count)] if self.accelerated else []

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Run what is within on the streams that :attr:`own_stream` asks for, ordered with what is outside."""
        if not (self.own_stream and self.accelerated):
            yield
            return
        with contextlib.ExitStack() as stack:
            pairs = []
            for device in self.devices:
                outside, inside = torch.accelerator.current_stream(device), torch.Stream(device)
                inside.wait_stream(outside)
                pairs.append((outside, inside))
            for _, inside in reversed(pairs):  # the first device stays the current one
                stack.enter_context(inside)
            yield
            for outside, inside in pairs:
                outside.wait_stream(inside)

    def all_reduce_mean(self, tensor: Tensor) -> None:
        """Replace a tensor by its mean over the ranks, as a user's program does."""
        if self.world_size == 1:
            return
        staged = tensor.contiguous() if self.direct else tensor.cpu()
        dist.all_reduce(staged, group=self.group)
        if staged is not tensor:
            tensor.copy_(staged)
        tensor.div_(self.world_size)


def on_host(value: Any) -> Any:
    """Copy nested containers, tensors in host memory; of a DTensor, this rank's part."""
    if isinstance(value, DTensor):
        value = value.to_local()
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return {key: on_host(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [on_host(item) for item in value]
    return value
