"""CUDA graphs: a backward whose gradients are reduced at once cannot be captured; AtStep takes what a graph leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import zero_opt
from test.gpu.processes import NCCL, own_gpu, two_gpus
from test.support.device_cases.places import on_host
from test.support.harness import assert_bitwise, run_processes

BUCKET_MB = 2048 / 2**20
STEPS = 5
# Two ranks share a GPU over gloo; or each has its own, over NCCL.
BACKENDS = pytest.mark.parametrize("backend", ["gloo", pytest.param(NCCL, marks=two_gpus)])


class Model(torch.nn.Module):
    """Elementwise layers: they have the same bits in a graph and outside of one."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.layers = torch.nn.ParameterList(torch.ones(numel, device=device) for numel in (700, 64, 300, 200, 500))

    def forward(self, scale: Tensor) -> Tensor:
        """Return the loss."""
        terms = [(layer * layer * scale / 8 + layer * (1 + index)).sum() for index, layer in enumerate(self.layers)]
        return torch.stack(terms).sum()


def made(rank: int, backend: str, reduction: Any) -> tuple[Model, zero_opt.ShardedOptimizer, Tensor]:
    model = Model(own_gpu(0 if backend == "gloo" else rank))
    optimizer = zero_opt.ShardedOptimizer(
        model.parameters(), torch.optim.AdamW, reduction=reduction, lr=0.1, foreach=False
    )
    return model, optimizer, torch.zeros((), device=model.layers[0].device)


def warmed_up(call: Callable[[], object]) -> None:
    """Run a few times on another stream, as torch asks for before a capture."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)


def eager(rank: int, world_size: int, backend: str, reduction: Any) -> Any:
    """Train without a graph."""
    model, optimizer, scale = made(rank, backend, reduction)
    for step in range(STEPS):
        scale.fill_(1 + rank + step)
        model(scale).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = on_host(list(model.parameters()))
    optimizer.close()
    return found


def captured(rank: int, world_size: int, backend: str) -> Any:
    """Train with forward and backward in one graph, whose gradients stay where they are."""
    model, optimizer, scale = made(rank, backend, zero_opt.AtStep(BUCKET_MB))
    warmed_up(lambda: model(scale).backward())
    optimizer.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model(scale).backward()
    for step in range(STEPS):
        scale.fill_(1 + rank + step)
        graph.replay()
        optimizer.step()
    found = on_host(list(model.parameters()))
    optimizer.close()
    return found


@BACKENDS
def test_at_step_takes_the_gradients_of_a_captured_backward(backend: str) -> None:
    expected = run_processes(2, eager, backend, zero_opt.AtStep(BUCKET_MB), backend=backend)
    assert_bitwise(run_processes(2, captured, backend, backend=backend), expected)


def graphed_callable(rank: int, world_size: int, backend: str, reduction: Any) -> Any:
    """Train with a module whose forward and backward torch replays from two graphs."""
    model, optimizer, scale = made(rank, backend, reduction)
    graphed: Any = torch.cuda.make_graphed_callables(model, (scale.clone(),))
    for step in range(STEPS):
        scale.fill_(1 + rank + step)
        graphed(scale).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = on_host(list(model.parameters()))
    optimizer.close()
    return found


@BACKENDS
@pytest.mark.parametrize("reduction", [zero_opt.Overlapped(BUCKET_MB), zero_opt.AtStep(BUCKET_MB)], ids=repr)
def test_graphed_callables_are_reduced_outside_of_their_graphs(reduction: Any, backend: str) -> None:
    expected = run_processes(2, eager, backend, reduction, backend=backend)
    assert_bitwise(run_processes(2, graphed_callable, backend, reduction, backend=backend), expected)


def refused(rank: int, world_size: int, backend: str) -> Any:
    """Capture a backward that is reduced at once; then train as if nothing had been."""
    model, optimizer, scale = made(rank, backend, zero_opt.Overlapped(BUCKET_MB))
    warmed_up(lambda: [model(scale).backward(), optimizer.zero_grad()])
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        loss = model(scale)
        with pytest.raises(zero_opt.ConfigConflict, match="captur"):
            loss.backward()
    optimizer.zero_grad()
    scale.fill_(1 + rank)
    model(scale).backward()
    optimizer.step()
    found = on_host(list(model.parameters()))
    optimizer.close()
    return found


@BACKENDS
def test_capture_of_a_backward_that_is_reduced_is_refused(backend: str) -> None:
    first, second = run_processes(2, refused, backend, backend=backend)
    assert_bitwise(first, second)
