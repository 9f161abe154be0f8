"""The ranks of a DeviceMesh, of any number of dimensions, as one group.

[Note: beside FSDP's collectives]
A call of one rank alone would meet, in the mesh's process groups, the collectives of the other ranks' forward; where
sizes differ, gloo aborts the process. So where a mesh has gloo, ranks send each other messages with a tag that nothing
else has. They take no part in the order of the collectives, and no process group is made for them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import uuid
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...comm.backend_errors import is_loss
from ...comm.backend_exchanges import gathered_over
from ...comm.departures import rank_name
from ...comm.device_backends import group_timeout_s
from ...comm.groups import INLINE_BYTES, ROUNDS, Group
from ...comm.lazy_gloo import all_gather, swaps
from ...comm.peer_watch import Watch
from ...comm.process_identity import ProcessIdentity
from ...comm.short_lived import CallWatch
from ...comm.store import default_store
from ...comm.transfers import NEVER_SENT, Transfer, peer_lost
from ...comm.waits_beside import SubmittedCall
from ...errors import ZeroOptError
from ...field_checks import waited_for
from ...policies import Checks
from ...system.background_thread import SerialThread

# Whom a message waits for, as long as nothing is known of the ranks.
ANY = "another rank of the mesh"


class _MeshWatch(CallWatch):
    """A watch of the calls over one mesh."""

    timeout_option, once_ended = Watch.timeout_option, "restart all ranks from the last checkpoint"

    def last(self, ranks: Sequence[int] = ()) -> str:  # noqa: ARG002  (as for steps)
        return "every rank of the mesh must make that call"

    def advice(self, ranks: Sequence[int]) -> str:
        return Watch.advice(self, ranks)


class MeshGroup(Group):
    """The ranks of a mesh, as a group that gathers small tensors over the mesh's own process groups.

    All ranks of the mesh make the same calls, in one order. Without gloo these are collectives of the mesh's backend,
    in one order with the forward and backward of a sharded model too; see [Note: beside FSDP's collectives]. Ranks are
    numbered as in the flattened mesh.

    Attributes:
        ranks: in the default process group.
    """

    def __init__(self, mesh: Any, checks: Checks) -> None:
        self._device_mesh, self._checks = mesh, checks
        self.ranks: list[int] = mesh.mesh.flatten().tolist()
        self.inline_bytes, self.backend = INLINE_BYTES, "mesh"
        self.rank, self.world_size = self.ranks.index(dist.get_rank()), len(self.ranks)
        groups = _groups_of(mesh)
        self._by_messages = bool(groups) and all("cpu:gloo" in str(dist.get_backend_config(pg)) for pg in groups)
        timeouts = [group_timeout_s(pg) for pg in groups] if checks.timeout is None else [checks.timeout]
        self.timeout_s = waited_for(min(timeouts, default=0.0))
        self._pid, self._waits = os.getpid(), SerialThread("zero_opt wait", partial(_disconnect, mesh))

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Gather a tensor from every rank.

        Raises:
            PeerLost, PeerSilent: a rank has ended, is stopped, or does not come in time.
        """
        self._require_not_forked()
        rows = tensor.detach().flatten()
        if self._by_messages:
            work = SubmittedCall(self._waits, self._gathered, rows)
            self._run(work.begin, ANY, rows)
            rows = work.value
        else:
            rows = rows.to(self._device_mesh.device_type)
            for pg in _groups_of(self._device_mesh):
                rows = gathered_over(pg, rows, ANY)
        return list(rows.to(tensor.device).view(-1, *tensor.shape))

    def _gathered(self, rows: Tensor) -> Tensor:
        for pg in _groups_of(self._device_mesh):
            rows = all_gather(swaps(pg, ROUNDS, self.timeout_s), pg.rank(), rows, pg.size()).flatten()
        return rows

    def all_gather_bytes(self, payload: bytes, call: str = "", called: str = "") -> list[bytes]:
        if self.watch is None and self._by_messages:
            try:
                self._introduce()
            except BaseException as error:
                if not isinstance(error, ZeroOptError):  # what was sent would be read as a later call's
                    _disconnect(self._device_mesh)
                raise
        return super().all_gather_bytes(payload, call, called)

    @property
    def calls(self) -> int:
        return 0 if self.watch is None else 1 + super().calls  # there was none for the first one

    @property
    def call(self) -> str:
        """The call, as messages name it, that ranks have last compared."""
        return "" if self.watch is None else self.watch.call

    @contextlib.contextmanager
    def collective(self, call: str) -> Iterator[None]:
        """A context of collectives over the mesh's own process groups, in a call that all ranks are in.

        Raises:
            PeerLost: in place of a backend's error about a rank; names it, where it can be told.
        """
        other = 1 - self.rank
        who = rank_name(other, self.ranks[other]) if self.world_size == 2 else ANY
        with peer_lost(f"{who}, for which {call} waits,"):
            try:
                yield
            except RuntimeError as error:
                if not isinstance(self.watch, CallWatch) or not is_loss(error):
                    raise
                raise self.watch.broken(error) or error from error

    def _introduce(self) -> None:
        """Tell the other ranks which process this is, and watch theirs from here on. Collective."""
        said = json.dumps([uuid.uuid4().hex, ProcessIdentity.of_this_process()])
        heard = super().all_gather_bytes(said.encode(), "ShardedOptimizer()")
        ranks = [ProcessIdentity(*json.loads(words)[1]) for words in heard]
        store = default_store(f"zero_opt/{hashlib.sha256(b''.join(heard)).hexdigest()[:32]}/watch")
        watch = _MeshWatch(store, self.rank, ranks, (self.timeout_s, self._checks.hang_timeout))
        watch.departures.leave = partial(_disconnect, self._device_mesh)
        watch.posted.begin_ring()
        watch.begin("ShardedOptimizer()")
        self.watch = watch


def _groups_of(mesh: Any) -> list[Any]:
    """Return the process groups of several ranks of a mesh: of its last dimension, which has neighbors, first."""
    return [mesh.get_group(dim) for dim in reversed(range(mesh.ndim)) if mesh.size(dim) > 1]


def _disconnect(mesh: Any) -> None:
    """Break the connections of gloo over a mesh, as :meth:`Group.disconnect` does, so that no rank waits for this one.

    FSDP's collectives end with it, as they do when a wait of gloo's times out.
    """
    for pg in _groups_of(mesh):
        for rank in (rank for rank in range(pg.size()) if rank != pg.rank()):
            with contextlib.suppress(RuntimeError):  # PeerLost is one
                Transfer("", pg.recv, [torch.empty(1, dtype=torch.float32, device="cpu")], rank, NEVER_SENT).wait(0.001)
