"""An :class:`ArenaShard` with two banks of state, of which a step reads one and writes the other, and room for sums."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from ...kernels import sums_of
from ...kernels.runs import BoundRun
from ...sharding.buckets import GradBucket
from ...system.shared_memory import Arena
from ..interface import ParamState
from .arena_shard import ArenaShard

_SECOND = ", bank 1"
_SQUARES = "squares"


def _in_bank(role: str, bank: int) -> str:
    return role + _SECOND if bank else role


class BankedShard(ArenaShard):
    """A shard with two banks of state, of which a step reads one and writes the other.

    Each slice has a bank of its own that counts: slices that a step does not use stay where they are, and nothing is
    ever copied from bank to bank. ``out`` and gradients are not state, and there once.

    Attributes:
        squares: per slice, a place for the sums that :func:`grad_squares` adds up; none if the shard lies elsewhere.
    """

    def __init__(self, bucket: GradBucket) -> None:
        super().__init__(bucket)
        self.squares: list[Tensor] = []
        self._sums = [sums_of(piece.in_shard.numel) for piece in self.pieces]
        self._other: dict[int, ParamState] = {}  # views of the bank that does not count, of slices that are shown

    def missing(self, *, amsgrad: bool, grads: int) -> dict[str, torch.dtype]:
        arrays = super().missing(amsgrad=amsgrad, grads=grads)
        state = [role for role in arrays if role != "out" and not role.startswith("grad")]
        arrays |= {_in_bank(role, 1): arrays[role] for role in state}
        if self.grads_in_arena and _SQUARES not in self._sections:
            arrays[_SQUARES] = torch.float64
        return arrays

    def numel_of(self, role: str) -> int:
        return sum(self._sums) if role == _SQUARES else super().numel_of(role)

    def kind_of(self, role: str) -> tuple[str, str]:
        if role == _SQUARES:
            return "buffers", "sums of squares"
        return ("buffers", "second bank") if role.endswith(_SECOND) else super().kind_of(role)

    @property
    def spare_nbytes(self) -> int:
        doubled = (dtype for role, (_, dtype) in self._sections.items() if _in_bank(role, 1) in self._sections)
        return super().spare_nbytes + sum(self.bucket.shard_numel * dtype.itemsize for dtype in doubled)

    def bind(self, arena: Arena) -> None:
        self._other.clear()
        super().bind(arena)
        self.squares = list(torch.split(self._arrays[_SQUARES], self._sums)) if self.grads_in_arena else []

    def _slice(self, role: str, position: int) -> Tensor:
        two = _in_bank(role, 1) in self._arrays
        return self._arrays[_in_bank(role, self.bank[position]) if two else role][
            slice(*self.pieces[position].in_shard)
        ]

    def _run(self, roles: Mapping[str, str], where: slice, step: float, bank: int) -> BoundRun:
        read = {role: self._arrays[_in_bank(name, bank)][where] for role, name in roles.items()}
        written = {role: self._arrays[_in_bank(name, 1 - bank)][where] for role, name in roles.items()}
        return BoundRun(read | self._out(where), self.grad_dtype, step=step, to=written)

    def count_step(self, positions: Collection[int]) -> None:
        """Let the banks count, and be shown, that the step has written."""
        super().count_step(positions)
        for position in positions:
            self.bank[position] ^= 1
            self._copies.pop(position, None)
            if position in self._views:
                self._turn(position)

    def _turn(self, position: int) -> None:
        """Show the bank that counts in the dict that the user has, but for what the user has put into it."""
        shown, before = self._views[position], self._own[position]
        after = self._other.pop(position, None) or self._shown(position)
        after["step"] = before["step"]  # there is one
        for key, value in after.items():
            if shown.get(key) is before[key]:
                shown[key] = value
        self._own[position], self._other[position] = after, before
