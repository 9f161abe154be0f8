"""Hosts on one machine: namespaces of Linux, and a switch between them that can be slow, lossy, or dead.

    with Network(2) as network:
        network.link(rate=1e9, round_trip_s=0.2e-3)
        ...                         # fork ranks; each calls network.join(host) before anything else
        network.ports[1].down = 1   # at any time, from any process: host 1 loses its network

Each host has a network of its own, with the address ``network.addresses[host]`` on the interface ``INTERFACE``, and
what else its kind says. The addresses exist in there only. Whatever happens, namespaces and processes are gone when
the process that made the network is.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import hashlib
import mmap
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

_HERE = Path(__file__).resolve().parent
_BUILDS = _HERE.parents[1] / "build" / "hosts"
INTERFACE = "eth0"
MOST_HOSTS = 8
_ENDS_WITHIN_S = 30.0
_SET_PARENT_DEATH_SIGNAL = 1
# Of Linux, in clone(2).
_CURRENT_FOLDER = 0x00000200
_NAMESPACES = {"mnt": 0x00020000, "uts": 0x04000000, "ipc": 0x08000000, "net": 0x40000000, "pid": 0x20000000}


class Unavailable(Exception):
    """Why there can be no hosts here."""


@dataclass(frozen=True)
class Kind:
    """What a host has to itself beside its network.

    Attributes:
        memory: /dev/shm and other memory that processes share, its name, and /etc/hosts.
        processes: processes of other hosts cannot be seen. Only with ``memory``.
        listed: /proc lists its processes, not those of the machine. Only with ``processes``.
        boot: the kernel's boot id. Only with ``listed``.
    """

    memory: bool = True
    processes: bool = True
    listed: bool = True
    boot: bool = True


HOST = Kind()
CONTAINER = Kind(boot=False)  # as docker makes one
CONTAINER_WITH_OTHERS_PROC = Kind(listed=False, boot=False)  # a pid in /proc is not the process that has it here
CONTAINER_OF_ALL_PROCESSES = Kind(processes=False, listed=False, boot=False)  # docker run --pid=host
NETWORK_ALONE = Kind(memory=False, processes=False, listed=False, boot=False)


class Port(ctypes.Structure):
    """A port of the switch; write to its fields at any time. All but ``dropped`` are for each direction.

    Attributes:
        rate: bits per second; 0 is no limit.
        loss: the share of frames that are lost.
        delay_ns: what each frame takes longer.
        jitter_ns: up to so much more, by chance; frames keep their order.
        down: 1 for a cable that is out.
        mtu: larger packets are lost, and nobody is told; 0 is no limit.
        queue_bytes: what waits for this port beyond that is lost.
        dropped: frames to this port that were lost.
    """

    rate: float
    loss: float
    delay_ns: int
    jitter_ns: int
    down: int
    mtu: int
    queue_bytes: int
    dropped: int

    _fields_ = [
        ("rate", ctypes.c_double),
        ("loss", ctypes.c_double),
        ("delay_ns", ctypes.c_int64),
        ("jitter_ns", ctypes.c_int64),
        ("down", ctypes.c_int64),
        ("mtu", ctypes.c_int64),
        ("queue_bytes", ctypes.c_int64),
        ("dropped", ctypes.c_int64),
    ]


_Pairs = (ctypes.c_int64 * MOST_HOSTS) * MOST_HOSTS


class _Control(ctypes.Structure):
    """The ``struct control`` of switch.c."""

    _fields_ = [("ports", Port * MOST_HOSTS), ("cut", _Pairs), ("carried", _Pairs)]


class Network:
    """Hosts and their switch, until the context ends.

    Attributes:
        ports, addresses: one per host.
        folder: for files; all hosts share it.
    """

    _LEAST_QUEUE_BYTES = 2 << 20

    def __init__(self, hosts: int, kind: Kind = HOST) -> None:
        if not 1 <= hosts <= MOST_HOSTS:
            raise ValueError(f"1 to {MOST_HOSTS} hosts, got {hosts}")
        self._kind, self._hosts = kind, hosts
        self.addresses = [f"10.77.0.{number}" for number in range(1, hosts + 1)]
        self._ends = contextlib.ExitStack()
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Network:
        """Make them.

        Raises:
            Unavailable: that is not permitted, or needs a program that is not here.
        """
        try:
            return self._made()
        except (OSError, subprocess.CalledProcessError) as error:
            self._ends.close()
            said = (getattr(error, "stderr", "") or "").strip()
            raise Unavailable(f"hosts cannot be made here, which takes root and namespaces: {error} {said}") from error
        except BaseException:
            self._ends.close()
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """End all processes of the hosts, and with them the namespaces."""
        self._ends.close()

    def _made(self) -> Network:
        program = switch_program()
        self.folder = folder = Path(tempfile.mkdtemp(prefix="zero_opt_hosts_"))
        self._ends.callback(shutil.rmtree, folder, ignore_errors=True)
        control = folder / "control"
        control.write_bytes(bytes(ctypes.sizeof(_Control)))
        with open(control, "r+b") as file:
            self._control = _Control.from_buffer(mmap.mmap(file.fileno(), 0))
        self.ports: Sequence[Port] = self._control.ports[: self._hosts]
        self.link(rate=0.0, round_trip_s=0.0)
        names = [f"{kind}{address} host{at}\n" for at, address in enumerate(self.addresses) for kind in ("", "::ffff:")]
        (folder / "names").write_text("".join(["127.0.0.1 localhost\n", *names]))
        for number in range(self._hosts):
            self._processes.append(self._start(_host_command(self._kind, number, folder), "up"))
        switch = self._start(["unshare", "--net", str(program), str(control), str(self._hosts)], "entered")
        self._connect(switch.pid)
        assert switch.stdin is not None and switch.stdout is not None
        switch.stdin.write("\n")
        switch.stdin.flush()
        _hear(switch, "ready")
        return self

    def _start(self, command: list[str], word: str) -> subprocess.Popen[str]:
        """Start a process that ends with this one, and wait until it says a word."""
        pipe = subprocess.PIPE
        whole = ["setpriv", "--pdeathsig", "KILL", *command]
        process = subprocess.Popen(whole, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        self._ends.callback(_end, process)
        _hear(process, word)
        return process

    def _connect(self, switch: int) -> None:
        """Make the cables, and give hosts their addresses. Each knows where the others are, and need not ask."""
        lines = []
        for number, host in enumerate(self._processes):
            lines += [
                f"link add port{number} type veth peer name {INTERFACE} netns {host.pid}",
                f"link set port{number} up",
            ]
        _ip(switch, lines)
        for number, host in enumerate(self._processes):
            lines = ["link set lo up", f"link set {INTERFACE} address {_hardware_address(number)}"]
            lines += [f"addr add {self.addresses[number]}/24 dev {INTERFACE}", f"link set {INTERFACE} up"]
            for other, address in enumerate(self.addresses):
                if other != number:
                    known = f"lladdr {_hardware_address(other)} dev {INTERFACE} nud permanent"
                    lines.append(f"neigh replace {address} {known}")
            _ip(host.pid, lines)

    def link(self, *, rate: float, round_trip_s: float) -> None:
        """Set the rate, in bits per second each way, of all ports, and the time from host to host and back."""
        queue = max(self._LEAST_QUEUE_BYTES, int(2 * rate / 8 * round_trip_s))
        for port in self.ports:
            port.rate, port.delay_ns, port.queue_bytes = rate, int(1e9 * round_trip_s / 4), queue

    def cut(self, one: int, other: int) -> None:
        """Let nothing through between two hosts, which others reach."""
        self._control.cut[one][other] = self._control.cut[other][one] = 1

    def set_mtu(self, mtu: int) -> None:
        """Set the MTU of all ports and of the hosts' interfaces, so that nothing too large is sent."""
        for port, process in zip(self.ports, self._processes, strict=True):
            port.mtu = mtu
            _ip(process.pid, [f"link set {INTERFACE} mtu {mtu}"])

    def kill(self, host: int) -> None:
        """End a host, with all its processes, as a loss of power does: nothing that their end would send gets out."""
        self.ports[host].down = 1
        self._processes[host].kill()
        self._processes[host].wait(_ENDS_WITHIN_S)

    def carried(self) -> list[tuple[int, int]]:
        """Bytes on the wire that have arrived: of each host, those that it has sent, and those that came to it."""
        pairs, hosts = self._control.carried, range(self._hosts)
        return [
            (sum(pairs[host][other] for other in hosts), sum(pairs[other][host] for other in hosts)) for host in hosts
        ]

    def join(self, host: int) -> None:
        """Be a process of a host, from now on.

        Where the host has processes of its own, a child goes on in the place of this process, which waits for it.
        """
        folder, pid = Path.cwd(), self._processes[host].pid
        spaces = ["net", *(["mnt", "uts", "ipc"] if self._kind.memory else [])]
        spaces += ["pid"] if self._kind.processes else []
        with contextlib.ExitStack() as files:
            # The process of the host has not itself entered the namespace of its children.
            paths = {space: f"/proc/{pid}/ns/{space if space != 'pid' else 'pid_for_children'}" for space in spaces}
            opened = {space: files.enter_context(open(path)) for space, path in paths.items()}
            # A process with threads, which share their current folder, enters no namespace of mounts.
            _checked(_libc().unshare(_CURRENT_FOLDER), "unshare")
            for space, file in opened.items():
                _checked(_libc().setns(file.fileno(), _NAMESPACES[space]), f"setns {space}")
        os.chdir(folder)
        if self._kind.processes:
            _go_on_in_child()
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE


