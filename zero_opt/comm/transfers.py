"""Messages under way between ranks."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import OutOfResources, PeerLost
from ..system.interrupts import by_handler
from .backend_errors import backend_words, first_line, is_loss, refused_here
from .slices import SLICE_S, done_within

if TYPE_CHECKING:
    from .groups import Group

# Messages under way at a time.
_WINDOW = 8
# A tag that no message has. All tags of messages are lower, since a backend may abort the process where a message does
# not fit its receiver.
NEVER_SENT = (1 << 31) - 1


def try_connection(pg: Any, rank: int) -> None:
    """Raise gloo's RuntimeError if the connection to a rank has ended: gloo refuses at once to receive over it.

    Where the connection holds, what is received here never comes.
    """
    pg.recv([torch.empty(1, dtype=torch.float32, device="cpu")], rank, NEVER_SENT)


def broken_among(group: dist.ProcessGroup, ranks: Iterable[int]) -> Iterator[tuple[int, str]]:
    """Yield those ranks to which a gloo group has no connection any more, and gloo's words."""
    for rank in ranks:
        try:
            try_connection(group, rank)
        except RuntimeError as error:
            if by_handler(error):
                raise
            yield rank, first_line(error)


def break_connections(group: dist.ProcessGroup, ranks: Iterable[int]) -> None:
    """End a gloo group's connections, by a wait that times out; see :meth:`Group.interrupt`."""
    for rank in ranks:
        with contextlib.suppress(RuntimeError):  # PeerLost is one
            empty = torch.empty(1, dtype=torch.float32, device="cpu")
            Transfer(f"rank {rank}", group.recv, [empty], rank, NEVER_SENT).wait(0.001)


class Transfer:
    """Something under way between ranks. PeerLost is raised in place of a backend's error about a rank."""

    def __init__(self, who: str, begin: Callable[..., dist.Work], *arguments: Any, on_host: bool = False) -> None:
        """Begin it.

        Args:
            who: the ranks that it may have to wait for. on_host: whether it is a collective of tensors in host memory,
                which is waited for in slices, so that Ctrl-C gets through.
        """
        self._who, self._on_host = who, on_host
        try:
            self._work = begin(*arguments)
        except RuntimeError as error:
            self._explain(error)

    def wait(self, seconds: float | None = None) -> None:
        """Return when the transfer is over.

        Args:
            seconds: how long a message may take instead of the group's timeout. If it takes longer, gloo ends the
                whole group.
        """
        try:
            if self._on_host:
                while not done_within(self._work, SLICE_S):
                    pass
            elif seconds is None:
                self._work.wait()
            else:
                self._work.wait(timedelta(seconds=seconds))
        except RuntimeError as error:
            self._explain(error)

    def _explain(self, error: RuntimeError) -> NoReturn:
        try:
            with peer_lost(self._who):
                raise error
        finally:
            del error  # its traceback refers to this frame: that cycle would keep connections open


class Message(Transfer):
    """A message between two ranks over gloo.

    A wait that times out ends the group, so waits cannot be short. The main thread leaves them to another thread.
    """

    def __init__(self, begin: Callable[..., dist.Work], tensor: Tensor, peer: int, tag: int, group: Group) -> None:
        """``begin``: starts to send a tensor to a rank, or to receive it from there."""
        self._peer, self.group = peer, group
        super().__init__(f"rank {peer}", begin, [tensor], peer, tag)

    def wait(self, seconds: float | None = None) -> None:
        aside_if_main(self.group, lambda: self.wait_here(seconds))

    def wait_here(self, seconds: float | None = None) -> None:
        """Wait on this thread, whichever it is."""
        self.group.awaits(self._peer)
        # gloo's own limit for messages is how long the ranks had to connect.
        super().wait(self.group.timeout_s if seconds is None else seconds)

    def _explain(self, error: RuntimeError) -> NoReturn:
        """Name the rank that has left, where one can be told."""
        known: PeerLost | None = None
        try:
            super()._explain(error)
        except PeerLost as lost:
            known = self.group.message_failed(self._peer, backend_words(lost))
            if known is None:
                raise
            raise known from lost
        finally:
            del error, known


def aside_if_main(group: Group, wait: Callable[[], None]) -> None:
    """Wait for messages of a group by a call, which the main thread leaves to another thread."""
    if threading.current_thread() is threading.main_thread():
        group.aside(wait)
    else:
        wait()


def wait_all(transfers: Iterable[Any]) -> None:
    """Wait for transfers, each of which has a ``wait()``; for messages, which are of one group, by one call."""
    waiting = list(transfers)
    if waiting and isinstance(waiting[0], Message):

        def wait() -> None:
            for message in waiting:
                message.wait_here()

        aside_if_main(waiting[0].group, wait)
        return
    for transfer in waiting:
        transfer.wait()


class TransferQueue:
    """Transfers under way, a few at a time, oldest first, and the tensors that they read or write."""

    def __init__(self, seconds: float | None = None) -> None:
        """``seconds``: see :meth:`Transfer.wait`."""
        self._seconds = seconds
        self._under_way: deque[tuple[Transfer, Tensor, Callable[[], None]]] = deque()

    def add(self, transfer: Transfer | None, tensor: Tensor | None, arrived: Callable[[], None] = lambda: None) -> None:
        """Add a transfer, and wait for the oldest if there are too many.

        Args:
            transfer: ``None`` is one that is over. tensor: ``None`` is that this rank takes no part in it.
            arrived: called once the transfer is over.
        """
        if tensor is None:
            return
        if transfer is None:
            arrived()
            return
        self._under_way.append((transfer, tensor, arrived))
        if len(self._under_way) > _WINDOW:
            self._end_oldest()

    def drain(self) -> None:
        """Wait for all of them."""
        while self._under_way:
            self._end_oldest()

    def _end_oldest(self) -> None:
        transfer, _, arrived = self._under_way.popleft()
        transfer.wait(self._seconds)
        arrived()


@contextlib.contextmanager
def peer_lost(who: str) -> Iterator[None]:
    """Within it, a backend's error about a rank is a PeerLost, which says that ``who`` has ended.

    A PeerLost is an OutOfResources where the backend says that this rank's own system has refused to send.
    """
    try:
        yield
    except PeerLost as lost:
        if not refused_here(text := backend_words(lost)):
            raise
        raise OutOfResources(
            f"this rank's system lacks memory for connections, or descriptors ({text}), so the other ranks do not hear "
            "from this one; free memory, or raise the limit of 'ulimit -n', and restart all ranks from the last "
            "checkpoint"
        ) from lost
    except RuntimeError as error:
        if not is_loss(error):
            raise
        text = first_line(error)
        raise PeerLost(f"{who} has ended or does not answer; restart from the last checkpoint ({text})") from error
