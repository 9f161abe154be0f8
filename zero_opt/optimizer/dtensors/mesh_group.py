"""The ranks of a DeviceMesh, of any number of dimensions, as one group."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...comm.backend_exchanges import gathered_over
from ...comm.groups import INLINE_BYTES, Group


class MeshGroup(Group):
    """The ranks of a mesh, as a group that gathers small tensors over the mesh's own process groups.

    Calls are made where operations on DTensors may be: on all ranks of the mesh, in one order with the forward and
    backward of a sharded model. Ranks are numbered as in the flattened mesh.

    Attributes:
        ranks: in the default process group.
    """

    def __init__(self, mesh: Any) -> None:
        self._device_mesh = mesh
        self.ranks: list[int] = mesh.mesh.flatten().tolist()
        self.inline_bytes, self.backend, self.parent = INLINE_BYTES, "mesh", None
        self.rank, self.world_size = self.ranks.index(torch.distributed.get_rank()), len(self.ranks)
        self.timeout_s = 0.0

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Gather a tensor from every rank; the wait ends with the mesh's own timeout.

        Raises:
            PeerLost: a rank has ended, or did not come in that time.
        """
        mesh = self._device_mesh
        rows = tensor.detach().to(mesh.device_type).flatten()
        for dim in reversed(range(mesh.ndim)):  # the last one's ranks are neighbors
            if mesh.size(dim) > 1:
                rows = gathered_over(mesh.get_group(dim), rows, "all ranks of the mesh")
        return list(rows.to(tensor.device).view(-1, *tensor.shape))
