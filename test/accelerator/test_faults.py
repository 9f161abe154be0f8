"""Faults that zero_opt had on accelerators before anyone ran it on one, by the numbers that their review gave them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import zero_opt
from test.accelerator import C, enable, unavailable
from test.accelerator.runner import BACKEND, DEVICE, Plan, wrong_lines
from test.support.device_cases.places import on_host
from test.support.device_cases.training import BUCKET_MB
from test.support.failures import PATIENCE_S
from test.support.harness import assert_bitwise, run_processes

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))

LUCK = (None, 0, 1, 2)  # seeds of what no race shows
OFFLOADS = (None, zero_opt.CPUOffload(), zero_opt.WorkerOffload())


def _assert_right(world_size: int, places: str, *names: str, seeds: tuple[int | None, ...] = (0,)) -> None:
    """Fail unless cases have the bits of the CPU, and no race, at the places."""
    wrong = wrong_lines(world_size, Plan(names, seeds, places=places), timeout=PATIENCE_S)
    lines = [f"{name}: {line}" for name, found in wrong.items() for line in found]
    assert not lines, "\n".join(lines[:12])


_communicators: list[int] = []
COUNTED = f"cpu:gloo,{DEVICE}:simcounted"


def _counted(store: Any, rank: int, size: int, timeout: Any) -> Any:
    """Make a communicator, and count it."""
    enable()
    _communicators.append(size)
    return C.Comm(dist.ProcessGroupGloo(store, rank, size, timeout=timeout), rank, size)


if unavailable() is None:
    dist.Backend.register_backend("simcounted", _counted, devices=[DEVICE])


def _device(rank: int) -> torch.device:
    """Return the device of a rank, and begin to count communicators."""
    enable()
    _communicators.clear()
    device = torch.device(DEVICE, rank)
    torch.accelerator.set_device_index(rank)
    return device


def _made(device: torch.device, group: Any = None, **options: Any) -> tuple[list[Tensor], zero_opt.ShardedOptimizer]:
    """Make an optimizer over several buckets of fp32 parameters."""
    dtype = options.pop("dtype", torch.float32)
    params = [torch.nn.Parameter(torch.ones(numel, device=device, dtype=dtype)) for numel in (700, 64, 300, 200, 500)]
    arguments = {"reduction": zero_opt.Overlapped(BUCKET_MB), "lr": 0.25, **options}
    return list(params), zero_opt.ShardedOptimizer(params, torch.optim.SGD, group, foreach=False, **arguments)


def _backward(params: list[Tensor], value: float) -> None:
    torch.autograd.backward(params, [torch.full_like(param, value) for param in params])


# -- F1 to F6 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2])
def test_f1_buckets_on_streams_of_their_own_shared_a_staging_buffer(world_size: int) -> None:
    _assert_right(
        world_size,
        "alone|comm|relay",
        "accumulating each reduced, Overlapped",
        "accumulating in fp32, Overlapped",
        "accumulating bf16, summed in fp32, Overlapped",
    )


def test_f2_a_late_gather_did_not_wait_for_the_step_nor_the_forward_for_the_gather() -> None:
    _assert_right(2, "(comm|relay), a stream of its own", "gathered late, Overlapped", "gathered late, host, in parts")


def _asks_first(rank: int, world_size: int) -> Any:
    """Rank 0 asks for the state before it takes part in a collective that rank 1 has launched."""
    device = _device(rank)
    params, optimizer = _made(device, momentum=0.9)
    _backward(params, 1.0 + rank)
    optimizer.step()
    optimizer.zero_grad()
    mine = torch.ones(8, device=device)
    dist.barrier(group=dist.new_group(backend="gloo"))
    if rank == 0:
        state = optimizer.state_dict()["state"]
        dist.all_reduce(mine)
        answer = on_host([state, mine])
    else:
        dist.all_reduce(mine)
        answer = on_host([None, mine])
    optimizer.close()
    return answer


def test_f3_state_was_served_only_after_collectives_that_waited_for_who_asked() -> None:
    (state, mine), _ = run_processes(2, _asks_first, backend=BACKEND)
    assert_bitwise(mine, torch.full((8,), 2.0))
    assert_bitwise([float(entry["momentum_buffer"][0]) for entry in state.values()], [1.5] * 5)


@pytest.mark.parametrize(
    "name", ["failed backward", "failed everywhere", "failed and dropped", "a step after a failure"]
)
def test_f4_after_a_failed_backward_collectives_met_those_of_another_bucket(name: str) -> None:
    _assert_right(2, "comm(, a stream of its own)?", name)


def _fails_once(rank: int, world_size: int) -> tuple[list[Tensor], int]:
    """Train past a backward that fails on rank 1 alone; return the parameters, and how many communicators there are."""
    params, optimizer = _made(_device(rank))
    for _ in range(3):
        _backward(params, 1.0 + rank)
        optimizer.step()
        optimizer.zero_grad()
    if rank == 1:
        params[2].register_hook(_raise)
        with pytest.raises(ZeroDivisionError):
            _backward(params, 64.0)
        params[2]._backward_hooks.clear()
    else:
        _backward(params, 64.0)
    optimizer.zero_grad()
    _backward(params, 1.0 + rank)
    optimizer.step()
    values = on_host(params)
    optimizer.close()
    return values, len(_communicators)


def _raise(_: Tensor) -> None:
    raise ZeroDivisionError


def test_f4_the_reductions_that_a_failed_backward_has_left_are_those_of_a_communicator() -> None:
    for values, communicators in run_processes(2, _fails_once, backend=COUNTED):
        assert communicators == 1
        for value in values:
            assert_bitwise(value, torch.full_like(value, 1.0 - 4 * 0.25 * 1.5))


@pytest.mark.parametrize("place", ["comm, two devices", "relay, two devices"])
def test_f5_autograd_has_a_thread_per_device_and_hooks_had_no_lock(place: str) -> None:
    _assert_right(2, place, "accumulating each reduced, Overlapped", "masters, Overlapped, bfloat16", seeds=LUCK)


def _contexts(rank: int, world_size: int, offload: Any, late: bool) -> list[bool]:
    """Train on device 1 alone; return which devices the process has a context on."""
    device = _device(1)
    layers = torch.nn.ModuleList(torch.nn.Linear(24, 24) for _ in range(3)).to(device)
    reduction = zero_opt.Overlapped(BUCKET_MB, overlap_param_gather=layers if late else None)
    optimizer = zero_opt.ShardedOptimizer(
        layers.parameters(), torch.optim.AdamW, reduction=reduction, offload=offload, fused=True
    )
    for _ in range(3):
        value = torch.ones(4, 24, device=device)
        for layer in layers:
            value = layer(value)
        value.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.consolidate_state_dict()
    if rank == 0:
        optimizer.state_dict()
    optimizer.close()
    return list(C.contexts())


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("offload", OFFLOADS, ids=lambda offload: type(offload).__name__)
@pytest.mark.parametrize("backend", [BACKEND, "gloo"], ids=["comm", "relay"])
def test_f6_r12_a_rank_on_device_1_had_a_context_on_device_0(backend: str, offload: Any, late: bool) -> None:
    for contexts in run_processes(2, _contexts, offload, late, backend=backend):
        assert contexts == [False, True]


# -- found by reading -------------------------------------------------------------------------------------------------


def _closes_alone(rank: int, world_size: int) -> int:
    """Rank 0 launches what rank 1 never does, closes its optimizer, and lets go of another.

    Return how many communicators there were.
    """
    device = _device(rank)
    params, optimizer = _made(device)
    _, dropped = _made(device)
    _backward(params, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        _backward(params, 2.0)
        optimizer.close()
        del dropped
    dist.barrier(group=dist.new_group(backend="gloo"))
    if rank == 1:
        optimizer.close()
        dropped.close()
    return len(_communicators)


def test_r1_a_rank_that_closes_alone_waited_for_the_others() -> None:
    assert run_processes(2, _closes_alone, backend=COUNTED) == [2] * 2


def _large_mean(rank: int, world_size: int, reduction: Any) -> tuple[list[Tensor], int]:
    """Return the parameters after a step whose gradients' sum overflows, and how many communicators there are."""
    params, optimizer = _made(_device(rank), reduction=reduction, dtype=torch.float16, lr=2.0**-15)
    _backward(params, 49152.0)
    optimizer.step()
    values = on_host(params)
    optimizer.close()
    return values, len(_communicators)


