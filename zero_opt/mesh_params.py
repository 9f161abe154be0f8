"""An optimizer over DTensors: its meshes, the global norm over them, and its state as a plain ``torch.optim`` dict.

Every rank steps its own part of every parameter, so a step needs no other rank. What does are the norm, one number per
rank, and a state dict in full shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .construction import is_elementwise, tensors_of
from .cpu_adam import CPUAdam, CPUAdamW
from .dtensors import check_dtensor, counts_here, cut_like, local_grad, local_of, shown, whole
from .errors import ConfigConflict, ConfigError, ConfigTypeError, UnsupportedOptimizer, UnsupportedParam
from .flat_param import is_dtensor
from .fsdp import Shards
from .grad_norm import clip_factor, norm_of, square_sum
from .mesh_group import MeshGroup
from .policies import AlreadyReduced, DDPHook
from .state_dict import copied
from .trial import is_known, state_after_a_step
from .wiring import Recipe

States = dict[int, dict[str, Any]]


class MeshParams:
    """See the module. Methods are collective over the parameters' meshes where they say so.

    Attributes:
        shards: what FSDP does with the parameters.
    """

    def __init__(self) -> None:
        self.shards = Shards()
        self._groups: dict[Any, MeshGroup] = {}
        self._kept: tuple[tuple[int, ...], States] | None = None

    def add(self, params: Sequence[Tensor]) -> None:
        """Take in more parameters, DTensors or not."""
        self.shards.add(params)
        for mesh in (param.device_mesh for param in params if is_dtensor(param)):  # type: ignore[attr-defined]
            if mesh not in self._groups:
                self._groups[mesh] = MeshGroup(mesh)

    @property
    def largest(self) -> MeshGroup:
        """The group of the largest mesh, which the ranks of a host are likely to share."""
        return max(self._groups.values(), key=lambda group: group.world_size)

    # -- the norm -----------------------------------------------------------------------------------------------------

    def norm(self, grads: Mapping[Tensor, Tensor]) -> Tensor:
        """Global L2 norm, as :func:`zero_opt.grad_norm.total_norm` gives it: the same bits on every rank. Collective.

        Args:
            grads: by parameter, this rank's part of the gradient. Of parts that several ranks have one counts; plain
                parameters' gradients are those of every rank.
        """
        squares = [square_sum(grad for param, grad in grads.items() if not is_dtensor(param))]
        for mesh, group in self._groups.items():
            mine = square_sum(
                grad
                for param, grad in grads.items()
                if is_dtensor(param) and param.device_mesh == mesh and counts_here(param)  # type: ignore[attr-defined]
            )
            squares += [float(one) for one in group.all_gather(torch.tensor([mine], dtype=torch.float64))]
        return norm_of(math.fsum(squares) if all(map(math.isfinite, squares)) else sum(squares))

    def clip(self, params: Iterable[Tensor], max_norm: float) -> Tensor:
        """Scale all gradients, in place, to a global norm of at most ``max_norm``; the norm before. Collective."""
        found = {param: grad for param in params if (grad := local_grad(param)) is not None}
        norm = self.norm(found)
        factor = clip_factor(norm, max_norm)
        for grad in found.values():
            grad.mul_(factor.to(grad.device))
        return norm

    # -- state --------------------------------------------------------------------------------------------------------

    def consolidate(self, to: object, states: Mapping[int, Mapping[str, Any]], live: Mapping[Tensor, Any]) -> None:
        """Bring state to rank ``to``, in full shapes and host memory. Collective.

        Args:
            to: rank in the default process group.
            states: by global index, tensors as DTensors. live: what the user sees as ``state``.

        Raises:
            ConfigError, ConfigTypeError: ``to`` is no rank of a mesh of the parameters.
        """
        if isinstance(to, bool) or not isinstance(to, int):
            raise ConfigTypeError(f"to must be a rank, got {to!r}")
        ranks = sorted({rank for mesh in self._groups for rank in mesh.mesh.flatten().tolist()})
        if to not in ranks:
            raise ConfigError(f"to must be one of the ranks that the parameters are on, {ranks}, got {to!r}")
        self.forget()
        mine, full = dist.get_rank() == to, dict[int, dict[str, Any]]()
        for index, state in sorted(states.items()):
            entry = {}
            for key, value in state.items():  # one after the other: nobody but ``to`` holds more than one
                found = whole(value)
                if mine:
                    entry[key] = found
            full[index] = entry
        if mine:
            self._kept = (_version(live), full)

    def full_state(self, states: Any, live: Mapping[Tensor, Any]) -> Any:
        """What :meth:`consolidate` brought here, shared with nothing, if that is still the state; else ``states``."""
        if self._kept is None or self._kept[0] != _version(live):
            return states
        return copied(self._kept[1])

    def forget(self) -> None:
        """The state is about to change."""
        self._kept = None

    def spread(
        self, saved_groups: Sequence[Mapping[str, Any]], param_groups: Sequence[Mapping[str, Any]]
    ) -> Callable[[Mapping[Any, Mapping[str, Any]]], dict[Any, dict[str, Any]]]:
        """What makes of checked state, under the ids of its own groups, what a step of DTensors needs; copies."""
        self.forget()
        param_of = {
            saved_id: param
            for saved, group in zip(saved_groups, param_groups, strict=True)
            for saved_id, param in zip(saved["params"], group["params"], strict=True)
        }

        def spread(states: Mapping[Any, Mapping[str, Any]]) -> dict[Any, dict[str, Any]]:
            return {
                index: {
                    key: cut_like(value, param_of[index]).detach().clone() if isinstance(value, Tensor) else value
                    for key, value in state.items()
                }
                for index, state in states.items()
            }

        return spread

    def begin_step(self) -> None:
        """The parameters and the state are about to change.

        Raises:
            ParamsUnsharded: FSDP has gathered copies of parameters.
        """
        self.shards.require_sharded()
        self.forget()


def state_like(
    cls: type[torch.optim.Optimizer], hypers: Mapping[str, Any], param: Tensor, *, masters: bool
) -> dict[str, Any]:
    """What a DTensor's state will be like after its first step, full of its first values, in host memory. Collective.

    Args:
        masters: state is fp32, with a master, whatever the parameter's dtype, and this rank's parts are stepped.
    """
    if not is_known(cls):
        return {}
    like = torch.zeros_like(param)
    if not (masters or steps_parts(cls)):
        made = state_after_a_step(cls, hypers, like)
    else:
        half = masters and param.dtype is not torch.float32
        part = local_of(like).to(torch.float32 if half else param.dtype)
        made = {**state_after_a_step(cls, hypers, part.clone()), **({"master": part} if half else {})}
        made = shown(made, param, part)
    return {key: value.detach().cpu() if isinstance(value, Tensor) else value for key, value in made.items()}


def _version(live: Mapping[Tensor, Any]) -> tuple[int, ...]:
    """Another one when state was edited in place, replaced, added or dropped."""
    return tuple(
        number
        for state in live.values()
        for value in state.values()
        if isinstance(value, Tensor)
        for number in (id(value), value._version)
    )


def mesh_of(entries: Iterable[Any], recipe: Recipe, process_group: object) -> MeshParams | None:
    """What an optimizer over DTensors has besides; ``None`` if none of its parameters is one.

    Args:
        entries: as :func:`zero_opt.construction.run_once` returns them.

    Raises:
        ParamsUnsharded, ConfigConflict, UnsupportedOptimizer, UnsupportedParam: see the functions below.
    """
    params = tensors_of(entries)
    mesh = MeshParams() if any(map(is_dtensor, params)) else None
    if mesh is not None:
        _check_policies(recipe, process_group)
        if recipe.offload is not None:
            _check_cuttable(recipe.optimizer_class)
    admit(mesh, params, recipe)
    return mesh


def admit(mesh: MeshParams | None, params: Sequence[Tensor], recipe: Recipe) -> None:
    """Take in parameters of an optimizer that was, or was not, made over DTensors.

    Raises:
        UnsupportedParam: one does not go with those that are there. ParamsUnsharded: one is a gathered copy.
    """
    Shards().add(params)
    for position, param in enumerate(params):
        label = f"parameter {position} of those given, of shape {tuple(param.shape)},"
        if is_dtensor(param) and mesh is None:
            raise UnsupportedParam(f"{label} is a DTensor, and the others are not; make another optimizer for DTensors")
        if mesh is not None and not is_dtensor(param) and not isinstance(recipe.reduction, AlreadyReduced):
            raise UnsupportedParam(
                f"{label} is a plain tensor among DTensors, so nobody reduces its gradient; give it an optimizer of "
                "its own, or reduce it yourself and pass reduction=zero_opt.AlreadyReduced()"
            )
        check_dtensor(param, label)
    if mesh is not None:
        mesh.add(params)


def steps_parts(cls: type[torch.optim.Optimizer]) -> bool:
    """Whether a class takes no DTensors, so that it must be given this rank's parts of them."""
    return cls in (CPUAdam, CPUAdamW)


