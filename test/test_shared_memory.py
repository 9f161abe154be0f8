"""The memfd arena."""

from __future__ import annotations

import os

import pytest
import torch

from zero_opt.shared_memory import PAGE, Arena, page_aligned


def test_pages() -> None:
    assert [page_aligned(n) for n in (0, 1, PAGE, PAGE + 1)] == [0, PAGE, PAGE, 2 * PAGE]


def test_two_mappings_share_memory() -> None:
    arena = Arena.create("test", 3 * PAGE)
    peer = Arena.of_peer(os.getpid(), arena.fd)
    arena.view(PAGE, 8, torch.float32).copy_(torch.arange(8.0))
    assert torch.equal(peer.view(PAGE, 8, torch.float32), torch.arange(8.0))
    assert peer.address != arena.address
    arena.close()
    peer.close()
    arena.close()  # twice is harmless


def test_its_size_is_sealed() -> None:
    arena = Arena.create("test", PAGE)
    for size in (0, 4 * PAGE):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, size)
    arena.close()


def test_a_process_that_is_not_there() -> None:
    with pytest.raises(FileNotFoundError):
        Arena.of_peer(2**22 + 1, 3)


def test_tensors_outlive_the_descriptor() -> None:
    arena = Arena.create("test", PAGE)
    view = arena.view(0, 4, torch.int32)
    arena.close()
    view.fill_(7)
    assert view.tolist() == [7, 7, 7, 7]
