"""``python -m zero_opt doctor``: what of this package works on this machine, what not, and what to do about it."""

from __future__ import annotations

import json
import os
import platform
import resource
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..errors import NativeUnavailable, OutOfResources, StorageFailed, ZeroOptError, mib
from ..kernels import native_isas
from ..kernels.threads import allowed_threads, fair_threads, torchrun_sharers
from ..placement.nvme.state_file import StateFile
from ..placement.worker.cores import first_sibling
from ..placement.worker.process import WorkerProcess
from ..policies import WorkerOffload
from ..system.devices import pci_address
from ..system.numa import cores_by_node, node_of_device, ranges
from ..system.shared_memory import PAGE, Arena, memory_left

# What setup.cfg asks for.
_LEAST_TORCH = (2, 11)
_LEAST_SHM_BYTES = 1 << 30
# Instruction sets that kernels are compiled for, and the extension that each is known for.
_KNOWN_FOR = {"v3": "AVX2", "v4": "AVX-512"}
_THP = Path("/sys/kernel/mm/transparent_hugepage")
OK, OFF, BAD = "ok", "off", "BAD"


class Finding(NamedTuple):
    """One line of the report.

    Attributes:
        status: ``ok``; ``off``: not available here, and the rest works without it; ``BAD``: the package, or what was
            asked for, does not work.
        found: what there is. advice: what follows from it, and what to do; empty where all is well.
    """

    status: str
    name: str
    found: str
    advice: str = ""

    def __str__(self) -> str:
        line = f"{self.status:<4} {self.name:<14} {self.found}"
        return f"{line}\n{'':<19} -> {self.advice}" if self.advice else line


def examine(path: str | None = None) -> Iterator[Finding]:
    """Look at everything, in the order of the report.

    Args:
        path: a directory for ``NVMeOffload``, if one is to be looked at.
    """
    machine = (
        _python,
        _torch,
        _native,
        _cores,
        _numa,
        _memory,
        _shm,
        _huge_pages,
        _system_calls,
        _backends,
        _accelerators,
    )
    for look in machine:
        yield from look()
    if path is not None:
        yield from _path(path)


def print_findings(version: str, path: str | None = None, *, as_json: bool = False) -> int:
    """Print the version, and what :func:`examine` finds; 0 if all of it can be used here, else 1."""
    return print_report(chain([Finding(OK, "zero_opt", version)], examine(path)), as_json=as_json)


def print_report(findings: Iterable[Finding], *, as_json: bool) -> int:
    """Print findings as they come; returns 1 if one of them is ``BAD``, else 0.

    Args:
        as_json: print a JSON list, with an object per finding.
    """
    reported = []
    for finding in findings:
        reported.append(finding)
        if not as_json:
            print(finding)
    if as_json:
        print(json.dumps([finding._asdict() for finding in reported], indent=2))
    return int(any(finding.status == BAD for finding in reported))


def _python() -> Iterator[Finding]:
    yield Finding(OK, "python", f"{platform.python_version()} on {platform.platform()}")


def _torch() -> Iterator[Finding]:
    numbers = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if numbers < _LEAST_TORCH:
        least = ".".join(map(str, _LEAST_TORCH))
        yield Finding(BAD, "torch", torch.__version__, f"too old: pip install 'torch>={least}'")
    else:
        yield Finding(OK, "torch", f"{torch.__version__}, {_in_words(torch.get_num_threads())}")


def _native() -> Iterator[Finding]:
    try:
        isas = native_isas()
    except NativeUnavailable as error:
        off = "CPUAdam, AdamState, WorkerOffload, NVMeOffload, Selective and exchange in shared memory are off"
        yield Finding(OFF, "native", f"no kernels: {off}", str(error))
        return
    forced = " by ZERO_OPT_ISA" if os.environ.get("ZERO_OPT_ISA") else ""
    built = ", ".join(map(_isa, isas.compiled))
    advice = ""
    if isas.processor not in isas.compiled:
        advice = f"steps are slower than this processor allows: build zero_opt with kernels for {_isa(isas.processor)}"
    elif isas.chosen != isas.processor:
        advice = f"steps are slower than this processor allows, which runs {_isa(isas.processor)}: unset ZERO_OPT_ISA"
    yield Finding(OK, "native", f"kernels for {_isa(isas.chosen)}{forced}; built for {built}", advice)


