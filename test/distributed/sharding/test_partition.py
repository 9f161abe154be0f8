"""Parameters whose data changes after the plan was made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import zero_opt
from test.support.actors import Actor, plain_actor, rank_actor
from test.support.harness import assert_bitwise, run_threads
from test.support.scenario import AT_STEP, OVERLAPPED


def _change_before_backward(rank: int, world_size: int, data: Tensor) -> str:
    actor = rank_actor(rank)
    actor.params[1].data = data
    with pytest.raises(zero_opt.UnsupportedParam) as caught:
        actor.params[1].sum().backward()
    actor.optimizer.close()
    return str(caught.value)


@pytest.mark.parametrize(
    "data",
    [torch.ones(65).bfloat16(), torch.ones(64), torch.ones(5, 13)],
    ids=lambda data: f"{tuple(data.shape)} {data.dtype}",
)
def test_a_gradient_of_a_parameter_that_changed_is_refused_in_backward(data: Tensor) -> None:
    for message in run_threads(2, _change_before_backward, data):
        assert "parameter 1 " in message and "when the optimizer was made and is" in message


def _reorder(rank: int, world_size: int, reduction: Any, after_backward: bool) -> tuple[str, list[Tensor], Any]:
    """Change the order of one parameter's elements, and re-point another, legally; put it right; go on."""
    actor = rank_actor(rank, reduction)
    actor.backward(0, everyone=True)
    actor.optimizer.step()
    actor.optimizer.zero_grad()
    before = [param.detach().clone() for param in actor.params]
    if after_backward:
        actor.backward(1, everyone=True)
    if rank:  # one rank is enough to stop all
        actor.params[0].data = actor.params[0].data.t().contiguous().t()
    actor.params[7].data = actor.params[7].data.clone()
    if not after_backward:
        actor.backward(1, everyone=True)
    with pytest.raises(zero_opt.UnsupportedParam) as caught:
        actor.optimizer.step()
    assert_bitwise([param.detach() for param in actor.params], before)
    actor.params[0].data = actor.params[0].data.contiguous()
    actor.optimizer.zero_grad()

    def script(_: Actor) -> None:
        actor.backward(1, everyone=True)
        actor.optimizer.step()

    return str(caught.value), *actor.play(script)


@pytest.mark.parametrize("reduction", [OVERLAPPED, AT_STEP], ids=lambda policy: type(policy).__name__)
@pytest.mark.parametrize("after_backward", [False, True], ids=["before backward", "after backward"])
def test_a_parameter_whose_elements_were_reordered_is_named(reduction: Any, after_backward: bool) -> None:
    def script(actor: Actor) -> None:
        for number in range(2):
            actor.optimizer.zero_grad()
            actor.backward(number, everyone=True)
            actor.optimizer.step()

    expected, state = plain_actor(2, reduction).play(script)
    for rank, (message, found, found_state) in enumerate(run_threads(2, _reorder, reduction, after_backward)):
        assert "parameter 0 " in message and "(7, 1)" in message and "before constructing" in message
        assert_bitwise(found, expected)
        if rank == 0:
            assert_bitwise(found_state, state)
