"""One bucket's shard of state, with this rank's slices of it: live views, and when a master follows its parameter."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from ..buckets import GradBucket
from ..flat_param import FlatParam
from .base import ParamState
from .native_rules import HALVES

MOMENTS = ("exp_avg", "exp_avg_sq")
MAXIMUM = "max_exp_avg_sq"


def follow_param(master: Tensor, param: Tensor) -> None:
    """Take a master from the parameter that the user has written to, in place; both 1-D, the master on the CPU."""
    if param.dtype in HALVES:
        # Where the parameter is what the master rounds to, nobody has written, and the master knows better.
        same = master.to(param.dtype).view(torch.int16) == param.view(torch.int16).to(master.device)
        torch.where(same, master, param.to(master.device).float(), out=master)
    else:
        master.copy_(param)


class StateShard:
    """See the module. Slices are named by their position among those of this rank in the bucket.

    Arrays are of the shard's size, and fp32: exp_avg, exp_avg_sq; max_exp_avg_sq for amsgrad; master, where that is not
    the parameter itself.

    Attributes:
        steps: steps done, fp32, one per slice.
        stepped: positions of slices that have state.
    """

    def __init__(self, bucket: GradBucket) -> None:
        self.bucket, self.pieces = bucket, bucket.slices
        by_index = dict(zip(bucket.layout.params, bucket.params, strict=True))
        self.flats: list[FlatParam] = [by_index[piece.param] for piece in self.pieces]
        self.param_dtype = bucket.params[0].param.dtype
        self.steps = torch.zeros(len(self.pieces), dtype=torch.float32)
        self.stepped: set[int] = set()
        self._arrays: dict[str, Tensor] = {}
        self._stale = set(range(len(self.pieces)))
        self._known = [flat.edits for flat in self.flats]
        self._views: dict[int, ParamState] = {}
        self._own: dict[int, ParamState] = {}

    def _renew_views(self) -> None:
        """Let the dicts that the user holds show the arrays as they are mapped now, but for what the user put there."""
        held, own = self._views, self._own
        self._views, self._own = {}, {}
        for position, shown in held.items():
            for key, value in self.state(position).items():
                if shown.get(key) is own[position].get(key):
                    shown[key] = value
            self._views[position] = shown

    def repoint(self, position: int) -> None:
        """The parameter's data moved: whatever lies there is the user's."""
        self._stale.add(position)

    def _slice(self, role: str, position: int) -> Tensor:
        return self._arrays[role][slice(*self.pieces[position].in_shard)]

    def state(self, position: int) -> ParamState:
        """The live state of a slice: tensors in the parameter's shape where it is whole, else 1-D."""
        if position not in self._views:
            flat = self.flats[position]
            whole = self.pieces[position].in_param.numel == flat.param.numel()
            shown: ParamState = {"step": self.steps[position]}
            keys = [key for key in (*MOMENTS, MAXIMUM) if key in self._arrays]
            for key in [*keys, *(["master"] if self.param_dtype in HALVES else [])]:
                run = self._slice(key, position)
                shown[key] = flat.shaped(run) if whole else run
            self._views[position], self._own[position] = shown, dict(shown)
        return self._views[position]

    def replaced(self, position: int, shown: ParamState) -> bool:
        """Whether the user has put other values in the place of those that :meth:`state` shows."""
        own = self._own.get(position, {})
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
        flat, piece = self.flats[position], self.pieces[position]
        if "master" in self._arrays and ("master" not in saved or self.param_dtype not in HALVES):
            flat.load()
            self._slice("master", position).copy_(flat.flat[slice(*piece.in_param)])
        self.follows(position)

    def edited(self, position: int) -> bool:
        """Whether the user has written to the parameter since it was last read or written here."""
        return position in self._stale or self.flats[position].edits != self._known[position]

    def follows(self, position: int) -> None:
        """The master is, or will be, what the parameter is at this moment."""
        self._stale.discard(position)
        self._known[position] = self.flats[position].edits

    def has_maximum(self) -> bool:
        """Whether there is a place for amsgrad's state."""
        return MAXIMUM in self._arrays

    def count_step(self, positions: Collection[int]) -> None:
        """These slices have been stepped."""
        if len(positions) == len(self.pieces):
            self.steps += 1
        else:
            self.steps[list(positions)] += 1
        self.stepped.update(positions)
