"""``python -m zero_opt bench``: reductions and offloads side by side on this machine, beside DDP.

Ranks are processes on this host, joined by gloo (and NCCL or alike for accelerators). Each way to train gets the same
model, a stack of linear layers, and the same batch, one way after the other, and all of them a second time in reverse.
*Exposed* is how much longer a step takes than forward and backward of the model alone, measured likewise.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
import re
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes
from torch.nn.parallel import DistributedDataParallel

from ..errors import ConfigError, OutOfMemory, PeerLost, ZeroOptError, error_of_rank, mib, name_and_text
from ..field_checks import check_integer
from ..kernels import CPUAdamW
from ..kernels.checks import GRAD_DTYPES
from ..optimizer.sharded_optimizer import ShardedOptimizer
from ..placement.nvme.state_file import StateFile
from ..policies import AdamState, AtStep, CPUOffload, NVMeOffload, Overlapped, WorkerOffload
from ..system.devices import HOST, is_host
from ..system.extension import native_available
from ..system.shared_memory import memory_left
from .drawing import file_pyplot
from .estimate import check_numel, checked_device

_WIDTH, _WARM = 1024, 2
_PATIENCE_S, _LOOK_AGAIN_S = 600.0, 0.2
_BARE = "forward and backward alone"
# Of a traceback: the pipe that it goes through is read once the rank has ended.
_TOLD_CHARS = 20_000
# What a process takes that has imported torch, of its own.
_INTERPRETER_BYTES = 100 << 20


@dataclass(frozen=True)
class Bench:
    """What to measure.

    Attributes:
        numel: elements of the model, about. ranks: how many processes. rows: of the batch of each rank.
        seconds: for how long each way is measured, in two parts, besides construction and two steps.
        device: type of device. path: a directory for ``NVMeOffload``; ``None`` leaves that out.
    """

    numel: float
    ranks: int = 2
    rows: int = 128
    seconds: float = 4.0
    param_dtype: torch.dtype = torch.float32
    device: str = "cpu"
    path: str | None = None

    def __post_init__(self) -> None:
        check_integer("ranks", self.ranks)
        check_integer("rows", self.rows)
        check_numel(self.numel)
        if self.param_dtype not in GRAD_DTYPES:
            named = ", ".join(str(dtype).removeprefix("torch.") for dtype in GRAD_DTYPES)
            raise ConfigError(f"param_dtype must be one of {named}, got {self.param_dtype}")
        checked_device(self.device)
        if not 0 < self.seconds < math.inf:
            raise ConfigError(f"seconds must be positive and finite, got {self.seconds:g}")
        found = _count_devices(self.device)
        if found is not None and self.ranks > found:
            raise ConfigError(
                f"{self.ranks} ranks need as many {self.device} devices, and torch {torch.__version__} finds {found} "
                "here: pass --ranks or --device"
            )


def _count_devices(device: str) -> int | None:
    """Return how many devices of a type torch finds; ``None`` for the CPU, which ranks share."""
    if is_host(torch.device(device)):
        return None
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    alike = accelerator is not None and accelerator.type == torch.device(device).type
    return torch.accelerator.device_count() if alike else 0


class Way(NamedTuple):
    """A way to train: ``make(model)`` returns what runs forward, and the optimizer; ``code`` is what to write."""

    name: str
    code: str
    make: Callable[[nn.Module], tuple[nn.Module, Any]]


@dataclass(frozen=True)
class Timing:
    """What a way has taken, of the slowest rank, or of the one with most.

    Attributes:
        name, code: of the way. step_s: median seconds of a step. exposed_s: without those of the model alone.
        nbytes: memory that model, gradients and optimizer have added to a process, or to its device.
    """

    name: str
    code: str
    step_s: float
    exposed_s: float
    nbytes: int


def _ddp(optimizer: Callable[[Any], Any], model: nn.Module) -> tuple[nn.Module, Any]:
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return wrapped, optimizer(wrapped.parameters())


def _zero_redundancy() -> Any:
    """Import the class, whose module has things that torch deprecates."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer


