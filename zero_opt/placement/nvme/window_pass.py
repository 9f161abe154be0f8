"""One pass over windows of a file: each is read, changed in memory and written back to where it was.

What a pass promises, whatever fails in between. Every window is at any time in exactly one of three conditions:

- *to do*: nothing of it has been changed; the file has it as it was before.
- *unsaved*: it was changed; a buffer holds it, and nothing else does, as a write that failed may have left anything.
- *saved*: it was changed, and the file has it.

A window goes from the first to the second when the change has been made, by a call that either does all of it or raises
before it does anything, and from the second to the third when its write has succeeded. A read that fails leaves it in
the first, a write that fails in the second; no buffer is given to another window before that, and Ctrl-C waits until a
window is in one of them. So a second call of :meth:`WindowPass.run`, which writes the unsaved windows anew and goes on
with those to do, changes every window once, and from what it was before the pass; it ends with the bits of a pass in
which nothing failed.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as futures_wait
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import StorageFailed
from ...field_checks import waited_for
from ...system.background_thread import SerialThread
from ...system.interrupts import uninterrupted
from ...system.phases import Phase
from .state_file import StateFile

BUFFERS = 3  # one is read into, one changed, one written


class FilePart(NamedTuple):
    """A stretch of one array: where in the file it begins, and its bytes, whole blocks."""

    start: int
    nbytes: int
    dtype: torch.dtype


class FileWindow(NamedTuple):
    """A stretch of several arrays that are read and written together.

    Attributes:
        number: its place in the order of all. parts: by role.
    """

    number: int
    parts: dict[str, FilePart]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(part.nbytes for part in self.parts.values())


class Buffer:
    """Memory for a window: whole pages, one array after the other."""

    def __init__(self, nbytes: int) -> None:
        # Shared with forks rather than copied for them: a transfer goes where the pages were when it began.
        self._memory = memoryview(mmap.mmap(-1, max(nbytes, 1)))
        self.nbytes = nbytes

    def parts(self, window: FileWindow) -> Iterator[tuple[str, memoryview]]:
        """The window's arrays as bytes, by role."""
        start = 0
        for role, part in window.parts.items():
            yield role, self._memory[start : start + part.nbytes]
            start += part.nbytes

    def arrays(self, window: FileWindow) -> dict[str, Tensor]:
        """The window's arrays by role."""
        return {role: torch.frombuffer(part, dtype=window.parts[role].dtype) for role, part in self.parts(window)}


class Disk:
    """A file with a thread that reads and one that writes, and bounded waits for both."""

    def __init__(self, file: StateFile, patience_s: float) -> None:
        self.file, self.patience_s = file, waited_for(patience_s)
        self._reader, self._writer = SerialThread("zero_opt state reader"), SerialThread("zero_opt state writer")
        self._read_nbytes = self._written_nbytes = 0

    def totals(self) -> Mapping[str, tuple[int, float]]:
        """Return the bytes so far that were to be read and written, and the seconds in which they were."""
        return {
            "read": (self._read_nbytes, self._reader.busy.seconds),
            "write": (self._written_nbytes, self._writer.busy.seconds),
        }

    def read(self, window: FileWindow, buffer: Buffer) -> Future[None]:
        """Begin to fill a buffer."""
        self._read_nbytes += window.nbytes
        return self._reader.submit(self._transfer, self.file.read, window, buffer)

    def write(self, window: FileWindow, buffer: Buffer) -> Future[None]:
        """Begin to save a buffer."""
        self._written_nbytes += window.nbytes
        return self._writer.submit(self._transfer, self.file.write, window, buffer)

    @staticmethod
    def _transfer(call: Callable[[int, memoryview], None], window: FileWindow, buffer: Buffer) -> None:
        for role, part in buffer.parts(window):
            call(window.parts[role].start, part)

    def wait(self, transfer: Future[None]) -> None:
        """Raise what went wrong with a transfer; StorageFailed if it does not end in time, and then it goes on."""
        with Phase("disk"):
            done = futures_wait([transfer], self.patience_s).done
        if transfer not in done:
            raise StorageFailed(
                f"the disk under {self.file.folder!r} has not answered for {self.patience_s:g} s; give it longer with "
                "NVMeOffload(hang_timeout=...)"
            )
        transfer.result(0)

    def close(self) -> None:
        """End the threads; transfers go on until they end."""
        self._reader.close()
        self._writer.close()


