"""Compact state of parameters in any layout, from tensors in any order of memory, on a rank alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter

import zero_opt
from test.support.compact_training import FORMS
from test.support.harness import assert_bitwise

shapes = st.lists(st.sampled_from((1, 1, 2, 5, 13, 70)), max_size=3).map(tuple)


def _in_order(value: Tensor, order: list[int]) -> Tensor:
    """A tensor with these values, whose dimensions lie in memory in this order."""
    back = [order.index(dim) for dim in range(len(order))]
    return value.permute(order).contiguous().permute(back)


def _gradient(values: Tensor) -> Tensor:
    """Numbers whose blocks have bases of their own, and others in another order."""
    scales = 0.5 ** (torch.arange(values.numel()) // 40 % 19)
    return torch.sin(values * 9) * scales.view(values.shape)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Tensor, list[int]]:
    """Values in any order of dimensions, with or without gaps, and another order."""
    shape = draw(shapes)
    steps = [draw(st.sampled_from((1, 1, 2))) for _ in shape]
    orders = [list(draw(st.permutations(range(len(shape))))) for _ in range(2)]
    spaced = [size * step for size, step in zip(shape, steps, strict=True)]
    base = _in_order(torch.randn(spaced, generator=torch.Generator().manual_seed(len(shape))), orders[0])
    return base[tuple(slice(None, None, step) for step in steps)], orders[1]


@pytest.mark.parametrize("offload", [None, zero_opt.CPUOffload(threads=1)], ids=["device", "cpu"])
@pytest.mark.parametrize("name", FORMS)
@given(layout=layouts())
@example(layout=(torch.arange(5200.0).view(65, 80)[:, ::2].t(), [1, 0]))
@example(layout=(torch.arange(4.0)[::4], [0]))
@settings(max_examples=25)
def test_tensors_in_any_order_of_memory_are_what_was_saved(
    name: str, offload: Any, layout: tuple[Tensor, list[int]]
) -> None:
    values, other = layout
    params = [Parameter(torch.empty_strided(values.shape, values.stride(), dtype=FORMS[name].dtype)) for _ in range(2)]
    with torch.no_grad():
        params[0].copy_(values), params[1].copy_(values)
    optimizer = zero_opt.ShardedOptimizer(params[:1], zero_opt.CPUAdamW, offload=offload, state=FORMS[name].state)
    plain = zero_opt.CPUAdamW(params[1:], state=FORMS[name].state)
    for param in params:
        param.grad = _gradient(values).to(param.dtype)
    optimizer.step()
    plain.step()
    before = copy.deepcopy(optimizer.state_dict()["state"])
    assert_bitwise(before, plain.state_dict()["state"])
    saved = zero_opt.sharded_state_dict(optimizer, compact=True)
    for key, value in saved["state"][0].items():
        if value.shape == values.shape:
            saved["state"][0][key] = _in_order(value, other)
    zero_opt.load_sharded_state_dict(optimizer, saved)
    assert_bitwise(optimizer.state_dict()["state"], before)
    optimizer.close()
