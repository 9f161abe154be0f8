"""Where the system forbids what others take for granted: memfd, pidfd, room in /dev/shm."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from typing import Any

import pytest
import torch
from torch import Tensor

import zero_opt
from test.support.actors import rank_actor
from test.support.harness import assert_bitwise, run_processes
from test.support.scenario import BUCKET_MB
from zero_opt.system.shared_memory import Arena

# Numbers of system calls, by machine.
_CALLS = {"x86_64": {"memfd": 319, "pidfd": 434}, "aarch64": {"memfd": 279, "pidfd": 434}}
_SET_NO_NEW_PRIVS, _SET_SECCOMP, _FILTER = 38, 22, 2
_LOAD_CALL, _IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000

pytestmark = pytest.mark.skipif(platform.machine() not in _CALLS, reason="numbers of system calls are not known")


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def forbid(*names: str) -> None:
    """Let these system calls fail in this process from now on, as a container's seccomp profile does."""
    calls = [_CALLS[platform.machine()][name] for name in names]
    code = [(_LOAD_CALL, 0, 0, 0)]
    for left, call in enumerate(reversed(calls)):
        code.insert(1, (_IF_EQUAL, left + 1, 0, call))
    code += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _ERRNO | errno.EPERM)]
    packed = b"".join(struct.pack("HBBI", *line) for line in code)
    buffer = ctypes.create_string_buffer(packed, len(packed))
    program = _Program(len(code), ctypes.cast(buffer, ctypes.c_void_p))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(_SET_SECCOMP, _FILTER, ctypes.byref(program), 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp")


def _train(rank: int, world_size: int, forbidden: dict[int, tuple[str, ...]]) -> list[Tensor]:
    if rank in forbidden:
        forbid(*forbidden[rank])
        if "memfd" in forbidden[rank]:
            with pytest.raises(PermissionError):
                os.memfd_create("test")
        if "pidfd" in forbidden[rank]:
            with pytest.raises(PermissionError):
                os.pidfd_open(os.getpid())
    actor = rank_actor(rank, zero_opt.Overlapped(BUCKET_MB))
    for number in range(3):
        actor.backward(number)
        actor.optimizer.step()
        actor.optimizer.zero_grad()
    actor.optimizer.consolidate_state_dict()
    actor.optimizer.close()  # type: ignore[attr-defined]
    return [param.detach() for param in actor.params]


@pytest.mark.parametrize("who", [(0,), (0, 1)])
@pytest.mark.parametrize("names", [("memfd",), ("pidfd",), ("memfd", "pidfd")], ids="+".join)
def test_without_memfd_or_pidfd_training_goes_on_with_the_same_bits(names: tuple[str, ...], who: Any) -> None:
    free = run_processes(2, _train, {})
    for found, expected in zip(run_processes(2, _train, dict.fromkeys(who, names)), free, strict=True):
        assert_bitwise(found, expected)


def _offload(rank: int, world_size: int, names: tuple[str, ...]) -> tuple[str, str]:
    if rank == 1:
        forbid(*names)
    params = [torch.nn.Parameter(torch.ones(300))]
    with pytest.raises(zero_opt.ZeroOptError) as caught:
        zero_opt.ShardedOptimizer(params, torch.optim.AdamW, fused=True, offload=zero_opt.WorkerOffload())
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize("names", [("memfd",), ("pidfd",)], ids="+".join)
def test_a_worker_that_the_sandbox_forbids_is_a_typed_error_on_all_ranks(names: tuple[str, ...]) -> None:
    first, second = run_processes(2, _offload, names)
    assert first[0] == second[0] != "ZeroOptError"
    assert first[1] == f"rank 1: {second[1]}"


def test_shared_memory_does_not_come_out_of_dev_shm() -> None:
    before = os.statvfs("/dev/shm")
    arena = Arena.create("zero_opt test", 80 << 20)
    arena.bytes.fill_(1)
    after = os.statvfs("/dev/shm")
    arena.close()
    assert (before.f_blocks - before.f_bfree) * before.f_bsize + (64 << 20) > (
        after.f_blocks - after.f_bfree
    ) * after.f_bsize
