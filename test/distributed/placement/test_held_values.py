"""Values of compact state that the user has read: what is written to them counts until the next step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_opt
from test.support.harness import assert_bitwise, run_processes
from test.support.offloads import FORMS, OFFLOADS

COMPACT = [name for name in FORMS if name != "fp32"]
PLACES = {"none": lambda _: None, **OFFLOADS}
CALLS: dict[str, Callable[[Any, list[nn.Parameter]], Any]] = {
    "state_dict": lambda opt, _: opt.state_dict(),
    "consolidate": lambda opt, _: opt.consolidate_state_dict(),
    "sharded": lambda opt, _: zero_opt.sharded_state_dict(opt),
    "compact": lambda opt, _: zero_opt.sharded_state_dict(opt, compact=True),
    "clip": lambda opt, _: opt.clip_grad_norm_(1e9),
    "flush": lambda opt, _: opt.flush(),
    "adopted": lambda opt, params: (opt.state[params[1]]["exp_avg"].mul_(2.0), opt.consolidate_state_dict()),
}


def _written_later(rank: int, world_size: int, place: str, form: str, call: str, folder: str) -> None:
    given: dict[str, Any] = {"lr": 1e-2, "state": FORMS[form]}
    ours, others = ([nn.Parameter(torch.ones(200)) for _ in range(2)] for _ in range(2))
    offload = PLACES[place](folder)
    optimizer, reference = (
        zero_opt.ShardedOptimizer(params, zero_opt.CPUAdamW, offload=offload, reduction=zero_opt.AtStep(), **given)
        for params in (ours, others)
    )
    for step in range(3):
        for params, stepped in ((ours, optimizer), (others, reference)):
            for number, param in enumerate(params):
                param.grad = torch.linspace(-1.0, 1.0 + number + step, 200)
            held = [stepped.state[param]["exp_avg"] for param in params] if step == 1 else []
            if step == 1 and stepped is optimizer:
                CALLS[call](stepped, params)
            for moments in held:
                moments.fill_(0.5)
            stepped.step()
            stepped.flush()
            stepped.zero_grad()
    assert_bitwise([param.detach() for param in ours], [param.detach() for param in others])
    optimizer.close()
    reference.close()


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("form", COMPACT)
@pytest.mark.parametrize("place", PLACES)
def test_what_is_written_after_a_call_counts(place: str, form: str, call: str, tmp_path: Path) -> None:
    run_processes(2, _written_later, place, form, call, str(tmp_path))


@pytest.mark.parametrize("form", FORMS)
def test_an_entry_takes_others_in_place(form: str) -> None:
    params = [nn.Parameter(torch.ones(200)) for _ in range(2)]
    optimizer = zero_opt.ShardedOptimizer(params, zero_opt.CPUAdamW, offload=zero_opt.CPUOffload(), state=FORMS[form])
    for param in params:
        param.grad = torch.ones(200)
    optimizer.step()
    entry, expected = optimizer.state[params[0]], torch.full((200,), 2.0)
    assert ({"other": 1} | entry).keys() == entry.keys() | {"other"}
    entry |= {"exp_avg": expected}
    optimizer.consolidate_state_dict()
    assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], expected)
    optimizer.close()


@pytest.mark.parametrize("form", COMPACT)
def test_a_value_shows_what_was_adopted_of_it(form: str) -> None:
    """As a value that is read anew does: an edit of one value rounds none that was adopted before again."""
    param = nn.Parameter(torch.ones(200))
    optimizer = zero_opt.ShardedOptimizer([param], zero_opt.CPUAdamW, offload=zero_opt.CPUOffload(), state=FORMS[form])
    param.grad = torch.linspace(-1.0, 1.0, 200)
    optimizer.step()
    held, squares = (optimizer.state[param][key] for key in ("exp_avg", "exp_avg_sq"))
    for factor in (0.37, 0.61):
        held.mul_(factor)
        squares.mul_(factor)
        optimizer.consolidate_state_dict()
        saved = optimizer.state_dict()["state"][0]
        assert_bitwise([held, squares], [saved["exp_avg"], saved["exp_avg_sq"]])
        assert optimizer.state[param]["exp_avg"] is held
    optimizer.close()