def _check_policies(recipe: Recipe, process_group: object) -> None:
    """Raise ConfigConflict for what cannot be asked of an optimizer over DTensors."""
    instead = None
    if process_group is not None:
        instead = "whose mesh says which ranks there are; leave process_group out"
    elif isinstance(recipe.reduction, DDPHook):
        instead = "whose gradients fully_shard reduces, not DDP; leave reduction out"
    elif recipe.reduction.overlap_param_gather is not None:
        instead = "which fully_shard gathers in the forward; leave overlap_param_gather out"
    elif recipe.precision.reduce_dtype is not None:
        instead = "whose gradients fully_shard reduces; set reduce_dtype in its MixedPrecisionPolicy instead"
    if instead is not None:
        raise ConfigConflict(f"parameters are DTensors, {instead}")


def _check_cuttable(cls: type[torch.optim.Optimizer]) -> None:
    """Raise UnsupportedOptimizer for a class that cannot step parts of parameters."""
    if not (is_elementwise(cls) or steps_parts(cls)):
        raise UnsupportedOptimizer(
            f"{cls.__name__} is not known to be elementwise, so it cannot step the local parts of DTensors; with "
            "offload=None it is given the DTensors themselves. If it is elementwise, see "
            "zero_opt.register_elementwise()"
        )
