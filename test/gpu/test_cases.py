"""Every case of test/accelerator on GPUs; what its result is compared with is in :mod:`test.gpu.places`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from test.gpu.places import CPU, KINDS, Kind, bits_of_the_cpu, far, run_cases, tolerance
from test.support.device_cases.cases import CASES, GROUPS
from test.support.harness import bitwise_difference, run_processes

# How many cases share forked ranks: CUDA and NCCL take seconds to start.
CHUNK = 16
SECONDS = 500  # nothing hangs
BLOCKING = "CUDA_LAUNCH_BLOCKING"
SANITIZED = "TORCH_CUDA_SANITIZER" in os.environ


@dataclass(frozen=True)
class Chunk:
    """Cases of one group that the same ranks run."""

    kind: Kind
    names: tuple[str, ...]

    def __str__(self) -> str:
        """Return what the test is called."""
        return f"{self.kind.name}: {self.names[0]} ..."


def chunks() -> Iterator[Any]:
    """Cut the groups of cases, for every kind of run."""
    count = torch.cuda.device_count()
    for kind in KINDS:
        few = pytest.mark.skipif(count < kind.gpus, reason=f"{kind.name} needs {kind.gpus} GPUs, here are {count}")
        for cases in GROUPS.values():
            fit = [case for case in cases if kind.world_size in case.world_sizes and (kind.direct or case.relayed)]
            names = [case.name for case in fit]
            for start in range(0, len(names), CHUNK):
                yield pytest.param(Chunk(kind, tuple(names[start : start + CHUNK])), marks=few)


def results(chunk: Chunk) -> list[Any]:
    """Run a chunk on forked ranks; return, by rank, case and place, what came of it."""
    kind = chunk.kind
    return run_processes(kind.world_size, run_cases, kind, chunk.names, backend=kind.backend, timeout=SECONDS)


def wrong(name: str, found: Sequence[Any], expected: Sequence[Any]) -> Iterator[str]:
    """Yield what is wrong with a case's results; ``expected`` comes from runs that waited for each kernel."""
    case = CASES[name]
    for rank, at in enumerate(result[name] for result in found):
        for place, value in at.items():
            lines = [
                f"not as with {BLOCKING}: {line}" for line in bitwise_difference(value, expected[rank][name][place])
            ]
            if bits_of_the_cpu(case):
                lines += [f"not as on the CPU: {line}" for line in bitwise_difference(value, at[CPU])]
            else:
                lines += [f"far from the CPU: {line}" for line in far(value, at[CPU], tolerance(case))]
            yield from (f"rank {rank}, {place}: {line}" for line in lines)


@pytest.mark.parametrize("chunk", list(chunks()), ids=str)
def test_the_bits_of_the_cpu_or_of_blocking_launches(
    chunk: Chunk, subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # the same products on every stream
    found = results(chunk)
    if SANITIZED:
        return  # the sanitizer raises errors of its own
    monkeypatch.setenv(BLOCKING, "1")
    expected = results(chunk)
    for name in chunk.names:
        with subtests.test(msg=name):
            lines = list(wrong(name, found, expected))
            assert not lines, "\n".join(lines[:12])
