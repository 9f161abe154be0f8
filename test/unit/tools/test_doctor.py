"""What the doctor says of a machine, and of machines that have less."""

from __future__ import annotations

import errno
import fcntl
import os
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from test.support.numa_nodes import stand_in_system
from zero_opt.errors import NativeUnavailable
from zero_opt.kernels.checks import NativeIsas
from zero_opt.system import numa
from zero_opt.tools import doctor
from zero_opt.tools.doctor import BAD, OFF, OK, Finding, examine, print_findings


def findings(path: str | None = None) -> dict[str, Finding]:
    return {found.name: found for found in examine(path)}


def refused(*_: Any, **__: Any) -> NoReturn:
    raise PermissionError(1, "Operation not permitted")


def test_here_everything_of_the_package_works(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = findings(str(tmp_path))
    for name in ("python", "torch", "native", "memory", "memfd", "pidfd", "eventfd", "shared memory", "worker", "gloo"):
        assert found[name].status == OK, found[name]
    assert found["path"].status == OK and "free" in found["path"].found
    assert print_findings("1.2") == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("ok   native") for line in lines)


def test_what_is_off_says_what_to_do() -> None:
    for name, found in findings().items():
        assert found.status == OK or found.advice, name
        assert "\n" not in found.found + found.advice


@pytest.mark.parametrize(("call", "name"), [("memfd_create", "memfd"), ("pidfd_open", "pidfd"), ("eventfd", "eventfd")])
def test_a_container_that_refuses_a_call(call: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, call, refused)
    found = findings()
    assert found[name].status == OFF and "Operation not permitted" in found[name].found
    assert call in found[name].advice and found["worker"].status == OFF
    assert print_findings("1.2") == 0


def test_a_python_that_lacks_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    found = findings()
    assert found["memfd"].found == f"refused (not on {sys.platform})"
    assert found["shared memory"].status == found["worker"].status == OFF


def test_without_the_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any) -> NoReturn:
        raise NativeUnavailable("it is compiled when zero_opt is installed from source")

    def not_there(_: int) -> NoReturn:
        raise ImportError("no _native")

    monkeypatch.setattr(doctor, "native_isas", missing)
    monkeypatch.setattr(doctor, "WorkerProcess", lambda *_: not_there(0))
    found = findings()
    assert found["native"].status == found["worker"].status == OFF
    assert "installed from source" in found["native"].advice and found["cores"].status == OK
    assert print_findings("1.2") == 0


def test_an_old_torch_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.10.1+cpu")
    assert findings()["torch"].status == BAD and print_findings("1.2") == 1


@pytest.mark.parametrize("name", ["nothing", "file"])
def test_a_path_that_cannot_be_used_is_bad(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert findings(str(tmp_path / name))["path"].status == BAD
    assert print_findings("1.2", str(tmp_path / name)) == 1


def test_a_path_without_direct_transfers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = fcntl.fcntl

    def no_direct(fd: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_SETFL and argument & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", no_direct)
    found = findings(str(tmp_path))["path"]
    assert "no O_DIRECT" in found.found and "page cache" in found.advice


def test_a_path_in_memory() -> None:
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("/dev/shm is not there")
    found = findings("/dev/shm")["path"]
    assert "tmpfs" in found.found and "a directory on a disk" in found.advice


def test_little_shared_memory_more_threads_than_cores_and_no_huge_pages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    there = namedtuple("there", ("f_blocks", "f_frsize"))
    monkeypatch.setattr(os, "statvfs", lambda _: there(64 << 8, 4096))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 10_000)
    monkeypatch.setattr(doctor, "_THP", tmp_path)
    (tmp_path / "enabled").write_text("always madvise [never]\n")
    found = findings()
    assert found["/dev/shm"].found == "64.0 MiB" and "--shm-size" in found["/dev/shm"].advice
    assert "OMP_NUM_THREADS" in found["cores"].advice
    monkeypatch.setattr(torch, "get_num_threads", lambda: 0)
    assert "fewer than may run" in findings()["cores"].advice
    assert found["huge pages"].status == OFF and found["huge pages"].found == "never; shared unknown"
    monkeypatch.setattr(os, "statvfs", refused)
    monkeypatch.setattr(doctor, "memory_left", lambda: sys.maxsize)
    found = findings()
    assert found["/dev/shm"].status == found["memory"].status == OFF


def test_cores_that_ranks_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of eight cores, two for each of four ranks: torch's threads are compared with those."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(doctor, "allowed_threads", lambda count: count)
    monkeypatch.setattr(doctor, "first_sibling", lambda core: core)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    for own, advice in ((1, "fewer than may run"), (2, ""), (3, "more than may run")):
        monkeypatch.setattr(torch, "get_num_threads", lambda own=own: own)
        found = findings()["cores"]
        assert "which 4 ranks share, time for 2 threads" in found.found
        assert advice in found.advice and bool(found.advice) == bool(advice)
        assert not advice or found.advice.endswith("set OMP_NUM_THREADS=2")
    monkeypatch.setattr(doctor, "first_sibling", lambda core: core // 4 * 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)  # torch's default for two cores of four hyperthreads
    assert findings()["cores"].advice == ""


def test_nodes_of_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(numa, "SYSTEM", tmp_path)
    assert findings()["numa"].found == "the system lists no nodes"
    stand_in_system(tmp_path, {0: "0-3", 1: ""})
    assert findings()["numa"].found == "1 node"
    stand_in_system(tmp_path, {0: "0-3", 1: "4-7"}, {"0000:3b:00.0": 1, "0000:d8:00.0": -1})
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 5})
    assert findings()["numa"].found == "2 nodes; node 0: cores 0-1; node 1: cores 5"
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(doctor, "pci_address", lambda number: ("0000:3b:00.0", "0000:d8:00.0")[number])
    assert next(doctor._numa()).found.endswith("; cuda:0 on node 1; cuda:1 on an unknown node")


@pytest.mark.parametrize(
    ("isas", "advice"),
    [
        (NativeIsas("v3", "v3", ["baseline", "v3", "v4"]), ""),
        (NativeIsas("v3", "v4", ["baseline", "v3"]), "build zero_opt with kernels for v4 (AVX-512)"),
        (NativeIsas("baseline", "v3", ["baseline"]), "build zero_opt with kernels for v3 (AVX2)"),
        (NativeIsas("baseline", "v3", ["baseline", "v3", "v4"]), "runs v3 (AVX2): unset ZERO_OPT_ISA"),
    ],
)
def test_a_processor_that_could_do_more(isas: NativeIsas, advice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "native_isas", lambda: isas)
    found = findings()["native"]
    assert found.found.startswith(f"kernels for {isas.chosen}") and found.advice.endswith(advice)
    assert bool(found.advice) == bool(advice)
