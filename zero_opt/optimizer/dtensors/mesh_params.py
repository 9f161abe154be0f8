"""An optimizer over DTensors: its meshes, the global norm over them, and its state as a plain ``torch.optim`` dict.

Every rank steps its own part of every parameter, so a step needs no other rank. The norm needs one number per rank, and
a state dict in full shapes needs all parts.
"""

from __future__ import annotations

import json
import math
import struct
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import is_
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parameter import is_lazy

from ...comm.agreement import Agreement
from ...comm.transfers import peer_lost
from ...errors import (
    ConfigConflict,
    ConfigError,
    ConfigTypeError,
    RankMismatch,
    UnsupportedOptimizer,
    UnsupportedParam,
    ZeroOptError,
)
from ...kernels.table import NATIVE_CLASSES
from ...policies import AlreadyReduced, DDPHook
from ...reduction.grad_norm import Share, look, norm_dtype
from ...sharding.flat_param import is_dtensor
from ...sharding.param_groups import params_of
from ...sharding.wrapped_class import is_elementwise
from ...state.kept_state import KeptState
from ...state.state_dict import StateDict, StatesByIndex, copied, tried_on
from ...state.trial import is_known, state_after_a_step
from ...system.background_thread import run_apart
from ...system.failures import on_failure
from ..config import Config
from ..contents import by_name
from .fsdp import Shards
from .held_state import difference, require_equal
from .local_parts import (
    bit_sum,
    check_cut_for_muon,
    check_dtensor,
    counts_here,
    cut_like,
    full_copy,
    local_of,
    state_of_param,
    travels,
)
from .mesh_group import ANY, MeshGroup, Result, sharing_a_process_group

# Of a rank's gradients: the sum of squares, the first parameter that is not finite, the norm to clip to, and whether
# the rank has parameters of several meshes, or of none.
_ROW = struct.Struct("<ddd?")
_NORM = struct.Struct("<d")
# How far, relative to the norm, replicas' gradients may be apart: they are made by kernels that may round otherwise.
_ROUNDING = 1e-4
# Seconds that the groups of an optimizer have to close once nothing refers to it.
_GROUPS_END_S = 1.0


