"""The simulated accelerator itself: what it runs, what it refuses, and the races that it must name or must not."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from test import accelerator as sim
from test.accelerator import build
from test.accelerator.ranks import on_device, on_ranks
from test.support.rank_processes import run_processes

if sim.unavailable():
    pytest.skip(sim.unavailable() or "", allow_module_level=True)

SLOW_US = 20_000


def side_stream() -> Any:
    """Return a stream of the current device that comes after all that its current stream has."""
    stream = torch.Stream(torch.device("sim", sim.current_device()))
    stream.wait_stream(torch.accelerator.current_stream())
    return stream


def test_a_process_has_no_device_until_it_uses_one() -> None:
    def before_and_after(rank: int, size: int, use: Callable[[], object]) -> tuple[Any, ...]:
        before = torch.accelerator.device_count(), torch.accelerator.is_available()
        use()
        return *before, torch.accelerator.device_count(), torch.accelerator.is_available()

    uses: list[Callable[[], object]] = [sim.enable, lambda: sim.C.races()]
    for use in uses:
        assert run_processes(1, before_and_after, use, backend=None) == [(0, False, 2, True)]


def test_a_machine_without_a_compiler_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_BUILDS", tmp_path)
    monkeypatch.setattr(build, "_compiler", lambda: None)
    with pytest.raises(build.Unavailable, match="C\\+\\+ compiler"):
        build.load()


def test_what_does_not_compile_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_BUILDS", tmp_path)
    monkeypatch.setattr(build, "_FLAGS", ["-std=none"])
    for _ in range(2):
        with pytest.raises(build.Unavailable, match="does not compile with torch"):
            build.load()
    assert not list(tmp_path.rglob("*.so"))


def test_a_backward_before_the_fork_does_no_harm() -> None:
    nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()

    def backward() -> float:
        x = torch.ones(2, device="sim", requires_grad=True)
        (x * 3).sum().backward()
        assert x.grad is not None
        return x.grad.sum().item()

    assert on_device(backward) == 6


def test_a_forked_process_has_streams_of_its_own() -> None:
    def fork() -> int:
        kept = torch.ones(4, device="sim")
        event = torch.accelerator.current_stream().record_event()
        sim.synchronize()
        child = os.fork()
        if child == 0:
            signal.alarm(300)  # should it hang, nothing else ends it
            event.synchronize()
            os._exit(int((kept + 1).sum().item()) + len(sim.races()))
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert on_device(fork) == 8


def test_the_host_cannot_touch_device_memory() -> None:
    def touch(rank: int, size: int) -> None:
        faulthandler.disable()  # it is meant to die
        ctypes.string_at(torch.ones(4, device="sim").data_ptr(), 4)

    (failure,) = run_processes(1, touch, backend="cpu:gloo,sim:simcomm", expect_errors=True)
    assert failure.type_name == "Died" and "signal 11" in failure.message


def test_kernels_run_after_their_launch() -> None:
    def launch() -> tuple[bool, bool]:
        x = torch.zeros(4, device="sim")
        sim.delays(SLOW_US, SLOW_US, SLOW_US, 1)
        for _ in range(20):
            x.add_(1)
        event = torch.accelerator.current_stream().record_event()
        at_once = event.query()
        event.synchronize()
        return at_once, event.query() and x.tolist() == [20] * 4

    assert on_device(launch) == (False, True)


def test_delays_repeat_with_their_seed() -> None:
    def drawn() -> list[int]:
        totals: list[int] = []
        stream = torch.Stream("sim:0")
        for seed in (1, 1, 2):
            sim.delays(100, 100, 100, seed)
            before = sim.delayed()
            x = torch.zeros(4, device="sim")
            stream.wait_stream(torch.accelerator.current_stream())
            with stream:
                for _ in range(20):
                    x.add_(1)
            stream.synchronize()
            totals.append(sim.delayed() - before)
        return totals

    first, again, other = on_device(drawn)
    assert 0 < first == again != other


@pytest.mark.parametrize("waits", [False, True])
def test_a_missing_wait_is_named(waits: bool) -> None:
    def share() -> list[str]:
        x = torch.zeros(4, device="sim")
        stream = torch.Stream("sim:0")
        if waits:
            stream.wait_stream(torch.accelerator.current_stream())
        with stream:
            x.add_(1)
        torch.accelerator.synchronize()
        return sim.races()

    races = on_device(share)
    if waits:
        assert races == []
    else:
        assert "aten::zero_" in races[0] and "aten::add" in races[0] and "default stream of sim:0" in races[0]


@pytest.mark.parametrize("waits", [False, True])
def test_a_write_waits_for_reads(waits: bool) -> None:
    def overwrite() -> list[str]:
        x = torch.zeros(4, device="sim")
        stream = side_stream()
        with stream:
            y = x * 2
        if waits:
            torch.accelerator.current_stream().wait_stream(stream)
        x.copy_(torch.ones(4, device="sim"))
        del y
        return sim.races()

    races = on_device(overwrite)
    if waits:
        assert races == []
    else:
        assert "aten::mul" in races[0] and "reads" in races[0] and "copy_ on the default stream" in races[0]


def test_only_what_the_host_waited_for_is_ordered() -> None:
    def wait() -> tuple[list[str], list[str], list[str]]:
        x, y = torch.zeros(4, device="sim"), torch.zeros(4, device="sim")
        stream = torch.Stream("sim:0")
        torch.accelerator.synchronize()
        with stream:
            x.add_(1)
        ordered = sim.races()
        y.item() if y.dim() == 0 else y.cpu()  # a blocking copy orders its own stream alone
        x.add_(1)
        unordered = sim.races()
        with stream:
            x.add_(1)
        stream.synchronize()
        sim.races()
        x.add_(1)
        return ordered, unordered, sim.races()

    ordered, unordered, synchronized = on_device(wait)
    assert ordered == [] and synchronized == [] and unordered


def test_views_of_one_storage_race_where_they_overlap() -> None:
    def views() -> list[int]:
        x = torch.zeros(10, 10, device="sim")
        halves, columns = side_stream(), side_stream()
        with halves:
            x[:5].add_(1)
        x[5:].add_(1)
        counts = [len(sim.races())]
        torch.accelerator.synchronize()
        with columns:
            x[:, 3].add_(1)
        x[:, 4].add_(1)
        counts.append(len(sim.races()))
        x[:, 2:4].add_(1)
        counts.append(len(sim.races()))
        return counts

    disjoint_rows, disjoint_columns, shared_column = on_device(views)
    assert (disjoint_rows, disjoint_columns) == (0, 0) and shared_column > 0


@pytest.mark.parametrize("kept_by", ["nothing", "record_stream", "a wait"])
def test_memory_that_another_stream_uses_may_not_come_back(kept_by: str) -> None:
    def free() -> list[str]:
        x = torch.zeros(100, device="sim")
        stream = side_stream()
        with stream:
            y = x + 1
        if kept_by == "record_stream":
            x.record_stream(stream)
        del x
        if kept_by == "a wait":
            torch.accelerator.current_stream().wait_stream(stream)
        torch.zeros(5, device="sim")  # of another size: what matters is that it could be
        del y
        return sim.races()

    races = on_device(free)
    if kept_by == "nothing":
        assert "record_stream() was not called" in races[0]
    else:
        assert races == []


@pytest.mark.parametrize("waits", [False, True])
def test_the_host_sees_nan_until_it_waits_for_a_copy(waits: bool) -> None:
    def copy() -> tuple[float, list[str]]:
        host = torch.zeros(4)
        host.copy_(torch.ones(4, device="sim"), non_blocking=True)
        event = torch.accelerator.current_stream().record_event()
        time.sleep(0.05)  # the copy is over: that alone does not help
        if waits:
            event.synchronize()
        return float(host.numpy()[0]), (host.sum(), sim.races())[1]

    seen, races = on_device(copy)
    if waits:
        assert seen == 1 and races == []
    else:
        assert seen != seen and "aten::sum on the host reads" in races[0]


def test_a_later_kernel_sees_what_was_copied_to_the_host() -> None:
    def relay() -> tuple[list[float], list[str]]:
        host, back = torch.zeros(4), torch.zeros(4, device="sim")
        host.copy_(torch.ones(4, device="sim"), non_blocking=True)
        back.copy_(host, non_blocking=True)
        return back.tolist(), sim.races()

    assert on_device(relay) == ([1, 1, 1, 1], [])


@pytest.mark.parametrize("change", ["by numpy", "by an operator", "after a wait"])
def test_the_source_of_a_copy_may_not_change_under_it(change: str) -> None:
    def copy() -> list[str]:
        host, device = torch.zeros(4), torch.zeros(4, device="sim")
        device.copy_(host, non_blocking=True)
        if change == "after a wait":
            torch.accelerator.synchronize()
        host.add_(1) if change == "by an operator" else host.numpy().fill(2)
        torch.accelerator.synchronize()
        return sim.races()

    races = on_device(copy)
    assert (races == []) == (change == "after a wait")
    assert all("host memory" in race or "on the host writes" in race for race in races)


def test_copies_of_pageable_memory_do_not_overlap() -> None:
    def copy() -> list[Any]:
        seen = []
        for pinned in (None, False):
            sim.pinned(pinned)
            host, device = torch.zeros(4), torch.ones(4, device="sim")
            device.copy_(host, non_blocking=True)
            host.fill_(2)
            seen.append(host.copy_(device, non_blocking=True).tolist())
        sim.pinned(None)
        locked = torch.zeros(4, pin_memory=True)
        assert locked.is_pinned() and not host.is_pinned()
        locked.copy_(device, non_blocking=True)
        torch.accelerator.synchronize()
        device.copy_(locked, non_blocking=True)
        locked.fill_(2)
        return [*seen, len(sim.races())]

    assert on_device(copy) == [[0] * 4, [0] * 4, 1]


def test_copies_between_devices_are_ordered_on_both() -> None:
    def copy() -> tuple[Any, ...]:
        before = sim.contexts()
        source = torch.arange(4.0, device="sim:1")
        target = source.to("sim:0", non_blocking=True)
        source.add_(1)
        return before, sim.contexts(), (target * 2).tolist(), sim.races()

    assert on_device(copy) == ([False, False], [True, True], [0, 2, 4, 6], [])


def test_contexts_are_of_the_devices_used() -> None:
    def use(rank: int) -> list[bool]:
        model = nn.Linear(2, 2).to("sim")
        model(torch.ones(1, 2, device="sim")).sum().backward()
        dist.all_reduce(model.weight.grad)
        torch.accelerator.synchronize()
        return sim.contexts()

    assert on_ranks(use) == [[True, False], [False, True]]


def test_data_may_come_from_another_type_of_device() -> None:
    def swap() -> list[Any]:
        param = nn.Parameter(torch.ones(3, device="sim"))
        seen: list[Any] = []
        for device in ("cpu", "sim"):
            param.data = param.data.to(device)
            seen += [param.device.type, param.data.sum().item()]
        live = sim.live_bytes()
        param.data = torch.zeros(3)
        return [*seen, live > sim.live_bytes(), sim.races()]

    assert on_device(swap) == ["cpu", 3, "sim", 3, True, []]


def _trained(device: str, optimizer: type[torch.optim.Optimizer], dtype: torch.dtype, kwargs: Any) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 16), nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 20))
    model.to(device, dtype)
    opt = optimizer(model.parameters(), lr=0.1, **kwargs)  # type: ignore[call-arg]
    tokens, targets = torch.randint(0, 20, (8, 5)), torch.randint(0, 20, (40,))
    for _ in range(3):
        loss = F.cross_entropy(model(tokens.to(device)).view(40, 20), targets.to(device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
        opt.step()
        opt.zero_grad()
    return [param.detach().cpu() for param in model.parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("kind", ["foreach", "fused", "neither"])
def test_training_has_the_bits_of_the_cpu(dtype: torch.dtype, optimizer: Any, kind: str) -> None:
    kwargs = {"foreach": kind == "foreach", "fused": kind == "fused"}

    def both() -> tuple[bool, list[str]]:
        sim.delays(100, 100, 100, 1)
        ours, theirs = (_trained(device, optimizer, dtype, kwargs) for device in ("sim", "cpu"))
        return all(map(torch.equal, ours, theirs)), sim.races()

    assert on_device(both) == (True, [])


def test_autograd_follows_the_streams_of_the_forward() -> None:
    def backward() -> tuple[list[float], list[str]]:
        x = torch.ones(4, device="sim", requires_grad=True)
        stream = side_stream()
        with stream:
            y = (x * 2).square()
        torch.accelerator.current_stream().wait_stream(stream)
        y.record_stream(torch.accelerator.current_stream())
        sim.delays(1000, 1000, 1000, 3)
        y.sum().backward()
        assert x.grad is not None
        return x.grad.tolist(), sim.races()

    assert on_device(backward) == ([8] * 4, [])


def test_autograd_crosses_devices() -> None:
    def train(devices: tuple[str, str]) -> list[Tensor]:
        torch.manual_seed(0)
        first, second = nn.Linear(8, 8).to(devices[0]), nn.Linear(8, 8).to(devices[1])
        x = torch.randn(4, 8).to(devices[0])
        for _ in range(3):
            second(first(x).to(devices[1], non_blocking=True)).square().sum().backward()
        return [param.grad.cpu() for layer in (first, second) for param in layer.parameters() if param.grad is not None]

    def both() -> tuple[bool, list[str]]:
        sim.delays(500, 500, 500, 2)
        return all(map(torch.equal, train(("sim:0", "sim:1")), train(("cpu", "cpu")))), sim.races()

    assert on_device(both) == (True, [])


def test_mixed_precision() -> None:
    def scale() -> tuple[Any, ...]:
        param = nn.Parameter(torch.ones(3, device="sim"))
        opt = torch.optim.SGD([param], lr=1.0)
        scaler = torch.amp.GradScaler("sim", init_scale=4.0)
        for factor in (2.0, float("inf")):
            with torch.autocast("sim", dtype=torch.bfloat16):
                product = F.linear(param.view(1, 3), torch.ones(1, 3, device="sim"))
            scaler.scale((product.float() * factor).sum()).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
        return product.dtype == torch.bfloat16, param.tolist(), scaler.get_scale(), sim.races()

    assert on_device(scale) == (True, [-1] * 3, 2.0, [])


def test_sparse_gradients_have_the_bits_of_the_cpu() -> None:
    def train(device: str) -> Tensor:
        torch.manual_seed(0)
        table = nn.Embedding(6, 3, sparse=True).to(device)
        opt = torch.optim.SGD(table.parameters(), lr=0.5)
        for _ in range(2):
            opt.zero_grad()
            table(torch.tensor([1, 1, 4], device=device)).square().sum().backward()
            assert table.weight.grad is not None and table.weight.grad.is_sparse
            opt.step()
        return table.weight.detach().cpu()

    assert on_device(lambda: (torch.equal(train("sim"), train("cpu")), sim.races())) == (True, [])


def test_draws_are_those_of_the_cpu() -> None:
    def draw() -> bool:
        sim.delays(1000, 1000, 1000, 1)
        drawn = []
        for device in ("sim", "cpu"):
            torch.manual_seed(3)
            drawn.append(torch.cat([torch.randn(5, device=device), torch.rand(5, device=device)]).cpu())
        return torch.equal(*drawn)

    assert on_device(draw)


def test_a_failed_kernel_fails_all_that_comes_later() -> None:
    def fail() -> str:
        table, index = torch.zeros(3, 2, device="sim"), torch.tensor([7], device="sim")
        F.embedding(index, table)
        with pytest.raises(RuntimeError) as error:
            torch.accelerator.synchronize()
        return str(error.value)

    assert "a kernel failed" in on_device(fail)


def test_reports_have_labels_and_lines() -> None:
    def race() -> list[str]:
        sim.trace(True)
        x = torch.zeros(4, device="sim")
        sim.label("bucket 3")
        with torch.Stream("sim:0"):
            x.add_(1)
        return sim.races()

    (race_text,) = on_device(race)
    assert "[bucket 3]" in race_text and race_text.count("test_simulator.py:") == 2
