"""Process groups of our own, and their collectives, chosen per backend and torch version.

Methods of the process group are called, which work from any thread and keep their names from torch 2.11 to 2.14.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..errors import (
    ConfigError,
    ConfigTypeError,
    OptimizerClosed,
    PeerLost,
    ProcessGroupError,
    UnsupportedParam,
    quoted,
)
from ..field_checks import plain_number, waited_for
from ..kernels.checks import lacks_memory
from ..policies import Checks
from ..system.background_thread import SerialThread
from ..system.devices import HOST, device_backends
from .connecting import Connecting
from .device_backends import Stages, abort_device_backend, add_device_backend, build_stages, group_timeout_s
from .keepalive import HostLimits
from .lazy_gloo import all_gather, greet, greetings, lazy_gloo, never_free, partners, swaps
from .parent import Parent, parent_of
from .peer_watch import Watch
from .rendezvous import Patience, require_same
from .stops import Stops
from .store import c10d
from .transfers import NEVER_SENT, Message, Transfer, break_connections, broken_among, peer_lost
from .waits_beside import Broken, Courtesies, SubmittedCall, outcome, submitted

# Of a message between all ranks: what was called, size of the payload, and as much of the payload as fits in.
_ENVELOPE = "<32sq{}s"
INLINE_BYTES = 216
# Up to so many ranks gloo's own all-gather, a ring, is faster than one in rounds.
_RING = 4
# Whom a collective waits for.
ALL = "another rank"
# The backend of a group of one.
ALONE = "alone"
# Backends of torch's tests, whose ranks are threads, and of its dry runs, whose other ranks do not exist.
THREADED, FAKE = "threaded", "fake"
_WITHOUT_PROCESSES = (THREADED, FAKE)
# Tags of Group.move(), of the rounds of all_gather(), and the first of connect(); no exchange of buckets has them.
_MOVED, _ROUNDS, _GREETINGS = NEVER_SENT - 1, NEVER_SENT - 2, NEVER_SENT - (1 << 10)


def _host_backend(backends: str) -> str:
    """Return the backend of an own group for tensors in host memory, given those of the user's group."""
    return next((name for name in _WITHOUT_PROCESSES if name in backends), "gloo")


def carries_messages(parent: dist.ProcessGroup) -> bool:
    """Whether its ranks are processes, two of which can exchange a message without the others."""
    return _host_backend(str(dist.get_backend_config(parent))) not in _WITHOUT_PROCESSES


def broadcast(pg: dist.ProcessGroup, tensor: Tensor, src: int) -> Transfer:
    """Start overwriting ``tensor`` with that of group rank ``src``."""
    return Transfer(_whom(pg), _broadcasting, pg, tensor, src, on_host=tensor.is_cpu)


def _whom(pg: dist.ProcessGroup) -> str:
    """Return whom a collective waits for: any rank, since backends pass messages on from rank to rank."""
    return f"rank {1 - pg.rank()}" if pg.size() == 2 else ALL


def _broadcasting(pg: dist.ProcessGroup, tensor: Tensor, src: int) -> dist.Work:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = src, 0
    return pg.broadcast([tensor], options)


def bytes_tensor(payload: bytes) -> Tensor:
    """Return a CPU tensor with these bytes."""
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8)


def tensor_bytes(tensor: Tensor) -> bytes:
    """Return the raw bytes of a contiguous CPU tensor, without numpy; raise UnsupportedParam if it has no memory."""
    if lacks_memory(tensor):  # ctypes would read elsewhere
        raise UnsupportedParam(f"a {type(tensor).__name__} has no memory of its own, so its bytes cannot be read")
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())


