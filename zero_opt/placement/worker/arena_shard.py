"""One bucket's shard as the worker has it: its arrays in the arena, and how they meet parameters and gradients."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby

import torch
from torch import Tensor

from ...kernels.adam_state import HALVES, role_numel, span_of, state_dtypes
from ...kernels.checks import GRAD_DTYPES
from ...kernels.runs import BoundRun
from ...sharding.buckets import GradBucket
from ...system.devices import is_host
from ...system.extension import native
from ...system.shared_memory import Arena
from ..memory import HOST_MEMORY, Tally, reduced_gradients, state_kind
from ..state_shard import Kept, StateShard
from .reduced_grad import ReducedGrad

# Every array begins at a multiple of this, so that no two share a line of a cache.
_ARRAY_ALIGN = 64
# Arrays whose distance is a power of two compete for one bank of memory: a step over large ones took 1.6 times as long.
_GAP_BYTES, _LARGE_BYTES = 4096 + 4 * _ARRAY_ALIGN, 1 << 18


SECOND_BANK = ", bank 1"


def in_bank(role: str, bank: int) -> str:
    """The name of an array of state in a bank."""
    return role + SECOND_BANK if bank else role


class ArenaShard(StateShard):
    """A state shard whose arrays lie in the arena.

    There is always a master; of a split one, the half that the parameters are is "param", in their dtype. Arrays are
    more: out, the new parameters in their own dtype, where neither param nor master is that, or predictions of them; as
    many grad0, grad1 as asked for, or one where gradients come in :meth:`take_grads` alone.

    Attributes:
        banks: how many banks of state there are. bank: per slice, the number of the one that its state is in.
        grads_in_arena: gradients are reduced into the arena.
        copied_early: gradients are reduced on an accelerator, in the dtype that the worker reads: see
            [Note: early copies].
        reduced: what has become of the gradient since the last step.
    """

    banks = 1

    def __init__(self, bucket: GradBucket, kept: Kept) -> None:
        super().__init__(bucket, kept)
        self._stepped_role = "param" if self.splits else "master"
        self.grad_dtype = bucket.shard_dtype if bucket.shard_dtype in GRAD_DTYPES else torch.float32
        self.grads_in_arena = bucket.shard_dtype is self.grad_dtype and is_host(bucket.device)
        self.copied_early = bucket.shard_dtype is self.grad_dtype and not is_host(bucket.device)
        self.reduced = ReducedGrad()
        self._grad_at = 0  # of a shard on an accelerator: the number of the array that the next step reads
        self.bank = [0] * len(self.pieces)
        self._sections: dict[str, tuple[int, torch.dtype]] = {}  # where each array begins in the arena

    def master(self, position: int) -> Tensor:
        return self._slice(self._stepped_role, position)

    # -- memory -------------------------------------------------------------------------------------------------------

    def missing(self, roles: Sequence[str], grads: int) -> dict[str, torch.dtype]:
        """The arrays that a step with ``roles`` of the update's needs and that have no place yet."""
        wanted = {self._stepped_role: self.param_dtype if self.splits else torch.float32}
        wanted |= state_dtypes(self.form, roles)
        if self._has_out:
            wanted["out"] = self.param_dtype
        grads = grads if self.grads_in_arena or self.copied_early else 1
        wanted.update({f"grad{number}": self.grad_dtype for number in range(grads)})
        return {role: dtype for role, dtype in wanted.items() if role not in self._sections}

    @property
    def _has_out(self) -> bool:
        return self.param_dtype in HALVES and not self.splits

    @property
    def spare_nbytes(self) -> int:
        """Bytes of state that is not shown: the masters of fp32 parameters."""
        owned = sum(piece.in_param.numel for piece in self.pieces)
        return 0 if self.param_dtype in HALVES else owned * torch.float32.itemsize

    def numel_of(self, role: str) -> int:
        """How many elements an array has."""
        return role_numel(role, self.bucket.shard_numel)

    def nbytes_of(self, arrays: Mapping[str, torch.dtype]) -> int:
        """Bytes of these arrays, one after the other, and of gaps between large ones."""
        sizes = [
            -(-self.numel_of(role) * dtype.itemsize // _ARRAY_ALIGN) * _ARRAY_ALIGN for role, dtype in arrays.items()
        ]
        return sum(size + (_GAP_BYTES if size >= _LARGE_BYTES else 0) for size in sizes)

    def add_memory(self, tally: Tally, arrays: Mapping[str, torch.dtype]) -> None:
        """Add what these arrays hold, without what fills them up, and what the shard has outside the arena."""
        for role, dtype in arrays.items():
            kind, name = self.kind_of(role)
            tally[kind, HOST_MEMORY, name] += self._held_numel(role, kind) * dtype.itemsize
        if self.update.counts:
            tally["state", HOST_MEMORY, "step"] += self.steps.nbytes
        if not self.grads_in_arena:
            tally.update(reduced_gradients([self.bucket]))

    def _held_numel(self, role: str, kind: str) -> int:
        """How many elements of an array are in use."""
        if kind == "grad_shards":
            return self.numel_of(role)
        return sum(role_numel(role, piece.in_param.numel) for piece in self.pieces)

    def kind_of(self, role: str) -> tuple[str, str]:
        """What an array is, as a kind and a name; see :class:`~zero_opt.tools.memory_rows.Row`."""
        if role.startswith("grad"):
            return ("grad_shards", "reduced gradients") if self.grads_in_arena else ("buffers", "copies of gradients")
        if role in ("out", "param"):
            return "buffers", "updated parameters"
        return state_kind(role), role

    def place(self, arrays: Mapping[str, torch.dtype], start: int) -> int:
        """Give arrays their places, from byte ``start`` of the arena on; returns where they end."""
        for role, dtype in arrays.items():
            self._sections[role] = (start, dtype)
            start += self.nbytes_of({role: dtype})
        return start

    def bind(self, arena: Arena) -> None:
        """Make the views of the arena as it is mapped now."""
        self._arrays = {
            role: arena.view(at, self.numel_of(role), dtype) for role, (at, dtype) in self._sections.items()
        }
        for role in self._arrays:
            if role.startswith("grad"):
                self._arrays[role] = self._arrays[role].data  # its version counter is not that of the state
        self._renew_views()
        self._copies.clear()
        if self.grads_in_arena:
            grads = [role for role in sorted(self._sections) if role.startswith("grad")]
            self.bucket.place_in_arena([self._arrays[role] for role in grads])

    def result(self, position: int) -> Tensor:
        return self._slice("out" if self._has_out else self._stepped_role, position)

    # -- a step -------------------------------------------------------------------------------------------------------

    @property
    def grads(self) -> Tensor:
        """The place in the arena that the worker reads gradients from in the next step, (shard numel,)."""
        return self.bucket.in_arena if self.grads_in_arena else self._arrays[f"grad{self._grad_at}"]

    @property
    def has_two_places(self) -> bool:
        """Whether gradients of the next step may come to the arena while the worker reads those of the last one."""
        return "grad1" in self._sections

    def copy_reduced(self) -> None:
        """Copy the shard to the arena, on the accelerator's current stream; see [Note: early copies]."""
        self.grads.copy_(self.bucket.shard, non_blocking=True)

    def take_grads(self, grads: Sequence[Tensor | None]) -> None:
        """Copy those gradients to the arena that are not there.

        From an accelerator the copies may still be under way on its current stream.
        """
        home = self.grads
        there = [home, self.bucket.shard] if self.reduced.in_arena else [home]
        for position, grad in enumerate(grads):
            where = slice(*self.pieces[position].in_shard)
            if grad is not None and all(grad.data_ptr() != place[where].data_ptr() for place in there):
                # In one order of elements: between two, torch may copy by way of host memory that no event guards.
                home[where].copy_(self.flat_grad(position, grad), non_blocking=True)

    def lend_grads(self) -> None:
        """Let the worker read the gradients until :meth:`count_step`; those that come meanwhile go elsewhere."""
        if self.grads_in_arena:
            self.bucket.lend()
        elif self.has_two_places:
            self._grad_at = 1 - self._grad_at

    def runs(self, positions: Sequence[int], roles: tuple[str, ...]) -> Iterator[tuple[native.UpdateRun, int]]:
        """Native runs over these slices, each from one bank of state to the other if there is one; their gradients.

        Args:
            roles: which of the update's arrays the step has.
        """
        home, self.roles = self.grads, roles
        for where, step, bank in self._neighbors(positions):
            arrays = self._state(where, bank)
            if self._has_out:
                arrays["out"] = self._arrays["out"][where]
            to = self._state(where, 1 - bank) if self.banks == 2 else None
            yield BoundRun(arrays, self.grad_dtype, step=step, to=to).run, home[where].data_ptr()

    def _neighbors(self, positions: Sequence[int]) -> Iterator[tuple[slice, float, int]]:
        """Neighboring slices with one step count and bank: where they lie, the number of the step, the bank."""
        next_steps = (self.steps + 1).tolist()

        def kind(at: tuple[int, int]) -> tuple[int, float, int]:
            return at[1] - at[0], next_steps[at[1]], self.bank[at[1]]

        for (_, step, bank), members in groupby(enumerate(positions), kind):
            neighbors = [position for _, position in members]
            start, stop = self.pieces[neighbors[0]].in_shard.start, self.pieces[neighbors[-1]].in_shard.stop
            if stop > start:
                yield slice(start, stop), self.next_step(neighbors[0], step), bank

    def _state(self, where: slice, bank: int) -> dict[str, Tensor]:
        """What a run reads of one bank, or writes to it, by the kernel's names for their roles."""
        names = {"param": self._stepped_role, **{role: role for role in state_dtypes(self.form, self.roles)}}
        return {role: self._arrays[in_bank(name, bank)][span_of(role, where)] for role, name in names.items()}

    def count_step(self, positions: Collection[int], numbers: Sequence[float]) -> None:
        """Count a step of these slices, whose gradients the worker has read."""
        super().count_step(positions, numbers)
        self.bucket.reclaim()