@pytest.mark.parametrize(
    "reduction", [zero_opt.Overlapped(BUCKET_MB), zero_opt.AtStep(BUCKET_MB)], ids=["Overlapped", "AtStep"]
)
def test_r2_a_sum_in_fp16_overflowed_where_the_mean_did_not(reduction: Any) -> None:
    for values, communicators in run_processes(2, _large_mean, reduction, backend=COUNTED):
        assert communicators == 1
        for value in values:
            assert_bitwise(value, torch.full_like(value, -0.5))


def test_r3_complex_gradients_went_to_a_backend_that_knows_none() -> None:
    _assert_right(2, "comm(, a stream of its own)?", "complex", "complex, AtStep", "complex, gathered late")


class _Seen(TorchDispatchMode):
    """The operators that this thread calls, and those of autograd's threads in its backwards; of no other thread."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives = self.host_waits = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, options = func(*args, **(kwargs or {})), kwargs or {}
        name = func.overloadpacket.__name__
        self.collectives += func.namespace == "c10d" and name in ("_reduce_scatter_base_", "reduce_")
        reads = [arg.device.type for arg in args if isinstance(arg, Tensor)]
        to_host = isinstance(result, Tensor) and result.is_cpu and DEVICE in reads and name in ("copy_", "_to_copy")
        waits = to_host and not options.get("non_blocking", len(args) > 2 and args[2])
        self.host_waits += waits or (name == "_local_scalar_dense" and DEVICE in reads)
        return result


def _launched(rank: int, world_size: int) -> list[int]:
    """Return how many reductions each backward has launched on its own threads, once zero_grad() has its place."""
    params, optimizer = _made(_device(rank))
    counts = []
    for _ in range(4):
        with _Seen() as seen:
            _backward(params, 1.0)
        counts.append(seen.collectives)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    return counts[2:]


def test_r4_collectives_were_launched_by_a_thread_of_ours() -> None:
    for counts in run_processes(2, _launched, backend=BACKEND):
        assert min(counts) >= 3  # 700 and 500 elements are buckets of their own


def _host_waits(rank: int, world_size: int, count: int) -> int:
    """Return how often the host waits for the device in one step that clips, with so many parameters."""
    device = _device(rank)
    params = [torch.nn.Parameter(torch.ones(64, device=device)) for _ in range(count)]
    optimizer = zero_opt.ShardedOptimizer(
        params, torch.optim.SGD, lr=0.5, foreach=False, max_grad_norm=1.0, reduction=zero_opt.Overlapped(BUCKET_MB)
    )
    waits = 0
    for _ in range(3):
        _backward(list(params), 1.0)
        with _Seen() as seen:
            optimizer.step()
        waits = seen.host_waits
        optimizer.zero_grad()
    optimizer.close()
    return waits


def test_r9_the_norm_took_a_host_wait_per_slice() -> None:
    few = run_processes(2, _host_waits, 4, backend=BACKEND)
    many = run_processes(2, _host_waits, 40, backend=BACKEND)
    assert many == few
    assert 1 <= max(many) <= 2


def test_r10_a_work_was_waited_for_by_a_stream_that_did_not_read_its_result() -> None:
    _assert_right(2, "comm, a stream of its own", "uneven inputs, AlreadyReduced")


def test_r11_ranks_without_inputs_were_sent_device_tensors_over_gloo() -> None:
    _assert_right(2, "relay.*", "uneven inputs, AlreadyReduced", "uneven inputs, Overlapped")


def _communicators_of(rank: int, world_size: int) -> list[int]:
    """Return how many communicators there are beside the program's own, with one optimizer and with two."""
    device, made, counts = _device(rank), [], []
    for _ in range(2):
        params, optimizer = _made(device)
        _backward(params, 1.0)
        optimizer.step()
        made.append(optimizer)
        counts.append(len(_communicators))
    for optimizer in made:
        optimizer.close()
    return counts