def _isa(name: str) -> str:
    """The name of an instruction set as ``ZERO_OPT_ISA`` takes it, and what it is known for."""
    return f"{name} ({_KNOWN_FOR[name]})" if name in _KNOWN_FOR else name


def _in_words(threads: int) -> str:
    return f"{threads} thread{'' if threads == 1 else 's'}"


def _cores() -> Iterator[Finding]:
    usable = os.sched_getaffinity(0)
    sharers = torchrun_sharers()
    threads = fair_threads(allowed_threads(len(usable)), sharers)
    shared = f", which {sharers} ranks share" if sharers > 1 else ""
    text = f"{len(usable)} of {os.cpu_count()} cores{shared}, time for {_in_words(threads)}"
    own, physical = torch.get_num_threads(), len({first_sibling(core) for core in usable})
    advice = ""
    if own > threads:
        advice = f"torch has {_in_words(own)}, more than may run: set OMP_NUM_THREADS={threads}"
    elif own < min(threads, physical):
        # By default torch has one thread for hyperthreads that share a core.
        advice = (
            f"torch has {_in_words(own)}, fewer than may run. Forward and backward on the CPU take so many, and "
            f"offloaded steps unless OMP_NUM_THREADS is 1: set OMP_NUM_THREADS={threads}"
        )
    yield Finding(OK, "cores", text, advice)


def _numa() -> Iterator[Finding]:
    nodes, usable = cores_by_node(), os.sched_getaffinity(0)
    if len(nodes) < 2:
        yield Finding(OK, "numa", f"{len(nodes)} node" if nodes else "the system lists no nodes")
        return
    parts = {node: cores & usable for node, cores in nodes.items()}
    texts = [f"node {node}: cores {ranges(cores) or 'none'}" for node, cores in parts.items()]
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    for number in range(torch.accelerator.device_count()) if accelerator is not None else ():
        node = node_of_device(pci_address(number))
        texts.append(f"{accelerator}:{number} on {'an unknown node' if node is None else f'node {node}'}")
    yield Finding(OK, "numa", f"{len(nodes)} nodes; {'; '.join(texts)}")


def _memory() -> Iterator[Finding]:
    total, left = os.sysconf("SC_PHYS_PAGES") * PAGE, memory_left()
    if left == sys.maxsize:
        advice = "an offload cannot tell beforehand whether it fits: mount /proc"
        yield Finding(OFF, "memory", f"{mib(total)}, of which the system does not say how much is left", advice)
    else:
        yield Finding(OK, "memory", f"{mib(left)} may still be had (MemAvailable and cgroups) of {mib(total)}")
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        advice = "offloaded state counts: ulimit -v unlimited"
        yield Finding(OK, "address space", f"at most {mib(limit)}", advice)


def _shm() -> Iterator[Finding]:
    try:
        there = os.statvfs("/dev/shm")
    except OSError as error:
        yield Finding(
            OFF, "/dev/shm", f"none ({error.strerror})", "DataLoader workers and NCCL want it; this package does not"
        )
        return
    size = there.f_blocks * there.f_frsize
    small = "small for DataLoader workers and NCCL (docker run --shm-size=8g); this package does not use it"
    yield Finding(OK, "/dev/shm", mib(size), small if size < _LEAST_SHM_BYTES else "")


def _huge_pages() -> Iterator[Finding]:
    modes = {}
    for name in ("enabled", "shmem_enabled"):
        try:
            text = (_THP / name).read_text(encoding="ascii")
            modes[name] = text[text.index("[") + 1 : text.index("]")]
        except (OSError, ValueError):
            modes[name] = "unknown"
    advice = ""
    if modes["enabled"] not in ("always", "madvise"):
        advice = f"steps over large state are slower: echo madvise > {_THP / 'enabled'}, as root"
    yield Finding(
        OK if not advice else OFF, "huge pages", f"{modes['enabled']}; shared {modes['shmem_enabled']}", advice
    )


