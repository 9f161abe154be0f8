"""The ranks of a DeviceMesh, of any number of dimensions, as one group."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...comm.groups import INLINE_BYTES, Group
from ...comm.transfers import peer_lost


class MeshGroup(Group):
    """Gathers small tensors over the mesh's own process groups, as operations on DTensors do; makes none.

    So callers must be where they may call such operations: on all ranks of the mesh, in one order with the forward and
    backward of a sharded model. Rank and order are those of the mesh's flattened ranks.

    Attributes:
        ranks: in the default process group.
    """

    def __init__(self, mesh: Any) -> None:
        self._device_mesh = mesh
        self.ranks: list[int] = mesh.mesh.flatten().tolist()
        self.inline_bytes, self.backend, self.parent = INLINE_BYTES, "mesh", None
        self.rank, self.world_size, self.timeout_s = (
            self.ranks.index(torch.distributed.get_rank()),
            len(self.ranks),
            0.0,
        )

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """See :class:`Group`; the wait ends with the mesh's own timeout.

        Raises:
            PeerLost: a rank has ended, or did not come in that time.
        """
        from torch.distributed.tensor import DTensor, Shard

        mesh = self._device_mesh
        mine = tensor.detach().to(mesh.device_type).unsqueeze(0)
        with peer_lost("all ranks of the mesh"):
            rows = DTensor.from_local(mine, mesh, [Shard(0)] * mesh.ndim, run_check=False).full_tensor()
            return list(rows.to(tensor.device))
