"""Counts of bytes that placements add to, before there are any; each placement states its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..sharding.buckets import GradBucket

# Where memory is: where the parameters are, in host memory, in a file.
DEVICE, HOST_MEMORY, NVME = "device", "host", "nvme"

# Bytes by (kind, where, name), as :class:`~zero_opt.tools.memory_rows.Row` explains them.
Tally = Counter[tuple[str, str, str]]


class MemoryInputs(NamedTuple):
    """What memory depends on besides the buckets and the policy.

    Attributes:
        hypers: of every param group, as the wrapped class completes them.
        state_nbytes: bytes of the state that the class keeps of a tensor, by key; given the number of its param group,
            its shape and its dtype.
        ranks_per_host: how many ranks share the cores.
    """

    hypers: Sequence[Mapping[str, Any]]
    state_nbytes: Callable[[int, Sequence[int], torch.dtype], Mapping[str, int]]
    ranks_per_host: int


def state_kind(role: str) -> str:
    """The kind of an array of state, or of masters."""
    return "masters" if role in ("master", "remainder") else "state"


def reduced_gradients(buckets: Sequence[GradBucket]) -> Tally:
    """The buckets' own shards of reduced gradients, beside the parameters."""
    return Tally({("grad_shards", DEVICE, "reduced gradients"): sum(bucket.shard_nbytes for bucket in buckets)})
