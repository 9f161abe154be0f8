"""A pass over windows whose transfers fail: what is landed again is what was changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from test.support.harness import assert_bitwise
from zero_opt.errors import StorageFailed
from zero_opt.placement.nvme.window_pass import BUFFERS, Buffer, FilePart, FileWindow, WindowPass
from zero_opt.system.future import Future

NUMEL, WINDOWS = 4, 7


class _Disk:
    """Memory in the place of a file. Some transfers fail the first time, of all those that are numbered."""

    def __init__(self, failing: set[int]) -> None:
        self.held = [torch.full((NUMEL,), float(number)) for number in range(WINDOWS)]
        self._failing, self._count = failing, 0

    def read(self, window: FileWindow, buffer: Buffer) -> Future[None]:
        return self._done(lambda: buffer.arrays(window)["master"].copy_(self.held[window.number]))

    def write(self, window: FileWindow, buffer: Buffer) -> Future[None]:
        return self._done(lambda: self.held[window.number].copy_(buffer.arrays(window)["master"]))

    def _done(self, transfer: Callable[[], Tensor]) -> Future[None]:
        future: Future[None] = Future()
        if self._count in self._failing:
            future.set_exception(StorageFailed("the disk has failed"))
        else:
            transfer()
            future.set_result(None)
        self._count += 1
        return future

    def wait(self, transfer: Future[None]) -> None:
        transfer.result(0)

    def drain(self) -> None:
        pass


@pytest.mark.parametrize("second", [None, 2, 5])
@pytest.mark.parametrize("first", range(2 * WINDOWS))
def test_a_pass_that_goes_on_ends_as_one_without_failures(first: int, second: int | None) -> None:
    disk: Any = _Disk({first} if second is None else {first, first + second})
    part = FilePart(0, NUMEL * torch.float32.itemsize, torch.float32)
    windows = [FileWindow(number, {"master": part}) for number in range(WINDOWS)]
    window_pass = WindowPass(windows, [Buffer(part.nbytes) for _ in range(BUFFERS)], disk)
    params = [torch.zeros(NUMEL) for _ in windows]

    def change(window: FileWindow, arrays: dict[str, Tensor]) -> Callable[[], None]:
        arrays["master"] += 100
        return lambda: params[window.number].copy_(arrays["master"])  # type: ignore[func-returns-value]

    for _ in range(3):
        try:
            for _ in window_pass.run(change):
                pass
        except StorageFailed:
            continue
        break
    expected = [torch.full((NUMEL,), 100.0 + number) for number in range(WINDOWS)]
    assert_bitwise(params, expected)
    assert_bitwise(disk.held, expected)
