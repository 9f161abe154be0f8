"""A few values of a gradient, by which gradients of other data and of other times are told apart."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..comm.agreement import StepAgreement
from ..comm.groups import Group
from ..layout import indices_of
from ..sharding.partition import Partition
from ..system.devices import pins
from .ddp_conflict import not_reduced

# So many elements of a gradient show whether all were changed.
_FEW = 16
# How far values of ranks may be apart, relative to the largest. Ranks that have reduced have the same bits as a rule;
# of ranks that have not, each has the gradient of other data.
_FAR_APART = 0.01
# Parameter, step, values.
_TOLD = struct.Struct(f"<qq{_FEW}f")


def few_values(grad: Tensor) -> Tensor:
    """Return real values of a gradient at equal distances, 1-D; a view where that is possible."""
    values = (grad._values() if grad.layout is torch.sparse_coo else grad).detach()
    count = min(_FEW, values.numel())
    step = values.numel() // max(1, count)
    if values.is_contiguous():
        few = values.as_strided((count,), (step,), values.storage_offset())
    else:
        few = values.take(torch.arange(count, dtype=torch.int64, device=values.device) * step)
    return torch.view_as_real(few.resolve_conj()).flatten() if few.is_complex() else few


class _Sample(NamedTuple):
    """Values of one gradient, (_FEW,), fp32, padded with zeros, in host memory once ``copied`` has passed."""

    param: int
    step: int
    values: Tensor
    copied: Any

    def pack(self) -> bytes:
        """Return it as bytes, once it is copied."""
        if self.copied is not None:
            self.copied.synchronize()
        return _TOLD.pack(self.param, self.step, *self.values.tolist())


class GradComparison:
    """Whether gradients are the same on all ranks, by a few values: of all in the first step, of one in turn later.

    What is compared later travels with the reports of the step. There, a copy from an accelerator would wait for the
    backward: so its values are told in the step after.
    """

    def __init__(self, partition: Partition, group: Group) -> None:
        self._partition, self._group = partition, group
        self._begun = False  # whether all were compared, and not all were zero or NaN, which shows nothing
        self._late: _Sample | None = None

    def sample(self, step: int) -> bytes:
        """Return what this rank tells the others with its report of a step."""
        params = [*self._partition.flats]
        if not (self._begun and params):
            return b""
        turn = step % len(params)
        sample = next(self._samples(chain(params[turn:], params[:turn]), step), None)
        if sample is not None and sample.copied is not None:
            sample, self._late = self._late, sample
        return b"" if sample is None else sample.pack()

    def require_same(self, agreed: StepAgreement, step: int) -> None:
        """Compare what the ranks have told, or all gradients if nothing was compared yet. Collective.

        Raises:
            GradientConflict: on every rank, if they differ.
        """
        if self._group.world_size == 1:
            return
        told: Sequence[bytes] = [report.sample for report in agreed.reports if not report.absent]
        if not self._begun:
            told = self._group.all_gather_bytes(self._all(agreed, step), "step()")
        by_place: dict[tuple[int, int], list[list[float]]] = {}
        for raw in told:
            for param, when, *values in _TOLD.iter_unpack(raw):
                by_place.setdefault((param, when), []).append(values)
        rows = {place: torch.tensor(values, dtype=torch.float32, device="cpu") for place, values in by_place.items()}
        for (param, when), of_ranks in sorted(rows.items(), key=lambda item: item[0]):
            if _far_apart(of_ranks):
                flat = self._partition.flats[param]
                raise not_reduced(flat.label, when, flat.param)
        # Sparse gradients have no rows. A step without any gradient shows nothing.
        alike = not rows or any(bool(_zeros_for_nonfinite(of_ranks).any()) for of_ranks in rows.values())
        self._begun = agreed.used != 0 and alike

    def _all(self, agreed: StepAgreement, step: int) -> bytes:
        if self._group.rank in agreed.absent:
            return b""
        used = sorted(indices_of(agreed.used) & self._partition.flats.keys())
        return b"".join(sample.pack() for sample in [*self._samples(used, step)])

    def _samples(self, params: Iterable[int], step: int) -> Iterator[_Sample]:
        """Start to copy values of the gradients of these parameters, but for sparse ones."""
        for param in params:
            grad = self._partition.flats[param].param.grad
            if grad is not None and grad.layout is torch.strided:
                few = few_values(grad)[:_FEW].float()
                values = torch.zeros(_FEW, dtype=torch.float32, device="cpu", pin_memory=pins(grad.device))
                values[: few.numel()].copy_(few, non_blocking=True)
                yield _Sample(param, step, values, self._partition.streams[grad.device].produced()[1])


def _zeros_for_nonfinite(values: Tensor) -> Tensor:
    """Return values with zeros in the place of those that are not finite."""
    return values.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def _far_apart(values: Tensor) -> bool:
    """Return whether rows, of a rank each, are of gradients that nobody has reduced."""
    finite, numbers = values.isfinite(), _zeros_for_nonfinite(values)
    apart = (numbers - numbers[:1]).abs()
    return bool((finite != finite[:1]).any() or apart.amax() > _FAR_APART * numbers.abs().amax())
