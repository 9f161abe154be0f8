"""Sparse gradients under AtStep: every rank's rows go to the parameter's owner, which adds them up."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from ..comm.exchange import in_tree_order
from ..errors import UnsupportedParam
from .grad_norm import scale_
from .interface import GradShard, ReductionParts


def sparse_grads(params: Sequence[Tensor]) -> dict[int, Tensor]:
    """Return the sparse gradients of this rank, by parameter: also of those that this step is about to plan."""
    return {i: param.grad for i, param in enumerate(params) if param.grad is not None and param.grad.is_sparse}


def sparse_refusal(parts: ReductionParts) -> UnsupportedParam | None:
    """Return the error if parameters may be cut anywhere, and one has a sparse gradient here."""
    for index in () if parts.partition.whole else sparse_grads(parts.all_params):
        return UnsupportedParam(
            f"{parts.partition.describe(index)} has a sparse gradient, and an elementwise class, whose parameters are "
            "cut anywhere, cannot take it; use torch.optim.SparseAdam or another class that is not known to be "
            "elementwise"
        )
    return None


def _added(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """Add two sparse gradients, either of which may be missing."""
    if first is None or second is None:
        return second if first is None else first
    return (first + second).coalesce()


class SparseGrads:
    """The reduction of sparse gradients, of parameters that are not cut."""

    def __init__(self, parts: ReductionParts) -> None:
        self._parts = parts
        self._reduced: dict[int, Tensor] = {}

    def reduce(self) -> Collection[int]:
        """Reduce all sparse gradients; returns the indices of parameters that have one on any rank. Collective.

        Raises:
            UnsupportedParam: on every rank, if a gradient is sparse on one rank and dense on another.
        """
        self._reduced.clear()
        mine = {index: grad.coalesce().cpu() for index, grad in sparse_grads(self._parts.all_params).items()}
        described = {i: [g.sparse_dim(), g.indices().shape[1]] for i, g in mine.items()}
        group = self._parts.agreement.group
        described_by = [json.loads(p) for p in group.all_gather_bytes(json.dumps(described).encode())]
        indices = sorted({int(key) for described in described_by for key in described})
        flats, error = self._parts.partition.flats, None
        for index in indices:
            if index not in mine and flats[index].param.grad is not None:
                error = UnsupportedParam(f"{flats[index].label} has a dense gradient here and a sparse one elsewhere")
        self._parts.agreement.raise_first_error(error)
        for index in indices:
            self._reduce(index, mine.get(index), [d.get(str(index)) for d in described_by])
        return indices

    def _reduce(self, index: int, mine: Tensor | None, shapes: list[list[int] | None]) -> None:
        partition = self._parts.partition
        owner = partition.owner_of_start(index)
        param = partition.flats[index].param
        parts = (
            self._fetch(param, mine if rank == partition.rank else None, rank, owner, described)
            for rank, described in enumerate(shapes)
        )
        total = in_tree_order(parts, _added)
        if total is not None:
            self._reduced[index] = total.to(param.device) / partition.world_size

    def _fetch(
        self, param: Tensor, mine: Tensor | None, rank: int, owner: int, described: list[int] | None
    ) -> Tensor | None:
        """Bring one rank's sparse gradient, if it has one, to the owner; returns ``None`` on other ranks."""
        if described is None:
            return None
        group, (sparse_dim, count) = self._parts.agreement.group, described
        if mine is None:
            indices = torch.empty(sparse_dim, count, dtype=torch.int64, device="cpu")
            values = torch.empty(count, *param.shape[sparse_dim:], dtype=param.dtype, device="cpu")
        else:
            indices, values = mine.indices().contiguous(), mine.values().contiguous()
        involved = group.rank in (rank, owner)
        for tensor in (indices, values):
            work = group.move(tensor if involved else None, rank, owner, tensor.numel(), tensor.dtype)
            if work is not None:
                work.wait()
        if group.rank != owner:
            return None
        unchecked = {"is_coalesced": True, "check_invariants": False}
        return torch.sparse_coo_tensor(indices, values, param.shape, dtype=values.dtype, device="cpu", **unchecked)

    def scale(self, factor: Tensor) -> None:
        """Multiply what was reduced last by a 0-dim tensor, in place."""
        scale_(self._reduced.values(), factor)

    def merge(self, shards: list[GradShard]) -> list[GradShard]:
        """Return the shards with sparse gradients in the places of parameters that have one."""
        merged = []
        for shard, bucket in zip(shards, self._parts.partition.buckets, strict=True):
            grads = [self._reduced.get(p.param, g) for p, g in zip(bucket.slices, shard.grads, strict=True)]
            merged.append(shard._replace(grads=grads))
        return merged
