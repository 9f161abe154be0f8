"""Variants of the library in which one wait, event or lock is missing, each of which a case has to notice."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

from test.accelerator.runner import Plan, wrong_lines

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "zero_opt"
SECONDS = 90  # of one case on a mutant


@dataclass(frozen=True)
class Mutant:
    """The shipped package with some of its text replaced.

    Attributes:
        name: what is wrong.
        file: below the package. replacements: texts and what comes in their place.
        case: the smallest one that notices. world_size, place: where it runs; the place is a pattern.
        hidden: whether no race shows it: a lock is missing, or a wait for memory that another process reads. Some seed
            shows wrong bits then, or an error.
    """

    name: str
    file: str
    replacements: tuple[tuple[str, str], ...]
    case: str
    world_size: int = 1
    place: str = "alone|comm"
    hidden: bool = False

    @property
    def plan(self) -> Plan:
        """What runs: the case without any delay, for races to notice; what they cannot see, with 20 seeds of delays."""
        seeds = tuple(range(20)) if self.hidden else (None,)
        return Plan((self.case,), seeds, places=self.place, until_wrong=True)

    def applied(self, source: str) -> str:
        """Return the mutated source. Raises ValueError unless every text is there exactly once."""
        for old, new in self.replacements:
            if source.count(old) != 1:
                raise ValueError(f"mutant {self.name!r} does not apply: {source.count(old)} times {old!r}")
            source = source.replace(old, new)
        return source

    def copied_to(self, folder: Path) -> None:
        """Copy the package, mutated, into a folder."""
        shutil.copytree(ROOT / PACKAGE, folder / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
        path = folder / PACKAGE / self.file
        path.write_text(self.applied(path.read_text()))


def noticed(mutant: Mutant, folder: Path) -> list[str]:
    """Run a mutant's case in a process of its own, with the package in ``folder``; return what is wrong."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "test.accelerator.mutants", str(folder), str(MUTANTS.index(mutant))]
    # The folder comes first in sys.path, being the working directory.
    found = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=2 * SECONDS, check=False
    )
    assert found.returncode == 0, found.stderr
    lines: list[str] = json.loads(found.stdout.splitlines()[-1])
    return lines


def _main(folder: str, index: str) -> None:
    import zero_opt

    assert Path(zero_opt.__file__).is_relative_to(folder), zero_opt.__file__
    mutant = MUTANTS[int(index)]
    try:
        lines = wrong_lines(mutant.world_size, mutant.plan, timeout=SECONDS)[mutant.case]
    except Exception as error:
        lines = ["error: " + line for line in traceback.format_exception_only(error)]
    print(json.dumps(lines))


