"""Parameters that are DTensors: this rank's part of them, of their gradients and of their state.

The functions import ``torch.distributed.tensor`` where they need it: the import takes long, and a program with
DTensors has made it already.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import StateDictError, UnsupportedParam
from ...kernels.strides import contiguous_strides
from ...placement import ReadThrough
from ...sharding.flat_param import is_dtensor


def check_dtensor(param: Tensor, label: str) -> None:
    """Raise UnsupportedParam, naming the parameter, for a DTensor of which this rank has no part of its own."""
    if not is_dtensor(param):
        return
    of: Any = param
    if any(placement.is_partial() for placement in of.placements):
        raise UnsupportedParam(
            f"{label} is a DTensor placed {of.placements}, whose values are sums over ranks; redistribute it to Shard "
            "or Replicate before constructing the optimizer"
        )
    if of.device_mesh.get_coordinate() is None:
        raise UnsupportedParam(f"{label} is a DTensor on {of.device_mesh}, which this rank is not in")


def check_cut_for_muon(param: Tensor, label: str) -> None:
    """Raise UnsupportedParam, naming the matrix, where a side is cut for more ranks than it is long.

    ``torch.optim.Muon`` would fail in the middle of the step, with the momentum and the decay of weights written.
    """
    of: Any = param
    for dim, length in enumerate(param.shape):
        cuts = zip(of.device_mesh.shape, of.placements, strict=True)
        ranks = math.prod(size for size, placement in cuts if placement.is_shard(dim))
        if length < ranks:
            raise UnsupportedParam(
                f"{label} is cut by dimension {dim}, of length {length}, for {ranks} ranks, and torch.optim.Muon steps "
                "no matrix that is shorter than that; give it to another optimizer, such as torch.optim.AdamW"
            )


def check_own_part(value: Any, label: str) -> None:
    """Raise StateDictError, naming the value, for a DTensor that has another rank's part: it was saved by that rank.

    A DTensor's mesh is saved with it, and with the mesh where its rank was in it. Parts that are alike count as one's
    own (HSDP).
    """
    mesh, here = value.device_mesh, dist.get_rank()
    coordinate, own = mesh.get_coordinate(), (mesh.mesh == here).nonzero().tolist()
    cut = [dim for dim, placement in enumerate(value.placements) if not placement.is_replicate()]
    if coordinate is None or not own or any(coordinate[dim] != own[0][dim] for dim in cut):
        whose = "no rank" if coordinate is None else f"rank {int(mesh.mesh[tuple(coordinate)])}"
        raise StateDictError(
            f"{label} is a DTensor with the part of {whose} of a mesh of {mesh.size()}, and this is rank {here}: each "
            "rank can load only what it has saved itself. To save one file for all ranks, call "
            "opt.consolidate_state_dict() on every rank before opt.state_dict(), or use torch.distributed.checkpoint"
        )


def local_of(value: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, over the same memory; any other value itself."""
    if not is_dtensor(value):
        return value
    part: Tensor = value._local_tensor  # type: ignore[attr-defined]  # to_local() makes a view, which takes long
    return part


def state_nbytes(param: Tensor, state: Mapping[str, Any]) -> int:
    """Return the bytes that this rank has of a parameter's state; none of one that lies wholly on other ranks."""
    if isinstance(state, ReadThrough):
        return state.nbytes
    tensors = [local_of(value) for value in state.values() if isinstance(value, Tensor)]
    of_elements = {tensor.shape for tensor in tensors if tensor.dim()}
    if of_elements == {torch.Size([0])} != {param.shape}:
        return 0  # its few scalars are shared with other such parameters
    return sum(tensor.nbytes for tensor in tensors)


def is_cut_alike(grad: Any, param: Any) -> bool:
    """Return whether a gradient is cut as its parameter is, so that its part is that of the parameter's part."""
    return not is_dtensor(param) or grad.placements == param.placements


def local_grad(param: Tensor) -> Tensor | None:
    """Return this rank's part of ``p.grad``, over the same memory.

    Where ``p.grad`` is cut otherwise than its parameter, this replaces it by a gradient that is cut alike, and is
    collective over the parameter's mesh. ``fully_shard`` makes no such gradient.
    """
    grad: Any = param.grad
    if grad is None or not is_dtensor(param):
        return param.grad
    if not is_cut_alike(grad, param):
        of: Any = param
        grad = param.grad = grad.redistribute(of.device_mesh, of.placements)
    return local_of(grad)