def test_r13_an_optimizer_had_two_communicators() -> None:
    counted = run_processes(2, _communicators_of, backend=COUNTED)
    assert counted == [[1, 2]] * 2


def test_r15_gradients_in_memory_of_graphs_were_staged_after_the_next_replay() -> None:
    _assert_right(2, "comm.*|relay.*", "graphs are replayed")
    _assert_right(1, "alone.*", "graphs are replayed, host")


def _hook_on_a_stream(rank: int, world_size: int) -> tuple[list[str], list[Tensor]]:
    """Train on a stream that DDP was not made on; rank 1 does not use a parameter, so its bucket leaves in step()."""
    device = _device(rank)
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
    params = torch.nn.ParameterList(torch.nn.Parameter(torch.ones(64, device=device)) for _ in range(3))
    optimizer = zero_opt.ShardedOptimizer(
        params.parameters(), torch.optim.SGD, dist.group.WORLD, lr=0.25, foreach=False, reduction=zero_opt.DDPHook()
    )
    model = torch.nn.parallel.DistributedDataParallel(_SomeUsed(params), find_unused_parameters=True)
    model.register_comm_hook(optimizer, zero_opt.ddp_hook)
    C.delays(0, 300, 300, 1)
    outside, inside = torch.accelerator.current_stream(), torch.Stream(device)
    inside.wait_stream(outside)
    with inside:
        for _ in range(4):
            model(1 + rank).backward()
            optimizer.step()
            optimizer.zero_grad()
    C.synchronize()
    races, values = [str(race) for race in C.races()], on_host(list(params))
    optimizer.close()
    return races, values


class _SomeUsed(torch.nn.Module):
    """Half the squares of every parameter, or of every second one."""

    def __init__(self, params: torch.nn.ParameterList) -> None:
        super().__init__()
        self.params = params

    def forward(self, step: int) -> Tensor:
        """Return the sum."""
        return torch.stack([(param * param).sum() for param in list(self.params)[::step]]).sum() / 2


def test_gradients_that_leave_in_the_step_were_read_beside_what_ddp_writes_to_them() -> None:
    for races, values in run_processes(2, _hook_on_a_stream, backend=BACKEND):
        assert not races
        for value, kept in zip(values, (0.75, 0.875, 0.75), strict=True):
            assert_bitwise(value, torch.full((64,), kept**4))