class Group:
    """A process group of our own, so that no traffic of the user's can cross ours.

    Attributes:
        ranks: those of the user's that it was made for, as global ones. rank: this rank's number in it.
        world_size: number of ranks.
        device_backends: backends that carry accelerator tensors, by device type.
        hosts: how many hosts these tensors go through in two stages; 1 if all ranks are one stage.
        watch: notices, while this rank waits for all ranks, which of them keep it waiting; explains errors.
        farewell: called before this rank breaks its connections.
        told: ``id`` of the error that all ranks raise. courtesies: what this rank does for the others alone.
        broken: whether this rank has broken its connections.
        inline_bytes: payloads up to this size need one message in ``all_gather_bytes``; the same on every rank.
    """

    watch: Watch | None = None
    farewell: Callable[[], None] | None = None
    told = 0
    _parent: Parent | None = None
    _mesh: weakref.ref[DeviceMesh] | None = None

    def __init__(
        self,
        parent: dist.ProcessGroup | Parent,
        timeout: float | None,
        purpose: str,
        connecting: Connecting | None,
        *,
        carries_devices: bool = False,
        hosts: int = 1,
    ) -> None:
        """``carries_devices``: whether to carry accelerator tensors too, by the backends of ``parent`` for them."""
        self.hosts, self._stages = hosts, list[Stages]()
        self._parent = parent = parent_of(parent)
        self.device_backends = device_backends(parent.backends) if carries_devices else {}
        self.inline_bytes, self.backend = INLINE_BYTES, _host_backend(parent.backends)
        self.ranks: list[int] = [*parent.ranks]
        self.rank, self.world_size = parent.rank, len(self.ranks)
        self.timeout_s = waited_for(parent.timeout_s if timeout is None else timeout)
        self._pid, self.broken, self._aborted = os.getpid(), Broken(), threading.Lock()
        self._connected = self._at_once()
        self._used = set(self._connected)
        self._waits, self.courtesies = SerialThread("zero_opt wait", self.interrupt), Courtesies()
        self._pg: dist.ProcessGroup | None = self._new_group(purpose, connecting)

    def _new_group(self, purpose: str, connecting: Connecting | None) -> Any:
        """Return a group of the parent's ranks, in its order, made by them alone.

        Args:
            purpose: differs between an optimizer's groups.

        ``new_group`` of torch cannot be used: without the other ranks it names a group after how many this process has
        at the moment. A name comes back once a group is destroyed, with the dead group's addresses in the store; and it
        differs where ranks have different groups besides. Either hangs. Here every rank draws a name, and rank 0's is
        taken.
        """
        ranks, timeout = self.ranks, timedelta(seconds=self.timeout_s)
        if self.backend == FAKE:  # it carries nothing, so no traffic can mix
            return self.parent
        if connecting is None:  # all ranks are in every group
            return c10d.new_group(ranks, timeout=timeout, backend=THREADED)
        name, rank, size = f"{connecting.name}/{purpose}", self.rank, self.world_size
        pg = c10d.ProcessGroup(c10d.PrefixStore(name, c10d._get_default_store()), rank, size)
        kinds = c10d.ProcessGroup.BackendType
        to_connect = min(timeout, timedelta(seconds=connecting.patience_s))
        self._addresses = connecting.addresses(purpose)  # held here: gloo asks it whenever two ranks connect
        gloo = connecting.connected(lambda: self._new_gloo(self._addresses, to_connect))
        gloo._set_default_timeout(timeout)
        pg._set_default_backend(kinds.GLOO)
        pg._register_backend(HOST, kinds.GLOO, gloo)
        pg._set_group_name(name)
        if self.hosts > 1 and self.device_backends:
            self._stages.append(build_stages(pg, self.device_backends, self.hosts, timeout, ranks))
        for device_type, backend in self.device_backends.items() if self.hosts == 1 else ():
            add_device_backend(pg, device_type, backend, timeout, ranks)
        pg._set_group_desc(f"zero_opt:{purpose}:{connecting.number}")
        return pg

    def _new_gloo(self, addresses: Any, timeout: timedelta) -> Any:
        """Return a backend for tensors in host memory, connected as collectives need it."""
        gloo = lazy_gloo(addresses, self.rank, self.world_size, timeout)
        addresses.meet()
        greet(gloo, self._connected, _GREETINGS, timeout)
        return gloo

    def _at_once(self) -> set[int]:
        """Return the ranks to connect to when the group is made."""
        return partners(self.rank, self.world_size)

    def connect(self, peers: Iterable[int]) -> None:
        """Connect to ranks, all of which call this about this rank, before messages to them keep a thread waiting."""
        fresh = set(peers) - {self.rank} - self._connected if self.has_send_recv else set()

        def greet() -> None:
            for message, _ in greetings(self.send_to, self.receive_from, fresh, _GREETINGS):
                message.wait_here()

        if fresh:
            self.aside(greet)
            self._connected |= fresh

    @property
    def pg(self) -> dist.ProcessGroup:
        """The group as torch has it; raises OptimizerClosed once it is closed."""
        if self._pg is None:
            raise OptimizerClosed("this optimizer is closed, and its connections with it")
        return self._pg

    @property
    def stages(self) -> Stages:
        """The groups that carry accelerator tensors in two stages.

        Raises:
            OptimizerClosed: they are closed.
        """
        self.pg  # noqa: B018  (raises)
        return self._stages[0]

    def explain(self, text: str, patience_s: float | None = None) -> PeerLost | None:
        """Return the error that names the rank that has left; ``None`` if no rank is known to have.

        Args:
            text: a backend's words. patience_s: how long to wait for news.
        """
        return None if (watch := self.watch) is None else watch.explain(text, None, patience_s) or watch.silence(text)

    def lookout(self) -> Callable[[], None]:
        """Return a function to call again and again in a wait: it raises PeerSilent for a rank that is stopped."""
        return (lambda: None) if self.watch is None else self.broken.lookout(Stops(self.watch).attend, self.explain)

    @contextlib.contextmanager
    def exchanging(self) -> Iterator[None]:
        """Return a context of waits for other ranks in a step."""
        try:
            yield
        except BaseException as error:
            self.leave_interrupted(error)
            raise

    def leave_interrupted(self, error: BaseException, what: str = "") -> None:
        """Leave training as :meth:`Watch.interrupted` does, unless the error says that this rank, or another, has."""
        known = isinstance(error, (PeerLost, OptimizerClosed)) or id(error) == self.told
        if self.watch is not None and not known:
            self.watch.interrupted(error, what)

    @property
    def calls(self) -> int:
        """The collective calls that this rank has entered, so far as others could be left waiting in one."""
        return 0 if self.watch is None else self.watch.departures.calls

    def awaits(self, rank: int) -> None:
        """Note, for messages, that an exchange waits for a rank."""
        if self.watch is not None:
            self.watch.awaited = rank

    def leave_silent(self, rank: int, text: str) -> PeerLost:
        """Leave training, and return the error about a rank that has not come to an exchange in time."""
        return PeerLost(text) if self.watch is None else self.watch.leave_silent([rank], text)

    def message_failed(self, rank: int, text: str) -> PeerLost | None:
        """Return the error once a message to or from a rank has failed, given the backend's words."""
        return None if self.watch is None else self.watch.message_failed(rank, text)

    def in_step(self, step: int) -> None:
        """Note, for messages, that this rank has completed so many steps."""
        if self.watch is not None:
            self.watch.step = step

    def aside(self, call: Callable[[], None]) -> None:
        """Run a call whose waits Python cannot cut into slices on a thread of its own, so that Ctrl-C gets through.

        What raises here, as Ctrl-C or a rank that is stopped, ends what the call waits for.
        """
        with self.exchanging(), contextlib.nullcontext() if self.watch is None else self.watch.awaiting_message():
            waiting = submitted(self._waits, call)
            try:
                outcome(waiting, self.lookout)
            finally:
                if not waiting.done():  # the ranks are not at one point any more
                    left, self._waits = self._waits, SerialThread("zero_opt wait", self.interrupt)
                    left.close()
                    self.interrupt()
                    self.broken.leave(left)

    @property
    def has_send_recv(self) -> bool:
        """Whether two ranks can exchange a message without the others; those of torch's tests and dry runs cannot."""
        return self.backend not in _WITHOUT_PROCESSES

    @property
    def parent(self) -> dist.ProcessGroup | None:
        """The user's group that this one was made for, if any; over a mesh, of its last dimension of several ranks.

        Raises:
            ProcessGroupError: the user has destroyed it.
        """
        parent = None if self._parent is None else self._parent.groups[0][0]()
        if self._parent is not None and parent not in c10d._world.pg_map:
            raise ProcessGroupError("the process group was destroyed, and is needed: call destroy_process_group() last")
        return parent

    def mesh(self) -> DeviceMesh:
        """Return the ranks of :attr:`parent`, which is needed, as a 1-D mesh, for tensors in host memory."""
        parent, mesh = self.parent, None if self._mesh is None else self._mesh()
        assert parent is not None, "a rank alone has no mesh"
        if mesh is None:
            mesh = DeviceMesh.from_group(parent, "cpu")
            self._mesh = weakref.ref(mesh)  # it holds the group
        return mesh

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return every rank's ``tensor`` (same shape and dtype everywhere), in rank order.

        Raises:
            ProcessGroupError: in a fork of the process that made the group. PeerLost, PeerSilent: one does not come.
        """
        self._require_not_forked()
        pg = self.pg
        if self.has_send_recv and tensor.is_cpu and self.world_size > _RING:
            swap = swaps(pg, _ROUNDS, self.timeout_s)
            work = SubmittedCall(self._waits, all_gather, swap, self.rank, tensor, self.world_size)
            self._run(work.begin, ALL, tensor)
            return list(work.value)
        outputs = [torch.empty_like(tensor) for _ in range(self.world_size)]
        self._run(lambda: pg.allgather([outputs], [tensor]), ALL, tensor)
        return outputs

    def _run(self, begin: Callable[[], Any], who: str, like: Tensor) -> None:
        """Run a collective of tensors like this one; ``who`` names the ranks that it may have to wait for."""
        if self.watch is None or not like.is_cpu:
            Transfer(who, begin, on_host=like.is_cpu).wait()
        else:
            with peer_lost(f"{who}, for which {self.watch.where} waits,"):
                self.watch.wait(begin)

    def all_gather_bytes(self, payload: bytes, call: str = "", called: str = "") -> list[bytes]:
        """Return every rank's payload, which may differ in length, in rank order.

        The first message has one size whatever it is about: a backend may abort the process where sizes differ.

        Args:
            call: what the user called; ranks compare it.
            called: the one that this rank called, where ``call`` names several.

        Raises:
            RankMismatch: on every rank, when ranks are in different calls.
        """
        if self.watch is not None:
            self.watch.begin(called or call)
        envelope = struct.Struct(_ENVELOPE.format(self.inline_bytes))
        first = envelope.pack(call.encode(), len(payload), payload[: self.inline_bytes])
        envelopes = [envelope.unpack(tensor_bytes(t)) for t in self.all_gather(bytes_tensor(first))]
        calls = [name for name, *_ in envelopes]
        if calls.count(calls[0]) < len(calls):
            require_same([name.rstrip(b"\0").decode(errors="replace") for name in calls])
        longest = max(length for _, length, _ in envelopes)
        if longest <= self.inline_bytes:
            return [inline[:length] for _, length, inline in envelopes]
        padded = torch.zeros(longest, dtype=torch.uint8, device="cpu")
        padded[: len(payload)] = bytes_tensor(payload) if payload else 0
        return [tensor_bytes(t[:length]) for t, (_, length, _) in zip(self.all_gather(padded), envelopes, strict=True)]

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """Overwrite ``tensor`` on every rank with that of group rank ``src``."""
        self._require_not_forked()
        pg = self.pg
        self._run(lambda: _broadcasting(pg, tensor, src), _whom(pg), tensor)

    def _require_not_forked(self) -> None:
        if os.getpid() != self._pid:
            raise ProcessGroupError(
                "this process was forked from the one that made this ShardedOptimizer, whose connections and threads "
                "it does not have; construct optimizers after forking"
            )
        if self.watch is not None:
            self.watch.require_going_on()

    def move(self, tensor: Tensor | None, src: int, dst: int, numel: int, dtype: torch.dtype) -> Transfer | None:
        """Start moving ``numel`` elements from rank ``src`` to rank ``dst``; every rank calls, in one order.

        ``tensor`` is contiguous: the source on ``src``, the destination on ``dst``, ``None`` elsewhere.
        """
        if self.has_send_recv:
            if tensor is None or numel == 0 or src == dst:
                return None
            if self.rank in (src, dst):
                self.connect([dst if self.rank == src else src])
            if self.rank == src:
                return self.send_to(tensor, dst, _MOVED)
            return self.receive_from(tensor, src, _MOVED) if self.rank == dst else None
        self.broadcast(torch.empty(numel, dtype=dtype, device="cpu") if tensor is None else tensor.view(-1), src)
        return None

    def send_to(self, tensor: Tensor, dst: int, tag: int) -> Message:
        """Start sending a contiguous tensor to one rank."""
        return self._message(self.pg.send, tensor, dst, tag)

    def receive_from(self, tensor: Tensor, src: int, tag: int) -> Message:
        """Start receiving a contiguous tensor from one rank; messages of one tag come in order."""
        return self._message(self.pg.recv, tensor, src, tag)

    def _message(self, begin: Callable[..., dist.Work], tensor: Tensor, peer: int, tag: int) -> Message:
        message = Message(begin, tensor, peer, tag, self)
        self._used.add(peer)  # there is a connection
        return message

    def broken_connections(self) -> Iterator[tuple[int, str]]:
        """Yield the ranks to which there is no connection any more, and gloo's words."""
        return broken_among(self.pg, sorted(self._used))

    def interrupt(self) -> None:
        """End every wait of CPU tensors in this group with a PeerLost, here and on ranks that wait for this one.

        gloo cannot cancel a wait. But if one times out, it closes all connections of the group.
        """
        self.disconnect()
        if os.getpid() == self._pid and self._aborted.acquire(blocking=False):
            self._abort_devices()

    def disconnect(self) -> None:
        """Break this rank's connections, but leave alone what is under way on an accelerator."""
        if os.getpid() == self._pid and self.has_send_recv and self.broken.begin():
            self.courtesies.do(self._break)

    def _break(self) -> None:
        if self.farewell is not None:
            self.farewell()
        break_connections(self.pg, list(self._used))

    def _abort_devices(self) -> None:
        """End what carries accelerator tensors, on this rank alone."""
        parts = [part for stages in self._stages for part in stages]
        for pg in [] if self._pg is None else [self._pg, *parts]:
            for device_type in self.device_backends:
                with contextlib.suppress(RuntimeError):
                    abort_device_backend(pg, device_type)

    def close(self) -> None:
        """Destroy the group, once; harmless when the user has destroyed everything already, and in a forked child."""
        pg = self._pg  # another thread may close it at the same time
        if pg is None:
            return
        if os.getpid() != self._pid:
            never_free(pg)
            return
        self._waits.close()
        if self.watch is not None:
            self.watch.close()
        with contextlib.suppress(ValueError, AssertionError, RuntimeError, KeyError):
            if self.has_send_recv:
                self.disconnect()  # gloo aborts where its thread ends before a connection that a fork has open too
                self._abort_devices()
                self.courtesies.do(pg._get_backend(HOST).shutdown)
            elif self.backend == THREADED:
                dist.destroy_process_group(pg)
        if self.courtesies.stuck or (self.watch is not None and self.watch.overdue):
            never_free(pg)
        self._pg = None  # the last reference, which gives back connections and threads
        self._stages.clear()


