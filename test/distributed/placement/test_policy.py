"""What a placement refuses of this package's own classes: by the parameter's own number, and with advice that works."""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import zero_opt
from test.support.harness import assert_bitwise, run_processes
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


FROZEN_AT: dict[str, dict[str, Any]] = {
    "alone": {},
    **{where: options for where, options in PLACES.items() if where != "device"},
    "selective": {"offload": zero_opt.CPUOffload(selective=zero_opt.Selective())},
}
CLASSES = (zero_opt.CPUAdamW, zero_opt.CPUAdagrad, torch.optim.AdamW, torch.optim.Adagrad)


def _with_frozen(
    rank: int, world_size: int, cls: type[torch.optim.Optimizer], options: dict[str, Any], dtypes: list[torch.dtype]
) -> Any:
    """Train beside frozen parameters of these dtypes, and take, load and train again."""
    torch.manual_seed(0)
    frozen = [nn.Parameter(torch.ones(3, 5).to(dtype), requires_grad=False) for dtype in dtypes]
    param = nn.Parameter(torch.randn(6, 4))
    optimizer = zero_opt.ShardedOptimizer([*frozen, param], cls, lr=0.1, **options)
    for dtype in dtypes:
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(5).to(dtype), requires_grad=False)]})
    for _ in range(2):
        (param.square().sum() * (1 + rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.load_state_dict(optimizer.state_dict())
    assert all(bool((each == 1).all()) for each in frozen)
    optimizer.close()
    return param.detach()


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("where", FROZEN_AT)
def test_what_is_frozen_may_have_any_dtype(where: str, world_size: int) -> None:
    dtypes = [torch.int8, torch.float64, torch.bool, torch.bfloat16, torch.complex64]
    for cls in CLASSES if where != "selective" else (zero_opt.CPUAdamW, torch.optim.AdamW):
        beside, without = (run_processes(world_size, _with_frozen, cls, FROZEN_AT[where], of) for of in (dtypes, []))
        assert_bitwise(beside, without, cls.__name__)


def _thawed(rank: int, world_size: int, cls: type[torch.optim.Optimizer], options: dict[str, Any]) -> None:
    base, param = nn.Parameter(torch.ones(4, dtype=torch.float64), requires_grad=False), nn.Parameter(torch.ones(6))
    twin = nn.Parameter(torch.ones(6))
    optimizer, plain = (zero_opt.ShardedOptimizer(of, cls, lr=0.1, **options) for of in ([base, param], [twin]))
    for thawed in (False, True, False):
        base.requires_grad_(thawed)
        before = param.detach().clone()
        loss = param.square().sum() * (1 + rank)
        (loss + base.sum() if thawed else loss).backward()
        if thawed:
            with pytest.raises(zero_opt.UnsupportedParam, match=r"param(eter)? 0 .*(is|got) torch\.float64"):
                optimizer.step()
            optimizer.flush()
            assert_bitwise(param.detach(), before)
            assert bool((base == 1).all())
        else:
            optimizer.step()
            (twin.square().sum() * (1 + rank)).backward()
            plain.step()
        optimizer.zero_grad()
        plain.zero_grad()
    assert_bitwise(param.detach(), twin.detach())
    optimizer.consolidate_state_dict()
    if rank == 0:
        assert optimizer.state_dict()["state"][1]["step"] == 2
    optimizer.close()
    plain.close()


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("where", FROZEN_AT)
def test_what_is_thawed_is_refused_on_every_rank_before_anything_changes(where: str, world_size: int) -> None:
    run_processes(world_size, _thawed, zero_opt.CPUAdamW, FROZEN_AT[where])
    if where in ("worker", "file", "selective"):  # elsewhere torch's class steps it
        run_processes(world_size, _thawed, torch.optim.AdamW, FROZEN_AT[where])


def _complex_thawed(rank: int, world_size: int) -> None:
    """With ``fused=True`` a complex parameter may be there, but not be stepped."""
    base, param = nn.Parameter(torch.ones(4, dtype=torch.complex64), requires_grad=False), nn.Parameter(torch.ones(6))
    optimizer = zero_opt.ShardedOptimizer([base, param], torch.optim.AdamW, lr=0.1, fused=True)
    for thawed in (False, True, False):
        base.requires_grad_(thawed)
        before = param.detach().clone()
        loss = param.square().sum() * (1 + rank)
        (loss + base.abs().sum() if thawed else loss).backward()
        with pytest.raises(zero_opt.ConfigConflict, match="complex64") if thawed else nullcontext():
            optimizer.step()
        assert torch.equal(param.detach(), before) is thawed
        optimizer.zero_grad()
    optimizer.close()


def test_a_complex_one_is_refused_likewise_where_the_class_is_fused() -> None:
    run_processes(2, _complex_thawed)