def counts_here(param: Any) -> bool:
    """Return whether sums over ranks take this rank's part of a DTensor: of ranks with the same part, the first."""
    coordinate = param.device_mesh.get_coordinate()
    return not any(at for at, placement in zip(coordinate, param.placements, strict=True) if placement.is_replicate())


def bit_sum(part: Tensor) -> int:
    """Return a sum over the bits of a part in bf16."""
    return int(part.detach().view(torch.int16).sum(dtype=torch.int64))


def dtensor_over(local: Tensor, like: Tensor, shape: torch.Size | None = None) -> Tensor:
    """Return a DTensor over the memory of ``local``, this rank's part, in all else as the DTensor ``like``.

    Unlike ``DTensor.from_local`` this leaves ``local`` where it is, on a device that may not be the mesh's.

    Args:
        shape: of the DTensor, if not that of ``like``; elements are in order then.
    """
    from torch.distributed.tensor import DTensor

    of: Any = like
    meta = of._spec.tensor_meta._replace(dtype=local.dtype)
    if shape is not None:
        meta = meta._replace(shape=shape, stride=contiguous_strides(shape))
    make: Any = DTensor
    made: Tensor = make(local, replace(of._spec, tensor_meta=meta), requires_grad=False)
    return made


def travels(value: Any, param: Tensor) -> bool:
    """Return whether :func:`cut_like` is collective: the value is a DTensor that is cut otherwise than ``param``."""
    like = getattr(param, "device_mesh", None), getattr(param, "placements", ())
    return isinstance(value, Tensor) and is_dtensor(value) and (value.device_mesh, value.placements) != like  # type: ignore[attr-defined]


def cut_like(value: Any, param: Tensor) -> Any:
    """Return state of any form as a step of ``param`` needs it: a DTensor cut like the parameter if it has its shape.

    Tensors of another shape are replicated. Scalars, what is no tensor, and state of plain parameters, stay as they
    are. Collective over the value's mesh, if the value is a DTensor that is cut otherwise.
    """
    if not isinstance(value, Tensor):
        return value
    from torch.distributed.tensor import Replicate, distribute_tensor

    full = value
    mesh, placements = getattr(param, "device_mesh", None), getattr(param, "placements", ())
    if is_dtensor(value):
        if not travels(value, param):
            return value
        full = value.full_tensor()  # type: ignore[attr-defined]
    if mesh is None or not full.dim():
        return full
    if full.shape != param.shape:
        placements = [Replicate()] * mesh.ndim
    for dim, placement in enumerate(placements):
        if not placement.is_replicate() and bool((mesh.mesh.diff(dim=dim) < 0).any()):
            raise StateDictError(
                f"the ranks of the mesh {mesh.mesh.tolist()} are not in ascending order: there fully_shard cuts "
                "parameters otherwise than torch cuts tensors. Make the mesh in ascending order, or load DTensors that "
                "these ranks have saved"
            )
    with torch.no_grad():
        return distribute_tensor(full.detach(), mesh, placements, src_data_rank=None)


def full_copy(value: Any) -> Any:
    """Return a copy of a state value in its full shape, in host memory. Collective over a DTensor's mesh."""
    if not isinstance(value, Tensor):
        return value
    if not is_dtensor(value):
        return value.detach().cpu().clone()
    local, device_type = local_of(value), value.device_mesh.device_type  # type: ignore[attr-defined]
    if local.device.type != device_type:  # what is offloaded travels over the mesh's own backend
        value = dtensor_over(local.to(device_type), value)
    with torch.no_grad():
        full: Tensor = value.full_tensor()
    return full.cpu().clone() if full.is_cpu else full.cpu()


def state_of_param(state: Mapping[str, Any], param: Tensor, local: Tensor) -> dict[str, Any]:
    """Return state of this rank's part of a parameter, ``local``, as state of the parameter, over the same memory."""
    return {key: value_of_param(value, param, local) for key, value in state.items()}


def value_of_param(value: Any, param: Tensor, local: Tensor) -> Any:
    """Return one value of :func:`state_of_param`: tensors in the part's shape become DTensors, but scalars."""
    fits = isinstance(value, Tensor) and value.dim() and value.shape == local.shape
    return dtensor_over(value, param) if fits and is_dtensor(param) else value


def state_of_part(state: Mapping[str, Any], param: Tensor) -> dict[str, Any]:
    """Return state of a parameter, in its full shape or cut in any way, as state of this rank's part of it.

    Collective as :func:`cut_like` is.
    """
    return {key: local_of(cut_like(value, param)) for key, value in state.items()}
