"""One bucket's shard of Adam's state, in arrays of the shard's size, as it is shown, replaced and counted."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels.adam_state import HALVES, MOMENTS
from ..sharding.buckets import GradBucket
from .adam_rules import MAXIMUM
from .interface import ParamState
from .masters import MasterShard, Stretch, slices_of


class StateShard(MasterShard):
    """One bucket's shard of Adam's state. Slices are those of this rank in the bucket.

    Arrays are (shard numel,), fp32: exp_avg, exp_avg_sq; max_exp_avg_sq for amsgrad; master, where the parameter is not
    that itself.

    Attributes:
        steps: steps done, fp32, one per slice.
        stepped: positions of slices that have state.
    """

    def __init__(self, bucket: GradBucket) -> None:
        super().__init__(*slices_of(bucket))
        self.bucket = bucket
        self.param_dtype = bucket.params[0].param.dtype
        self.steps = torch.zeros(len(self.pieces), dtype=torch.float32, device="cpu")
        self.stepped: set[int] = set()
        self._arrays: dict[str, Tensor] = {}
        self._views: dict[int, tuple[ParamState, ParamState]] = {}  # per position: what users hold, and what it shows

    def master(self, position: int) -> Tensor:
        return self._slice("master", position)

    def _slice(self, role: str, position: int) -> Tensor:
        return self._arrays[role][slice(*self.pieces[position].in_shard)]

    def _renew_view(self, position: int, own: ParamState) -> None:
        """Let the dict that the user holds show other tensors of ours, but for what the user put into it."""
        shown, before = self._views[position]
        for key, value in own.items():
            if shown.get(key) is before.get(key):
                shown[key] = value
        self._views[position] = (shown, own)

    def _renew_views(self) -> None:
        """Let the dicts that the user holds show the arrays as they are mapped now."""
        for position in self._views:
            self._renew_view(position, self._shown(position))

    def state(self, position: int) -> ParamState:
        """The live state of a slice: tensors in the parameter's shape where it is whole, else 1-D."""
        if position not in self._views:
            own = self._shown(position)
            self._views[position] = (dict(own), own)
        return self._views[position][0]

    def _shown(self, position: int) -> ParamState:
        shown: ParamState = {"step": self.steps[position]}
        keys = [key for key in (*MOMENTS, MAXIMUM) if key in self._arrays]
        for key in [*keys, *(["master"] if self.param_dtype in HALVES else [])]:
            shown[key] = self.shaped(self._slice(key, position), position)
        return shown

    def replaced(self, position: int, shown: ParamState) -> bool:
        """Whether the user has put other values in the place of those that :meth:`state` shows."""
        _, own = self._views.get(position, ({}, {}))
        return shown.keys() != own.keys() or any(shown[key] is not value for key, value in own.items())

    def forget_views(self, position: int) -> None:
        """Let :meth:`state` show the arrays' own values again."""
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

    def stretches_of(self, position: int) -> Sequence[Stretch]:
        """What of a slice is stepped, and at which step counts."""
        if position in self.stretches:
            return self.stretches[position]
        next_step = float(self.steps[position] + 1)  # in fp32, where counting ends at 2^24, as torch's does
        return [Stretch(0, self.pieces[position].in_shard.numel, next_step - 1)]

    def has_maximum(self) -> bool:
        """Whether there is a place for amsgrad's state."""
        return MAXIMUM in self._arrays

    def count_step(self, positions: Collection[int]) -> None:
        """Count a step of these slices."""
        if len(positions) == len(self.pieces):
            self.steps += 1
        else:
            self.steps[list(positions)] += 1
        self.stepped.update(positions)