RECORD_READS = (
    "            for tensor in reads:  # nothing to record where the memory is that stream's own\n"
    "                tensor.record_stream(stream)\n"
)
STAGED = "            copy_all([view for _, view in taken], [grad for grad, _ in taken])\n"
READY = "            fill.ready = [self.streams.produced()[1]]\n"
SIDE_WAITS = "            for event in after:\n                side.wait_event(event)\n"
SIDE_RECORDS = "            for tensor in reads:\n                tensor.record_stream(side)\n"
REDUCED = '"_reduce_scatter_base"), part, whole, options).wait()\n'
GATHERED = "            return _start_gather(pg, _as_real(bucket), _as_real(chunks[self._rank])).wait\n"
FETCH = "        with streams.side([], []):\n            try:\n                self._grads"
IMPORT = ("from contextlib import contextmanager\n", "import contextlib\nfrom contextlib import contextmanager\n")
OVERLAPPED, HOST = "device, Overlapped, float32", "host, Overlapped, bfloat16"
OWN = "comm, a stream of its own"
MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "staging waits for no producer but the last",
        "system/streams.py",
        (("            for _, event in events[:-1]:\n                stream.wait_event(event)\n", ""),),
        "gradients of two streams",
        2,
    ),
    Mutant(
        "staging does not record the stream that reads gradients",
        "system/streams.py",
        ((RECORD_READS, ""),),
        "gradients of two streams",
        2,
    ),
    Mutant(
        "the side stream does not wait for staging",
        "sharding/buckets.py",
        (("            fill.ready = [self.streams.produced()[1]]\n", ""),),
        HOST,
    ),
    Mutant(
        "staging ends before the copies do",
        "sharding/buckets.py",
        ((STAGED + READY, READY + STAGED),),
        HOST,
    ),
    Mutant("the side stream waits for no event", "system/streams.py", ((SIDE_WAITS, ""),), OVERLAPPED, 2),
    Mutant(
        "the side stream does not record what it reads",
        "system/streams.py",
        ((SIDE_RECORDS, ""),),
        OVERLAPPED,
        2,
    ),
    Mutant(
        "the step does not wait for the side stream",
        "system/streams.py",
        (("            reader.wait_stream(self._side)\n", "            pass\n"),),
        OVERLAPPED,
        2,
    ),
    Mutant(
        "a forward does not wait for its parameters",
        "system/streams.py",
        (("        torch.accelerator.current_stream(self._device).wait_event(event)\n", "        pass\n"),),
        "gathered late, Overlapped",
        2,
        OWN,
    ),
    Mutant(
        "a late gather does not wait for the step",
        "sharding/background_gather.py",
        (("bucket.streams.side([stepped], ", "bucket.streams.side([], "),),
        "gathered late, Overlapped",
        2,
        OWN,
    ),
    Mutant(
        "a late gather is over before it begins",
        "sharding/background_gather.py",
        (
            (
                "            arrivals.complete_counted(arrive)\n            return bucket.streams.produced()[1]\n",
                "            event = bucket.streams.produced()[1]\n            arrivals.complete_counted(arrive)\n"
                "            return event\n",
            ),
        ),
        "gathered late, Overlapped",
        2,
        OWN,
    ),
    Mutant(
        "no stream waits for a reduce-scatter",
        "comm/backend_exchanges.py",
        ((REDUCED, REDUCED.replace(").wait()", ")")),),
        OVERLAPPED,
        2,
    ),
    Mutant(
        "no stream waits for an all-gather",
        "comm/backend_exchanges.py",
        ((GATHERED, GATHERED.replace("return ", "").replace(".wait", "\n            return tuple")),),
        OVERLAPPED,
        2,
    ),
    Mutant(
        "the processor does not wait for gradients",
        "placement/in_process/host_offload.py",
        (("        for event in (self._arrived, self._left):\n", "        for event in (self._left,):\n"),),
        HOST,
    ),
    Mutant(
        "copies to the host do not wait for the reduction",
        "placement/in_process/host_offload.py",
        (("        with streams.side([self._link.start], []):\n            try:\n                self._grads", FETCH),),
        HOST,
    ),
    Mutant(
        "the next forward does not wait for results",
        "placement/in_process/host_offload.py",
        (("        streams.wait(self._left)\n", ""),),
        HOST,
    ),
    Mutant(
        "the worker does not wait for gradients",
        "placement/worker/placement.py",
        (("            event.synchronize()\n", "            pass\n"),),
        "worker, Overlapped, bfloat16",
        hidden=True,
    ),
    Mutant(
        "gradients are copied for the worker before they are reduced",
        "placement/worker/placement.py",
        (("torch.no_grad(), shard.bucket.streams.side([], []):", "torch.no_grad():"),),
        "worker, Overlapped, bfloat16",
    ),
    Mutant(
        "state is served before the step is over",
        "state/guard.py",
        (("streams.side([event, *(", "streams.side([*("),),
        "one rank asks, device",
        2,
        "comm, a stream of its own",
    ),
    Mutant(
        "the second stage of a reduction does not wait for the first",
        "comm/backend_exchanges.py",
        (("part, whole, options).wait()", "part, whole, options)"),),
        "device, AtStep, float32",
        4,
        "hosts",
    ),
    Mutant(
        "the second stage of a gather does not wait for the first",
        "comm/backend_exchanges.py",
        (("chunks[self._turn(self._rank)]).wait()", "chunks[self._turn(self._rank)])"),),
        "device, AtStep, float32",
        4,
        "hosts",
    ),
    Mutant(
        "the second stage of a broadcast does not wait for the first",
        "comm/backend_exchanges.py",
        (("_start_broadcast(between, chunk, host).wait()", "_start_broadcast(between, chunk, host)"),),
        "whole parameters, SGD of the user's",
        4,
        "hosts",
    ),
    Mutant(
        "hooks have no lock",
        "reduction/overlapped.py",
        (("with self._passes.handing_over:\n", "with contextlib.nullcontext():\n"), IMPORT),
        "accumulating each reduced, Overlapped",
        2,
        "comm, two devices",
        hidden=True,
    ),
)

if __name__ == "__main__":
    _main(*sys.argv[1:])
