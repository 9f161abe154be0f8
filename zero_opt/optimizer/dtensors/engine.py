"""The parts of an optimizer over DTensors: each rank steps what it has of every parameter, and needs no other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import ZeroOptError
from ...policies import AlreadyReduced, Checks
from ...reduction import GradShard
from ...reduction.grad_norm import Measured
from ...sharding.param_groups import PlannedGroups
from ..config import Recipe
from ..engine import Wiring
from ..offload_state import Parked
from ..process_groups import OwnGroups
from .local_parts import hidden, shown
from .local_view import LocalView
from .mesh_params import MeshParams


class LocalWiring(Wiring):
    """Everything that :class:`Wiring` connects, over this rank's parts as plain parameters of a rank alone.

    What is asked of it, and what its user sees, are DTensors. Nothing it does is collective but for :meth:`measure`,
    :meth:`consolidate`, and :meth:`load` of state that is cut otherwise than the parameters.
    """

    def __init__(
        self,
        recipe: Recipe,
        groups: OwnGroups,
        describe: Callable[[int], str],
        owner: torch.optim.Optimizer,
        mesh: MeshParams,
        parked: Parked,
    ) -> None:
        self._user, self._mesh, self._view = owner, mesh, LocalView(owner)
        # Gradients are the means already, of the parts that are here.
        super().__init__(replace(recipe, reduction=AlreadyReduced()), groups, describe, self._view, parked)
        self.planned = PlannedGroups(owner)

    def finish(self, error: ZeroOptError | None = None, clip_to: float | None = None) -> Sequence[GradShard]:
        """See :class:`Wiring`; takes this rank's parts of the gradients."""
        self.planned.require()
        self._mesh.forget()
        self._follow()
        return super().finish(error, clip_to)

    def _follow(self) -> None:
        self._mesh.shards.require_sharded()
        self._view.follow()

    def take(self, grads: Sequence[GradShard], grad_scale: float = 1.0) -> None:
        """See :class:`Wiring`."""
        try:
            super().take(grads, grad_scale)
        finally:
            self._view.written()

    def flush(self) -> None:
        """See :class:`Wiring`."""
        if self.placement.pending:
            self._mesh.forget()
        self._follow()
        try:
            super().flush()
        finally:
            self._view.written()

    def measure(self, grads: Sequence[GradShard]) -> Measured:
        """See :class:`Wiring`. Collective over the parameters' meshes."""
        found: list[Tensor | None] = [None] * len(self._params)
        for shard in grads:
            for piece, grad in zip(shard.slices, shard.grads, strict=True):
                found[piece.param] = grad
        return self._mesh.measure([self._view.param_of(plain) for plain in self._params], found)

    def _show_state(self) -> None:
        super()._show_state()
        self._view.state.refresh()

    # -- state --------------------------------------------------------------------------------------------------------

    def _as_shown(self, states: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
        return {
            index: shown(state, self._view.param_of(self._params[index]), self._params[index])
            for index, state in states.items()
        }

    def consolidate(self, to: int) -> None:
        """Bring the full state, a pending step included, to a rank. Collective; see :meth:`MeshParams.consolidate`."""
        self._settle("consolidate_state_dict()")
        self._mesh.consolidate(to, self._as_shown(super().full_state()), self._user.state)

    def rows(self) -> dict[int, dict[str, Any]]:
        """All state, a pending step included, as DTensors in host memory; it shares none with anything."""
        self._settle("sharded_state_dict()")
        return self._as_shown(super().full_state())

    def full_state(self) -> dict[int, dict[str, Any]]:
        """The full state on the rank that :meth:`consolidate` brought it to, while current; else :meth:`rows`' form."""
        found: dict[int, dict[str, Any]] = self._mesh.full_state(self._as_shown(super().full_state()), self._user.state)
        return found

    def load(self, states: Mapping[int, Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> None:
        """See :class:`Wiring`; tensors are whole, or cut in any way."""
        self._mesh.forget()
        self._follow()
        parts = {index: hidden(state, self._view.param_of(self._params[index])) for index, state in states.items()}
        super().load(parts, groups)
        self._view.written()


def build_wiring(
    recipe: Recipe,
    groups: OwnGroups,
    describe: Callable[[int], str],
    owner: torch.optim.Optimizer,
    mesh: MeshParams | None,
    parked: Parked,
) -> Wiring:
    """What connects the parts of an optimizer, over DTensors if it has a mesh. Collective."""
    if mesh is None:
        return Wiring(recipe, groups, describe, owner, parked)
    return LocalWiring(recipe, groups, describe, owner, mesh, parked)


def own_groups(parent: dist.ProcessGroup | None, checks: Checks, mesh: MeshParams | None) -> OwnGroups:
    """The groups of an optimizer: over DTensors a rank is alone but for its neighbors. Collective."""
    return OwnGroups(parent, checks, None if mesh is None else mesh.largest)
