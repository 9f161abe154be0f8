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
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ...comm.backend_errors import is_loss
from ...comm.backend_exchanges import gathered_over
from ...comm.departures import rank_name
from ...comm.device_backends import group_timeout_s
from ...comm.groups import INLINE_BYTES, ROUNDS, Group
from ...comm.keepalive import HostLimits
from ...comm.lazy_gloo import all_gather, swaps
from ...comm.peer_watch import Watch
from ...comm.process_identity import ProcessIdentity
from ...comm.rendezvous import LOOK_AFTER_S
from ...comm.short_lived import CallWatch
from ...comm.store import default_store
from ...comm.transfers import NEVER_SENT, Transfer, peer_lost
from ...comm.user_connections import broken_connections, parent_of
from ...comm.waits_beside import Broken, SubmittedCall
from ...errors import PeerSilent, ZeroOptError
from ...field_checks import waited_for
from ...policies import Checks
from ...system.background_thread import SerialThread
from ...system.devices import HOST
from ...system.future import Future

# Whom a message waits for, as long as nothing is known of the ranks.
ANY = "another rank of the mesh"
Result = TypeVar("Result")


class _MeshWatch(CallWatch):
    """A watch of the calls over one mesh.

    Attributes:
        limits: on silent hosts, held once this rank has waited a second.
    """

    timeout_option, once_ended = Watch.timeout_option, "restart all ranks from the last checkpoint"
    limits: HostLimits

    def silence(self, text: str, waited: float = 0.0) -> PeerSilent | None:
        if waited > LOOK_AFTER_S and not self.limits.held:
            self.limits.hold()
        return super().silence(text, waited)

    def last(self, ranks: Sequence[int] = ()) -> str:  # noqa: ARG002  (as for steps)
        return "every rank of the mesh must make that call"

    def advice(self, ranks: Sequence[int]) -> str:
        return Watch.advice(self, ranks)


