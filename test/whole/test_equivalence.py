"""Sharded equals unsharded, to the bit: every class, every reduction, one to four ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import zero_opt
from test.support.harness import assert_bitwise, run_processes, run_threads
from test.support.lion import Lion
from test.support.scenario import AT_STEP, BUCKET_MB, OVERLAPPED, SHAPES, Case, case, expected, train

ALREADY = zero_opt.AlreadyReduced()
REDUCTIONS = (OVERLAPPED, AT_STEP, ALREADY)
WORLD_SIZES = (1, 2, 3, 4)


def elementwise(foreach: bool) -> list[Case]:
    """All elementwise classes, with options that make their state and arithmetic differ between groups."""
    optim = torch.optim
    return [
        case(optim.Adadelta, {"lr": 0.7, "rho": 0.8, "weight_decay": 0.01}, lr=0.5, foreach=foreach),
        case(optim.Adagrad, {"lr": 0.02, "lr_decay": 0.1, "maximize": True}, lr=0.05, foreach=foreach),
        case(optim.Adam, {"lr": 0.003, "betas": (0.8, 0.9), "amsgrad": True}, lr=0.01, foreach=foreach),
        case(optim.Adamax, {"lr": 0.02, "weight_decay": 0.1}, lr=0.01, foreach=foreach),
        case(optim.AdamW, {"lr": 0.02, "weight_decay": 0.3, "eps": 1e-4}, lr=0.01, foreach=foreach),
        case(optim.ASGD, {"lr": 0.02, "t0": 3, "lambd": 0.1}, lr=0.01, foreach=foreach),
        case(optim.NAdam, {"lr": 0.02, "decoupled_weight_decay": True, "weight_decay": 0.1}, lr=0.01, foreach=foreach),
        case(optim.RAdam, {"lr": 0.02, "betas": (0.7, 0.8)}, lr=0.01, foreach=foreach),
        case(optim.RMSprop, {"lr": 0.002, "centered": True}, lr=0.01, momentum=0.9, foreach=foreach),
        case(optim.Rprop, {"lr": 0.002, "etas": (0.4, 1.3)}, lr=0.01, foreach=foreach),
        case(optim.SGD, {"lr": 0.02, "nesterov": True}, lr=0.01, momentum=0.9, foreach=foreach),
        case(optim.SGD, {"lr": 0.02, "weight_decay": 0.1}, lr=0.01, foreach=foreach),
    ]


def native() -> list[Case]:
    """Elementwise classes of this package."""
    return [
        case(zero_opt.CPUAdam, {"lr": 0.003, "betas": (0.8, 0.9), "amsgrad": True}, lr=0.01),
        case(zero_opt.CPUAdamW, {"lr": 0.02, "weight_decay": 0.3, "eps": 1e-4}, lr=0.01),
    ]


def whole_params() -> list[Case]:
    """Classes whose parameters stay whole."""
    filled = tuple(shape for shape in SHAPES if 0 not in shape)  # torch's Adafactor divides by an empty one's numel
    matrices = ((20, 7), (64, 3), (5, 40), (16, 16), (1, 9), (8, 8), (33, 2))
    return [
        replace(case(torch.optim.Adafactor, {"lr": 0.02, "weight_decay": 0.1}, lr=0.01), shapes=filled),
        replace(case(torch.optim.Muon, {"lr": 0.02, "momentum": 0.8}, lr=0.01), shapes=matrices),
        case(Lion, {"lr": 0.02, "beta": 0.8}, lr=0.01),
    ]


def sparse() -> Case:
    """SparseAdam over tables with sparse gradients."""
    tables = ((20, 7), (64, 3), (5, 40), (16, 16), (9, 1), (8, 8), (33, 2))
    return Case(torch.optim.SparseAdam, (("lr", 0.01),), (("lr", 0.02),), tables, sparse=True)


@cache
def _expected(case: Case, world_size: int, at_step: bool) -> tuple[list[Tensor], dict[str, Any]]:
    return expected(case, world_size, AT_STEP if at_step else OVERLAPPED)


def _train_all(rank: int, world_size: int, cases: Sequence[Case], reductions: Sequence[Any]) -> list[Any]:
    return [train(what, rank, world_size, reduction) for what in cases for reduction in reductions]


def _check(runs: Sequence[list[Any]], cases: Sequence[Case], reductions: Sequence[Any]) -> None:
    """Every rank's parameters, and the state of the rank it was brought to, against the plain class."""
    for number, (what, reduction) in enumerate((what, reduction) for what in cases for reduction in reductions):
        params, state = _expected(what, len(runs), isinstance(reduction, zero_opt.AtStep))
        where = f"{what.cls.__name__} {dict(what.kwargs)} {reduction}, {len(runs)} ranks"
        states = [run[number][1] for run in runs if run[number][1] is not None]
        assert len(states) == 1
        assert_bitwise(states[0], state, f"{where}: state")
        for rank, run in enumerate(runs):
            assert_bitwise(run[number][0], params, f"{where}: rank {rank}")


# What more ranks change is the same with and without foreach.
@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("world_size", "foreach"), [*((world_size, False) for world_size in WORLD_SIZES), (1, True), (2, True)]
)
@pytest.mark.parametrize("reduction", REDUCTIONS, ids=lambda policy: type(policy).__name__)
def test_elementwise_classes(world_size: int, reduction: Any, foreach: bool) -> None:
    cases = [*elementwise(foreach), *native()]
    if world_size > 2:  # what more ranks change is the same for every class: three ranks take one half, four the other
        cases = cases[world_size % 2 :: 2]
    _check(run_threads(world_size, _train_all, cases, [reduction]), cases, [reduction])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("reduction", REDUCTIONS, ids=lambda policy: type(policy).__name__)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_classes_that_need_whole_params(world_size: int, reduction: Any) -> None:
    cases = whole_params()
    _check(run_threads(world_size, _train_all, cases, [reduction]), cases, [reduction])


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_sparse_gradients(world_size: int) -> None:
    cases, reductions = [sparse()], [AT_STEP, ALREADY]
    _check(run_threads(world_size, _train_all, cases, reductions), cases, reductions)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("exchange", ["auto", "backend"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_sample_in_real_processes(world_size: int, exchange: str) -> None:
    every = [*elementwise(False), *elementwise(True)]
    number = 2 * world_size + (exchange == "auto")
    dense = [*every[number::9], whole_params()[number % 3]]
    reductions = [
        zero_opt.Overlapped(BUCKET_MB, exchange=exchange),
        zero_opt.AtStep(BUCKET_MB, exchange=exchange),
        zero_opt.AlreadyReduced(exchange=exchange),
    ]
    _check(run_processes(world_size, _train_all, dense, reductions), dense, reductions)


@pytest.mark.parametrize("world_size", [2, 3])
def test_sparse_gradients_in_real_processes(world_size: int) -> None:
    cases, reductions = [sparse()], [AT_STEP, ALREADY]
    _check(run_processes(world_size, _train_all, cases, reductions), cases, reductions)