def _ours(options: Callable[[nn.Module], dict[str, Any]], model: nn.Module) -> tuple[nn.Module, Any]:
    given = options(model)
    return model, ShardedOptimizer(model.parameters(), given.pop("cls", torch.optim.AdamW), **given)


def ways(bench: Bench) -> list[Way]:
    """All ways that can be measured."""
    found = [
        Way("DDP + AdamW", "", partial(_ddp, partial(torch.optim.AdamW, fused=True))),
        Way(
            "DDP + ZeroRedundancyOptimizer",
            "",
            partial(_ddp, partial(_zero_redundancy(), optimizer_class=torch.optim.AdamW, fused=True)),
        ),
    ]
    head = "zero_opt.ShardedOptimizer(model.parameters(), "
    plain = f"{head}torch.optim.AdamW, lr=lr, fused=True"

    def add(name: str, code: str, options: Callable[[nn.Module], dict[str, Any]]) -> None:
        found.append(Way(name, code + ")", partial(_ours, options)))

    add("Overlapped()", plain, lambda _: {"fused": True})
    add(
        "Overlapped(overlap_param_gather=model)",
        f"{plain}, reduction=zero_opt.Overlapped(overlap_param_gather=model)",
        lambda model: {"fused": True, "reduction": Overlapped(overlap_param_gather=model)},
    )
    add("AtStep()", f"{plain}, reduction=zero_opt.AtStep()", lambda _: {"fused": True, "reduction": AtStep()})
    offloads: list[tuple[str, Any]] = [] if is_host(torch.device(bench.device)) else [("CPUOffload()", CPUOffload())]
    if native_available():
        offloads += [("WorkerOffload()", WorkerOffload())]
        offloads += [("WorkerOffload(speculate=True)", WorkerOffload(speculate=True))]
        if bench.path is not None:
            offloads += [(f"NVMeOffload({bench.path!r})", NVMeOffload(bench.path))]
    for name, offload in offloads:
        code = f"{head}torch.optim.AdamW, lr=lr, offload=zero_opt.{name}"
        add(name, code, lambda _, offload=offload: {"offload": offload})  # type: ignore[misc]
    if native_available():
        state = AdamState("block8", "split" if bench.param_dtype is torch.bfloat16 else None)
        add(
            "WorkerOffload(), 8-bit moments",
            f"{head}zero_opt.CPUAdamW, lr=lr, state=zero_opt.{state!r}, offload=zero_opt.WorkerOffload()",
            lambda _: {"cls": CPUAdamW, "state": state, "offload": WorkerOffload()},
        )
    return found


# -- on a rank --------------------------------------------------------------------------------------------------------


