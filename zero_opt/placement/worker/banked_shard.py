"""An :class:`ArenaShard` with two banks of state, of which a step reads one and writes the other, and room for sums."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from ...kernels import sum_count
from ...sharding.buckets import GradBucket
from ...system.extension import native
from ...system.failures import on_failure
from ...system.shared_memory import Arena
from ..interface import ParamState
from ..state_shard import Kept
from .arena_shard import SECOND_BANK, ArenaShard, in_bank

_SQUARES = "squares"


class BankedShard(ArenaShard):
    """A shard with two banks of state, of which a step reads one and writes the other.

    Each slice has a bank of its own that counts: slices that a step does not use stay where they are, and nothing is
    copied from bank to bank but arrays that a step does not have. ``out`` and gradients are not state, and there once.

    Attributes:
        squares: per slice, a place for the sums that :func:`grad_squares` adds up; none if the shard lies elsewhere.
    """

    banks = 2

    def __init__(self, bucket: GradBucket, kept: Kept) -> None:
        super().__init__(bucket, kept)
        self.squares: list[Tensor] = []
        self._sums = [sum_count(piece.in_shard.numel) for piece in self.pieces]
        self._written = list(self.bank)  # by the step that was begun last
        self._other: dict[int, ParamState] = {}  # views of the bank that does not count, of slices that are shown

    def missing(self, roles: Sequence[str], grads: int) -> dict[str, torch.dtype]:
        arrays = super().missing(roles, grads)
        state = [role for role in arrays if role != "out" and not role.startswith("grad")]
        arrays |= {in_bank(role, 1): arrays[role] for role in state}
        if self.grads_in_arena and _SQUARES not in self._sections:
            arrays[_SQUARES] = torch.float64
        return arrays

    def numel_of(self, role: str) -> int:
        return sum(self._sums) if role == _SQUARES else super().numel_of(role.removesuffix(SECOND_BANK))

    def _held_numel(self, role: str, kind: str) -> int:
        return sum(self._sums) if role == _SQUARES else super()._held_numel(role.removesuffix(SECOND_BANK), kind)

    def kind_of(self, role: str) -> tuple[str, str]:
        if role == _SQUARES:
            return "buffers", "sums of squares"
        return ("buffers", "second bank") if role.endswith(SECOND_BANK) else super().kind_of(role)

    @property
    def spare_nbytes(self) -> int:
        doubled = {role: dtype for role, (_, dtype) in self._sections.items() if role.endswith(SECOND_BANK)}
        sizes = (self._held_numel(role, "buffers") * dtype.itemsize for role, dtype in doubled.items())
        return super().spare_nbytes + sum(sizes)

    def forget_views(self, position: int) -> None:
        super().forget_views(position)
        self._other.pop(position, None)

    def bind(self, arena: Arena) -> None:
        self._other.clear()
        super().bind(arena)
        self.squares = list(torch.split(self._arrays[_SQUARES], self._sums)) if self.grads_in_arena else []

    def _array(self, role: str, position: int) -> Tensor:
        name = in_bank(role, self.bank[position])
        return self._arrays[name if name in self._arrays else role]

    def runs(self, positions: Sequence[int], roles: tuple[str, ...]) -> Iterator[tuple[native.UpdateRun, int]]:
        self._carry_over(positions, [role for role in self.places() if role not in roles])
        return super().runs(positions, roles)

    def _carry_over(self, positions: Sequence[int], roles: Collection[str]) -> None:
        """Copy arrays that a step does not have to the bank that it writes."""
        for where, _, bank in self._neighbors(positions) if roles else ():
            for role in roles:
                # What has a version counter of its own: no value changes that counts.
                self._arrays[in_bank(role, 1 - bank)].data[where] = self._arrays[in_bank(role, bank)][where]

    def next_steps(self, positions: Sequence[int]) -> list[float]:
        numbers = super().next_steps(positions)
        for position in positions:
            self._written[position] = 1 - self.bank[position]
        return numbers

    def count_step(self, positions: Collection[int], numbers: Sequence[float]) -> None:
        """Let the banks count, and be shown, that the step has written."""
        super().count_step(positions, numbers)
        for position in (position for position in positions if self.bank[position] != self._written[position]):
            with on_failure(partial(self.bank.__setitem__, position, self.bank[position])):
                self.bank[position] = self._written[position]
                self._show_bank(position)

    def _show_bank(self, position: int) -> None:
        """Let the views that users hold of a slice show the bank that counts now."""
        self._copies.pop(position, None)
        if position in self._views and not self.compact:
            _, before = self._views[position]
            after = self._other.pop(position, {})
            if after.keys() != before.keys():
                after = self._shown(position)
            if "step" in before:
                after["step"] = before["step"]  # there is one
            self._renew_view(position, after)
            self._other[position] = before
