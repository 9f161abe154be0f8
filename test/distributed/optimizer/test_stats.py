"""What ``stats()`` says of a step: its keys by configuration, and figures that are known."""

from __future__ import annotations

import math
import re
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_opt
from test.support.guides import DOCS
from test.support.harness import run_processes, run_threads

EXPOSED = {
    f"exposed/{phase}_s"
    for phase in ("agreement", "reduction", "norm", "update", "worker", "disk", "gather", "params", "other", "total")
}
ALWAYS = {"steps", "skipped_steps", "sent_bytes", "hidden/exchange_s", *EXPOSED}
NUMEL = 64 * 64 * 2
SENT_NBYTES = 2 * NUMEL // 2 * 4  # half of the gradients, and half of the parameters


def _model() -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator))
    return model


def make(model: nn.Module, **options: Any) -> zero_opt.ShardedOptimizer:
    return zero_opt.ShardedOptimizer(model.parameters(), torch.optim.AdamW, **options)


def _train(model: nn.Module, optimizer: zero_opt.ShardedOptimizer, rank: int, steps: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 64, generator=generator)).square().mean().backward()
        optimizer.step()


def _stats(rank: int, world_size: int, offload: Any, overlap: bool, steps: int = 3) -> dict[str, float]:
    model = _model()
    reduction = zero_opt.Overlapped(overlap_param_gather=model if overlap else None)
    options: dict[str, Any] = {"offload": offload, "reduction": reduction, "fused": True}
    with closing(make(model, **options)) as optimizer:
        assert optimizer.stats() == {"steps": 0.0, "skipped_steps": 0.0}
        _train(model, optimizer, rank, steps)
        found = optimizer.stats()
        found["again"] = float(found == optimizer.stats())
        optimizer.flush()
    return found


WORKER = {"worker/step_s", "worker/deaths", "hidden/worker_s"}
OF_OFFLOAD: dict[str, tuple[Any, set[str]]] = {
    "none": (None, set()),
    "cpu": (zero_opt.CPUOffload(), set()),
    "worker": (zero_opt.WorkerOffload(), WORKER),
    "late": (zero_opt.WorkerOffload(delay=1), WORKER),
    "drafts": (zero_opt.WorkerOffload(speculate=True), {*WORKER, "worker/drafts_kept", "worker/drafts_redone"}),
}


@pytest.mark.parametrize("overlap", [False, True], ids=["gathered", "overlapped"])
@pytest.mark.parametrize("kind", OF_OFFLOAD)
def test_the_keys_follow_from_the_policies(kind: str, overlap: bool) -> None:
    offload, keys = OF_OFFLOAD[kind]
    for found in run_processes(2, _stats, offload, overlap):
        assert found.pop("again")
        assert found.keys() == ALWAYS | keys
        assert all(type(value) is float and value >= 0 for value in found.values())
        assert found["steps"] == 3
        parts = [found[key] for key in EXPOSED - {"exposed/total_s"}]
        assert math.isclose(sum(parts), found["exposed/total_s"])
        if not overlap:  # else a gather is under way
            assert found["sent_bytes"] == SENT_NBYTES
        assert found["exposed/agreement_s"] > 0 < found["exposed/update_s"]
        if kind == "drafts":
            assert found["worker/drafts_kept"] + found["worker/drafts_redone"] > 0


