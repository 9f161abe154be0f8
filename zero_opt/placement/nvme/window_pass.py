"""One pass over windows of a file: each is read, changed in memory and written back to where it was.

What a pass promises, whatever fails in between, wherever an exception is raised. Windows are changed in order, and
written in order, so two counts tell how far a pass is. Every window is at any time in one of three conditions:

- *to do*, from the count of changed windows on: the file has it as it was before, and so have the parameters.
- *unsaved*: it was changed; its buffer holds it, and nothing else does, as a write that failed may have left anything.
- *saved*, up to the count of saved windows: it was changed, and the file has it.

One assignment moves a window from the first to the second. A change that is made before it is in memory that nobody
reads otherwise: in the buffer, which is read anew, and in results, which are not in the parameters. After it, the
results are copied to the parameters, which may be repeated. Another assignment moves the window from the second to the
third, when its write has succeeded. A window has its buffer by its number, and no buffer is given to another window
before the one that it holds is saved. All else that a pass remembers are transfers under way; a second call of
:meth:`WindowPass.run` waits until there are none, and forgets them. So it changes every window once, and from what it
was before the pass; it ends with the bits of a pass in which nothing failed.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import StorageFailed
from ...field_checks import waited_for
from ...system.background_thread import SerialThread
from ...system.future import Future
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
            done = transfer.wait(self.patience_s)
        if not done:
            raise self._silent()
        transfer.result(0)

    def drain(self) -> None:
        """Wait until no transfer is under way, known to the caller or not; StorageFailed as from :meth:`wait`."""
        with Phase("disk"):
            for thread in (self._reader, self._writer):
                if not thread.idle_within(self.patience_s):
                    raise self._silent()

    def _silent(self) -> StorageFailed:
        return StorageFailed(
            f"the disk under {self.file.folder!r} has not answered for {self.patience_s:g} s; give it longer with "
            "NVMeOffload(hang_timeout=...)"
        )

    def close(self) -> None:
        """End the threads; transfers go on until they end."""
        self._reader.close()
        self._writer.close()


# Makes a change of a window and its arrays, which are written in place. What it returns brings the result to where it
# is read, and may be called again. Called anew if it raises, with the arrays as they were.
Change = Callable[[FileWindow, dict[str, Tensor]], Callable[[], None]]


class _Changed(NamedTuple):
    """The end of the windows that have been changed, and what brings the last one's result to where it is read."""

    end: int
    land: Callable[[], None]


def _has_failed(transfer: Future[None]) -> bool:
    return transfer.done() and transfer.exception(0) is not None


class WindowPass:
    """A pass over windows, which can be resumed after a failure.

    Args:
        windows: in the order in which they are to be changed.
        buffers: at least one, each as large as the largest window.
    """

    def __init__(self, windows: Sequence[FileWindow], buffers: Sequence[Buffer], disk: Disk) -> None:
        self._windows, self._buffers, self._disk = windows, buffers, disk
        self._changed = _Changed(0, lambda: None)
        self._saved = 0  # how many
        # Transfers by place in the order: of windows that are to do, and of those that are unsaved.
        self._reads: dict[int, Future[None]] = {}
        self._writes: dict[int, Future[None]] = {}

    def run(self, change: Change) -> Iterator[FileWindow]:
        """Make the pass, or what is left of it. Yields every window when it is changed; ends when all are saved.

        Raises:
            StorageFailed, or what ``change`` raises: see the module.
        """
        self._resume()
        for place in range(self._changed.end, len(self._windows)):
            window = self._windows[place]
            self._await_room(place)
            with uninterrupted():
                self._read_ahead()
            self._disk.wait(self._reads[place])
            with uninterrupted():
                self._changed = _Changed(place + 1, change(window, self._buffer(place).arrays(window)))
                self._changed.land()
                self._write(place)
            yield window
        while self._saved < len(self._windows):
            self._save_next()

    def _resume(self) -> None:
        """After a failure: forget what was read, which may be old, and write anew what could not be."""
        self.drain()
        self._reads.clear()
        with uninterrupted():
            if self._saved < self._changed.end:  # once it is saved, its buffer may hold another window
                self._changed.land()
            for place in range(self._saved, self._changed.end):
                if place not in self._writes or _has_failed(self._writes[place]):
                    self._write(place)

    @property
    def unchanged(self) -> Sequence[FileWindow]:
        """The windows that are to do."""
        return self._windows[self._changed.end :]

    def drain(self) -> None:
        """Wait until no transfer is under way, however those end.

        Raises:
            StorageFailed: one does not end in time.
        """
        self._disk.drain()

    def _buffer(self, place: int) -> Buffer:
        return self._buffers[place % len(self._buffers)]

    def _write(self, place: int) -> None:
        self._writes[place] = self._disk.write(self._windows[place], self._buffer(place))

    def _await_room(self, place: int) -> None:
        """Wait until the buffer of a window is free, if it is the next to be changed."""
        while place >= self._saved + len(self._buffers):
            self._save_next()

    def _read_ahead(self) -> None:
        """Let all free buffers be read into."""
        while (write := self._writes.get(self._saved)) is not None and write.done() and not _has_failed(write):
            self._save_next()
        free = range(self._changed.end, min(self._saved + len(self._buffers), len(self._windows)))
        for place in free:
            if place not in self._reads:
                self._reads[place] = self._disk.read(self._windows[place], self._buffer(place))

    def _save_next(self) -> None:
        """Wait for the oldest write, which frees its buffer."""
        self._disk.wait(self._writes[self._saved])
        self._saved += 1