class MeshParams:
    """The DTensors of one optimizer, and the groups of their meshes. Methods that say so are collective over those.

    Attributes:
        shards: what FSDP does with the parameters.
        takes_plain: whether parameters may be plain tensors, whose gradients no rank reduces here.
        by_muon: whether ``torch.optim.Muon`` steps the DTensors: each needs at least one row per rank.
        call: the call of the user's that is under way, which ranks compare.
    """

    call = "step()"
    _measured = False  # since the beginning of the call

    def __init__(self, config: Config) -> None:
        self.shards = Shards()
        self.takes_plain = isinstance(config.reduction, AlreadyReduced)
        self.by_muon = config.optimizer_class is torch.optim.Muon
        self._checks, self._params = config.checks, list[Tensor]()
        self._groups: dict[Any, MeshGroup] = {}
        self._finalizer = weakref.finalize(self, run_apart, partial(_close_all, self._groups), _GROUPS_END_S)
        self._finalizer.atexit = False
        self._kept = KeptState()

    def add(self, params: Sequence[Tensor]) -> None:
        """Take in more parameters, DTensors or not."""
        self.shards.add(params)
        self._params += params
        for mesh in (param.device_mesh for param in params if is_dtensor(param)):  # type: ignore[attr-defined]
            if mesh not in self._groups:
                self._groups[mesh] = MeshGroup(mesh, self._checks)

    def follow(self, param_groups: Sequence[Mapping[str, Any]]) -> None:
        """Take in parameters that the user has replaced others with; see :func:`admit`."""
        params = [param for group in param_groups for param in group["params"]]
        if len(params) != len(self._params) or not all(map(is_, params, self._params)):
            self.shards, self._params = Shards(), []
            self.close()
            self.forget()
            admit(self, params)

    @property
    def share(self) -> float:
        """How much of the parameters this rank has: 1 of all."""
        everything = sum(param.numel() for param in self._params)
        return sum(local_of(param).numel() for param in self._params) / max(everything, 1)

    @property
    def largest(self) -> MeshGroup:
        """The group of the largest mesh, which the ranks of a host are likely to share."""
        return max(self._groups.values(), key=lambda group: group.world_size)

    def in_step(self, step: int) -> None:
        """Note, for messages, that this rank has completed so many steps."""
        for group in self._groups.values():
            group.in_step(step)

    def close(self) -> None:
        """Close the groups; parameters that are added later get new ones."""
        _close_all(self._groups)

    @contextmanager
    def of_all_ranks(self, failed_here: Callable[[BaseException], bool] = lambda _: False) -> Iterator[None]:
        """A context of a call of all ranks. An exception that ends it on this rank alone is the end of training here.

        It is not where the exception comes before the first message, nor where the other ranks raise it too.

        Args:
            failed_here: whether an exception is a failure of what this rank does by itself, which ends no training.
        """
        sent = {group: group.calls for group in self._groups.values()}
        for group in sent:
            group.told = 0
        try:
            yield
        except BaseException as error:
            groups = [*self._groups.values()]
            calls = [group.call for group in groups if group.calls > sent.get(group, 0)]
            told = isinstance(error, ZeroOptError) or any(id(error) == group.told for group in groups)
            for group in sharing_a_process_group(groups) if calls and not told and not failed_here(error) else ():
                group.leave_interrupted(error, calls[0])
            raise

    @contextmanager
    def clipping(self) -> Iterator[None]:
        """A context of ``clip_grad_norm_()``. Collective.

        What fails within it on one rank, before gradients are measured, is raised on all.
        """
        before, self.call, self._measured = self.call, "clip_grad_norm_()", False
        try:
            yield
        except ZeroOptError as error:
            if not self._measured:
                self.norm_share((), (), math.nan, error=error)
            raise
        finally:
            self.call = before

    def require_equal_checks(self, config: Config) -> None:
        """Raise RankMismatch, on every rank of a mesh, if ranks differ in what makes a step collective. Collective."""
        told = {"max_grad_norm": config.max_grad_norm, "checks.nonfinite": config.checks.nonfinite}
        with self.of_all_ranks():
            self._compare("ShardedOptimizer()", told)

    def norm_share(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        limit: float,
        known: Sequence[Tensor | None] = (),
        error: ZeroOptError | None = None,
    ) -> Share:
        """Return what all ranks' gradients add to a norm, the same bits on every rank. Collective.

        Args:
            params: all parameters, by global index. grads: this rank's parts of their gradients. A part that several
                ranks have counts once; plain parameters' gradients are the same on every rank.
            limit: what this rank will clip the norm to; 0 if it will not, NaN if there is an ``error``.
            known: as for :func:`grad_squares`.
            error: why this rank cannot clip.

        Raises:
            RankMismatch: on every rank, if limits or norms differ, or ranks are in different calls. ZeroOptError: on
                every rank, the ``error`` of one.
            PeerLost, PeerSilent: a rank does not come.
        """
        plain = [None if is_dtensor(param) else grad for param, grad in zip(params, grads, strict=True)]
        rows, limits = list[tuple[int, float, float]](), dict[int, float]()
        several = len({*map(_mesh_of, params)}) > 1
        if any(grad is not None for grad in plain):
            rows.append((0, *look(plain, range(len(params)), known)))
        for mesh, group in self._groups.items():
            counted = [
                grad if _mesh_of(param) == mesh and counts_here(param) else None
                for param, grad in zip(params, grads, strict=True)
            ]
            mine = (*look(counted, range(len(params)), known), limit, several)
            self._measured = True  # from here on the ranks raise what they are told together
            told = group.all_gather_bytes(_ROW.pack(*mine), self.call)
            for rank, (square, nonfinite, its_limit, others) in zip(group.ranks, map(_ROW.unpack, told), strict=True):
                rows.append((rank, square, nonfinite))
                limits[rank], several = its_limit, several or others
                limit = math.nan if math.isnan(its_limit) else limit  # ranks of the next mesh hear it too
        if math.isnan(limit):
            with self.together(self.call):
                if error is not None:
                    raise error
        require_equal("the norm that gradients are clipped to", {rank: told or None for rank, told in limits.items()})
        share = Share.from_rows(rows, norm_dtype(params))
        if several:  # as all ranks of a mesh know of each that has
            with self.together(self.call):
                self._require_one_norm(share.square, clips=0 < limit < math.inf)
        return share

    def _require_one_norm(self, square: float, *, clips: bool) -> None:
        """Raise RankMismatch if ranks that share a DTensor would do different things to its parts. Collective.

        Args:
            square: of the norm that this rank has put together.
            clips: whether gradients will be clipped to it; if not, what counts is whether it is finite.
        """
        packed = _NORM.pack(math.sqrt(square))
        told = [(group.ranks, group.all_gather_bytes(packed, self.call)) for group in self._groups.values()]
        for ranks, norms in told:  # all that are told: no rank waits for one that has raised
            (first, wanted), *others = zip(ranks, (norm for (norm,) in map(_NORM.unpack, norms)), strict=True)
            for rank, norm in others:
                apart = clips and not math.isclose(norm, wanted, rel_tol=_ROUNDING)
                if math.isfinite(norm) != math.isfinite(wanted) or (math.isfinite(norm) and apart):
                    raise RankMismatch(
                        f"the norm of the gradients is {wanted:g} on rank {first} and {norm:g} on rank {rank}: "
                        "parameters of a smaller mesh, or plain ones, have other gradients on other ranks. Give those "
                        "of smaller meshes an optimizer of their own, or one mesh of all ranks (experts by data), and "
                        "average the gradients of plain ones"
                    )

    # -- state --------------------------------------------------------------------------------------------------------

    def consolidate(self, to: object, seen: Callable[[], StatesByIndex], live: Mapping[Tensor, Any]) -> None:
        """Bring state to rank ``to``, in full shapes and host memory. Collective.

        Args:
            to: rank in the default process group.
            seen: returns it, by global index, tensors as DTensors. live: what the user sees as ``state``.

        Raises:
            ConfigError, ConfigTypeError: ``to`` is no rank of a mesh of the parameters.
            RankMismatch: it differs between ranks, or ranks are in different calls; all of them on every rank.
            StateDictError: see :meth:`alike`.
            PeerLost, PeerSilent: a rank does not come.
        """

        def checked() -> StatesByIndex:
            self._require_rank(to)
            return seen()

        states = self.alike("consolidate_state_dict()", checked)
        self._compare("consolidate_state_dict()", {"to": to})
        self.forget()
        mine = dist.get_rank() == to
        full: dict[int, dict[str, Any]] = {index: dict.fromkeys(state) for index, state in sorted(states.items())}

        def gather(group: MeshGroup | None) -> None:
            for index, entry in full.items():
                for key, value in sorted(states[index].items(), key=by_name):  # none but ``to`` keeps them
                    if self._groups.get(_mesh_of(value)) is group:
                        full_value = full_copy(value)
                        if mine:
                            entry[key] = full_value

        for group in self._groups.values():
            group.collective("consolidate_state_dict()", partial(gather, group))
        with peer_lost(f"{ANY}, for which consolidate_state_dict() waits,"):
            gather(None)
        if mine:
            self._kept.keep(full, live.values())

    def alike(self, call: str, seen: Callable[[], StatesByIndex]) -> StatesByIndex:
        """Return the state by global index that ``seen`` returns, which has the same form on every rank. Collective.

        Raises:
            StateDictError: on every rank, if it has not. What ``seen`` raises on one rank, all raise.
            RankMismatch: ranks are in different calls. PeerLost, PeerSilent: a rank does not come.
        """
        with self.together(call):
            states = seen()
        here = {mesh: [i for i, param in enumerate(self._params) if _mesh_of(param) == mesh] for mesh in self._groups}
        errors = [difference(group, states, here[mesh], call) for mesh, group in self._groups.items()]
        with self.together(call):
            for error in filter(None, errors):
                raise error
        return states

    def _require_rank(self, to: object) -> None:
        if isinstance(to, bool) or not isinstance(to, int):
            raise ConfigTypeError(f"to must be a rank, got {to!r}")
        ranks = sorted({rank for group in self._groups.values() for rank in group.ranks})
        if to not in ranks:
            raise ConfigError(f"to must be one of the ranks that the parameters are on, {ranks}, got {to!r}")

    @contextmanager
    def together(self, call: str) -> Iterator[None]:
        """A context that raises on all ranks of the meshes, at its end, what fails within it on one. Collective."""
        with ExitStack() as agreed:
            for group in self._groups.values():
                agreed.enter_context(Agreement(group, str).together(call))
            yield

    def _compare(self, call: str, told: Mapping[str, object]) -> None:
        """Raise RankMismatch, on every rank, if ranks differ in what they tell, by name. Collective."""
        payload, by_rank = json.dumps({name: repr(value) for name, value in told.items()}).encode(), dict[int, Any]()
        for group in self._groups.values():
            by_rank |= zip(group.ranks, map(json.loads, group.all_gather_bytes(payload, call)), strict=True)
        for name in told:
            require_equal(name, {rank: values[name] for rank, values in by_rank.items()})

    def sums(self, params: Mapping[int, Tensor], call: str) -> dict[int, int]:
        """Return a sum over the bits of each bf16 DTensor of these, the same for every cut. Collective.

        Args:
            params: those that this rank wants summed. A sum that not all ranks want is left out.

        Raises:
            RankMismatch: ranks are in different calls. PeerLost, PeerSilent: a rank does not come.
        """
        known = dict[int, int]()
        for mesh, group in self._groups.items():
            if not any(param.dtype is torch.bfloat16 for param in self._params if _mesh_of(param) == mesh):
                continue
            mine = {
                index: bit_sum(local_of(param)) if counts_here(param) else 0
                for index, param in params.items()
                if param.dtype is torch.bfloat16 and _mesh_of(param) == mesh
            }
            told = [
                dict(json.loads(said)) for said in group.all_gather_bytes(json.dumps([*mine.items()]).encode(), call)
            ]
            known |= {index: sum(sums[index] for sums in told) for index in mine if all(index in sums for sums in told)}
        return known

    def full_state(self, states: Any, live: Mapping[Tensor, Any]) -> Any:
        """Return a copy of what :meth:`consolidate` brought here, if that is still the state; else ``states``."""
        kept = self._kept.current(live.values())
        return states if kept is None else copied(kept)

    def forget(self) -> None:
        """Drop what :meth:`consolidate` brought here, since the state is about to change."""
        self._kept.forget()

    def cut_state_dict(self, state_dict: StateDict, param_groups: Sequence[Mapping[str, Any]]) -> StateDict:
        """Return a checked state dict, its state by :func:`cut_like` as a step of DTensors needs it. Collective."""
        self.forget()
        param_of = {
            saved_id: param
            for saved, group in zip(state_dict["param_groups"], param_groups, strict=True)
            for saved_id, param in zip(saved["params"], group["params"], strict=True)
        }

        def cut() -> StatesByIndex:
            return {
                index: {key: cut_like(value, param_of[index]) for key, value in state.items()}
                for index, state in state_dict["state"].items()
            }

        return {**state_dict, "state": self.cut(state_dict["state"], param_of, cut)}

    def cut(
        self, states: Mapping[Any, Mapping[str, Any]], params: Mapping[Any, Tensor], do: Callable[[], Result]
    ) -> Result:
        """Return what ``do`` makes of state by :func:`cut_like`. Collective if any of it is a DTensor cut otherwise."""
        if not any(travels(value, params[index]) for index, state in states.items() for value in state.values()):
            return do()
        with self.together("load_state_dict()"):
            pass
        return self.largest.collective("load_state_dict()", do)