class MeshGroup(Group):
    """The ranks of a mesh, as a group that gathers small tensors over the mesh's own process groups.

    All ranks of the mesh make the same calls, in one order. Without gloo these are collectives of the mesh's backend,
    in one order with the forward and backward of a sharded model too; see [Note: beside FSDP's collectives]. Ranks are
    numbered in the order of the default process group, whatever order the mesh has.

    Attributes:
        ranks: in the default process group, ascending.
    """

    def __init__(self, mesh: Any, checks: Checks) -> None:
        self._device_mesh, self._checks = mesh, checks
        self._arriving = _order_of_arrival(mesh)
        self.ranks: list[int] = sorted(self._arriving)
        self.inline_bytes, self.backend = INLINE_BYTES, "mesh"
        self.rank, self.world_size = self.ranks.index(dist.get_rank()), len(self.ranks)
        groups = _groups_of(mesh)
        self._by_messages = bool(groups) and all("cpu:gloo" in str(dist.get_backend_config(pg)) for pg in groups)
        timeouts = [group_timeout_s(pg) for pg in groups] if checks.timeout is None else [checks.timeout]
        self.timeout_s = waited_for(min(timeouts, default=0.0))
        self._pid, self.broken, self._limits = os.getpid(), Broken(), HostLimits(timeout_s=self.timeout_s)
        self._interrupt = partial(_interrupt, mesh, self.broken)  # refers to no group: threads keep it
        self._waits = SerialThread("zero_opt wait", self._interrupt)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Gather a tensor from every rank.

        Raises:
            PeerLost, PeerSilent: a rank has ended, is stopped, or does not come in time.
        """
        self._require_not_forked()
        rows = tensor.detach().flatten()
        if self._by_messages:
            work = SubmittedCall(self._waits, self._gathered, rows)
            with self._limited():
                self._run(work.begin, ANY, rows)
            rows = work.value
        else:
            rows = rows.to(self._device_mesh.device_type)
            for pg in _groups_of(self._device_mesh):
                rows = gathered_over(pg, rows, ANY)
        by_rank = dict(zip(self._arriving, rows.to(tensor.device).view(-1, *tensor.shape), strict=True))
        return [by_rank[rank] for rank in self.ranks]

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

    def collective(self, call: str, do: Callable[[], Result]) -> Result:
        """Run ``do``, which calls collectives of the mesh's own process groups, and return its result. Collective.

        ``do`` runs under ``torch.no_grad()``. Over a mesh of host memory it runs on another thread, so that Ctrl-C ends
        the wait.

        Args:
            call: the call that all ranks are in.

        Raises:
            PeerLost: in place of a backend's error about a rank; names it, where it can be told. PeerSilent: a rank is
                stopped.
        """
        other, outcome = 1 - self.rank, Future[Result]()

        def run() -> None:
            try:
                with torch.no_grad():
                    outcome.set_result(do())
            except Exception as error:  # raised below: an exception here would look like the end of the wait
                outcome.set_exception(error)

        who = rank_name(other, self.ranks[other]) if self.world_size == 2 else ANY
        with peer_lost(f"{who}, for which {call} waits,"):
            if isinstance(self.watch, CallWatch) and self._device_mesh.device_type == HOST.type:
                with self._limited():
                    self.aside(run)
            else:  # on the streams of this thread
                run()
            error = outcome.exception(0)
            if isinstance(self.watch, CallWatch) and isinstance(error, RuntimeError) and is_loss(error):
                raise self.watch.failed(error) or error from error
            return outcome.result(0)

    @contextlib.contextmanager
    def _limited(self) -> Iterator[None]:
        """A context of waits in which :class:`_MeshWatch` may set limits on silent hosts; lifts them at its end."""
        try:
            yield
        finally:
            self._limits.lift()

    def interrupt(self) -> None:
        self._interrupt()

    def _introduce(self) -> None:
        """Tell the other ranks which process this is, and watch theirs from here on. Collective."""
        said = json.dumps([uuid.uuid4().hex, ProcessIdentity.of_this_process()])
        heard = super().all_gather_bytes(said.encode(), "ShardedOptimizer()")
        ranks = [ProcessIdentity(*json.loads(words)[1]) for words in heard]
        store = default_store(f"zero_opt/{hashlib.sha256(b''.join(heard)).hexdigest()[:32]}/watch")
        watch = _MeshWatch(store, self.rank, ranks, (self.timeout_s, self._checks.hang_timeout))
        watch.departures.leave, watch.limits = self._interrupt, self._limits
        watch.broken_connections = partial(_broken_connections, self._device_mesh, self.ranks)
        watch.posted.begin_ring()
        watch.begin("ShardedOptimizer()")
        self.watch = watch


def _groups_of(mesh: Any) -> list[Any]:
    """Return the process groups of several ranks of a mesh: of its last dimension, which has neighbors, first."""
    return [mesh.get_group(dim) for dim in reversed(range(mesh.ndim)) if mesh.size(dim) > 1]


def _order_of_arrival(mesh: Any) -> list[int]:
    """Return the ranks in the order in which their rows arrive, gathered over one dimension after another, last first.

    torch numbers the ranks of a process group in ascending order.
    """
    here = tuple(mesh.get_coordinate())

    def along(dim: int, *place: int) -> list[int]:
        if dim == mesh.ndim:
            return [int(mesh.mesh[place])]
        places = [(*place, at) for at in range(mesh.size(dim))]  # one group: they differ in this dimension alone
        places.sort(key=lambda there: int(mesh.mesh[(*there, *here[dim + 1 :])]))
        return [rank for there in places for rank in along(dim + 1, *there)]

    return along(0)


def _broken_connections(mesh: Any, ranks: Sequence[int]) -> Iterator[tuple[int, str]]:
    """Yield the numbers among ``ranks`` of those to which a mesh's groups have no connection, and gloo's words."""
    for pg in _groups_of(mesh):
        members = parent_of(pg)
        for rank, words in broken_connections(members):
            yield ranks.index(members.ranks[rank]), words


def _interrupt(mesh: Any, broken: Broken) -> None:
    """End every wait over a mesh, and break its connections."""
    if broken.begin():
        _disconnect(mesh)


def _disconnect(mesh: Any) -> None:
    """Break the connections of gloo over a mesh, as :meth:`Group.disconnect` does, so that no rank waits for this one.

    FSDP's collectives end with it, as they do when a wait of gloo's times out.
    """
    for pg in _groups_of(mesh):
        for rank in (rank for rank in range(pg.size()) if rank != pg.rank()):
            with contextlib.suppress(RuntimeError):  # PeerLost is one
                Transfer("", pg.recv, [torch.empty(1, dtype=torch.float32, device="cpu")], rank, NEVER_SENT).wait(0.001)