def switch_program() -> Path:
    """The program of the switch, compiled unless there is one of the same source.

    Raises:
        Unavailable: there is no compiler, or it fails.
    """
    source = _HERE / "switch.c"
    program = _BUILDS / f"switch-{hashlib.sha256(source.read_bytes()).hexdigest()[:16]}"
    if not program.exists():
        compiler = shutil.which("cc")
        if sys.platform != "linux" or compiler is None:
            raise Unavailable("the switch between hosts takes Linux, and a C compiler called cc")
        _BUILDS.mkdir(parents=True, exist_ok=True)
        own = program.with_suffix(f".{os.getpid()}")  # tests that run at once begin together
        command = [compiler, "-O2", "-Wall", "-Wextra", "-o", str(own), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Unavailable(f"the switch between hosts does not compile: {done.stderr}")
        own.rename(program)
    return program


def _host_command(kind: Kind, number: int, folder: Path) -> list[str]:
    """A process that holds a host's namespaces, says "up", and waits to be killed."""
    lines, spaces = ["set -e"], ["--net"]
    if kind.memory:
        spaces += ["--mount", "--ipc", "--uts"]
        lines += [f"hostname host{number}", "mount -t tmpfs tmpfs /dev/shm", f"mount --bind {folder}/names /etc/hosts"]
    if kind.processes:
        spaces += ["--pid", "--fork", "--kill-child"]
    if kind.listed:
        spaces.append("--mount-proc")
    if kind.boot:
        boot = folder / f"boot{number}"
        boot.write_text(f"{number:08}-0000-4000-8000-000000000000\n")
        lines.append(f"mount --bind {boot} /proc/sys/kernel/random/boot_id")
    lines += ["echo 1 2>/dev/null >/proc/sys/net/ipv6/conf/all/disable_ipv6 || true", "echo up", "exec cat"]
    return ["unshare", *spaces, "sh", "-c", "\n".join(lines)]


def _hardware_address(host: int) -> str:
    """As switch.c knows it: the last number tells the port, from 1 on."""
    return f"02:77:00:00:00:{host + 1:02x}"


def _hear(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdout is not None and process.stderr is not None
    if process.stdout.readline().strip() != word:
        process.kill()
        raise OSError(process.stderr.read().strip())


def _end(process: subprocess.Popen[str]) -> None:
    """Kill a process, and what lives in a namespace of processes that it has made."""
    process.kill()
    process.wait(_ENDS_WITHIN_S)
    for pipe in (process.stdin, process.stdout, process.stderr):
        with contextlib.suppress(OSError):
            assert pipe is not None
            pipe.close()


def _ip(pid: int, lines: Sequence[str]) -> None:
    """Run commands of ip(8) in the network of a process."""
    command = ["nsenter", f"--net=/proc/{pid}/ns/net", "ip", "-batch", "-"]
    subprocess.run(command, input="\n".join(lines) + "\n", text=True, capture_output=True, check=True)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> None:
    if result:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def _go_on_in_child() -> None:
    """Fork, and return in the child: a process never changes its namespace of processes, only its children's.

    The parent ends as the child does, and the child with the parent.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12, where there are threads
        child = os.fork()
    if child == 0:
        _checked(_libc().prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL), "prctl")
        return
    # Tests ask ranks for their stacks with this signal, by the pid that they know.
    faulthandler.unregister(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, lambda *_: os.kill(child, signal.SIGUSR1))
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        with contextlib.suppress(OSError):  # SIGKILL has no handler to reset
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))
