"""A shard of optimizer state that is several times the memory it is allowed, stepped from a disk.

    python docs/benchmarks/nvme.py [DIRECTORY] [--state-mb 2048] [--rounds 7] [--forms] [--write FOLDER]

Per round, in turns: the disk's own speed, and one step. The first is a plain loop over a file as large, reserved and
opened in the same way: it is read and written from start to end at the same time, in blocks as large as a window's
arrays, by one, two or four threads each (what is fastest), and nothing is computed; then either alone. Medians count.

With ``--forms``: steps of bf16 parameters instead, in turns with fp32 and with 8-bit moments and split masters. That is
as much faster as the state is smaller where the disk is the bottleneck. A fast disk beside few or busy processors is
not: run the script in a cgroup that limits the disk (``blkio.throttle.read_bps_device``, ``write_bps_device``), which
the result names.

Memory is what the process holds more at its highest (VmHWM) than before the optimizer was made, with parameters and
gradients there already. Transfers that go past the page cache (O_DIRECT) leave nothing of the state there.
"""

from __future__ import annotations

import argparse
import itertools
import mmap
import os
import statistics
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from support.machine import add_write, command, load, machine, publish, spread, today

import zero_opt
from zero_opt.placement.nvme.state_file import StateFile, filesystem_of

SCRIPT = "docs/benchmarks/nvme.py"
STATE_BYTES = 8  # per element: two fp32 moments; a parameter in fp32 on the CPU is its own master
FORMS = {
    "fp32 moments and masters": zero_opt.AdamState(master="float32"),
    "8-bit moments, split masters": zero_opt.AdamState("block8", "split"),
}
THREADS = (1, 2, 4)  # that may read, and as many that write, in the plain loop
MIB = 2**20


def status(name: str) -> int:
    """A line of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def forget_peak() -> None:
    """Let VmHWM begin anew at what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def disk_limit() -> str:
    """How fast this process may use its disks, as far as a cgroup says so."""
    groups = [line.split(":") for line in Path("/proc/self/cgroup").read_text().split()]
    folder = next((f"/sys/fs/cgroup/blkio{path}" for _, name, path in groups if name == "blkio"), "")
    limits = []
    for way in ("read", "write"):
        file = Path(folder) / f"blkio.throttle.{way}_bps_device"
        words = file.read_text().split() if folder and file.exists() else []
        limits += [f"{way} {int(limit) / 1e6:.0f} MB/s" for limit in words[1::2]]
    return f"a cgroup (blkio.throttle) lets this process {', '.join(limits)}" if limits else "no cgroup limits the disk"


class PlainFile:
    """Reads and writes a file from start to end in blocks, by as many threads as are fastest."""

    def __init__(self, folder: str, nbytes: int, block_nbytes: int) -> None:
        self.file = StateFile(folder)
        self.nbytes, self._block = nbytes // block_nbytes * block_nbytes, block_nbytes
        self.file.reserve(self.nbytes)
        self._blocks = [memoryview(mmap.mmap(-1, block_nbytes)) for _ in range(2 * max(THREADS))]
        self.threads = 1
        self.move([True])  # reserved blocks that were never written are not read from the disk
        tries = {}
        for count in THREADS:
            self.threads = count
            tries[count] = min(self.move([False, True]) for _ in range(2))
        self.threads = min(tries, key=lambda count: tries[count])

    def _pump(self, number: int, block: memoryview, *, write: bool) -> None:
        """Move every so many-th block once."""
        for start in range(number * self._block, self.nbytes, self.threads * self._block):
            (self.file.write if write else self.file.read)(start, block)

    def move(self, directions: Sequence[bool]) -> float:
        """Seconds to read all (False), or to write all (True), or both at the same time."""
        threads = [
            threading.Thread(target=self._pump, args=(number, block), kwargs={"write": write})
            for (write, number), block in zip(itertools.product(directions, range(self.threads)), self._blocks)
        ]
        begin = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - begin


def optimizer_of(params: list[torch.nn.Parameter], folder: str, window_mb: float) -> zero_opt.ShardedOptimizer:
    """Over a file in a folder."""
    return zero_opt.ShardedOptimizer(
        params,
        torch.optim.AdamW,
        fused=True,
        reduction=zero_opt.AlreadyReduced(),
        offload=zero_opt.NVMeOffload(folder, window_mb=window_mb),
    )


def load_code(folder: str) -> None:
    """Take a small step, so that modules that are imported when first used do not count as held by a large one."""
    param = torch.nn.Parameter(torch.ones(64))
    optimizer = optimizer_of([param], folder, 1)
    param.grad = torch.ones(64)
    optimizer.step()
    optimizer.close()


