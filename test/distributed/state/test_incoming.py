"""State of which some ranks lack their part is an error, wherever it is brought together; never other memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zero_opt
from test.support.harness import run_processes
from test.support.stepped import take_step

NUMEL = 4096


def _drop(optimizer: Any, param: Tensor) -> None:
    del optimizer.state[param]


def _drop_key(optimizer: Any, param: Tensor) -> None:
    del optimizer.state[param]["exp_avg"]


def _add(optimizer: Any, param: Tensor) -> None:
    optimizer.state[param]["ema"] = torch.ones_like(optimizer.state[param]["exp_avg"])


EDITS: dict[str, tuple[Callable[[Any, Tensor], None], str, int]] = {  # with the key that is named, and who has it
    "dropped": (_drop, "exp_avg", 0),
    "key dropped": (_drop_key, "exp_avg", 0),
    "key added": (_add, "ema", 1),
}
CALLS: dict[str, Callable[[Any], Any]] = {
    "consolidated": lambda optimizer: optimizer.consolidate_state_dict(to=0),
    "elsewhere": lambda optimizer: optimizer.consolidate_state_dict(to=1),
    "rows": zero_opt.sharded_state_dict,
    "compact rows": lambda optimizer: zero_opt.sharded_state_dict(optimizer, compact=True),
}


def _edited(world_size: int, edit: str, rank: int) -> tuple[Any, Tensor]:
    """An optimizer of a parameter that all ranks own a part of, whose state rank 1 has edited; with that parameter."""
    param, unused = (nn.Parameter(torch.ones(numel)) for numel in (NUMEL, 1))
    optimizer = zero_opt.ShardedOptimizer([param, unused], torch.optim.AdamW, lr=0.1)
    param.sum().backward()
    optimizer.step()
    if rank == 1:
        EDITS[edit][0](optimizer, param)
    return optimizer, param


def _brought_together(rank: int, world_size: int, edit: str, call: str) -> str:
    optimizer, param = _edited(world_size, edit, rank)
    with pytest.raises(zero_opt.StateDictError) as caught:
        CALLS[call](optimizer)
    if edit == "dropped":
        if rank != 1:
            _drop(optimizer, param)
    elif rank == 1:  # as it was
        entry: Any = optimizer.state[param]
        entry.pop("ema", None)
        entry.setdefault("exp_avg", torch.full_like(entry["exp_avg_sq"], 0.1))
    CALLS[call](optimizer)
    optimizer.close()
    return str(caught.value)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_every_rank_hears_which_ranks_have_it(world_size: int, edit: str, call: str) -> None:
    told = {*run_processes(world_size, _brought_together, edit, call)}
    assert len(told) == 1
    _, key, has = EDITS[edit]
    message = told.pop()
    assert message.startswith(f"state {key!r} of parameter 0 (group 0, position 0) is not on all ranks")
    shares = dict.fromkeys(range(world_size))
    having = [rank for rank in shares if (rank == 1) == (has == 1)]
    assert [f"rank {rank} has " in message for rank in shares] == [rank in having for rank in shares]


def _pulled(rank: int, world_size: int, edit: str) -> str:
    optimizer, _ = _edited(world_size, edit, rank)
    message = ""
    if rank == 1:  # another rank has the edits after rank 1's next step
        with pytest.raises(zero_opt.StateDictError) as caught:
            optimizer.state_dict()
        message = str(caught.value)
    dist.barrier()
    optimizer.close()
    return message


@pytest.mark.parametrize("edit", EDITS)
def test_a_rank_that_asks_alone_hears_it(edit: str) -> None:
    first, message = run_processes(2, _pulled, edit)
    assert not first
    assert message.startswith(f"state {EDITS[edit][1]!r} of parameter 0 (group 0, position 0) is not on all ranks")


class Counting(torch.optim.Optimizer):
    """Momentum, with a step count of one element that has a dimension."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in (param for group in self.param_groups for param in group["params"] if param.grad is not None):
            state = self.state[param]
            if not state:
                state |= {"step": torch.zeros(1), "sum": torch.zeros_like(param)}
            state["step"] += 1
            state["sum"] += param.grad
            param.sub_(state["sum"], alpha=0.1)


def _counted(rank: int, world_size: int, numels: list[int]) -> Any:
    zero_opt.register_elementwise(Counting)
    params = [nn.Parameter(torch.ones(numel)) for numel in numels]
    optimizer = zero_opt.ShardedOptimizer(params, Counting)
    for _ in range(2):
        take_step(params, optimizer)
    alone = optimizer.state_dict()
    dist.barrier()
    optimizer.consolidate_state_dict(to=1)
    found = [alone, optimizer.state_dict()]
    dist.barrier()
    rows = zero_opt.sharded_state_dict(optimizer)["state"]
    steps = [rows[index]["step"] for index in range(len(numels))]
    optimizer.load_state_dict(alone)
    take_step(params, optimizer)
    found.append(optimizer.state_dict())
    dist.barrier()
    optimizer.close()
    return [[[state[index]["step"] for index in range(len(numels))] for state in (d["state"] for d in found)], steps]


@pytest.mark.parametrize("numels", [[65], [129], [1, 64], [65, 1, 300], [1]])
def test_a_count_with_a_dimension_is_no_slice_of_one_element(numels: list[int]) -> None:
    for (alone, consolidated, stepped), steps in run_processes(2, _counted, numels):
        for counts, number in ((alone, 2.0), (consolidated, 2.0), (stepped, 3.0)):
            assert [(count.shape, count.tolist()) for count in counts] == [((1,), [number])] * len(numels)
        assert [step.shape for step in steps] == [(1,)] * len(numels)
