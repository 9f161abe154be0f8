"""Draw what runs at the same time in a training step, from a trace of torch's profiler.

    python docs/benchmarks/trace_picture.py [--write FOLDER]

Two gloo ranks, ``WorkerOffload(delay=1)`` and ``overlap_param_gather``. The lanes of rank 0's threads are the trace's
events. The worker is another process, which no profiler sees: its bar begins where ``step()`` submits the step, and is
as long as the worker says it took (``worker/step_s`` of ``opt.stats()``).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from support.machine import command, load, machine, pyplot, today
from torch import nn
from torch.profiler import ProfilerActivity, _ExperimentalConfig, profile, record_function

import zero_opt
from zero_opt.placement.worker.process import WorkerProcess

WIDTH, LAYERS, ROWS, WARM, STEPS, SHOWN = 1024, 16, 64, 4, 20, 2
LANES = ("main thread", "exchange thread", "worker process")
COLORS = {
    "forward": "#9ecae1",
    "backward": "#4292c6",
    "step()": "#d9d9d9",
    "reduction": "#f16913",
    "gather": "#41ab5d",
    "update": "#807dba",
    "params": "#dd3497",
    "worker": "#a63603",
    "agreement": "#737373",
}
PARTS = ("forward", "backward", "step()")
LABELS = {**{name: name for name in PARTS}, "worker": "the worker's step"}


class Bar(NamedTuple):
    """Something that a lane does, in milliseconds since the first step that is shown."""

    lane: str
    name: str
    start: float
    length: float


def train(rank: int, folder: str) -> None:
    """One rank; rank 0 writes its trace, and how long the worker took for each step."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())])
    opt = zero_opt.ShardedOptimizer(
        model.parameters(),
        torch.optim.AdamW,
        lr=1e-3,
        reduction=zero_opt.Overlapped(overlap_param_gather=model),
        offload=zero_opt.WorkerOffload(delay=1),
    )
    data, took_s = torch.randn(ROWS, WIDTH), list[float]()

    def step() -> None:
        with record_function("forward"):
            loss = model(data).square().mean()
        with record_function("backward"):
            loss.backward()
        with record_function("step()"):
            opt.step()
        took_s.append(opt.stats().get("worker/step_s", 0.0))
        opt.zero_grad()

    for _ in range(WARM):
        step()
    took_s.clear()
    submit = WorkerProcess.submit

    def marked(worker: WorkerProcess, *arguments: Any, **options: Any) -> int:
        with record_function("submit"):
            return submit(worker, *arguments, **options)

    config = _ExperimentalConfig(profile_all_threads=True)
    with (
        mock.patch.object(WorkerProcess, "submit", marked),
        profile(activities=[ProfilerActivity.CPU], experimental_config=config) as trace,
    ):
        for _ in range(STEPS):
            step()
    opt.flush()
    opt.close()
    if rank == 0:
        trace.export_chrome_trace(f"{folder}/trace.json")
        Path(folder, "took_s.json").write_text(json.dumps(took_s))
    dist.destroy_process_group()


def bars(events: Sequence[dict[str, Any]], took_s: Sequence[float]) -> list[Bar]:
    """Return the bars of the ``SHOWN`` steps that took least, which other programs have disturbed least."""
    timed = sorted((event for event in events if event.get("ph") == "X"), key=lambda event: event["ts"])
    named = {name: [event for event in timed if event["name"] == name] for name in ("forward", "step()", "submit")}
    main = named["forward"][0]["tid"]
    ends = [event["ts"] + event["dur"] for event in named["step()"]]
    # From the beginning of a forward to the end of the step.
    lengths = [ends[at + SHOWN - 1] - named["forward"][at]["ts"] for at in range(1, STEPS - SHOWN)]
    first = 1 + lengths.index(min(lengths))
    begin, end = named["forward"][first]["ts"], ends[first + SHOWN - 1]
    found = []
    for event in timed:
        name = event["name"].removeprefix("zero_opt::")
        if name in COLORS and begin <= event["ts"] < end:
            lane = LANES[0] if event["tid"] == main else LANES[1]
            found.append(Bar(lane, name, (event["ts"] - begin) / 1e3, event["dur"] / 1e3))
    # The step that ``step()`` number n submits is over, and its time known, after step() number n + 1.
    for submitted, seconds in zip(named["submit"], took_s[1:], strict=False):
        start, length = (submitted["ts"] - begin) / 1e3, 1e3 * seconds
        if start + length > 0 and submitted["ts"] < end:
            found.append(Bar(LANES[2], "worker", start, length))
    return found


def draw(found: Sequence[Bar], path: Path) -> None:
    """Draw the bars, a lane above the other."""
    from matplotlib.patches import Patch

    plt = pyplot()
    end = max(bar.start + bar.length for bar in found if bar.lane == LANES[0])
    figure, axis = plt.subplots(figsize=(11, 3.8), layout="constrained")
    for bar in sorted(found, key=lambda bar: -bar.length):
        phase = bar.lane == LANES[0] and bar.name not in PARTS
        height = 0.4 if phase else 0.8
        bottom = LANES.index(bar.lane) - height / 2
        axis.broken_barh([(bar.start, bar.length)], (bottom, height), color=COLORS[bar.name], lw=0)
        if bar.name in PARTS and bar.length > 0.04 * end:
            axis.text(bar.start + bar.length / 2, bottom + 0.13, bar.name, ha="center", va="center", fontsize=9)
    axis.set(xlim=(0, end), yticks=range(len(LANES)), yticklabels=LANES, xlabel="ms")
    axis.invert_yaxis()
    used = [name for name in COLORS if any(bar.name == name for bar in found)]
    patches = [Patch(color=COLORS[name], label=LABELS.get(name, f"zero_opt::{name}")) for name in used]
    figure.legend(handles=patches, ncols=5, fontsize=8, loc="outside upper center")
    figure.savefig(path, dpi=100)
    plt.close(figure)


def main() -> None:
    """Train, and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, default=Path("build"), help="a folder for trace.png")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train, (folder,), 2)
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
        took_s = json.loads(Path(folder, "took_s.json").read_text())
    given.write.mkdir(parents=True, exist_ok=True)
    draw(bars(events, took_s), given.write / "trace.png")
    print(f"{today()}: {machine()}; {load()}; `{command('docs/benchmarks/trace_picture.py')}`")


if __name__ == "__main__":
    main()