def measure_forms(arguments: argparse.Namespace) -> str:
    """The result of --forms as markdown."""
    folder, numel = arguments.directory, arguments.mi * MIB
    optimizers, times, own = {}, {name: list[float]() for name in FORMS}, list[float]()
    for name, form in FORMS.items():
        param = torch.nn.Parameter(torch.randn(numel, generator=torch.Generator().manual_seed(0)).bfloat16())
        param.grad = torch.randn(numel, generator=torch.Generator().manual_seed(1)).bfloat16()
        optimizers[name] = zero_opt.ShardedOptimizer(
            [param],
            zero_opt.CPUAdamW,
            reduction=zero_opt.AlreadyReduced(),
            offload=zero_opt.NVMeOffload(folder, window_mb=arguments.window_mb),
            state=form,
        )
    plain = PlainFile(folder, 4 * numel, 4 * MIB)
    for number in range(-1, arguments.rounds):  # the first finds files that were never written
        own.append(2 * plain.nbytes / 1e6 / plain.move([False, True]))
        for name, optimizer in optimizers.items():
            begin = time.perf_counter()
            optimizer.step()
            if number >= 0:
                times[name].append(1e3 * (time.perf_counter() - begin))
    lines = [
        f"### Stepping compact state from a disk, {today()}",
        "",
        f"`{command(SCRIPT)}`",
        "",
        f"{machine()}; {load()}.",
        f"{numel / 1e6:.1f} M bf16 parameters, one rank; {disk_limit()}.",
        f"The disk's own speed: {spread(own[1:], 0)} MB/s read and written, {plain.threads} threads each.",
        "",
        "| | state, bytes per element | `step()`, ms, median (least - most) | MB/s read and written | of fp32's |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name, found in times.items():
        nbytes = optimizers[name].memory_report()["state"]
        rate = 2 * nbytes / 1e3 / statistics.median(found)
        share = statistics.median(map(float.__truediv__, found, next(iter(times.values()))))
        lines.append(f"| {name} | {nbytes / numel:.2f} | {spread(found, 0)} | {rate:.0f} | {share:.2f} |")
        optimizers[name].close()
    return "\n".join(lines)


def measure(arguments: argparse.Namespace) -> str:
    """The result as markdown."""
    folder, nbytes = arguments.directory, arguments.state_mb * MIB
    load_code(folder)
    param = torch.nn.Parameter(torch.randn(nbytes // STATE_BYTES, generator=torch.Generator().manual_seed(0)))
    param.grad = torch.randn(param.numel(), generator=torch.Generator().manual_seed(1))
    plain = PlainFile(folder, nbytes, int(arguments.window_mb * MIB / 2))
    plain.move([False, True])
    forget_peak()
    before = status("VmRSS")
    optimizer = optimizer_of([param], folder, arguments.window_mb)
    for _ in range(2):  # the first finds a file that was never written
        optimizer.step()
    own, reads, writes, steps = [], [], [], []
    for _ in range(arguments.rounds):
        own.append(2 * plain.nbytes / 1e6 / plain.move([False, True]))
        begin = time.perf_counter()
        optimizer.step()
        steps.append(2 * nbytes / 1e6 / (time.perf_counter() - begin))
        reads.append(plain.nbytes / 1e6 / plain.move([False]))
        writes.append(plain.nbytes / 1e6 / plain.move([True]))
    held = status("VmHWM") - before
    windows = optimizer.memory_report()["staging"]
    optimizer.close()
    share = statistics.median(map(float.__truediv__, steps, own))  # round by round
    rows = [
        ("state in the file, MiB", f"{arguments.state_mb}"),
        ("windows, MiB, all of them", f"{windows / MIB:.0f}"),
        ("memory held more than before, at its highest, MiB", f"{held / MIB:.0f}"),
        ("state over that memory", f"{nbytes / held:.2f}"),
        (
            f"the disk's own speed ({plain.threads} threads each), MB/s read and written, median (least - most)",
            spread(own, 0),
        ),
        ("`step()`, MB/s read and written, median (least - most)", spread(steps, 0)),
        ("**`step()` over the disk's own speed**", f"**{100 * share:.0f} %**"),
        ("the disk's own speed, MB/s, reading alone", spread(reads, 0)),
        ("the disk's own speed, MB/s, writing alone", spread(writes, 0)),
    ]
    way = "O_DIRECT" if plain.file.direct else "buffered, put out of the cache after every block"
    head = [f"### Stepping from a disk, {today()}", "", f"`{command(SCRIPT)}`", "", f"{machine()}; {load()}."]
    head.append(
        f"File system {filesystem_of(plain.file._fd)}, {way}; AdamW, {param.numel() >> 20} Mi fp32 parameters, "
    )
    head[-1] += "one rank."
    table = ["| | |", "| --- | ---: |", *(f"| {name} | {value} |" for name, value in rows)]
    return "\n".join([*head, "", *table])


def main() -> None:
    """Measure, print, and write if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", nargs="?", default="build/nvme", help="on the disk to use")
    parser.add_argument("--state-mb", type=int, default=2048, help="size of the state, in MiB")
    parser.add_argument("--forms", action="store_true", help="compare forms of the state")
    parser.add_argument("--mi", type=int, default=32, help="with --forms: parameters, in Mi")
    parser.add_argument("--window-mb", type=float, default=64, help="of each of the three windows, in MiB")
    parser.add_argument("--rounds", type=int, default=7)
    add_write(parser)
    arguments = parser.parse_args()
    os.makedirs(arguments.directory, exist_ok=True)
    text = measure_forms(arguments) if arguments.forms else measure(arguments)
    publish(arguments.write, "nvme_forms" if arguments.forms else "nvme", text)


if __name__ == "__main__":
    main()
