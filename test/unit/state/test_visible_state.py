"""What a step asks of the state that users see."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import zero_opt
from zero_opt.placement.compact_state import PlainForm

OFFLOADS = {"cpu": zero_opt.CPUOffload(), "worker": zero_opt.WorkerOffload(threads=1)}


@pytest.mark.parametrize("offload", OFFLOADS)
def test_a_step_makes_no_compact_state_that_nobody_has_read(offload: str, monkeypatch: pytest.MonkeyPatch) -> None:
    params = [nn.Parameter(torch.ones(100)) for _ in range(3)]
    optimizer = zero_opt.ShardedOptimizer(
        params, zero_opt.CPUAdamW, state=zero_opt.AdamState("block8", "float32"), offload=OFFLOADS[offload]
    )
    asked: list[PlainForm] = []
    keys_of = PlainForm.__iter__

    def note(form: PlainForm) -> Iterator[str]:
        asked.append(form)
        return keys_of(form)

    monkeypatch.setattr(PlainForm, "__iter__", note)

    def step() -> int:
        before = len(asked)
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
        return len(asked) - before

    for _ in range(3):
        step()
    assert step() == 0
    optimizer.state[params[0]]["exp_avg"].mul_(2)
    assert step() > 0
    assert optimizer.state[params[0]]["exp_avg"].mean() > optimizer.state[params[1]]["exp_avg"].mean()
    optimizer.close()