@pytest.mark.parametrize("exchange", ["auto", "backend"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_bytes_are_those_that_others_have_of_a_rank(world_size: int, exchange: Any) -> None:
    def sent(rank: int, world_size: int) -> float:
        model = _model()
        reduction = zero_opt.Overlapped(exchange=exchange)
        with closing(make(model, reduction=reduction)) as optimizer:
            _train(model, optimizer, rank, 2)
            return optimizer.stats()["sent_bytes"]

    found = run_processes(world_size, sent)
    padded = -(-NUMEL // 64 // world_size) * 64 * world_size  # messages have no padding
    assert sum(found) == 2 * (world_size - 1) * (NUMEL if exchange == "backend" else padded) * 4


def _labels(rank: int, world_size: int, exchange: Any) -> dict[str, int]:
    """How many threads have each label in a trace of all threads."""
    config = torch.profiler._ExperimentalConfig(profile_all_threads=True)
    kinds = [torch.profiler.ProfilerActivity.CPU]
    model, threads = _model(), dict[str, set[int]]()
    with closing(make(model, reduction=zero_opt.Overlapped(0.01, exchange=exchange))) as optimizer:
        _train(model, optimizer, rank, 1)
        with torch.profiler.profile(activities=kinds, experimental_config=config) as profile:
            _train(model, optimizer, rank, 3)
    for event in profile.events() or ():
        if event.name.startswith("zero_opt::"):
            threads.setdefault(event.name, set()).add(event.thread)
    return {name: len(found) for name, found in threads.items()}


@pytest.mark.parametrize("exchange", ["auto", "backend"])
def test_a_trace_shows_reductions_on_the_exchange_thread_too(exchange: Any) -> None:
    for labels in run_processes(2, _labels, exchange):
        assert labels["zero_opt::reduction"] == 2 and labels["zero_opt::agreement"] == labels["zero_opt::update"] == 1


def test_the_file_is_read_and_written_once_a_step(tmp_path: Path) -> None:
    for found in run_threads(2, _stats, zero_opt.NVMeOffload(tmp_path), False):
        assert found["disk/read_bytes"] == found["disk/write_bytes"] >= NUMEL // 2 * 8
        assert found["disk/read_GB_per_s"] > 0 < found["disk/write_GB_per_s"]


def _clipped(rank: int, world_size: int, by_call: bool) -> tuple[dict[str, float], float, float]:
    model, limit = _model(), 0.5
    with closing(make(model, max_grad_norm=None if by_call else limit)) as optimizer:
        model(torch.ones(4, 64) * (1 + rank)).square().mean().backward()
        norm = float(optimizer.clip_grad_norm_(limit)) if by_call else 0.0
        optimizer.step()
        found = optimizer.stats()
        optimizer.zero_grad()
        (0.0 * model(torch.ones(4, 64)).sum()).backward()
        optimizer.step()
        return found, norm, optimizer.stats().get("grad_norm", -1.0)


def test_norm_and_factor_are_those_of_the_step() -> None:
    by_call, by_step = (run_threads(2, _clipped, by_call) for by_call in (True, False))
    for (called, norm, after), (stepped, *_, zero) in zip(by_call, by_step, strict=True):
        assert called["grad_norm"] == norm == stepped["grad_norm"] > 0.5
        assert called["clip_factor"] == stepped["clip_factor"] < 1
        assert after == -1.0  # not clipped
        assert zero == 0.0


def _skipped(rank: int, world_size: int) -> dict[str, float]:
    model = _model()
    checks = zero_opt.Checks(nonfinite="skip")
    with closing(make(model, checks=checks)) as optimizer:
        (math.inf * model(torch.ones(4, 64)).sum()).backward()
        optimizer.step()
        return optimizer.stats()


@pytest.mark.parametrize("world_size", [1, 2])
def test_skipped_steps_are_counted(world_size: int) -> None:
    for found in run_threads(world_size, _skipped):
        assert found["skipped_steps"] == 1
        assert found["steps"] == 0


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 1.0}], ids=["plain", "clipped"])
def test_a_rank_alone_has_its_counts(options: dict[str, Any]) -> None:
    model = _model()
    optimizer = make(model, **options)
    assert optimizer.stats() == {"steps": 0.0, "skipped_steps": 0.0}
    _train(model, optimizer, 0, 2)
    optimizer.step(lambda: None)
    assert optimizer.stats() == {"steps": 3.0, "skipped_steps": 0.0}


def _all_keys(rank: int, world_size: int, folder: Path) -> set[str]:
    found: set[str] = set()
    for offload in (zero_opt.WorkerOffload(speculate=True), zero_opt.NVMeOffload(folder)):
        model = _model()
        with closing(make(model, offload=offload, max_grad_norm=1.0)) as optimizer:
            _train(model, optimizer, rank, 1)
            found |= optimizer.stats().keys()
    return found


def test_the_guide_lists_every_key(tmp_path: Path) -> None:
    listed = {
        key
        for line in (DOCS / "observing.md").read_text().splitlines()
        if line.startswith("| `") and "`" in line
        for key in re.findall(r"`([a-zA-Z_/]+)`", line.split("|")[1])
    }
    (found,) = run_threads(1, _all_keys, tmp_path)
    assert found == {key for key in listed if not key.isupper()}


def _printed(rank: int, world_size: int, options: dict[str, Any]) -> str:
    with closing(make(_model(), **options)) as optimizer:
        assert repr(optimizer) == str(optimizer)
        text = repr(optimizer)
    assert repr(optimizer)
    return text


def test_what_is_printed() -> None:
    offload = zero_opt.WorkerOffload(threads=1)
    for rank, text in enumerate(run_processes(2, _printed, {"offload": offload})):
        kind, summary, held, *groups = text.splitlines()
        assert kind == "ShardedOptimizer ("
        assert summary.startswith(f"AdamW on rank {rank} of 2; Overlapped(")
        assert "through shared memory; " in summary
        assert summary.endswith(f"{offload}; 1 thread")
        assert "state" in held and held.count(";") == 2
        assert groups[0] == "Parameter Group 0"
    for text in run_processes(2, _printed, {"reduction": zero_opt.AtStep(exchange="backend")}):
        assert "; no offload" in text and "through messages" in text
    (alone,) = run_threads(1, _printed, {})
    plain = torch.optim.AdamW(_model().parameters())
    assert alone == repr(plain).replace("AdamW", "ShardedOptimizer", 1)  # where the wrapped class steps by itself