def connect(
    parent: dist.ProcessGroup,
    groups: int,
    checks: Checks = Checks(),  # noqa: B008  (frozen)
    limits: HostLimits | None = None,
    hosts: int = 1,
) -> Connecting | None:
    """Begin to make so many groups; returns ``None`` if the ranks are not processes. Collective.

    Args:
        limits: held when this rank has waited a second. hosts: as for :class:`Group`.

    Raises:
        OutOfResources: a rank lacks descriptors or threads for them. Others as for :meth:`rendezvous.Meeting.come`.
    """
    if not carries_messages(parent):
        return None
    come_s = waited_for(group_timeout_s(parent))
    timeout_s = come_s if checks.timeout is None else waited_for(checks.timeout)
    patience = Patience(come_s, timeout_s, checks.hang_timeout, limits)
    if hosts > 1:
        patience = patience._replace(call=f"ShardedOptimizer() with a mesh of {hosts} x {parent.size() // hosts} ranks")
    return Connecting(parent, groups, patience)


def checked_rank(rank: Any, world_size: int, name: str) -> int:
    """Return ``rank`` as Python's own integer. Raise ConfigTypeError or ConfigError unless it is a rank of a group."""
    rank = plain_number(rank)
    message = f"{name} must be a rank of the group, 0 to {world_size - 1}, got {quoted(rank)}"
    if isinstance(rank, bool) or not isinstance(rank, int):
        raise ConfigTypeError(message)
    if not 0 <= rank < world_size:
        raise ConfigError(message)
    return rank
