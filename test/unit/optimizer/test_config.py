"""Which of two words says what masters there are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zero_opt
from test.support.harness import assert_bitwise
from zero_opt import AdamState, MixedPrecision


def _trained(**options: object) -> tuple[torch.Tensor, object]:
    param = nn.Parameter(torch.linspace(-1, 1, 200).bfloat16())
    optimizer = zero_opt.ShardedOptimizer([param], zero_opt.CPUAdamW, lr=0.1, **options)  # type: ignore[arg-type]
    for step in range(3):
        param.backward(torch.full_like(param, 1 + step))
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            with torch.no_grad():
                param[3:50].mul_(2)
    state = optimizer.state_dict()["state"]
    optimizer.close()
    return param.detach(), state


@pytest.mark.parametrize(("dtype", "master"), [(torch.float32, "float32"), ("split", "split")])
def test_master_dtype_of_a_class_that_has_state_is_an_alias(dtype: torch.dtype | str, master: str) -> None:
    expected = _trained(state=AdamState("block8", master))
    with pytest.warns(DeprecationWarning, match=rf"say state=AdamState\(moments='block8', master='{master}'\)"):
        found = _trained(state=AdamState("block8"), precision=MixedPrecision(dtype))
    assert_bitwise(found, expected)


def test_two_answers_are_a_conflict() -> None:
    param = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    with pytest.raises(zero_opt.ConfigConflict, match="two answers to one question"):
        zero_opt.ShardedOptimizer(
            [param], zero_opt.CPUAdamW, state=AdamState(master="split"), precision=MixedPrecision(torch.float32)
        )


def test_selective_keeps_fp32_state() -> None:
    offload = zero_opt.WorkerOffload(selective=zero_opt.Selective())
    with pytest.raises(
        zero_opt.ConfigConflict, match=r"Selective keeps fp32 moments and masters, not AdamState\(moments="
    ):
        zero_opt.ShardedOptimizer(
            [nn.Parameter(torch.ones(3, 3))], zero_opt.CPUAdamW, offload=offload, state=AdamState("block8")
        )


def test_only_bf16_masters_are_split() -> None:
    param = nn.Parameter(torch.ones(3, dtype=torch.float16))
    for offload in (None, zero_opt.CPUOffload(), zero_opt.WorkerOffload()):
        with pytest.raises(zero_opt.UnsupportedParam, match=r"float16.*bfloat16.*use state=.*master='float32'"):
            zero_opt.ShardedOptimizer([param], zero_opt.CPUAdamW, offload=offload, state=AdamState(master="split"))
