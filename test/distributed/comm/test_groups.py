"""A group of ours: what it sends, and how long it waits."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from test.support.harness import run_processes, run_threads
from test.support.wrapper_tensor import wrapped
from zero_opt.comm.connecting import made_by_all
from zero_opt.comm.groups import Group, connect, tensor_bytes
from zero_opt.errors import UnsupportedParam

pytestmark = pytest.mark.usefixtures("no_launcher")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32, torch.bfloat16])
def test_bytes_of_a_tensor(dtype: torch.dtype) -> None:
    values = torch.tensor([1, 2, 3]).to(dtype)
    assert tensor_bytes(values) == bytes(values.view(torch.uint8).tolist())
    assert tensor_bytes(values[1:]) == bytes(values.view(torch.uint8).tolist())[dtype.itemsize :]
    assert tensor_bytes(torch.zeros(0)) == b""


@pytest.mark.parametrize("offset", [0, 1])
def test_a_tensor_that_wraps_others_has_no_bytes_to_read(offset: int) -> None:
    with pytest.raises(UnsupportedParam, match="a WrapperTensor has no memory of its own"):
        tensor_bytes(wrapped(5, offset=offset))


def _group(rank: int, world_size: int) -> list[object]:
    assert dist.group.WORLD is not None
    group = Group(dist.group.WORLD, 30, "test", connect(dist.group.WORLD, groups=1))
    assert (group.rank, group.world_size) == (rank, world_size)
    gathered = group.all_gather_bytes(b"x" * (rank * 3))
    tensors = [int(t) for t in group.all_gather(torch.tensor([rank * rank]))]
    value = torch.tensor([float(rank)])
    group.broadcast(value, 2)
    into = torch.full((4,), 10.0 + rank) if rank in (1, 2) else None
    work = group.move(into, 1, 2, 4, torch.float32)
    if work is not None:
        work.wait()
    group.close()
    group.close()
    group.interrupt()
    return [gathered, tensors, value.item(), None if into is None else into.tolist()]


def test_what_a_group_of_ours_does() -> None:
    results = run_threads(3, _group)
    for rank, (gathered, tensors, value, moved) in enumerate(results):
        assert gathered == [b"", b"xxx", b"xxxxxx"]
        assert tensors == [0, 1, 4]
        assert value == 2
        assert moved == (None if rank == 0 else [11.0] * 4)


def _timeouts(rank: int, world_size: int) -> list[float]:
    assert dist.group.WORLD is not None
    found = []
    for parent in (dist.group.WORLD, dist.new_group([0, 1], timeout=timedelta(seconds=55))):
        for timeout in (None, 7.5):
            connecting = connect(parent, groups=1)
            with nullcontext() if connecting is None else made_by_all(connecting):
                group = Group(parent, timeout, "test", connecting)
            found.append(group.timeout_s)
            group.close()
    return found


def test_the_timeout_is_the_groups_own_unless_one_is_given() -> None:
    assert run_processes(2, _timeouts, group_timeout=77) == [[77.0, 7.5, 55.0, 7.5]] * 2
    [found, _] = run_threads(2, _timeouts)  # its groups have none
    assert found[1] == 7.5 and found[0] == found[2] > 60


_THREADS_LEFT = """
import contextlib, gc, os, sys, weakref, torch, torch.distributed as dist
init = dict(init_method="file://{store}", rank=int(sys.argv[1]), world_size={ranks})
dist.init_process_group("gloo", **init)
import zero_opt  # after that, as torch's modules that have the default group among their default arguments
param = torch.nn.Parameter(torch.ones(3))
optimizer = zero_opt.ShardedOptimizer([param], torch.optim.AdamW, {given})
param.sum().backward()
optimizer.step()
kept, group = optimizer, weakref.ref(dist.group.WORLD)
{end}
from zero_opt.system.waiting import until
def of_gloo():
    count = 0
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has ended
            count += "gloo" in open(f"/proc/self/task/{{task}}/comm").read()
    return count
before = of_gloo()
dist.destroy_process_group()
gc.collect()
none_left = until(lambda: not of_gloo(), 600.0 if {ranks} == 1 else 0.0)  # one that is joined is listed for a moment
print(before, group() is None, none_left)
"""


@pytest.mark.parametrize(
    ("ranks", "given", "end"),
    [
        *product((1, 2), ["None"], ["", "optimizer.close()"]),
        (2, "dist.group.WORLD", ""),
        (2, "None", "zero_opt.sharded_state_dict(optimizer)"),
    ],
)
def test_the_user_s_group_ends_with_destroy_process_group(tmp_path: Path, ranks: int, given: str, end: str) -> None:
    """A thread of gloo that frees a tensor while the interpreter ends aborts the process."""
    code = _THREADS_LEFT.format(store=tmp_path / "store", ranks=ranks, given=given, end=end)
    run = partial(subprocess.run, capture_output=True, text=True, timeout=600)
    with ThreadPoolExecutor(ranks) as pool:
        done = list(pool.map(lambda rank: run([sys.executable, "-c", code, str(rank)]), range(ranks)))
    assert [process.returncode for process in done] == [0] * ranks, [process.stderr for process in done]
    for said in (process.stdout.split() for process in done):
        assert int(said[0]) > 0 and said[1] == "True", said
        assert ranks > 1 or said[2] == "True"  # else the optimizer's own groups have threads, which end at exit
