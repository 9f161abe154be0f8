"""Messages between two ranks at a time, in which each exchange's name goes ahead of its data."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from .exchange import Ident
from .transfers import wait_all

# An exchange has at most so many messages to a peer, besides the header.
MOST_MESSAGES = 25
_HEADER_NUMEL = 3 + MOST_MESSAGES
# So many headers from a peer are being received at a time. gloo sends only what the other end is ready for, and "ready"
# would wait behind this rank's own data if it were said when a header is due.
_HEADERS_AHEAD = 8
# Exchanges with a peer that have tags of their own, two each: of the header and of the data. All tags have 30 bits.
TAG_MODULUS = 1 << 29


class PeerMessages(Protocol):
    """What an exchange by messages needs of a process group."""

    rank: int
    world_size: int

    def connect(self, peers: Iterable[int]) -> None:
        """Connect to ranks, as they do to this one."""

    def send_to(self, tensor: Tensor, dst: int, tag: int) -> Any:
        """Start sending a contiguous tensor; the result is waited for."""

    def receive_from(self, tensor: Tensor, src: int, tag: int) -> Any:
        """Start receiving a contiguous tensor; messages of one tag come in the order in which they were sent."""


class _Inbox:
    """Messages from one peer, in the order it sent them: a header, then the data of one exchange."""

    def __init__(self, messages: PeerMessages, peer: int) -> None:
        self._messages, self._peer, self._count = messages, peer, 0
        self._headers: deque[tuple[Any, Tensor]] = deque()  # being received, of the exchanges from _count on
        self._next: tuple[Ident, list[int]] | None = None

    def _peek(self) -> tuple[Ident, list[int]]:
        """Return the next exchange's ident, and the sizes of its messages in bytes."""
        if self._next is None:
            headers = self._headers  # which close() replaces
            while len(headers) < _HEADERS_AHEAD:
                header = torch.empty(_HEADER_NUMEL, dtype=torch.int64, device="cpu")
                tag = 2 * ((self._count + len(headers)) % TAG_MODULUS)
                headers.append((self._messages.receive_from(header, self._peer, tag), header))
            work, header = headers[0]
            work.wait()
            headers.popleft()
            step, epoch, sequence, *sizes = header.tolist()
            self._next = Ident(step, epoch, sequence), [size for size in sizes if size]
        return self._next

    def take(self, into: Sequence[Tensor]) -> list[Any]:
        """Start receiving the next exchange's messages."""
        tag, self._next = 2 * self._count + 1, None
        self._count = (self._count + 1) % TAG_MODULUS
        return [self._messages.receive_from(tensor, self._peer, tag) for tensor in into]

    def close(self) -> None:
        """Drop the headers that are being received: each keeps the group's connections open."""
        self._headers = deque()

    def drop(self) -> None:
        """Receive the next exchange's messages, and drop them."""
        _, sizes = self._peek()
        wait_all(self.take([torch.empty(size, dtype=torch.uint8, device="cpu") for size in sizes]))

    def skip_before(self, ident: Ident) -> bool:
        """Drop exchanges older than ``ident``; returns whether the next one is ``ident``."""
        while True:
            following, _ = self._peek()
            if following >= ident:
                return following == ident
            self.drop()


class HeadedMessages:
    """What this rank and its peers send each other, one exchange after another: a header, then the data.

    The header has the exchange's ident and the sizes of its messages. So a rank that has skipped an exchange is
    noticed, and what it has skipped can be received and dropped.

    A rank that takes part in an exchange announces it to its peers before it waits for any rank, and sends what it has
    announced. To each peer it sends its data once it has started to receive that peer's: a connection carries its
    messages in order, so "ready to receive" behind this rank's own data would keep the peer from sending meanwhile.

    An exchange may be announced before the data of those that were announced earlier is sent or received. Data is sent,
    and received, in the order of the announcements.
    """

    def __init__(self, messages: PeerMessages, peers: Iterable[int]) -> None:
        self._messages = messages
        self._inbox = {peer: _Inbox(messages, peer) for peer in peers}
        self._sent = dict.fromkeys(self._inbox, 0)
        self._under_way: dict[int, list[tuple[int, Any]]] = {peer: [] for peer in self._inbox}

    def announce(self, peer: int, ident: Ident, tensors: Sequence[Tensor]) -> int:
        """Start sending a peer the header of an exchange.

        Args:
            tensors: of the sizes of those that :meth:`send` will be given, none of them empty.

        Returns:
            The exchange's number among those with this peer.
        """
        sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
        padded = sizes + [0] * (MOST_MESSAGES - len(sizes))
        header = torch.tensor([*ident, *padded], dtype=torch.int64, device="cpu")
        number = self._sent[peer]
        self._under_way[peer].append((number, self._messages.send_to(header, peer, 2 * (number % TAG_MODULUS))))
        self._sent[peer] += 1
        return number

    def is_in(self, peer: int, ident: Ident) -> bool:
        """Wait until a peer has come to an exchange, or to a later one; returns ``False`` if it has skipped it."""
        return self._inbox[peer].skip_before(ident)

    def receive(self, peer: int, into: Sequence[Tensor]) -> list[Any]:
        """Start receiving the data of an exchange that the peer is in."""
        return self._inbox[peer].take(into)

    def send(self, peer: int, number: int, tensors: Iterable[Tensor]) -> None:
        """Start sending a peer the data of an exchange, by the number it was announced with."""
        tag = 2 * (number % TAG_MODULUS) + 1
        self._under_way[peer] += [(number, self._messages.send_to(tensor, peer, tag)) for tensor in tensors]

    def end(self, peer: int, number: int) -> None:
        """Wait until all is sent to a peer of an exchange that it is in, and of those before.

        What is sent to a peer that has skipped it is read only when that peer gets to a later exchange, for which it
        may need this rank to get there first.
        """
        under_way = self._under_way[peer]
        # gloo allows one wait for each message.
        self._under_way[peer] = [(later, work) for later, work in under_way if later > number]
        wait_all(work for earlier, work in under_way if earlier <= number)

    def close(self) -> None:
        """Receive no more headers."""
        for inbox in self._inbox.values():
            inbox.close()
