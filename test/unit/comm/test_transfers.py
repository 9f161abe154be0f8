"""Messages under way between ranks, and what a backend's errors mean."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from zero_opt.comm.transfers import Transfer, TransferQueue, peer_lost
from zero_opt.errors import OutOfResources, PeerLost


class _Message(Transfer):
    """Writes down when it is waited for."""

    def __init__(self, waited: list[int], number: int) -> None:
        self._waited, self._number = waited, number

    def wait(self, seconds: float | None = None) -> None:
        self._waited.append(self._number)


def test_a_window_waits_for_the_oldest_and_in_the_end_for_all() -> None:
    window, waited, before = TransferQueue(), list[int](), list[int]()
    for number in range(20):
        window.add(_Message(waited, number), torch.ones(1))
        window.add(None, torch.ones(1))
        before.append(number + 1 - len(waited))
    assert max(before) == 8 and before[:8] == [1, 2, 3, 4, 5, 6, 7, 8]
    window.drain()
    assert waited == list(range(20))
    window.drain()
    assert waited == list(range(20))


# -- what a backend says ----------------------------------------------------------------------------------------------


def _says(text: str) -> Callable[[], None]:
    def call() -> None:
        raise RuntimeError(text)

    return call


def test_a_peer_that_is_gone_or_silent_is_lost_and_other_errors_are_what_they_are() -> None:
    for text in ("[gloo/transport/tcp/pair.cc:534] Connection closed by peer", "Timed out waiting 500ms for recv"):
        with pytest.raises(PeerLost, match="rank 3 has ended or does not answer") as lost:
            Transfer("rank 3", _says(text))  # type: ignore[arg-type]
        assert str(lost.value).endswith(f"checkpoint ({text})") and type(lost.value.__cause__) is RuntimeError
    with pytest.raises(RuntimeError, match=r"^Invalid scalar type$") as other:
        Transfer("rank 3", _says("Invalid scalar type"))  # type: ignore[arg-type]
    assert type(other.value) is RuntimeError


@pytest.mark.parametrize("reason", ["Cannot allocate memory", "No buffer space available", "Too many open files"])
def test_what_this_rank_could_not_send_is_no_loss_of_another(reason: str) -> None:
    words = f"[gloo/transport/tcp/pair.cc:339] writev [127.0.0.1]:15749: {reason}"
    with pytest.raises(OutOfResources, match=f"this rank's system lacks .*{reason}"), peer_lost("another rank"):
        raise PeerLost("one of rank 1, rank 2 has ended") from RuntimeError(words)
    with pytest.raises(PeerLost, match="has ended"), peer_lost("another rank"):
        raise PeerLost("one of rank 1, rank 2 has ended") from RuntimeError("Connection closed by peer")