def _close_all(groups: dict[Any, MeshGroup]) -> None:
    while groups:
        groups.popitem()[1].close()


def state_like(config: Config, hypers: Mapping[str, Any], param: Tensor, stepped_dtype: torch.dtype) -> dict[str, Any]:
    """Return what a DTensor's state will be like after its first step, in host memory. Collective.

    Args:
        stepped_dtype: of what is stepped for the parameter; where it is not the parameter's, there is a master too.
    """
    cls = config.optimizer_class
    if not is_known(cls):
        return {}
    like = torch.zeros_like(param)
    if not steps_apart(config):
        made = state_after_a_step(cls, hypers, like)
    else:
        part = local_of(like).to(tried_on(cls, like), stepped_dtype)
        master = {} if stepped_dtype is param.dtype else {"master": part}
        made = state_of_param({**state_after_a_step(cls, hypers, part.clone()), **master}, param, part)
    return {key: value.detach().cpu() if isinstance(value, Tensor) else value for key, value in made.items()}


def _mesh_of(param: Tensor) -> Any:
    return getattr(param, "device_mesh", None)


def mesh_of(entries: Iterable[Any], config: Config, *, ranks_given: bool) -> MeshParams | None:
    """Return the :class:`MeshParams` of an optimizer; ``None`` if none of its parameters is a DTensor. Collective.

    Args:
        entries: as :func:`zero_opt.sharding.param_groups.run_once` returns them.
        ranks_given: whether the user has passed a process group.

    Raises:
        ParamsUnsharded, ConfigConflict, UnsupportedOptimizer, UnsupportedParam: see the functions below.
        RankMismatch: on every rank of a mesh, where ranks differ in what they clip to or check.
    """
    params = params_of(entries)
    mesh = None
    if any(map(is_dtensor, params)):
        _check_config(config, ranks_given=ranks_given)
        mesh = MeshParams(config)
    admit(mesh, params)
    if mesh is not None:
        with on_failure(mesh.close):
            mesh.require_equal_checks(config)
    return mesh


