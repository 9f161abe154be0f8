"""DistributedDataParallel over the same parameters is found, and looking for it harms nobody."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from test.support.failures import PATIENCE_S
from zero_opt import GradientConflict
from zero_opt.reduction.ddp_conflict import ddp_conflict


class Wrapper(DistributedDataParallel):
    """As a subclass of a framework, without a process group."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module
        self._comm_hooks: list[object] = []


class Slow(Wrapper):
    """Lets somebody else finish while it is looked at."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.looked_at, self.go_on = threading.Event(), threading.Event()

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        self.looked_at.set()
        assert self.go_on.wait(PATIENCE_S)
        return super().parameters(recurse)


def test_a_wrapper_of_a_class_below_is_found_until_it_is_gone() -> None:
    layer = nn.Linear(2, 2)
    assert ddp_conflict(layer.parameters()) is None
    wrapper = Wrapper(layer)
    assert isinstance(ddp_conflict([layer.weight]), GradientConflict)
    assert ddp_conflict([torch.ones(2)]) is None and ddp_conflict([]) is None
    wrapper._comm_hooks.append(object())
    assert ddp_conflict([layer.weight]) is None, "it leaves the reduction to its hook"
    wrapper._comm_hooks.clear()
    del wrapper
    assert ddp_conflict([layer.weight]) is None


def test_one_whose_construction_failed_reduces_nothing() -> None:
    half = Wrapper.__new__(Wrapper)
    assert ddp_conflict([torch.ones(2)]) is None
    del half


def test_what_other_threads_are_making_stays_theirs() -> None:
    """CPython cannot finish a tuple that somebody else refers to, as the list of all objects would."""
    wrapper = Slow(nn.Linear(2, 2))
    begun, made = threading.Event(), list[tuple[int, ...]]()

    def numbers() -> Iterator[int]:
        yield 0
        begun.set()
        assert wrapper.looked_at.wait(PATIENCE_S)
        yield 1

    def make() -> None:
        try:
            made.append(tuple(numbers()))
        finally:
            wrapper.go_on.set()

    thread = threading.Thread(target=make)
    thread.start()
    assert begun.wait(PATIENCE_S)
    assert ddp_conflict([torch.ones(2)]) is None
    thread.join(PATIENCE_S)
    assert made == [(0, 1)]
