"""The estimate beside what ranks really hold, in bytes."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import zero_opt
from test.support.harness import run_processes
from zero_opt import AdamState
from zero_opt.optimizer.single_rank import SingleRank
from zero_opt.placement import ReadThrough
from zero_opt.tools.estimate import Estimate

Shapes = Sequence[tuple[int, ...]]
ODD: Shapes = ((300, 41), (65,), (), (0, 3), (3, 5, 7, 2), (1000,), (64,), (20_000,), (1,))
EVEN: Shapes = ((128, 256), (256,), (256, 128), (128,)) * 3


class Config(NamedTuple):
    """What an optimizer is made of."""

    cls: type[torch.optim.Optimizer]
    reduction: Any = zero_opt.Overlapped()
    shapes: Shapes = ODD
    dtype: torch.dtype = torch.float32
    precision: Any = zero_opt.MixedPrecision()
    offload: Any = None
    defaults: tuple[tuple[str, Any], ...] = ()

    def options(self) -> dict[str, Any]:
        """Keyword arguments of both the optimizer and the estimate."""
        policies = {"reduction": self.reduction, "precision": self.precision, "offload": self.offload}
        return {**policies, **dict(self.defaults)}

    def model(self, device: str) -> nn.ParameterList:
        """Parameters, the same on every rank."""
        return nn.ParameterList(nn.Parameter(torch.ones(s, dtype=self.dtype, device=device)) for s in self.shapes)


SMALL = 0.03  # MiB, so that there are many buckets
LARGE: Shapes = ((2000, 1000), (30,), (1500, 1500), (1700, 1000))  # reduced in pieces
TO_FP32 = zero_opt.MixedPrecision(reduce_dtype=torch.float32)
CONFIGS = [
    Config(torch.optim.AdamW),
    Config(torch.optim.AdamW, zero_opt.Overlapped(bucket_mb=SMALL, exchange="backend"), EVEN),
    Config(torch.optim.AdamW, zero_opt.AtStep(bucket_mb=SMALL), dtype=torch.bfloat16),
    Config(torch.optim.SGD, zero_opt.Overlapped(5, exchange="backend"), LARGE),
    Config(torch.optim.SGD, zero_opt.AtStep(5, exchange="backend"), LARGE, torch.bfloat16, TO_FP32),
    Config(torch.optim.Adam, zero_opt.AtStep(exchange="backend"), defaults=(("fused", True), ("amsgrad", True))),
    Config(torch.optim.AdamW, zero_opt.AlreadyReduced(exchange="backend")),
    Config(torch.optim.AdamW, zero_opt.AlreadyReduced(), EVEN, torch.float16),
    Config(torch.optim.SGD, zero_opt.Overlapped(bucket_mb=SMALL)),
    Config(torch.optim.SGD, defaults=(("momentum", 0.9),), dtype=torch.float64),
    Config(torch.optim.Rprop, shapes=EVEN),
    Config(torch.optim.ASGD),
    Config(torch.optim.Adagrad, zero_opt.AtStep()),
    Config(torch.optim.Adafactor, zero_opt.Overlapped(bucket_mb=SMALL), ((300, 41), (65,), (3, 5, 7, 2), (200, 90))),
    Config(torch.optim.Muon, zero_opt.AtStep(bucket_mb=SMALL, exchange="backend"), ((40, 30), (300, 200), (7, 7))),
    Config(zero_opt.CPUAdamW, shapes=EVEN),
    Config(torch.optim.Adam, dtype=torch.complex64),
    Config(torch.optim.Adam, dtype=torch.bfloat16, precision=TO_FP32),
    Config(torch.optim.Adam, zero_opt.AtStep(), precision=zero_opt.MixedPrecision(reduce_dtype=torch.bfloat16)),
]
FUSED = (("fused", True),)
MASTERS = zero_opt.MixedPrecision(torch.float32)
CONFIGS += [
    Config(torch.optim.AdamW, dtype=torch.bfloat16, precision=MASTERS),
    Config(torch.optim.SGD, zero_opt.AtStep(), EVEN, torch.float16, MASTERS, defaults=(("momentum", 0.9),)),
    Config(
        torch.optim.AdamW, zero_opt.Overlapped(), EVEN, torch.bfloat16, zero_opt.MixedPrecision("split"), defaults=FUSED
    ),
    Config(
        zero_opt.CPUAdamW,
        zero_opt.AlreadyReduced(),
        dtype=torch.float16,
        defaults=(("state", AdamState(master="float32")),),
    ),
    Config(zero_opt.CPUAdamW, defaults=(("state", AdamState("block8")),)),
    Config(torch.optim.Adam, dtype=torch.bfloat16, precision=zero_opt.MixedPrecision(accumulate_dtype=torch.float32)),
    Config(torch.optim.RMSprop, zero_opt.AtStep(bucket_mb=SMALL), offload=zero_opt.CPUOffload()),
    Config(torch.optim.AdamW, dtype=torch.bfloat16, offload=zero_opt.CPUOffload(ratio=0.5), defaults=FUSED),
    Config(
        zero_opt.CPUAdamW,
        zero_opt.AtStep(bucket_mb=SMALL),
        dtype=torch.bfloat16,
        offload=zero_opt.CPUOffload(),
        defaults=(("state", AdamState("block8", "split")), ("amsgrad", True)),
    ),
]
COMPACT: tuple[tuple[str, Any], ...] = (("state", AdamState("block8", "split")),)
WORKER = [
    Config(torch.optim.AdamW, offload=zero_opt.WorkerOffload(threads=1), defaults=FUSED),
    Config(
        torch.optim.Adam,
        zero_opt.Overlapped(bucket_mb=SMALL),
        EVEN,
        torch.bfloat16,
        offload=zero_opt.WorkerOffload(delay=1, threads=2),
        defaults=(*FUSED, ("amsgrad", True)),
    ),
    Config(
        torch.optim.AdamW,
        zero_opt.AlreadyReduced(),
        ((1000, 1000), (77,)),
        torch.float16,
        offload=zero_opt.WorkerOffload(delay=1, threads=1),
        defaults=FUSED,
    ),
    Config(
        torch.optim.AdamW,
        zero_opt.AtStep(),
        precision=zero_opt.MixedPrecision(reduce_dtype=torch.float64),
        offload=zero_opt.WorkerOffload(threads=1),
        defaults=FUSED,
    ),
    Config(
        zero_opt.CPUAdamW,
        zero_opt.Overlapped(bucket_mb=SMALL),
        dtype=torch.bfloat16,
        offload=zero_opt.WorkerOffload(threads=1),
        defaults=COMPACT,
    ),
    Config(zero_opt.CPUAdamW, offload=zero_opt.WorkerOffload(threads=1), defaults=(("state", AdamState("block8")),)),
]
MOMENTUM = (("momentum", 0.9),)
WORKER += [
    Config(torch.optim.SGD, offload=zero_opt.WorkerOffload(threads=1), defaults=MOMENTUM),
    Config(torch.optim.SGD, zero_opt.AtStep(), EVEN, offload=zero_opt.WorkerOffload(delay=1, threads=1)),
    Config(
        torch.optim.Adagrad,
        zero_opt.Overlapped(bucket_mb=SMALL),
        dtype=torch.bfloat16,
        offload=zero_opt.WorkerOffload(delay=1, threads=1),
        defaults=(("initial_accumulator_value", 0.1),),
    ),
    Config(zero_opt.CPULion, offload=zero_opt.WorkerOffload(threads=1)),
]
SPECULATING = [
    config._replace(reduction=reduction, offload=zero_opt.WorkerOffload(threads=1, speculate=True))
    for config, reduction in (
        (WORKER[0], zero_opt.Overlapped()),
        (WORKER[1], zero_opt.Overlapped(bucket_mb=SMALL)),
        (WORKER[4], zero_opt.Overlapped()),
        (WORKER[6], zero_opt.Overlapped(bucket_mb=SMALL)),
        (WORKER[8], zero_opt.Overlapped()),
    )
]


FILE = [
    Config(torch.optim.AdamW, zero_opt.Overlapped(bucket_mb=SMALL), defaults=FUSED),
    Config(torch.optim.Adam, shapes=EVEN, dtype=torch.bfloat16, defaults=(*FUSED, ("amsgrad", True))),
    Config(torch.optim.AdamW, zero_opt.AtStep(), ((3000, 200), (77,)), torch.float16, defaults=FUSED),
    Config(zero_opt.CPUAdamW, zero_opt.Overlapped(bucket_mb=SMALL), dtype=torch.bfloat16, defaults=COMPACT),
    Config(zero_opt.CPUAdamW, zero_opt.AtStep(), ((3000, 200), (77,)), defaults=(("state", AdamState("block8")),)),
    Config(
        zero_opt.CPUAdam,
        shapes=EVEN,
        dtype=torch.bfloat16,
        defaults=(("state", AdamState("bfloat16", "split")), ("amsgrad", True)),
    ),
    Config(torch.optim.SGD, zero_opt.Overlapped(bucket_mb=SMALL), defaults=MOMENTUM),
    Config(torch.optim.SGD, shapes=EVEN),
    Config(torch.optim.SGD, zero_opt.AtStep(), EVEN, torch.bfloat16),
    Config(torch.optim.Adagrad, dtype=torch.bfloat16, defaults=(("initial_accumulator_value", 0.1),)),
    Config(zero_opt.CPULion, zero_opt.AtStep(), EVEN),
]


# What there is in host memory that is not in a worker's arena.
OUTSIDE = ("step", "gradients that wait", "columns")
SELECTIVE = zero_opt.Selective(0.25, update_interval=2)
ROWS: Shapes = ((512, 64), (40, 32), (65,), (), (3, 5, 7, 2))
COLUMNS = [
    Config(torch.optim.AdamW, shapes=EVEN, offload=zero_opt.CPUOffload(selective=SELECTIVE), defaults=FUSED),
    Config(
        torch.optim.Adam,
        zero_opt.Overlapped(bucket_mb=SMALL),
        EVEN,
        torch.bfloat16,
        offload=zero_opt.CPUOffload(selective=SELECTIVE),
        defaults=(*FUSED, ("amsgrad", True)),
    ),
    Config(
        torch.optim.AdamW,
        zero_opt.AlreadyReduced(),
        ROWS,
        torch.bfloat16,
        offload=zero_opt.WorkerOffload(delay=1, threads=1, selective=SELECTIVE),
        defaults=FUSED,
    ),
    Config(
        torch.optim.AdamW,
        shapes=EVEN,
        offload=zero_opt.WorkerOffload(threads=2, selective=zero_opt.Selective(0.5, update_interval=1)),
        defaults=FUSED,
    ),
]


def nbytes(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if isinstance(tensor, Tensor))


def held(config: Config, opt: zero_opt.ShardedOptimizer, params: nn.ParameterList) -> dict[str, int]:
    """What there is after a step or two."""
    found = {key: value for key, value in opt.memory_report().items() if key in ("grad_shards", "staging")}
    found["params"] = nbytes(params)
    engine: Any = opt._engine
    if isinstance(engine, SingleRank):
        found["state"] = nbytes(value for state in opt.state.values() for value in state.values())
        return found
    home = engine.placement
    if config.offload is not None and config.offload.selective is not None:
        found |= held_by_columns(home)
        home = home._inner
    else:
        found["state"] = sum(
            state.nbytes if isinstance(state, ReadThrough) else nbytes(state.values()) for _, state in home.state()
        )
    if config.offload is None or config.offload.selective is None:
        found["reported"] = opt.memory_report()["state"]
    if isinstance(config.offload, zero_opt.WorkerOffload):
        found["arena"] = in_file(home._worker.arena.fd)
    if isinstance(config.offload, zero_opt.NVMeOffload):
        found["file"] = home._disk.file.nbytes
    return found


def held_by_columns(placement: Any) -> dict[str, int]:
    """What is shown as state is put together when it is read; here is what it is put together from."""
    states = [state for _, state in placement._inner.state()]
    slices = placement._slices.values()
    compact = [found.selected for found in slices]
    return {
        "state": nbytes(value for state in states for value in state.values())
        + nbytes(value for state in compact for key, value in state.items() if key != "param"),
        "selected masters": nbytes(state["param"] for state in compact if state),
        "means": sum(home.shard_nbytes for home in placement._buckets.values()),
        "columns": nbytes(found.mask for found in slices),
        "places": nbytes(found.places for found in slices),
    }


def in_file(fd: int) -> int:
    """Bytes that a file takes, whoever maps it; not those that nobody has touched."""
    return os.fstat(fd).st_blocks * 512


def train(config: Config) -> dict[str, int]:
    params = config.model("cpu")
    opt = zero_opt.ShardedOptimizer(params, config.cls, lr=0.01, **config.options())
    for _ in range(2):
        torch.stack([param.sum().abs().double() for param in params]).sum().backward()
        opt.step()
        opt.zero_grad()
    found = held(config, opt, params)
    opt.close()
    return found


def compare(config: Config, estimated: Estimate, found: dict[str, int]) -> None:
    """Every kind, to the byte."""
    told = {kind: estimated.nbytes(kind) for kind in ("params", "grad_shards", "staging", "state")}
    if isinstance(config.offload, zero_opt.WorkerOffload):
        arena = sum(row.nbytes for row in estimated.rows if row.where == "host" and row.name not in OUTSIDE)
        # Memory is taken by pages: one may be shared, or begun, where an array or a part of the control area ends.
        parts = 8 * len(config.shapes)
        assert abs(found.pop("arena") - arena) <= 4096 * parts
    if "reported" in found:
        banks = sum(row.nbytes for row in estimated.rows if row.name == "second bank")
        told["reported"] = told["state"] + estimated.nbytes("masters") + banks
    if isinstance(config.offload, zero_opt.NVMeOffload):
        told["file"] = estimated.nvme_bytes
    rows = {row.name: row.nbytes for row in estimated.rows}
    if "selected masters" in found:
        told["selected masters"] = rows.get("selected columns", 0)
        told["means"] = rows.get("means of gradients", 0)
        told["columns"] = rows.get("columns", 0)
        told["places"] = rows.get("places of selected columns", 0)
    if config.dtype is not torch.float32:
        told["state"] += estimated.nbytes("masters") - told.get("selected masters", 0)  # shown there too
    assert told == {**dict.fromkeys(told, 0), **found}, config


def resident() -> int:
    """Bytes of memory of its own that this process has taken, without what the allocator keeps for later."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def large(shape: tuple[int, ...], offload: Any) -> zero_opt.ShardedOptimizer:
    """An optimizer that has taken a step."""
    params = [nn.Parameter(torch.ones(shape)) for _ in range(12)]
    opt = zero_opt.ShardedOptimizer(params, torch.optim.AdamW, reduction=zero_opt.AtStep(), offload=offload, fused=True)
    for param in params:
        param.grad = torch.ones_like(param)
    opt.step()
    return opt


