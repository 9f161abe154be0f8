"""One bucket's shard as the worker has it: its arrays in the arena, and how they meet parameters and gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..buckets import GradBucket
from ..cpu_adam.checks import GRAD_DTYPES
from ..cpu_adam.runs import BoundRun
from ..flat_param import FlatParam, own_writes
from ..shared_memory import Arena
from .base import ParamState

HALVES = (torch.bfloat16, torch.float16)
PARAM_DTYPES = (torch.float32, *HALVES)
_MOMENTS = ("exp_avg", "exp_avg_sq")
_MAXIMUM = "max_exp_avg_sq"
# Every array begins at a multiple of this, so that no two share a line of a cache.
_ALIGN = 64
# Arrays whose distance is a power of two compete for one bank of memory: a step over large ones took 1.6 times as long.
_GAP_BYTES, _LARGE_BYTES = 4096 + 4 * _ALIGN, 1 << 18


class Section(NamedTuple):
    """Where an array of the shard's size lies in the arena."""

    start: int
    dtype: torch.dtype


def section_nbytes(numel: int, dtypes: Sequence[torch.dtype]) -> int:
    """Bytes of arrays of ``numel`` elements each, one after the other, and of gaps between large ones."""
    sizes = [-(-numel * dtype.itemsize // _ALIGN) * _ALIGN for dtype in dtypes]
    return sum(size + (_GAP_BYTES if size >= _LARGE_BYTES else 0) for size in sizes)


class ArenaShard:
    """See the module. Slices are named by their position among those of this rank in the bucket.

    Arrays are (shard numel,), fp32 but for ``out`` and gradients: master, exp_avg, exp_avg_sq; max_exp_avg_sq for
    amsgrad; out, the new parameters in their own dtype, where that is not fp32; as many grad0, grad1 as asked for.

    Attributes:
        steps: steps done, fp32, one per slice.
        stepped: positions of slices that have state.
        bank: per slice, in which bank of arrays its state is; there is one, 0.
    """

    def __init__(self, bucket: GradBucket) -> None:
        self.bucket, self.pieces = bucket, bucket.slices
        by_index = dict(zip(bucket.layout.params, bucket.params, strict=True))
        self.flats: list[FlatParam] = [by_index[piece.param] for piece in self.pieces]
        self.param_dtype = bucket.params[0].param.dtype
        self.lodged = bucket.dtype in GRAD_DTYPES and bucket.device.type == "cpu"
        self.grad_dtype = bucket.dtype if self.lodged else torch.float32
        self.steps = torch.zeros(len(self.pieces), dtype=torch.float32)
        self.stepped: set[int] = set()
        self.bank = [0] * len(self.pieces)
        self._stale = set(range(len(self.pieces)))
        self._known = [flat.edits for flat in self.flats]
        self._sections: dict[str, Section] = {}
        self._views: dict[int, ParamState] = {}
        self._own: dict[int, ParamState] = {}
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}

    # -- memory -------------------------------------------------------------------------------------------------------

    def missing(self, *, amsgrad: bool, grads: int) -> dict[str, torch.dtype]:
        """The arrays that a step needs and that have no place yet."""
        wanted = dict.fromkeys(("master", *_MOMENTS), torch.float32)
        if amsgrad:
            wanted[_MAXIMUM] = torch.float32
        if self.param_dtype in HALVES:
            wanted["out"] = self.param_dtype
        wanted.update({f"grad{number}": self.grad_dtype for number in range(grads if self.lodged else 1)})
        return {role: dtype for role, dtype in wanted.items() if role not in self._sections}

    @property
    def spare_nbytes(self) -> int:
        """Bytes of state that does not count."""
        return 0

    def place(self, arrays: Mapping[str, torch.dtype], start: int) -> int:
        """Give arrays their places, from byte ``start`` of the arena on; returns where they end."""
        for role, dtype in arrays.items():
            self._sections[role] = Section(start, dtype)
            start += section_nbytes(self.bucket.shard_numel, [dtype])
        return start

    def bind(self, arena: Arena) -> None:
        """Make the views of the arena as it is mapped now."""
        numel = self.bucket.shard_numel
        self._arrays = {role: arena.view(at, numel, dtype) for role, (at, dtype) in self._sections.items()}
        for role in self._arrays:
            if role.startswith("grad"):
                self._arrays[role] = self._arrays[role].data  # its version counter is not that of the state
        self._renew_views()
        self._copies.clear()
        if self.lodged:
            grads = [role for role in sorted(self._sections) if role.startswith("grad")]
            self.bucket.lodge([self._arrays[role] for role in grads])

    def _renew_views(self) -> None:
        """Let the dicts that the user holds show the arena as it is mapped now, but for what the user put into them."""
        held, own = self._views, self._own
        self._views, self._own = {}, {}
        for position, shown in held.items():
            for key, value in self.state(position).items():
                if shown.get(key) is own[position].get(key):
                    shown[key] = value
            self._views[position] = shown

    def repoint(self, position: int) -> None:
        """The parameter's data moved: whatever lies there is the user's."""
        self._copies.pop(position, None)
        self._stale.add(position)

    def _slice(self, role: str, position: int) -> Tensor:
        return self._arrays[role][slice(*self.pieces[position].in_shard)]

    # -- state --------------------------------------------------------------------------------------------------------

    def state(self, position: int) -> ParamState:
        """The live state of a slice: tensors in the parameter's shape where it is whole, else 1-D."""
        if position not in self._views:
            shown = self._shown(position)
            self._views[position], self._own[position] = shown, dict(shown)
        return self._views[position]

    def _shown(self, position: int) -> ParamState:
        flat = self.flats[position]
        whole = self.pieces[position].in_param.numel == flat.param.numel()
        shown: ParamState = {"step": self.steps[position]}
        keys = [key for key in (*_MOMENTS, _MAXIMUM) if key in self._sections]
        for key in [*keys, *(["master"] if self.param_dtype in HALVES else [])]:
            run = self._slice(key, position)
            shown[key] = flat.shaped(run) if whole else run
        return shown

    def replaced(self, position: int, shown: ParamState) -> bool:
        """Whether the user has put other values in the place of those that :meth:`state` shows."""
        own = self._own.get(position, {})
        return shown.keys() != own.keys() or any(shown[key] is not value for key, value in own.items())

    def forget_views(self, position: int) -> None:
        """Let :meth:`state` show the arena's own values again."""
        self._views.pop(position, None)

    def load(self, position: int, saved: Mapping[str, Any]) -> None:
        """Replace the state of a slice; an empty one makes it new. Without a master, the parameter is it."""
        for key, value in self.state(position).items():
            if key == "step":
                self.steps[position] = float(saved.get(key, 0.0))
            elif key in saved:
                value.copy_(saved[key])
            elif key != "master":
                value.zero_()
        if saved:
            self.stepped.add(position)
        else:
            self.stepped.discard(position)
        flat, piece = self.flats[position], self.pieces[position]
        if "master" not in saved or self.param_dtype not in HALVES:
            flat.load()
            self._slice("master", position).copy_(flat.flat[slice(*piece.in_param)])
        self._stale.discard(position)
        self._known[position] = flat.edits

    # -- a step -------------------------------------------------------------------------------------------------------

    def edited(self, position: int) -> bool:
        """Whether the user has written to the parameter since it was last read or written here."""
        return position in self._stale or self.flats[position].edits != self._known[position]

    def read_params(self, positions: Sequence[int]) -> None:
        """Take masters from parameters that the user has written to."""
        for position in filter(self.edited, positions):
            flat, piece = self.flats[position], self.pieces[position]
            flat.load()
            param, master = flat.flat[slice(*piece.in_param)], self._slice("master", position)
            if self.param_dtype in HALVES:
                # Where the parameter is what the master rounds to, nobody has written, and the master knows better.
                same = master.to(self.param_dtype).view(torch.int16) == param.view(torch.int16).to(master.device)
                torch.where(same, master, param.to(master.device).float(), out=master)
            else:
                master.copy_(param)
            self._stale.discard(position)
            self._known[position] = flat.edits

    def take_grads(self, grads: Sequence[Tensor | None]) -> Tensor:
        """The gradients in the arena, (shard numel,): those that have not been reduced into it are copied there.

        From an accelerator the copies may still be under way on its current stream.
        """
        home = self.bucket.lodging if self.lodged else self._arrays["grad0"]
        for position, grad in enumerate(grads):
            target = home[slice(*self.pieces[position].in_shard)]
            if grad is not None and grad.data_ptr() != target.data_ptr():
                whole = grad.numel() == self.flats[position].param.numel()
                (self.flats[position].shaped(target) if whole else target).copy_(grad, non_blocking=True)
        return home

    def lend_grads(self) -> None:
        """The gradients are read until :meth:`count_step`."""
        if self.lodged:
            self.bucket.lend()

    def runs(self, positions: Sequence[int], *, amsgrad: bool) -> Iterator[tuple[BoundRun, slice]]:
        """One native run, and its place in the shard, per stretch of neighbouring slices at one step count and bank."""
        counts = self.steps.tolist()

        def kind(at: tuple[int, int]) -> tuple[int, float, int]:
            return at[1] - at[0], counts[at[1]], self.bank[at[1]]

        for (_, count, bank), members in groupby(enumerate(positions), kind):
            found = [position for _, position in members]
            start, stop = self.pieces[found[0]].in_shard.start, self.pieces[found[-1]].in_shard.stop
            if stop > start:
                roles = {"param": "master", **{moment: moment for moment in _MOMENTS}}
                roles |= {_MAXIMUM: _MAXIMUM} if amsgrad else {}
                yield self._run(roles, slice(start, stop), count + 1, bank), slice(start, stop)

    def _run(self, roles: Mapping[str, str], where: slice, step: float, bank: int) -> BoundRun:  # noqa: ARG002
        """A run of some elements; ``roles`` names the array of each of its parts."""
        arrays = {role: self._arrays[name][where] for role, name in roles.items()} | self._out(where)
        return BoundRun(arrays, self.grad_dtype, step=step)

    def _out(self, where: slice) -> dict[str, Tensor]:
        return {"out": self._arrays["out"][where]} if self.param_dtype in HALVES else {}

    def has_maximum(self) -> bool:
        """Whether there is a place for amsgrad's state."""
        return _MAXIMUM in self._sections

    def count_step(self, positions: Sequence[int]) -> None:
        """These slices have been stepped; nobody reads the gradients any more."""
        if len(positions) == len(self.pieces):
            self.steps += 1
        else:
            self.steps[list(positions)] += 1
        self.stepped.update(positions)
        self.bucket.reclaim()

    def write_params(self, positions: Sequence[int]) -> None:
        """Bring what was stepped into the parameters; on an accelerator, in the order of its current stream."""
        for position in positions:
            if position not in self._copies:
                target = self.flats[position].flat[slice(*self.pieces[position].in_param)]
                self._copies[position] = (target, self._slice("out" if "out" in self._arrays else "master", position))
        pairs = [self._copies[position] for position in positions]
        flats = [self.flats[position] for position in positions]
        with own_writes(flats):
            if pairs:
                targets, sources = zip(*pairs, strict=True)
                torch._foreach_copy_(targets, sources, non_blocking=True)
            for flat in flats:
                flat.store()
