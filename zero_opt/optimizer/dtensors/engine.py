"""Engines over DTensors: each rank steps what it has of every parameter, and a step needs no other rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...comm.agreement import StepAgreement
from ...errors import ConfigTypeError, ZeroOptError
from ...placement.compact_state import is_compact
from ...policies import AlreadyReduced, Overlapped
from ...reduction import GradShard, ReductionPolicy, bucket_mb_of
from ...reduction.grad_norm import Joint, Share, alone, clip_factor
from ...state.state_dict import StateDict, StatesByIndex
from ..compact_rows import stored_parts
from ..config import Config
from ..join import UnevenInputs
from ..loading import Loaded, fitted_state
from ..process_groups import OwnGroups
from ..sharded import ShardedEngine
from ..single_rank import SingleRank
from .local_parts import local_grad, state_of_param, state_of_part
from .local_view import LocalView, StreamedView
from .mesh_params import MeshParams

# Of parts, a bucket has at least so much: each is handed to the worker by itself.
_BUCKET_MB = 1


class DTensorSingleRank(SingleRank):
    """The engine that has the wrapped class step the DTensors themselves.

    Collective over the parameters' meshes are :meth:`consolidate`, :meth:`rows`, :meth:`sums`, :meth:`load`,
    :meth:`clip`, and a step that needs a norm.
    """

    _mesh: MeshParams

    def of_all_ranks(self) -> AbstractContextManager[None]:
        return self._mesh.of_all_ranks()

    def require_copyable(self) -> None:
        raise ConfigTypeError(
            "a ShardedOptimizer of DTensors cannot be copied or pickled: this rank has a part of its state, and "
            "connections to the other ranks; save opt.state_dict() after opt.consolidate_state_dict(to=rank) on every "
            "rank, or zero_opt.sharded_state_dict(opt)"
        )

    def _current(self) -> torch.optim.Optimizer:
        wrapped = super()._current()
        self._mesh.follow(wrapped.param_groups)
        return wrapped

    def step(
        self, closure: Callable[[], Any] | None, options: Mapping[str, Any], error: ZeroOptError | None = None
    ) -> Any:
        self._mesh.shards.require_sharded()
        self._mesh.forget()
        loss = super().step(closure, options, error)
        self._mesh.in_step(self.steps)
        return loss

    def _share(self, params: Sequence[Tensor], limit: float) -> Share:
        with self.of_all_ranks():
            return self._mesh.norm_share(params, [local_grad(param) for param in params], limit)

    def _scale(self, params: Sequence[Tensor], max_norm: float, norm: Tensor) -> None:
        factor = clip_factor(norm, max_norm)
        for grad in map(local_grad, params):
            if grad is not None:
                grad.mul_(factor.to(grad.device))

    def clip(self, max_norm: object, joint: Joint = alone, error: ZeroOptError | None = None) -> Tensor:
        with self.of_all_ranks(), self._mesh.clipping():
            return super().clip(max_norm, joint, error)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(self._mesh.largest.ranks)

    def consolidate(self, to: int) -> None:
        wrapped = self._current()
        with self.of_all_ranks():
            self._mesh.consolidate(to, lambda: wrapped.state_dict()["state"], wrapped.state)

    def rows(self, *, compact: bool) -> StatesByIndex:
        return self._mesh.alike("sharded_state_dict()", partial(super().rows, compact=compact))

    def sums(self, params: Mapping[int, Tensor], call: str) -> Mapping[int, int]:
        return self._mesh.sums(params, call)

    def together_on_meshes(self, call: str) -> AbstractContextManager[None]:
        return self._mesh.together(call)

    def check_rows(self, state_dict: StateDict) -> None:
        fitted_state(state_dict, self._current().param_groups, self._config, strict=True, whole=True)

    def state_dict(self) -> StateDict:
        """Return state as DTensors, or what :meth:`consolidate` has brought here."""
        wrapped = self._current()
        state_dict = wrapped.state_dict()
        return {**state_dict, "state": self._mesh.full_state(state_dict["state"], wrapped.state)}

    def _in_form(self, state_dict: StateDict) -> StateDict:
        with self.of_all_ranks():
            return self._mesh.cut_state_dict(state_dict, self._current().param_groups)

    def close(self) -> None:
        self._mesh.close()


class DTensorEngine(ShardedEngine):
    """The sharded engine over this rank's parts as plain parameters of a rank alone.

    Its user gives and sees DTensors. Collective, over the parameters' meshes, are :meth:`share`,
    :meth:`consolidate`, :meth:`sums`, and :meth:`load` of state that is cut otherwise than the parameters.
    """

    _mesh: MeshParams
    _view: LocalView

    def __init__(self, config: Config, groups: OwnGroups, user: UnevenInputs, mesh: MeshParams) -> None:
        # Gradients are the means already, of the parts that are here.
        reduction: ReductionPolicy = AlreadyReduced()
        if config.placement.steps_in_background and isinstance(config.reduction, Overlapped):
            reduction, self._view = _of_parts(config.reduction, mesh), StreamedView(user)
        else:
            self._view = LocalView(user)
        super().__init__(replace(config, reduction=reduction), groups, user, mesh, self._view)

    @contextmanager
    def of_all_ranks(self) -> Iterator[None]:
        with self._mesh.of_all_ranks(lambda error: error is self._guard.failure), super().of_all_ranks():
            yield

    def reduce(
        self,
        clip_to: float | None = None,
        *,
        unscale_by: float | None = None,
        absent: bool = False,
        error: ZeroOptError | None = None,
    ) -> tuple[StepAgreement, Sequence[GradShard]]:
        self._planner.planned.require()
        self._mesh.forget()
        self._follow()
        try:
            return super().reduce(clip_to, unscale_by=unscale_by, absent=absent, error=error or self._view.missed())
        finally:
            self._view.show_consumed()

    def zero_grad(self) -> None:
        self._view.follow_dropped()
        super().zero_grad()

    def _follow(self) -> None:
        self._mesh.shards.require_sharded()
        self._view.follow(pending=self.placement.pending)

    def _update(self, agreed: StepAgreement, shards: Sequence[GradShard]) -> None:
        try:
            super()._update(agreed, shards)
        finally:
            self._mesh.in_step(self.count.step)
            self._view.note_writes()

    def clip(self, max_norm: object, joint: Joint = alone, error: ZeroOptError | None = None) -> Tensor:
        with self.of_all_ranks(), self._mesh.clipping():
            return super().clip(max_norm, joint, error)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(self._mesh.largest.ranks)

    def _bring_in(self, call: str) -> None:
        if self.placement.pending:
            self._mesh.forget()
        self._follow()
        try:
            super()._bring_in(call)
        finally:
            self._view.note_writes()

    def share(self, shards: Sequence[GradShard], limit: float) -> Share:
        params = self.parts.params
        grads: list[Tensor | None] = [None] * len(params)
        known: list[Tensor | None] = [None] * len(params)
        for shard in shards:
            squares = self.partition.buckets[shard.bucket].squares()
            for piece, grad, sums in zip(shard.slices, shard.grads, squares, strict=True):
                grads[piece.param], known[piece.param] = grad, sums
        return self._mesh.norm_share([self._view.param_of(plain) for plain in params], grads, limit, known)

    # -- state --------------------------------------------------------------------------------------------------------

    def _show_state(self) -> None:
        super()._show_state()
        self._view.state.refresh()

    def _as_seen(self, states: Mapping[int, Mapping[str, Any]]) -> StatesByIndex:
        plain = self.parts.params
        self._require_fitting(states)
        return {i: state_of_param(state, self._view.param_of(plain[i]), plain[i]) for i, state in states.items()}

    def _require_fitting(self, states: Iterable[int]) -> None:
        for index in states:
            self.partition.flats[index].moved()  # state of a part that does not fit any more is no DTensor of the param

    def consolidate(self, to: int) -> None:
        with self.of_all_ranks():
            self._mesh.consolidate(to, partial(self._complete, "consolidate_state_dict()"), self._user.state)

    def _complete(self, call: str) -> StatesByIndex:
        """Return this rank's part of the state, pending step included."""
        self._complete_state(call)
        return self._as_seen(super()._full_state())

    def rows(self, *, compact: bool) -> StatesByIndex:
        call, stored = "sharded_state_dict()", compact and is_compact(self._config.placement.inputs.form)
        return self._mesh.alike(call, self._stored if stored else partial(self._complete, call))

    def _stored(self) -> StatesByIndex:
        plain, parts = self.parts.params, super().rows(compact=True)
        self._require_fitting(parts)
        return {i: stored_parts(state, self._view.param_of(plain[i]), plain[i]) for i, state in parts.items()}

    def sums(self, params: Mapping[int, Tensor], call: str) -> Mapping[int, int]:
        return self._mesh.sums(params, call)

    def together_on_meshes(self, call: str) -> AbstractContextManager[None]:
        return self._mesh.together(call)

    def check_rows(self, state_dict: StateDict) -> None:
        fitted_state(state_dict, self._user.param_groups, self._config, strict=True, whole=False)

    def _full_state(self) -> StatesByIndex:
        """Return what :meth:`consolidate` brought here, while current; else what :meth:`rows` returns."""
        states: StatesByIndex = self._mesh.full_state(self._as_seen(super()._full_state()), self._user.state)
        return states

    def _write(self, loaded: Loaded) -> None:
        self._mesh.forget()
        self._follow()
        params = {index: self._view.param_of(self.parts.params[index]) for index in loaded.states}

        def cut() -> dict[int, Mapping[str, Any]]:
            return {index: state_of_part(state, params[index]) for index, state in loaded.states.items()}

        super()._write(loaded._replace(states=self._mesh.cut(loaded.states, params, cut)))
        self._view.note_writes()

    # -- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._view.close()
            self._mesh.close()


def _of_parts(reduction: Overlapped, mesh: MeshParams) -> Overlapped:
    """Return the reduction of plain parameters over parts, whose buckets have parts of as many parameters."""
    whole = bucket_mb_of(reduction, between_hosts=False)
    return replace(reduction, bucket_mb=max(whole * mesh.share, min(whole, _BUCKET_MB)))
