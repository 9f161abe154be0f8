"""What is left of a window that one rank has given up, where a collective of one rank is answered by another's next."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zero_opt
from test.accelerator import C, enable, unavailable
from test.accelerator.runner import BACKEND, DEVICE
from test.support.harness import run_processes

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))

NUMELS = (704, 320, 512)
BUCKET_MB = 2 / 1024


def _made(rank: int, **options: Any) -> tuple[list[Tensor], zero_opt.ShardedOptimizer]:
    """Make an optimizer over several buckets on a device of the rank's own."""
    enable()
    torch.accelerator.set_device_index(rank)
    params = [torch.nn.Parameter(torch.zeros(numel, device=torch.device(DEVICE, rank))) for numel in NUMELS]
    reduction = zero_opt.Overlapped(BUCKET_MB)
    return list(params), zero_opt.ShardedOptimizer(
        params, torch.optim.SGD, lr=1.0, foreach=False, reduction=reduction, **options
    )


def _backward(params: list[Tensor], value: float) -> None:
    torch.autograd.backward(params, [torch.full_like(param, value) for param in params])


def _values(params: list[Tensor]) -> set[float]:
    assert C.races() == []
    return {value for param in params for value in param.detach().cpu().tolist()}


def _fails_first(rank: int, world_size: int, steps: int) -> set[float]:
    """Rank 1 leaves a forward, so it has launched nothing; both drop the window with one zero_grad()."""
    params, optimizer = _made(rank)
    for _ in range(steps):
        _backward(params, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    if rank == 0:
        _backward(params, 100.0)
    optimizer.zero_grad()
    _backward(params, 4.0)
    optimizer.step()
    optimizer.close()
    return _values(params)


@pytest.mark.parametrize("steps", [0, 1, 2])
@pytest.mark.parametrize("backend", [BACKEND, "gloo"])
def test_a_window_of_one_rank_alone_leaves_nothing(backend: str, steps: int) -> None:
    assert run_processes(2, _fails_first, steps, backend=backend) == [{-4.0 - steps}] * 2


def _adds(rank: int, world_size: int, drops_first: bool) -> set[float]:
    """A group is added to after a backward of rank 0 alone, which both drop; two steps follow."""
    params, optimizer = _made(rank)
    _backward(params, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        _backward(params, 100.0)
    if drops_first:
        optimizer.zero_grad()
    params.append(torch.nn.Parameter(torch.full((640,), -1.0, device=torch.device(DEVICE, rank))))
    optimizer.add_param_group({"params": params[-1:]})
    if not drops_first:
        optimizer.zero_grad()
    for value in (4.0, 2.0):
        _backward(params, value)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    return _values(params)


@pytest.mark.parametrize("drops_first", [False, True])
@pytest.mark.parametrize("backend", [BACKEND, "gloo"])
def test_a_group_is_added_after_a_window_of_one_rank_alone(backend: str, drops_first: bool) -> None:
    assert run_processes(2, _adds, drops_first, backend=backend) == [{-7.0}] * 2


def _leaves(rank: int, world_size: int, offload: Any, again: bool) -> set[float]:
    """State leaves the device, for the second time, while collectives of a dropped window wait for the other rank's."""
    params, optimizer = _made(rank, offload=offload)
    for _ in range(2):
        _backward(params, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.offload_state()
    optimizer.reload_state()
    if rank == 0:
        _backward(params, 100.0)
    optimizer.zero_grad()
    if again:
        _backward(params, 4.0)
    optimizer.offload_state()
    mine = [torch.zeros(numel // world_size, device=param.device) for numel, param in zip(NUMELS, params, strict=True)]
    optimizer.reload_state()
    if not again:
        _backward(params, 4.0)
    optimizer.step()
    optimizer.close()
    assert _values(mine) == {0.0}
    return _values(params)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("offload", [None, zero_opt.CPUOffload()])
def test_state_leaves_after_a_window_of_one_rank_alone(offload: Any, again: bool) -> None:
    assert run_processes(2, _leaves, offload, again, backend=BACKEND) == [{-6.0}] * 2


def _drops_on_two_devices(rank: int, world_size: int) -> int:
    """Gradients are dropped by model.zero_grad(); autograd's thread of each device brings new ones."""
    enable()
    torch.accelerator.set_device_index(rank)
    devices = [torch.device(DEVICE, index) for index in range(2)]
    params = [torch.nn.Parameter(torch.ones(64, device=devices[index % 2])) for index in range(40)]
    optimizer = zero_opt.ShardedOptimizer(
        params, torch.optim.SGD, lr=0.25, foreach=False, reduction=zero_opt.Overlapped(BUCKET_MB)
    )
    steps = 40
    for step in range(steps):
        sums = [torch.zeros((), device=device) for device in devices]
        for index, param in enumerate(params):
            if (index + step + rank) % 4:  # some are unused on some ranks
                sums[index % 2] = sums[index % 2] + param.sum()
        (sums[0] + sums[1].to(devices[0])).backward()
        optimizer.step()
        for param in params:
            param.grad = None
    optimizer.close()
    assert C.races() == []
    return steps


def test_gradients_that_another_thread_has_brought_do_not_hide_a_drop() -> None:
    assert run_processes(2, _drops_on_two_devices, backend=BACKEND) == [40, 40]


def _leaves_alone(rank: int, world_size: int, skips: bool) -> set[float]:
    """State leaves, between a backward and a step, where the backward of rank 1 has reached nothing, or comes later."""
    params, optimizer = _made(rank)
    for _ in range(3):
        if rank == 0 or not skips:
            _backward(params, 1.0)
        dist.barrier(group=_host_group())
        if rank == 0:
            optimizer.offload_state()
            optimizer.reload_state()
        dist.barrier(group=_host_group())
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    return _values(params)


def _host_group() -> Any:
    return dist.new_group(backend="gloo")


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("backend", [BACKEND, "gloo"])
def test_state_leaves_on_one_rank_without_waiting_for_another(backend: str, skips: bool) -> None:
    expected = {-1.5 if skips else -3.0}
    assert run_processes(2, _leaves_alone, skips, backend=backend) == [expected] * 2


def _edits(rank: int, world_size: int, what: str, closes: bool, beside: bool) -> list[Tensor]:
    """Rank 1 reads the state that rank 0 has just edited, or edited and left by closing.

    Args:
        beside: the step runs on a stream of its own, and what is edited is edited on the default one.
    """
    enable()
    torch.accelerator.set_device_index(rank)
    param = torch.nn.Parameter(torch.ones(4096, device=torch.device(DEVICE, rank), dtype=torch.bfloat16))
    optimizer = zero_opt.ShardedOptimizer(
        [param],
        torch.optim.SGD,
        lr=0.5,
        momentum=0.5,
        foreach=False,
        precision=zero_opt.MixedPrecision(master_dtype=torch.float32),
    )
    stream, default = torch.Stream(param.device), torch.accelerator.current_stream()
    stream.wait_stream(default)
    with stream if beside else contextlib.nullcontext():
        param.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    default.wait_stream(stream)
    C.synchronize()
    C.delays(20000, 0, 0, 1)
    for _ in range(30):
        torch.ones(8, device=param.device).mul_(1)
    with torch.no_grad():
        (param if what == "master" else optimizer.state[param][what]).mul_(0.25)
    host = _host_group()
    if closes and rank == 0:
        optimizer.close()
    dist.barrier(group=host)
    found = [optimizer.state_dict()["state"][0][what]] if rank == 1 else []
    dist.barrier(group=host)
    optimizer.close()
    C.delays(0, 0, 0, 0)
    assert C.races() == []
    return found


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("closes", [False, True])
@pytest.mark.parametrize(("what", "expected"), [("master", 0.125), ("momentum_buffer", 0.25)])
def test_state_that_another_rank_reads_has_an_edit_of_its_owner(
    what: str, expected: float, closes: bool, beside: bool
) -> None:
    _, [value] = run_processes(2, _edits, what, closes, beside, backend=BACKEND)
    assert set(value.tolist()) == {expected}


def _accumulates(rank: int, world_size: int, ways: int) -> set[float]:
    """A gradient waits in no_sync(); the next is added on another stream, and the first stream goes on allocating."""
    enable()
    param = torch.nn.Parameter(torch.zeros(4096, device=torch.device(DEVICE, 0)))
    options: Any = {"offload": zero_opt.CPUOffload(), "lr": 1.0, "foreach": False}
    optimizer = zero_opt.ShardedOptimizer([param], torch.optim.SGD, **options)
    factor = torch.full_like(param, 2.0)
    (param * factor).sum().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    C.synchronize()
    first, second = torch.Stream(DEVICE), torch.Stream(DEVICE)
    with first, optimizer.no_sync():
        (param * factor).sum().backward()
    C.delays(0, 20000, 0, 3)
    second.wait_stream(first)
    with second, optimizer.no_sync():
        for _ in range(ways):
            factor.mul_(1)
        (param * factor).sum().backward()
    C.delays(0, 0, 0, 0)
    with first:
        kept = [torch.full_like(param, float("nan")) for _ in range(12)]
    C.synchronize()
    (param * factor).sum().backward()
    optimizer.step()
    C.synchronize()
    del kept
    optimizer.close()
    return _values([param])


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
def test_a_gradient_that_waits_is_not_freed_while_another_stream_reads_it() -> None:
    assert run_processes(1, _accumulates, 5, backend=None) == [{-8.0}]


def _moves(rank: int, world_size: int) -> None:
    enable()
    model = torch.nn.Linear(8, 8).to(DEVICE)
    optimizer = zero_opt.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, offload=zero_opt.CPUOffload())
    model(torch.ones(2, 8, device=DEVICE)).sum().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    grads = [param.grad for param in model.parameters()]
    assert model.to(torch.float32) is model
    assert all(param.grad is grad for param, grad in zip(model.parameters(), grads, strict=True))
    with pytest.raises(zero_opt.GradientConsumed):
        model.to(torch.float64)
    optimizer.close()


def test_a_model_moves_to_where_it_is_while_its_gradients_are_in_buckets() -> None:
    """module.to() asks whether each gradient's data can be replaced."""
    run_processes(1, _moves, backend=None)


def _rate_on_the_device(rank: int, world_size: int) -> None:
    """Stand-ins of parameters that lie on the other rank are stepped in host memory, with the same learning rate."""
    enable()
    torch.accelerator.set_device_index(rank)
    device = torch.device(DEVICE, rank)
    params = [torch.nn.Parameter(torch.ones(64, device=device)) for _ in range(8)]
    options: dict[str, Any] = {"lr": torch.tensor(0.5, device=device), "fused": True, "offload": zero_opt.CPUOffload()}
    optimizer = zero_opt.ShardedOptimizer(params, torch.optim.AdamW, **options)
    C.delays(300, 300, 300, 1)
    for _ in range(3):
        torch.stack([param.sum() for param in params]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    C.synchronize()
    C.delays(0, 0, 0, 0)
    optimizer.close()
    assert C.races() == []


def test_a_learning_rate_may_lie_on_the_device() -> None:
    run_processes(2, _rate_on_the_device, backend=BACKEND)
