"""The memfd arena."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from zero_opt import OutOfMemory, OutOfResources
from zero_opt.system import shared_memory
from zero_opt.system.shared_memory import (
    PAGE,
    Arena,
    GrowingArena,
    allocation_errors,
    mapped_bytes,
    memory_errors,
    memory_left,
    page_aligned,
    require_memory,
)


def test_pages() -> None:
    assert [page_aligned(n) for n in (0, 1, PAGE, PAGE + 1)] == [0, PAGE, PAGE, 2 * PAGE]


def _in_child(write: Callable[[], object]) -> None:
    child = os.fork()
    if child == 0:
        write()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_what_a_forked_child_writes_stays_there() -> None:
    arena = Arena.create("test", 3 * PAGE)
    earlier, offset = arena.bytes[2 * PAGE :], mapped_bytes(arena.fd, PAGE, PAGE)
    arena.bytes.fill_(1)

    def write() -> None:
        assert arena.bytes.eq(1).all() and offset.eq(1).all()
        arena.bytes.fill_(2)
        offset.fill_(3)
        assert earlier.eq(2).all() and offset.eq(3).all()

    _in_child(write)
    assert arena.bytes.eq(1).all()
    arena.bytes.fill_(4)  # still shared with other processes
    assert os.pread(arena.fd, 1, PAGE) == b"\x04"


def test_a_fork_of_a_fork_has_what_the_first_one_has_written() -> None:
    arena = Arena.create("test", PAGE)
    arena.bytes.fill_(1)

    def write() -> None:
        arena.bytes.fill_(2)
        _in_child(lambda: None if arena.bytes.eq(2).all() else os._exit(1))

    _in_child(write)
    assert arena.bytes.eq(1).all()


def test_where_a_fork_gets_no_memory_of_its_own_a_write_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    arena, mmap = Arena.create("test", PAGE), shared_memory._mmap
    arena.bytes.fill_(1)

    def refuse(address: int, nbytes: int, flags: int, *rest: int) -> int:
        if flags & 0x02:
            raise OSError(errno.ENOMEM, "no memory")
        return mmap(address, nbytes, flags, *rest)

    monkeypatch.setattr(shared_memory, "_mmap", refuse)
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        os.kill(os.getpid(), 0 if arena.bytes.eq(1).all() else signal.SIGKILL)
        arena.bytes.fill_(2)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGSEGV
    assert arena.bytes.eq(1).all()


def test_a_descriptor_that_is_used_again_is_not_mapped_in_a_child(tmp_path: Path) -> None:
    arena = Arena.create("test", PAGE)
    fd, memory = arena.fd, arena.bytes.fill_(1)
    arena.close()
    other = os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT)
    os.ftruncate(other, PAGE)
    assert os.dup2(other, fd) == fd
    try:
        _in_child(lambda: None if memory.eq(1).all() else os._exit(1))
    finally:
        os.close(other)
        if other != fd:
            os.close(fd)


def test_two_mappings_share_memory() -> None:
    arena = Arena.create("test", 3 * PAGE)
    arena.bytes[5:8] = 9
    peer = Arena.of_peer(os.getpid(), arena.fd, 3 * PAGE - 1, (5, b"\x09" * 3))
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
        Arena.of_peer(2**22 + 1, 3, PAGE, (0, b""))


def _a_memfd(nbytes: int, seals: int, text: bytes) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.truncate(fd, nbytes)
    os.pwrite(fd, text, 0)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


SEALED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
FOREIGN = {
    "empty": (lambda: os.memfd_create("test"), "it has 0 bytes"),
    "shorter": (lambda: _a_memfd(PAGE, SEALED, b"token"), f"it has {PAGE} bytes, not {2 * PAGE}"),
    "longer": (lambda: _a_memfd(3 * PAGE, SEALED, b"token"), f"it has {3 * PAGE} bytes, not {2 * PAGE}"),
    "one that may be made shorter": (lambda: _a_memfd(2 * PAGE, fcntl.F_SEAL_GROW, b"token"), "its size may change"),
    "another program's": (lambda: _a_memfd(2 * PAGE, SEALED, b"other"), "another rank's, or another program's"),
    "a file": (lambda: os.open(__file__, os.O_RDONLY), "is no shared memory"),
    "a directory": (lambda: os.open("/", os.O_RDONLY), "is no shared memory"),
    "a pipe": (lambda: os.pipe()[0], "is no shared memory"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_file_that_is_not_the_arena_is_refused_and_not_mapped(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, said = FOREIGN[kind]
    fd, before = make(), os.listdir("/proc/self/fd")
    monkeypatch.setattr(Arena, "_map", lambda _: pytest.fail("mapped"))
    with pytest.raises(OSError, match=said):
        Arena.of_peer(os.getpid(), fd, 2 * PAGE - 5, (0, b"token"))
    assert os.listdir("/proc/self/fd") == before
    os.close(fd)


def test_tensors_outlive_the_descriptor() -> None:
    arena = Arena.create("test", PAGE)
    view = arena.view(0, 4, torch.int32)
    arena.close()
    view.fill_(7)
    assert view.tolist() == [7, 7, 7, 7]


def test_a_growing_arena_keeps_what_it_has() -> None:
    arena = GrowingArena.create("test", PAGE)
    before = arena.view(0, 4, torch.int32)
    before.fill_(7)
    arena.grow(PAGE)  # it is as long already
    assert arena.bytes.numel() == PAGE
    arena.grow(2 * PAGE + 1)
    assert arena.bytes.numel() == 3 * PAGE
    assert not arena.bytes[16:].any()
    arena.view(0, 4, torch.int32).add_(1)
    assert before.tolist() == [8, 8, 8, 8]
    with pytest.raises(PermissionError):
        os.ftruncate(arena.fd, PAGE)
    arena.close()


def test_a_growing_arena_that_could_not_be_mapped_takes_less(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, nbytes: int) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    arena = GrowingArena.create("test", PAGE)
    with monkeypatch.context() as patched:
        patched.setattr(shared_memory, "mapped_bytes", refuse)
        with pytest.raises(OSError, match=os.strerror(errno.ENOMEM)):
            arena.grow(4 * PAGE)
    assert arena.bytes.numel() == PAGE
    arena.grow(2 * PAGE)
    assert arena.bytes.numel() >= 2 * PAGE
    arena.bytes[2 * PAGE - 1] = 7
    arena.close()


def _tree(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


MEMINFO = "MemTotal:  4000 kB\nMemAvailable:  1000 kB\n"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 1000 * 1024),
        ({"proc/self/cgroup": "0::/a/b\n", "cg/a/b/memory.max": "max\n", "cg/a/b/memory.current": "5\n"}, 1000 * 1024),
        ({"proc/self/cgroup": "0::/a/b\n", "cg/a/b/memory.max": "500\n", "cg/a/b/memory.current": "100\n"}, 400),
        (  # of those above it too, and page cache counts as free
            {
                "proc/self/cgroup": "0::/a/b\n",
                "cg/a/b/memory.max": "500\n",
                "cg/a/b/memory.current": "100\n",
                "cg/a/memory.max": "600\n",
                "cg/a/memory.current": "400\n",
                "cg/a/memory.stat": "anon 300\ninactive_file 50\n",
            },
            250,
        ),
        (  # the first version, as a container sees it: its own group is the mount's root
            {
                "proc/self/cgroup": "4:cpu:/docker/x\n9:memory:/docker/x\n0::/\n",
                "cg/memory/memory.limit_in_bytes": "900\n",
                "cg/memory/memory.usage_in_bytes": "1000\n",
                "cg/memory/memory.stat": "total_inactive_file 400\n",
            },
            300,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/\n",
                "cg/memory/memory.limit_in_bytes": "10\n",
                "cg/memory/memory.usage_in_bytes": "20\n",
            },
            0,
        ),
    ],
)
def test_memory_that_is_left(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    _tree(tmp_path, {"proc/meminfo": MEMINFO, **files})
    assert memory_left(str(tmp_path / "proc"), str(tmp_path / "cg")) == expected


def test_more_memory_than_there_is() -> None:
    require_memory(1 << 20, "this")
    with pytest.raises(OutOfMemory, match=r"this needs [\d,]+\.0 MiB of host memory, and [\d,]+\.\d MiB may") as caught:
        require_memory(1 << 50, "this")
    assert isinstance(caught.value, MemoryError)
    with pytest.raises(OutOfMemory, match=r"cgroups\); wait for more, or raise the limit$"):
        require_memory(1 << 50, "this", "wait for more")


# -- what the system refuses ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_memory_without_a_descriptor(number: int) -> None:
    raising = pytest.raises(OutOfResources, match=r"it needs a file descriptor .*raise the limit of file descriptors")
    with raising, memory_errors(PAGE, "it"):
        raise OSError(number, os.strerror(number))


@pytest.mark.parametrize(
    ("number", "limit"), [(errno.ENOMEM, "ulimit -a"), (errno.EFBIG, "ulimit -f"), (errno.ENOSPC, "ulimit -a")]
)
def test_memory_that_is_refused(number: int, limit: str) -> None:
    raising = pytest.raises(OutOfMemory, match=rf"it needs 4,096 bytes of host memory, .* refuses it .*{limit}")
    with raising, memory_errors(PAGE, "it"):
        raise OSError(number, os.strerror(number))


def test_memory_that_torch_s_allocator_does_not_get() -> None:
    raising = pytest.raises(OutOfMemory, match=r"it gets no host memory; .*ulimit -a.*DefaultCPUAllocator")
    with raising, allocation_errors("it"):
        torch.empty(1 << 56, dtype=torch.uint8, device="cpu")
    for other in (RuntimeError("another"), OSError(errno.ENOMEM, "another")):
        with pytest.raises(type(other), match="another"), allocation_errors("it"):
            raise other