class _Transfer(NamedTuple):
    window: FileWindow
    buffer: Buffer
    future: Future[None]

    @property
    def failed(self) -> bool:
        return self.future.done() and self.future.exception(0) is not None

    @property
    def saved(self) -> bool:
        return self.future.done() and self.future.exception(0) is None


class WindowPass:
    """A pass over windows, which can be resumed after a failure.

    Args:
        windows: in the order in which they are to be changed.
        buffers: at least one, each as large as the largest window.
    """

    def __init__(self, windows: Sequence[FileWindow], buffers: Sequence[Buffer], disk: Disk) -> None:
        self._todo = deque(windows)
        self._free, self._disk = list(buffers), disk
        self._reading: deque[_Transfer] = deque()
        self._unsaved: deque[_Transfer] = deque()

    def run(self, change: Callable[[FileWindow, dict[str, Tensor]], None]) -> Iterator[FileWindow]:
        """Make the pass, or what is left of it. Yields every window when it is changed; ends when all are saved.

        Args:
            change: is given a window and its arrays, to be written in place; all or nothing.

        Raises:
            StorageFailed, or what ``change`` raises: see the module.
        """
        self.drain()
        with uninterrupted():
            self._resume()
        while self._todo or self._reading:
            self._await_room()
            with uninterrupted():
                self._read_ahead()
            self._await_read()
            with uninterrupted():
                window, buffer, _ = self._reading.popleft()
                try:
                    change(window, buffer.arrays(window))
                except BaseException:
                    self._give_up(window, buffer)
                    raise
                self._unsaved.append(_Transfer(window, buffer, self._disk.write(window, buffer)))
            yield window
        while self._unsaved:
            self._disk.wait(self._unsaved[0].future)
            self._free_saved()

    def _resume(self) -> None:
        """After a failure: forget what was read, which may be old, and write anew what could not be."""
        while self._reading:
            self._give_up(*self._reading.pop()[:2])
        self._todo = deque(sorted(self._todo, key=lambda window: window.number))
        for number, (window, buffer, _) in enumerate(self._unsaved):
            if self._unsaved[number].failed:
                self._unsaved[number] = _Transfer(window, buffer, self._disk.write(window, buffer))

    @property
    def unchanged(self) -> list[FileWindow]:
        """The windows that are to do."""
        return [*(transfer.window for transfer in self._reading), *self._todo]

    def drain(self) -> None:
        """Wait until no transfer is under way, however those end.

        Raises:
            StorageFailed: one does not end in time.
        """
        for transfer in (*self._reading, *self._unsaved):
            self._wait_out(transfer)

    def _wait_out(self, transfer: _Transfer) -> None:
        try:
            self._disk.wait(transfer.future)
        except Exception:
            if not transfer.future.done():
                raise

    def _give_up(self, window: FileWindow, buffer: Buffer) -> None:
        """Put a window back among those to do, and free its buffer."""
        self._todo.appendleft(window)
        self._free.append(buffer)

    def _await_room(self) -> None:
        """Wait for a buffer if there is none to read into, nor one that is being read."""
        if self._todo and not self._free and not self._reading:
            self._disk.wait(self._unsaved[0].future)

    def _read_ahead(self) -> None:
        """Let all free buffers be read into."""
        while self._unsaved and self._unsaved[0].saved:
            self._free_saved()
        while self._todo and self._free:
            window, buffer = self._todo.popleft(), self._free.pop()
            self._reading.append(_Transfer(window, buffer, self._disk.read(window, buffer)))

    def _await_read(self) -> None:
        """Wait for the oldest read; one that has failed leaves its window to do."""
        window, buffer, future = self._reading[0]
        try:
            self._disk.wait(future)
        except Exception:
            if future.done():
                with uninterrupted():
                    self._reading.popleft()
                    self._give_up(window, buffer)
            raise

    def _free_saved(self) -> None:
        """Free the buffer of the oldest write, which has succeeded."""
        with uninterrupted():
            self._free.append(self._unsaved.popleft().buffer)