def _model(bench: Bench, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    layers = max(round(bench.numel / _WIDTH**2), 1)
    width = _WIDTH if layers > 1 else max(round(bench.numel**0.5), 1)
    made = [nn.Linear(width, width, bias=False, dtype=bench.param_dtype, device=device) for _ in range(layers)]
    return nn.Sequential(*made)


def _resident(device: torch.device) -> int:
    """Bytes of this process and its workers, of shared memory a part; or of its device."""
    if not is_host(device):
        return torch.accelerator.memory_allocated(device)
    pids = ["self"]
    for path in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended
            pids += path.read_text().split()
    total = 0
    for pid in pids:
        with suppress(OSError):  # it has ended
            found = re.search(r"^Pss: *(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
            total += 1024 * int(found[1]) if found else 0
    return total


class _Meeting:
    """Where ranks compare numbers.

    Args:
        barrier: of all ranks. values: one place per rank.
    """

    def __init__(self, barrier: Any, values: Any) -> None:
        self._barrier, self._values = barrier, values

    def most(self, rank: int, value: float = 0.0) -> float:
        """Return the greatest of the ranks' values, once all have come."""
        self._values[rank] = value
        self._barrier.wait(_PATIENCE_S)
        greatest = max(self._values)
        self._barrier.wait(_PATIENCE_S)
        return float(greatest)


def _give_back_memory() -> None:
    """Return to the system what earlier ways have freed, so that it does not pass for room of later ones."""
    gc.collect()
    with suppress(AttributeError, OSError):  # another libc
        ctypes.CDLL(None).malloc_trim(0)


def _measure(bench: Bench, way: Way, data: Tensor, most: Callable[..., float]) -> tuple[list[float], int]:
    """Return the seconds of each step, and bytes."""
    _give_back_memory()
    before = _resident(data.device)
    module, optimizer = way.make(_model(bench, data.device))
    seconds, held, end = list[float](), list[int](), float("inf")
    while len(seconds) < _WARM + 3 or most(time.perf_counter()) < end:
        begin = time.perf_counter()
        module(data).float().square().mean().backward()
        if len(seconds) < _WARM:
            held.append(_resident(data.device))
        if optimizer is not None:
            optimizer.step()
            if len(seconds) < _WARM:
                held.append(_resident(data.device))
            optimizer.zero_grad()
        else:
            module.zero_grad()
        if not is_host(data.device):
            torch.accelerator.synchronize(data.device)
        seconds.append(most(time.perf_counter() - begin))
        if len(seconds) == _WARM:
            end = most(time.perf_counter() + bench.seconds / 2)  # all ranks take as many steps
    nbytes = int(most(max(held) - before))
    if isinstance(optimizer, ShardedOptimizer):
        optimizer.close()
    return seconds[_WARM:], nbytes


def _rank(rank: int, bench: Bench, store: str, meeting: _Meeting, results: Any, failures: Any) -> None:
    try:
        _measure_all(rank, bench, store, meeting, results)
    except Exception as error:
        told = name_and_text(error) if isinstance(error, ZeroOptError) else ["", traceback.format_exc()[-_TOLD_CHARS:]]
        failures.put((rank, *told))
        raise


def _measure_all(rank: int, bench: Bench, store: str, meeting: _Meeting, results: Any) -> None:
    device = HOST if is_host(torch.device(bench.device)) else torch.device(bench.device, rank)
    if is_host(device):
        torch.set_num_threads(max(len(os.sched_getaffinity(0)) // bench.ranks, 1))
        backend = "gloo"
    else:
        torch.accelerator.set_device_index(rank)
        backend = f"cpu:gloo,{bench.device}:{dist.get_default_backend_for_device(bench.device)}"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=bench.ranks)
    width = next(_model(bench, torch.device("meta")).parameters()).shape[1]
    data = torch.randn(bench.rows, width, dtype=bench.param_dtype, device=device)
    for way in _in_order(bench):
        seconds, nbytes = _measure(bench, way, data, partial(meeting.most, rank))
        if rank == 0:
            results.put((way.name, seconds, nbytes))
    dist.destroy_process_group()


def _in_order(bench: Bench) -> list[Way]:
    """Every way twice, the second time in reverse."""
    once = [Way(_BARE, "", lambda model: (model, None)), *ways(bench)]
    return [*once, *reversed(once)]


# -- the whole --------------------------------------------------------------------------------------------------------


def run(bench: Bench, note: Callable[[str, int, int], None] = lambda *_: None) -> list[Timing]:
    """Measure every way; the least exposed first. Starts ``bench.ranks`` processes.

    Args:
        note: told what is measured next, how much is done, and of how much.

    Raises:
        ConfigError: a launcher has started this process. StorageFailed, OutOfResources: no file can be made in
            ``path``. OutOfMemory: the ranks do not fit in host memory. All before a process starts. ZeroOptError: what
            a process has raised.
    """
    _check_alone()
    _check_room(bench)
    order, seconds, nbytes = _in_order(bench), dict[str, list[float]](), dict[str, int]()
    with ExitStack() as stack:
        spawn = mp.get_context("spawn")
        results, failures = spawn.SimpleQueue(), spawn.SimpleQueue()
        meeting = _Meeting(spawn.Barrier(bench.ranks), spawn.Array("d", bench.ranks))
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        given = (bench, f"{folder}/store", meeting, results, failures)
        start: Any = start_processes
        ranks = start(_rank, given, bench.ranks, join=False, start_method="spawn")
        stack.callback(_end, ranks)
        for done, way in enumerate(order):
            note(way.name, done, len(order))
            while results.empty() and not _ended(ranks, failures):
                pass
            name, measured, held = results.get()
            seconds.setdefault(name, []).extend(measured)
            nbytes[name] = max(held, nbytes.get(name, 0))
        while not _ended(ranks, failures):
            pass
    step_s = {name: statistics.median(each) for name, each in seconds.items()}
    timings = [
        Timing(way.name, way.code, step_s[way.name], step_s[way.name] - step_s[_BARE], nbytes[way.name])
        for way in ways(bench)
    ]
    return sorted(timings, key=lambda one: one.exposed_s)


def _ended(ranks: Any, failures: Any) -> bool:
    """Return whether all processes have ended, after a moment. Raise the error of the first that has failed."""
    try:
        return bool(ranks.join(_LOOK_AGAIN_S))
    except ProcessExitedException as error:
        how = error.signal_name or f"exit code {error.exit_code}"
        raise PeerLost(f"rank {error.error_index} was ended ({how}); if that is SIGKILL, memory may be short") from None
    except ProcessRaisedException:
        rank, name, text = failures.get()
        if name:
            raise error_of_rank(rank, name, text) from None
        raise ProcessRaisedException(text, rank, ranks.processes[rank].pid) from None


def _check_alone() -> None:
    """Raise ConfigError under a launcher: each of its ranks would start all of a bench's."""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError(
            f"bench starts its ranks itself, and this is one of the {os.environ['WORLD_SIZE']} of a launcher such as "
            "torchrun: run python -m zero_opt bench --ranks N without it"
        )


def _check_room(bench: Bench) -> None:
    """Raise StorageFailed or OutOfMemory where there is no file, or no host memory for ranks with a plain AdamW."""
    if bench.path is not None:
        StateFile(bench.path).close()
    held = 4 * bench.numel * bench.param_dtype.itemsize  # parameters, gradients and two moments
    needed = bench.ranks * (_INTERPRETER_BYTES + held * is_host(torch.device(bench.device)))
    left = memory_left()
    if needed > left:
        raise OutOfMemory(
            f"{bench.ranks} ranks with {bench.numel:g} elements each need at least {mib(needed)} of host memory, and "
            f"{mib(left)} may still be had; pass a smaller --numel, or fewer --ranks"
        )


def _end(ranks: Any) -> None:
    for process in ranks.processes:
        if process.is_alive():
            process.terminate()
            process.join(_PATIENCE_S)


def progress(name: str, done: int, total: int) -> None:
    """Show a bar on stderr, if that is a terminal."""
    if sys.stderr.isatty():
        bar = "#" * done + "." * (total - done)
        sys.stderr.write(f"\r\x1b[K[{bar}] {name}" if done + 1 < total else "\r\x1b[K")
        sys.stderr.flush()


def report(measured: Sequence[Timing]) -> str:
    """The measurements as text, and the line to write."""
    lines = [f"{'':<40}{'step, ms':>10}{'exposed, ms':>13}{'MiB':>9}"]
    for one in measured:
        lines.append(f"{one.name:<40}{1e3 * one.step_s:>10.1f}{1e3 * one.exposed_s:>13.1f}{one.nbytes / 2**20:>9.0f}")
    ours = [one for one in measured if one.code]
    lines += ["", "The fastest of zero_opt's, and the one of them that takes the least memory:"]
    for one in dict.fromkeys((ours[0], min(ours, key=lambda one: one.nbytes))):
        lines.append(f"  opt = {one.code}")
    return "\n".join(lines)


def picture(measured: Iterable[Timing], path: str) -> None:
    """Draw exposed time and memory of each way.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    pyplot = file_pyplot()
    listed = [*measured]
    figure, axes = pyplot.subplots(1, 2, figsize=(12, 0.4 * len(listed) + 1.5), sharey=True)
    names = [one.name for one in listed]
    axes[0].barh(names, [1e3 * max(one.exposed_s, 0.0) for one in listed])
    axes[0].set_xlabel("exposed, ms a step")
    axes[1].barh(names, [one.nbytes / 2**20 for one in listed], color="tab:orange")
    axes[1].set_xlabel("memory, MiB a rank")
    axes[0].invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
