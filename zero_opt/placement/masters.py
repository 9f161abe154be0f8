"""Masters and other copies of parameters: which of the two was written last, and copies between them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import StepPending
from ..kernels import copy_
from ..kernels.adam_state import Halfway, follow_param
from ..layout import ParamSlice
from ..sharding.buckets import GradBucket
from ..sharding.flat_param import FlatParam, own_writes
from ..system.extension import native_available


def slices_of(bucket: GradBucket, members: Iterable[int] | None = None) -> tuple[list[ParamSlice], list[FlatParam]]:
    """This rank's slices of a bucket, all or those at the given positions, and their parameters."""
    by_index = dict(zip(bucket.layout.params, bucket.params, strict=True))
    pieces = [*bucket.slices] if members is None else [bucket.slices[member] for member in members]
    return pieces, [by_index[piece.param] for piece in pieces]


class FollowedParams:
    """Slices of one bucket whose parameters the user may write to, named by their position among those given.

    A write to a parameter raises its version counter. :func:`share_counters` finds parameters that share one.

    Attributes:
        pieces: the slices. flats: the parameter of each. param_dtype: of all of them.
    """

    def __init__(self, pieces: Sequence[ParamSlice], flats: Sequence[FlatParam]) -> None:
        self.pieces, self.flats = pieces, flats
        self.param_dtype = flats[0].param.dtype if flats else torch.float32
        self._stale = set(range(len(pieces)))
        self._distrusted: set[int] = set()
        self._known = [flat.edits for flat in flats]

    def param_run(self, position: int) -> Tensor:
        """The slice of the parameter itself, or of its mirror, 1-D."""
        return self.flats[position].flat[slice(*self.pieces[position].in_param)]

    def part(self, position: int) -> Tensor:
        """The slice of the parameter as users see it; see :meth:`FlatParam.part`."""
        return self.flats[position].part(self.pieces[position].in_param)

    def shaped(self, run: Tensor, position: int) -> Tensor:
        """A 1-D run of a slice as users see it: in the parameter's shape where the slice is whole."""
        return self.flats[position].shaped_if_whole(run)

    def flat_grad(self, position: int, grad: Tensor) -> Tensor:
        """Return a gradient of a slice as 1-D in storage order; a view where possible."""
        flat = self.flats[position]
        return flat.flatten(grad) if grad.numel() == flat.numel else grad

    def repoint(self, position: int) -> None:
        """Follow a parameter whose data moved: what lies there is the user's."""
        self._stale.add(position)

    def edited(self, position: int) -> bool:
        """Whether the user has written to the parameter since it was last read or written here."""
        return position in self._stale or self.flats[position].edits != self._known[position]

    def rewritten(self, position: int) -> bool:
        """Whether the user has written to the parameter, or re-pointed it, since it was last read or written here."""
        return self.edited(position) or self.flats[position].repointed

    def rewritten_run(self, position: int) -> Tensor:
        """The slice of the parameter as it is now, 1-D, also of one that was re-pointed."""
        return self.flats[position].elements()[slice(*self.pieces[position].in_param)]

    def saved_master(self, position: int, master: Tensor) -> Tensor:
        """A master as users see it, or, if the parameter is :meth:`rewritten`, a copy that has followed it."""
        if not self.rewritten(position):
            return master
        copy = master.clone()
        follow_param(copy.as_strided((copy.numel(),), (1,)), self.rewritten_run(position))
        return copy

    def saved_state(self, position: int, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """A state whose master, if it has one, is :meth:`saved_master`."""
        if "master" not in state or not self.rewritten(position):
            return state
        return {**state, "master": self.saved_master(position, state["master"])}

    def distrust(self, position: int) -> None:
        """Let a master that was loaded count, from the next step on, where the parameter is what it rounds to."""
        self._distrusted.add(position)

    def to_read(self, position: int) -> bool:
        """Whether the next step has to look at the parameter first."""
        return position in self._distrusted or self.edited(position)

    def follow(self, position: int) -> None:
        """Let what was made of the parameter be right as it is, whatever was written to that."""
        self._stale.discard(position)
        self._distrusted.discard(position)
        self._known[position] = self.flats[position].edits


def changed_while_pending(
    used: Iterable[tuple[FollowedParams, Sequence[int]]], remedy: str = "call opt.flush()", cause: str = ""
) -> StepPending | None:
    """What is wrong if the user has changed a parameter that a pending step updates, of some slices.

    Args:
        remedy: what brings the step in. cause: why it is pending, where that is worth saying.
    """
    for shard, positions in used:
        for position in filter(shard.edited, positions):
            return StepPending(
                f"{shard.flats[position].label} was changed while a step for it was pending{cause}; {remedy} before "
                "changing parameters. To go on, call it on every rank, unless it is what raises this: it keeps the "
                "change and drops the update"
            )
    return None


class MasterShard(FollowedParams, ABC):
    """Slices and their masters, which follow the parameters.

    Attributes:
        gradients: of how many the gradient of each slice is the mean.
    """

    def __init__(self, pieces: Sequence[ParamSlice], flats: Sequence[FlatParam]) -> None:
        super().__init__(pieces, flats)
        self.gradients = [1] * len(pieces)
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}
        self._halfway: dict[int, Halfway] = {}  # of split masters that were loaded and not stepped yet

    def repoint(self, position: int) -> None:
        super().repoint(position)
        self._copies.pop(position, None)

    @abstractmethod
    def master(self, position: int) -> Tensor:
        """The master of a slice, 1-D in storage order."""

    def result(self, position: int) -> Tensor:
        """What a step leaves for the parameter, 1-D in storage order: the master, or that rounded."""
        return self.master(position)

    def next_stepped(self, position: int) -> Tensor:
        """What the next step begins from, 1-D: the master, or the parameter where the user has written to that.

        Of a split master, the parameter's half; what rounding has cut off stays.
        """
        return self.rewritten_run(position) if self.rewritten(position) else self.master(position)

    def take_param(self, position: int) -> None:
        """Let the master be the parameter."""
        self.flats[position].load()
        self.master(position).copy_(self.param_run(position))
        self.follow(position)

    def read_params(self, positions: Sequence[int]) -> None:
        """Take masters from parameters that the user has written to."""
        for position in filter(self.to_read, positions):
            self.flats[position].load()
            follow_param(self.master(position), self.param_run(position))
            self.follow(position)

    def note_halfway(self, position: int, master: Tensor | None) -> None:
        """Note which elements of a split master that is loaded wait for the parameter; ``None``: there is none."""
        self._halfway.pop(position, None)
        if master is not None and (halfway := Halfway.of(master)) is not None:
            self._halfway[position] = halfway

    def copies(self, positions: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Of some slices, the parameter and what was stepped, 1-D; the same tensors until either moves."""
        for position in positions:
            if position not in self._copies:
                self._copies[position] = (self.param_run(position), self.result(position))
        return [self._copies[position] for position in positions]

    def write_params(self, positions: Sequence[int]) -> None:
        """Bring what was stepped into the parameters; on an accelerator, in the order of its current stream."""
        with own_writes([self.flats[position] for position in positions]):
            write_counted([(self, positions)])


def write_counted(shards: Iterable[tuple[MasterShard, Sequence[int]]], *, threads: int | None = None) -> None:
    """As :meth:`MasterShard.write_params` of each, in one call; the caller counts the writes, see :class:`OwnWrites`.

    Args:
        threads: at most so many copy what lies in host memory; ``None`` is the default.
    """
    flats: list[FlatParam] = []
    copies: list[tuple[Tensor, Tensor]] = []
    for shard, positions in shards:
        flats += (shard.flats[position] for position in positions)
        copies += shard.copies(positions)
    _copy_to_params(flats, copies, threads)


def write_copies(flats: Sequence[FlatParam], copies: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy to parameters, given as the pairs of 1-D runs of theirs and of what is copied, without counting an edit."""
    with own_writes(flats):
        _copy_to_params(flats, copies)


def _copy_to_params(
    flats: Iterable[FlatParam], copies: Iterable[tuple[Tensor, Tensor]], threads: int | None = None
) -> None:
    native: list[tuple[Tensor, Tensor]] = []
    others: list[tuple[Tensor, Tensor]] = []
    kernel = native_available()
    for target, source in copies:
        plain = kernel and target.is_cpu and source.is_cpu and target.dtype is source.dtype
        (native if plain else others).append((target, source))
    if native:
        targets, sources = zip(*native, strict=True)
        copy_(targets, sources, threads=threads)
    if others:
        targets, sources = zip(*others, strict=True)
        torch._foreach_copy_(targets, sources, non_blocking=True)
    for flat in flats:
        flat.store()
