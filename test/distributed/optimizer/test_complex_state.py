"""State of complex parameters, saved and loaded: every key, to the bits of the plain class."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import zero_opt
from test.support.harness import assert_bitwise, run_threads
from test.support.torch_variants import INFOS, Variant, plain, variants

COMPLEX = [name for name, info in INFOS.items() if info.supports_complex and name != "LBFGS"]


def _complex_variants(name: str) -> list[Variant]:
    return [v for v in variants(name, (torch.complex64,)) if v.dtype is torch.complex64 and not v.sparse]


def _expected(name: str) -> list[Any]:
    """Of every variant: the state dict after two steps; parameters and state dict after one step more."""
    found = []
    for variant in _complex_variants(name):
        params = variant.params()
        opt = plain(variant)(params, variant.arguments())
        variant.step(opt, params, 0)
        variant.step(opt, params, 1)
        saved = copy.deepcopy(opt.state_dict())
        variant.step(opt, params, 2)
        found.append((saved, [param.detach() for param in params], opt.state_dict()))
    return found


def _resumed(rank: int, world_size: int, name: str, offload: Any, expected: list[Any]) -> None:
    for variant, (saved, stepped, end) in zip(_complex_variants(name), expected, strict=True):
        params = variant.params()
        for numbers in ((0, 1), (2,)):
            given = {"reduction": zero_opt.AlreadyReduced(), "offload": offload, **variant.arguments()}
            opt = zero_opt.ShardedOptimizer(params, variant.cls, **given)
            if numbers == (2,):
                opt.load_state_dict(saved)
            for number in numbers:
                variant.step(opt, params, number)
            opt.consolidate_state_dict(to=0)
            if rank == 0:
                assert_bitwise(opt.state_dict(), saved if numbers == (0, 1) else end)
            opt.close()
        assert_bitwise([param.detach() for param in params], stepped)


@pytest.mark.parametrize("offload", [None, zero_opt.CPUOffload()], ids=["device", "cpu"])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", COMPLEX)
def test_what_is_saved_of_complex_parameters_is_loaded(name: str, world_size: int, offload: Any) -> None:
    expected = _expected(name)
    assert expected
    run_threads(world_size, _resumed, name, offload, expected)


_BAD_MAXIMA = {
    "real": torch.ones(3),
    "shape": torch.ones(2, dtype=torch.complex64),
    "one element": torch.ones(1, dtype=torch.complex64),
    "no dimension": torch.ones((), dtype=torch.complex64),
    "integers": torch.ones(3, dtype=torch.int64),
    "number": 2.0,
    "none": None,
}


@pytest.mark.parametrize("bad", _BAD_MAXIMA.values(), ids=_BAD_MAXIMA)
def test_a_maximum_that_is_not_of_a_complex_parameter_is_refused(bad: Any) -> None:
    param = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))
    opt = zero_opt.ShardedOptimizer([param], torch.optim.Adam, amsgrad=True, offload=zero_opt.CPUOffload())
    param.grad = torch.ones_like(param)
    opt.step()
    saved = copy.deepcopy(opt.state_dict())
    saved["state"][0]["max_exp_avg_sq"] = bad
    with pytest.raises(zero_opt.StateDictError, match="state 'max_exp_avg_sq' of parameter 0 "):
        opt.load_state_dict(saved)
    opt.close()
