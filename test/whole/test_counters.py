"""Counters that had an end, or have one of torch's, in one process: every one is started just below it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.nn import Parameter

import zero_opt
from zero_opt.comm import agreement
from zero_opt.layout import ALIGN
from zero_opt.reduction import autograd_hooks
from zero_opt.sharding.flat_param import FlatParam, own_writes, share_counters

# torch counts steps in fp32, which has no 2^24 + 1.
LAST_STEP = 2.0**24
# Of 2^24 steps something is left to correct, and one step more would be seen.
BETAS = (1 - 2.0**-24, 1 - 2.0**-25)


def _step_size(lr: float, step: float) -> float:
    return torch.tensor(lr / (1 - BETAS[0] ** step), dtype=torch.float32).item()


LR = next(
    lr for lr in (0.01 + i / 1024 for i in range(64)) if _step_size(lr, LAST_STEP) != _step_size(lr, LAST_STEP + 1)
)


def _run(optimizer: Any, param: Parameter, first: float) -> tuple[torch.Tensor, Any]:
    """Four steps on from a count."""
    grad = torch.linspace(1, 3, param.numel())
    saved = optimizer.state_dict()
    saved["state"] = {0: {"step": torch.tensor(first), "exp_avg": grad / 2, "exp_avg_sq": grad.square() / 3}}
    optimizer.load_state_dict(saved)
    for _ in range(4):
        param.grad = grad.clone()
        optimizer.step()
    if hasattr(optimizer, "flush"):
        optimizer.flush()
    return param.detach().clone(), optimizer.state_dict()["state"][0]


OPTIMIZERS: dict[str, Any] = {
    "CPUAdamW": lambda p, _: zero_opt.CPUAdamW([p], lr=LR, betas=BETAS),
    **{
        name: lambda p, folder, policy=policy: zero_opt.ShardedOptimizer(
            [p], torch.optim.AdamW, lr=LR, betas=BETAS, fused=True, offload=policy(folder)
        )
        for name, policy in {
            "no offload": lambda _: None,
            "CPUOffload": lambda _: zero_opt.CPUOffload(),
            "WorkerOffload": lambda _: zero_opt.WorkerOffload(threads=1),
            "WorkerOffload, a step later": lambda _: zero_opt.WorkerOffload(delay=1, threads=1),
            "NVMeOffload": lambda folder: zero_opt.NVMeOffload(folder, threads=1),
        }.items()
    },
}


@pytest.mark.parametrize("first", [LAST_STEP - 2, LAST_STEP + 2])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_counting_steps_ends_where_torchs_does(kind: str, first: float, tmp_path: Path) -> None:
    mine, plain = (Parameter(torch.zeros(4 * ALIGN)) for _ in range(2))  # so that an ulp of a step is seen
    params, state = _run(OPTIMIZERS[kind](mine, tmp_path), mine, first)
    expected, theirs = _run(torch.optim.AdamW([plain], lr=LR, betas=BETAS, fused=True), plain, first)
    assert float(state["step"]) == float(theirs["step"]) == (LAST_STEP if first < LAST_STEP else LAST_STEP + 4)
    assert torch.equal(params, expected)
    assert torch.equal(state["exp_avg_sq"], theirs["exp_avg_sq"])


def _versions_at(params: list[torch.Tensor], version: int) -> None:
    torch._C._autograd._unsafe_set_version_counter(tuple(params), (version,) * len(params))


def test_a_version_counter_of_32_bits_may_wrap() -> None:
    base = torch.zeros(10)
    views = [base[:5].requires_grad_(), base[5:].requires_grad_(), torch.zeros(3, requires_grad=True)]
    _versions_at([base, views[2]], 2**32 - 1)
    flats = [FlatParam(view, f"view {i}") for i, view in enumerate(views)]
    share_counters([], flats)
    before = [flat.edits for flat in flats]
    _versions_at([base, views[2]], 2**32 - 1)
    for flat, edits in zip(flats, before, strict=True):
        flat._counter.own_writes += flat.edits - edits
    before = [flat.edits for flat in flats]
    with own_writes(flats[:1]):
        flats[0].flat.fill_(1.0)
    assert [flat.edits for flat in flats] == before, "a write of ours is no edit of what has the same counter"
    with torch.no_grad():
        views[0].fill_(2.0)
        views[2].fill_(2.0)
    assert all(flat.edits != edits for flat, edits in zip(flats, before, strict=True))


@pytest.mark.parametrize("outer", [100, 2**31 - 1, -2])
def test_autograds_numbers_of_backwards_may_wrap(outer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An int32: a reentrant checkpoint may have the lowest of all while what is around it has the highest."""
    now = {"task": outer, "inner": False}
    monkeypatch.setattr(autograd_hooks, "graph_task", lambda: now["task"])
    monkeypatch.setattr(autograd_hooks, "inside_function", lambda: now["inner"])
    engine = SimpleNamespace(queue_callback=lambda _: None)
    monkeypatch.setattr(torch.autograd.Variable, "_execution_engine", engine)
    passes = autograd_hooks.BackwardPasses(cast(autograd_hooks.ArrivalHooks, SimpleNamespace(missed=False)))

    def begins(number: int, *, inner: bool = False) -> bool:
        now.update(task=(number + 2**31) % 2**32 - 2**31, inner=inner)
        return passes.note_arrival()

    assert begins(outer - 2)
    assert not begins(outer + 1, inner=True), "which backward it is in is not known yet"
    assert not begins(outer), "it had started before"
    assert not begins(outer + 3, inner=True)
    assert begins(outer + 4)


@pytest.mark.parametrize("number", [2**20, 2**24, 2**32, 2**62])
def test_a_report_of_a_step_carries_any_number(number: int) -> None:
    report = agreement.StepReport(number, number, number, 5, 7, abandoned=number)
    assert agreement.StepReport.unpack(report.pack(1, failed=False), 1) == (report, False)
