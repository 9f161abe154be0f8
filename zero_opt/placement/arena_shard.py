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
from ..shared_memory import Arena
from .base import ParamState
from .master_shard import HALVES, MasterShard

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


class ArenaShard(MasterShard):
    """See the module. Slices are named by their position among those of this rank in the bucket.

    Arrays are (shard numel,), fp32 but for ``out`` and gradients: master, exp_avg, exp_avg_sq; max_exp_avg_sq for
    amsgrad; out, the new parameters in their own dtype, where that is not fp32; as many grad0, grad1 as asked for.

    Attributes:
        steps: steps done, fp32, one per slice.
        stepped: positions of slices that have state.
    """

    def __init__(self, bucket: GradBucket) -> None:
        by_index = dict(zip(bucket.layout.params, bucket.params, strict=True))
        super().__init__(bucket.slices, [by_index[piece.param] for piece in bucket.slices])
        self.bucket = bucket
        self.param_dtype = bucket.params[0].param.dtype
        self.lodged = bucket.shard_dtype in GRAD_DTYPES and bucket.device.type == "cpu"
        self.grad_dtype = bucket.shard_dtype if self.lodged else torch.float32
        self.steps = torch.zeros(len(self.pieces), dtype=torch.float32)
        self.stepped: set[int] = set()
        self._sections: dict[str, Section] = {}
        self._views: dict[int, ParamState] = {}
        self._own: dict[int, ParamState] = {}

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

    def master(self, position: int) -> Tensor:
        """See :class:`MasterShard`."""
        return self._slice("master", position)

    def result(self, position: int) -> Tensor:
        """See :class:`MasterShard`."""
        return self._slice("out" if "out" in self._arrays else "master", position)

    def _slice(self, role: str, position: int) -> Tensor:
        return self._arrays[role][slice(*self.pieces[position].in_shard)]

    # -- state --------------------------------------------------------------------------------------------------------

    def state(self, position: int) -> ParamState:
        """The live state of a slice: tensors in the parameter's shape where it is whole, else 1-D."""
        if position not in self._views:
            shown: ParamState = {"step": self.steps[position]}
            keys = [key for key in (*_MOMENTS, _MAXIMUM) if key in self._sections]
            for key in [*keys, *(["master"] if self.param_dtype in HALVES else [])]:
                shown[key] = self.shaped(self._slice(key, position), position)
            self._views[position], self._own[position] = shown, dict(shown)
        return self._views[position]

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
        if "master" not in saved or self.param_dtype not in HALVES:
            self.take_param(position)
        self.follow(position)

    # -- a step -------------------------------------------------------------------------------------------------------

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
        """One native run, and its place in the shard, per stretch of neighbouring slices at one step count."""
        counts = self.steps.tolist()
        for (_, count), members in groupby(enumerate(positions), lambda at: (at[1] - at[0], counts[at[1]])):
            found = [position for _, position in members]
            start, stop = self.pieces[found[0]].in_shard.start, self.pieces[found[-1]].in_shard.stop
            if stop > start:
                yield self._run(slice(start, stop), count + 1, amsgrad=amsgrad), slice(start, stop)

    def _run(self, where: slice, step: float, *, amsgrad: bool) -> BoundRun:
        roles = {"param": "master", **{moment: moment for moment in _MOMENTS}}
        if amsgrad:
            roles[_MAXIMUM] = _MAXIMUM
        if self.param_dtype in HALVES:
            roles["out"] = "out"
        arrays = {role: self._arrays[name][where] for role, name in roles.items()}
        return BoundRun(arrays, self.grad_dtype, step=step)

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