def admit(mesh: MeshParams | None, params: Sequence[Tensor]) -> None:
    """Check parameters, and add them to ``mesh`` if the optimizer has DTensors.

    Raises:
        UnsupportedParam: one does not go with those that are there. ParamsUnsharded: one is a gathered copy.
    """
    Shards().add(params)
    for position, param in enumerate(params):
        if is_lazy(param):
            raise UnsupportedParam(
                f"parameter {position} of those given has no shape yet, as a lazy module has not run; run a forward "
                "first, on every rank, then make the optimizer"
            )
        shape = "of several shapes" if param.is_nested else f"of shape {tuple(param.shape)}"
        label = f"parameter {position} of those given, {shape},"
        if is_dtensor(param) and mesh is None:
            raise UnsupportedParam(f"{label} is a DTensor, and the others are not; make another optimizer for DTensors")
        if mesh is not None and not is_dtensor(param) and not mesh.takes_plain:
            raise UnsupportedParam(
                f"{label} is a plain tensor among DTensors, so no rank reduces its gradient; give it an optimizer of "
                "its own, or reduce it yourself and pass reduction=zero_opt.AlreadyReduced() and foreach=False"
            )
        check_dtensor(param, label)
        if mesh is not None and mesh.by_muon and is_dtensor(param) and param.requires_grad:
            check_cut_for_muon(param, label)
    if mesh is not None:
        mesh.add(params)


