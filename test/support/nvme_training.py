"""Optimizers with their state in a file."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import zero_opt
from test.support.scenario import OVERLAPPED
from zero_opt.placement.nvme import extents

WINDOW_MB = 8192 / 2**20  # a block or two per array: parameters are cut by windows


def in_file(path: Any, **options: Any) -> zero_opt.NVMeOffload:
    return zero_opt.NVMeOffload(path, **{"window_mb": WINDOW_MB, **options})


def make(params: Any, path: Any, cls: Any = torch.optim.AdamW, **options: Any) -> zero_opt.ShardedOptimizer:
    options = {"offload": in_file(path), "reduction": OVERLAPPED, "fused": True, **options}
    return zero_opt.ShardedOptimizer(params, cls, **options)


def placement_of(optimizer: zero_opt.ShardedOptimizer) -> Any:
    engine: Any = optimizer._engine
    return engine.placement


def step_copies_of_params(monkeypatch: pytest.MonkeyPatch) -> None:
    """Step copies of the parameters, as on an accelerator, with the copies in host memory."""
    made = extents.FileShard.__init__

    def apart(self: Any, bucket: Any, kept: Any) -> None:
        made(self, bucket, kept)
        self.direct = False

    monkeypatch.setattr(extents.FileShard, "__init__", apart)


class Faults:
    """Transfers of which the n-th of a kind fails, once; a failing write has written garbage to half of its place."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._calls = {"preadv": os.preadv, "pwritev": os.pwritev}
        self.counts = dict.fromkeys(self._calls, 0)
        self.due: tuple[str, int, int] | None = None
        self._lock = threading.Lock()
        for name in self._calls:
            monkeypatch.setattr(os, name, lambda *given, name=name: self._call(name, *given))

    def _call(self, name: str, fd: int, buffers: Any, offset: int) -> int:
        with self._lock:
            number, self.counts[name] = self.counts[name], self.counts[name] + 1
            due = self.due  # which the test may change meanwhile
        if due is not None and due[:2] == (name, number):
            if name == "pwritev":
                torn = mmap.mmap(-1, max(len(buffers[0]) // 8192, 1) * 4096)  # transfers past the page cache need pages
                torn[:] = b"\xff" * len(torn)
                self._calls[name](fd, [torn], offset)
            raise OSError(due[2], os.strerror(due[2]))
        return self._calls[name](fd, buffers, offset)

    @contextmanager
    def at(self, name: str, number: int, code: int) -> Iterator[None]:
        self.counts = dict.fromkeys(self._calls, 0)
        self.due = (name, number, code)
        yield
        self.due = None