def grow(rank: int, world_size: int, offload: Any) -> tuple[int, int]:
    """Memory that a larger case takes, and the estimate for it."""
    large((10, 10), offload).close()  # whatever is taken once, whatever the size
    shape = (512, 2048)
    estimated = zero_opt.estimate(
        [torch.empty(shape, device="meta").requires_grad_() for _ in range(12)],
        world_size,
        reduction=zero_opt.AtStep(),
        offload=offload,
        device="cpu",
        fused=True,
    )
    before = resident()
    opt = large(shape, offload)
    found = resident() - before + opt.memory_report()["staging"]
    if offload is not None:
        found += in_file(opt._engine.placement._worker.arena.fd)  # type: ignore[attr-defined]
    opt.close()
    return found, estimated.on_rank(rank).nbytes()


@pytest.mark.parametrize("offload", [None, zero_opt.WorkerOffload(threads=1)], ids=["device", "worker"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_what_the_system_says(world_size: int, offload: Any) -> None:
    for found, estimated in run_processes(world_size, grow, offload):
        assert abs(found - estimated) <= 0.03 * estimated


def of_process(pid: int) -> int:
    """Bytes of memory that a process has, those that it shares included."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def step_compact(rank: int, world_size: int) -> tuple[int, int, int, int]:
    """Bytes of state, of the worker's arena as it is and as it is estimated, and what the worker has beside it."""
    config = Config(
        zero_opt.CPUAdamW,
        zero_opt.AtStep(),
        ((512, 2048),) * 12,
        torch.bfloat16,
        offload=zero_opt.WorkerOffload(threads=1),
        defaults=COMPACT,
    )
    estimated = zero_opt.estimate(config.model("meta"), world_size, config.cls, device="cpu", **config.options())
    rows = [row for row in estimated.on_rank(rank).rows if row.where == "host" and row.name not in OUTSIDE]
    params = config.model("cpu")
    opt = zero_opt.ShardedOptimizer(params, config.cls, **config.options())
    for param in params:
        param.grad = torch.ones_like(param)
    opt.step()
    worker = opt._engine.placement._worker  # type: ignore[attr-defined]
    arena, resident = in_file(worker.arena.fd), of_process(worker._handles.child.pid)
    state = opt.memory_report()["state"]
    opt.close()
    return state, arena, sum(row.nbytes for row in rows), resident - arena


def test_what_compact_state_takes_on_two_ranks() -> None:
    """Of whole pages: codes, bases and remainders take 4.06 bytes per element, which the ranks share."""
    for state, arena, estimated, beside in run_processes(2, step_compact):
        assert abs(state / (12 * 512 * 2048 / 2) - 4.0625) <= 0.02 * 4.0625
        assert arena == estimated
        assert 0 < beside <= 16e6


def run_all(rank: int, world_size: int, configs: Sequence[Config]) -> None:
    for config in configs:
        estimated = zero_opt.estimate(config.model("meta"), world_size, config.cls, device="cpu", **config.options())
        compare(config, estimated.on_rank(rank), train(config))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_what_ranks_hold(world_size: int) -> None:
    run_processes(world_size, run_all, CONFIGS if world_size < 3 else CONFIGS[::3])


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_what_a_worker_holds(world_size: int) -> None:
    run_processes(world_size, run_all, WORKER + SPECULATING)


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_columns_take(world_size: int, tmp_path: Path) -> None:
    """Cuts between ranks fall between rows, so that every slice has all columns."""
    file = COLUMNS[0]._replace(offload=zero_opt.NVMeOffload(tmp_path, 0.25, threads=1, selective=SELECTIVE))
    run_processes(world_size, run_all, [*COLUMNS, file])


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_a_file_holds(world_size: int, tmp_path: Path) -> None:
    offload = zero_opt.NVMeOffload(tmp_path, window_mb=0.25, threads=1)
    run_processes(world_size, run_all, [config._replace(offload=offload) for config in FILE])


def refuse(rank: int, world_size: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    param = nn.Parameter(distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (world_size,))))
    with pytest.raises(zero_opt.UnsupportedParam, match="estimate what one rank has"):
        zero_opt.estimate([param], world_size)


def test_dtensors_are_refused() -> None:
    run_processes(1, refuse)
