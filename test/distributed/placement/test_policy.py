"""What a placement refuses of this package's own classes: by the parameter's own number, and with advice that works."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
from torch import nn

import zero_opt
from zero_opt import AdamState

PLACES: dict[str, dict[str, Any]] = {
    "device": {"state": AdamState(master="float32")},
    "host": {"offload": zero_opt.CPUOffload()},
    "worker": {"offload": zero_opt.WorkerOffload(threads=1)},
    "file": {"offload": zero_opt.NVMeOffload(tempfile.gettempdir(), threads=1)},
}
TORCHS = {
    zero_opt.CPUAdam: torch.optim.Adam,
    zero_opt.CPUAdamW: torch.optim.AdamW,
    zero_opt.CPUSGD: torch.optim.SGD,
    zero_opt.CPUAdagrad: torch.optim.Adagrad,
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
@pytest.mark.parametrize("where", PLACES)
def test_a_class_is_named_that_takes_the_dtype(where: str, dtype: torch.dtype) -> None:
    for cls, other in TORCHS.items():
        optimizer = zero_opt.ShardedOptimizer([nn.Parameter(torch.ones(9))], cls, lr=0.1, **PLACES[where])
        param = nn.Parameter(torch.ones(5, dtype=dtype))
        with pytest.raises(zero_opt.UnsupportedParam) as caught:
            optimizer.add_param_group({"params": [param]})
        optimizer.close()
        said = str(caught.value)
        assert said.startswith("parameter 1 (group 1, position 0) ")
        assert f"{dtype}; " in said
        _, advice = said.rsplit("; use ", 1)
        assert advice.removesuffix(" with offload=None") == f"torch.optim.{other.__name__}"
        offload = PLACES[where].get("offload") if advice.endswith(other.__name__) else None
        followed = zero_opt.ShardedOptimizer([param], other, lr=0.1, offload=offload)
        param.abs().sum().backward()
        followed.step()
        assert bool((param.detach() != 1).all())
        followed.close()


@pytest.mark.parametrize("option", [{"state": AdamState("block8")}, {"threads": 1}, {"flush_denormals": True}], ids=str)
@pytest.mark.parametrize("where", PLACES)
def test_an_added_group_is_named_by_its_number(where: str, option: dict[str, Any]) -> None:
    (name,) = option
    options: dict[str, Any] = {"lr": 0.1, **PLACES[where]}
    optimizer = zero_opt.ShardedOptimizer([nn.Parameter(torch.ones(9))], zero_opt.CPUAdamW, **options)
    with pytest.raises(zero_opt.ConfigError, match=f"param group 1 has '{name}'"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(5))], **option})
    assert len(optimizer.param_groups) == 1
    optimizer.close()


def test_lion_is_left_for_any_class_of_torch() -> None:
    params = [nn.Parameter(torch.ones(5, dtype=torch.float64))]
    with pytest.raises(zero_opt.UnsupportedParam, match=r"torch.float64; use a class of torch\.optim$"):
        zero_opt.ShardedOptimizer(params, zero_opt.CPULion, offload=zero_opt.CPUOffload())


def test_what_is_frozen_may_have_any_dtype() -> None:
    params = [nn.Parameter(torch.ones(9)), nn.Parameter(torch.ones(3, dtype=torch.int64), requires_grad=False)]
    optimizer = zero_opt.ShardedOptimizer(params, zero_opt.CPUAdamW, lr=0.1, offload=zero_opt.CPUOffload())
    params[0].sum().backward()
    optimizer.step()
    assert bool((params[0].detach() < 1).all())
    optimizer.close()
