"""With how many threads offloaded state is stepped in this process, under a launcher that sets OMP_NUM_THREADS=1."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_opt
from test.support.harness import assert_bitwise, run_processes, run_threads
from zero_opt import _native
from zero_opt.kernels import threads

NUMEL = 200_003
CORES = 8


class NotedSGD(torch.optim.SGD):
    """SGD that notes how many threads torch has in its steps."""

    def step(self, closure: Any = None) -> Any:
        if any(param.numel() > 1000 for group in self.param_groups for param in group["params"]):  # not a trial
            _noted.append(torch.get_num_threads())
        return super().step(closure)


zero_opt.register_elementwise(NotedSGD)
_noted: list[int] = []


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _on_eight_cores(monkeypatch: pytest.MonkeyPatch, mine: set[int] | None = None) -> None:
    """Let this rank believe that its host has eight cores, of which it may use some."""
    cores = set(range(CORES)) if mine is None else mine
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores)
    monkeypatch.setattr(threads, "allowed_threads", lambda count: min(count, len(cores)))
    threads._sharers_of.cache_clear()
    monkeypatch.setattr(threads, "_most_sharers", 1)  # whoever other tests have met in this process


def _note_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = _native.update_step

    def noted(*args: Any, threads: int, **options: Any) -> int:
        _noted.append(threads)
        return kernel(*args, threads=threads, **options)

    monkeypatch.setattr(_native, "update_step", noted)


def _train(
    rank: int,
    world_size: int,
    cls: type[torch.optim.Optimizer],
    options: dict[str, Any],
    halves: list[set[int]] | None = None,
) -> Any:
    """Thread counts in two steps, what was logged of them, torch's own count after, and the parameters."""
    lines = _Lines()
    logger = logging.getLogger("zero_opt")
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    with pytest.MonkeyPatch.context() as monkeypatch:
        _on_eight_cores(monkeypatch, None if halves is None else halves[rank])
        _note_kernel(monkeypatch)
        params = [nn.Parameter(torch.linspace(-1, 1, NUMEL)), nn.Parameter(torch.linspace(0, 1, 70_001))]
        optimizer = zero_opt.ShardedOptimizer(params, cls, **options)
        _noted.clear()
        for step in range(2):
            for param in params:
                param.grad = torch.sin(param.detach() * (step + 1))
            optimizer.step()
        optimizer.flush()
        found = [line for line in lines.lines if "steps with" in line]
        result = sorted(set(_noted)), found, torch.get_num_threads(), [param.detach().clone() for param in params]
        optimizer.close()
    return result


def _counts(world_size: int, cls: type[torch.optim.Optimizer], halves: Any = None, **options: Any) -> Any:
    options = {"reduction": zero_opt.AtStep(), **options}
    runs = run_processes(world_size, _train, cls, options, halves)
    assert all(own == 1 for _, _, own, _ in runs), "torch's threads are as they were"
    return runs


def _offloads(folder: Path, **options: Any) -> dict[str, dict[str, Any]]:
    columns = zero_opt.Selective(0.5, update_interval=1)
    return {
        "CPUOffload, kernel": {"cls": torch.optim.AdamW, "fused": True, "offload": zero_opt.CPUOffload(**options)},
        "CPUOffload, class": {"cls": NotedSGD, "lr": 0.1, "offload": zero_opt.CPUOffload(**options)},
        "NVMeOffload": {"cls": torch.optim.AdamW, "fused": True, "offload": zero_opt.NVMeOffload(folder, **options)},
        "Selective": {
            "cls": torch.optim.AdamW,
            "fused": True,
            "offload": zero_opt.CPUOffload(selective=columns, **options),
        },
    }


KINDS = list(_offloads(Path("/")))


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_divide_the_cores_that_they_share(kind: str, tmp_path: Path) -> None:
    for world_size in (1, 2):
        name = kind.split(",")[0].replace("Selective", "CPUOffload")
        for rank, (counts, lines, _, _) in enumerate(_counts(world_size, **_offloads(tmp_path)[kind])):
            assert counts == [CORES // world_size]
            shared = f", which {world_size} ranks share" if world_size > 1 else ""
            assert lines == [f"rank {rank}: {name} steps with {counts[0]} threads on 8 cores{shared}"]


def test_ranks_that_are_bound_to_cores_of_their_own_use_them() -> None:
    halves = [{0, 1, 2}, {3, 4, 5, 6, 7}]
    runs = _counts(2, torch.optim.AdamW, halves, fused=True, offload=zero_opt.CPUOffload())
    assert [counts for counts, *_ in runs] == [[3], [5]]


@pytest.mark.parametrize("kind", KINDS)
def test_the_user_says_how_many_and_no_bit_depends_on_it(kind: str, tmp_path: Path) -> None:
    """Of the tensors' lengths none is a multiple of what threads take at a time."""
    found = []
    for count in (1, 3):
        (counts, lines, _, params), _ = _counts(2, **_offloads(tmp_path, threads=count)[kind])
        assert counts == [count]
        assert f"steps with {count} threads" in lines[0]
        found.append(params)
    assert_bitwise(found[0], found[1])


@pytest.mark.parametrize("kind", ["CPUOffload", "NVMeOffload"])
def test_what_the_class_is_given_holds_unless_the_policy_says(kind: str, tmp_path: Path) -> None:
    nvme = kind == "NVMeOffload"
    options: dict[str, Any]
    for options, expected in (({}, 3), ({"threads": 2}, 2)):
        offload: Any = zero_opt.NVMeOffload(tmp_path, **options) if nvme else zero_opt.CPUOffload(**options)
        ((counts, *_),) = _counts(1, zero_opt.CPUAdamW, threads=3, offload=offload)
        assert counts == [expected]


def test_ranks_that_are_threads_divide_the_cores_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_most_sharers", 1)
    options = {"fused": True, "reduction": zero_opt.AtStep(), "offload": zero_opt.CPUOffload()}
    assert run_threads(2, _meets, options) == [2, 2]


def _meets(rank: int, world_size: int, options: dict[str, Any]) -> int:
    optimizer = zero_opt.ShardedOptimizer([nn.Parameter(torch.ones(300))], torch.optim.AdamW, **options)
    optimizer.close()
    return threads._most_sharers