def steps_apart(config: Config) -> bool:
    """Return whether this rank's parts of DTensors are stepped, or masters of them, and not the DTensors themselves."""
    native = config.optimizer_class in NATIVE_CLASSES  # which take no DTensors
    return native or config.has_masters


def _check_config(config: Config, *, ranks_given: bool) -> None:
    """Raise ConfigConflict or UnsupportedOptimizer for what cannot be asked of an optimizer over DTensors."""
    instead = None
    if ranks_given:
        instead = "whose mesh says which ranks there are; leave process_group out"
    elif isinstance(config.reduction, DDPHook):
        instead = "whose gradients fully_shard reduces, not DDP; leave reduction out"
    elif config.reduction.overlap_param_gather is not None:
        instead = "which fully_shard gathers in the forward; leave overlap_param_gather out"
    elif config.precision.reduce_dtype is not None or config.precision.accumulate_dtype is not None:
        instead = "whose gradients fully_shard reduces; set dtypes in its MixedPrecisionPolicy, but for masters"
    elif config.precision.between_hosts_dtype is not None:
        instead = "whose gradients fully_shard reduces; leave between_hosts_dtype out"
    elif getattr(config.offload, "selective", None) is not None:
        # Each rank steps alone, so each would select by its own rows, and columns of one DTensor would part.
        instead = "of whose columns each rank has a part, and selects none for all; leave selective out"
    if instead is not None:
        raise ConfigConflict(f"parameters are DTensors, {instead}")
    if steps_apart(config) and not is_elementwise(config.optimizer_class):
        name = config.optimizer_class.__name__
        raise UnsupportedOptimizer(
            f"{name} is not known to be elementwise, so it cannot step the local parts of DTensors; with "
            "offload=None and no master_dtype it is given the DTensors themselves. If it is elementwise, see "
            "zero_opt.register_elementwise()"
        )