def _system_calls() -> Iterator[Finding]:
    off = "WorkerOffload and exchange in shared memory are off; "
    allow = "let the container's seccomp profile allow {} (docker: the default profile does)"
    kinds: dict[str, tuple[Callable[[], None], str]] = {
        "memfd": (lambda: os.close(os.memfd_create("zero_opt doctor", os.MFD_CLOEXEC)), "memfd_create"),
        "pidfd": (lambda: os.close(os.pidfd_open(os.getpid())), "pidfd_open"),
        "eventfd": (lambda: os.close(os.eventfd(0)), "eventfd2"),
    }
    for name, (make, call) in kinds.items():
        yield _tried(name, make, "yes", "refused", off + allow.format(call))
    mapped = "ranks of this host can map each other's, if in one process namespace"
    advice = "ranks of this host exchange through torch.distributed instead; mount /proc, allow memfd_create"
    yield _tried("shared memory", _map_as_a_peer, mapped, "not between processes", advice)
    advice = "WorkerOffload is off; see native, memfd, pidfd and eventfd"
    yield _tried("worker", _start_worker, "starts", "does not start", advice)


def _tried(name: str, attempt: Callable[[], None], yes: str, no: str, advice: str) -> Finding:
    """Return what comes of an attempt, which may be refused."""
    try:
        attempt()
    except AttributeError:
        return Finding(OFF, name, f"{no} (not on {sys.platform})", advice)
    except NativeUnavailable:  # what is said of native says why
        return Finding(OFF, name, no, advice)
    except (ZeroOptError, OSError, ImportError) as error:
        return Finding(OFF, name, f"{no} ({error})", advice)
    return Finding(OK, name, yes)


def _map_as_a_peer() -> None:
    """Open shared memory by process and descriptor, as ranks of a host open each other's."""
    with closing(Arena.create("zero_opt doctor", PAGE)) as arena:
        Arena.of_peer(os.getpid(), arena.fd, PAGE, (0, bytes(8))).close()


def _start_worker() -> None:
    with closing(WorkerProcess(WorkerOffload(threads=1), sorted(os.sched_getaffinity(0)), 1)) as worker:
        worker.start()


def _backends() -> Iterator[Finding]:
    if not dist.is_available():
        advice = "one rank only: install a torch that was built with distributed"
        yield Finding(OFF, "distributed", "torch has none", advice)
        return
    wanted = {
        "gloo": (dist.is_gloo_available(), "ranks on CPUs need it: install a torch that was built with it"),
        "nccl": (dist.is_nccl_available(), "for several ranks on GPUs: install a torch that was built for CUDA"),
        "mpi": (dist.is_mpi_available(), "nothing here needs it; torch has it only where it was built with an MPI"),
    }
    for name, (there, advice) in wanted.items():
        version = ""
        if name == "nccl" and there:
            version = " " + ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        yield Finding(OK, name, f"yes{version}") if there else Finding(OFF, name, "no", advice)


def _accelerators() -> Iterator[Finding]:
    accelerator = torch.accelerator.current_accelerator()  # the one that torch was built for
    if accelerator is None:
        text = f"torch {torch.__version__} was built without"
        yield Finding(OFF, "accelerator", text, "for a GPU: install a torch that was built for it")
        return
    kind = accelerator.type
    for number in range(torch.accelerator.device_count()):
        yield Finding(OK, f"{kind}:{number}", _described(torch.get_device_module(accelerator), number))
    if not torch.accelerator.is_available():
        advice = "nvidia-smi says more; in a container: docker run --gpus all; see CUDA_VISIBLE_DEVICES"
        yield Finding(OFF, kind, f"torch was built for {kind}, and sees no device", advice)


def _described(module: ModuleType, number: int) -> str:
    """Return the name and the memory of a device, as far as the module of its type tells them."""
    properties = getattr(module, "get_device_properties", lambda _: None)(number)
    name, memory = getattr(properties, "name", "yes"), getattr(properties, "total_memory", None)
    return name if memory is None else f"{name}, {mib(memory)}"


def _path(path: str) -> Iterator[Finding]:
    try:
        file = StateFile(path)
    except (StorageFailed, OutOfResources) as error:
        yield Finding(BAD, "path", path, str(error))
        return
    file.close()
    there = os.statvfs(path)
    free = f"{path}: {mib(there.f_bavail * there.f_frsize)} free on {file.kind or 'an unknown file system'}"
    if file.in_memory:
        yield Finding(OK, "path", free, "that is memory, and NVMeOffload saves none there: use a directory on a disk")
    elif not file.direct:
        advice = "state goes through the page cache, which is slower: use a directory on ext4 or xfs"
        yield Finding(OK, "path", f"{free}, no O_DIRECT", advice)
    else:
        yield Finding(OK, "path", f"{free}, O_DIRECT")
