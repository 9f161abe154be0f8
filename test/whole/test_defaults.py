"""``torch.set_default_device`` and ``torch.set_default_dtype`` change nothing: every internal tensor names both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import zero_opt
from test.support.actors import make_params, two_groups
from test.support.harness import assert_bitwise, run_processes
from test.support.scenario import BUCKET_MB, OVERLAPPED, SHAPES, values

SELECTIVE = zero_opt.Selective(0.5, update_interval=2)
SGD = (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})
ADAM = (zero_opt.CPUAdamW, {"lr": 0.01})
# torch.optim.AdamW puts its own step counts on the default device.
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "overlapped": (SGD, {"reduction": OVERLAPPED}),
    "at step, through the backend": (SGD, {"reduction": zero_opt.AtStep(BUCKET_MB, exchange="backend")}),
    "gathered in the background": (ADAM, {"reduction": zero_opt.Overlapped(BUCKET_MB, exchange="backend")}),
    "reduced before": (SGD, {"reduction": zero_opt.AlreadyReduced()}),
    "masters": (SGD, {"reduction": OVERLAPPED, "precision": zero_opt.MixedPrecision(master_dtype=torch.float32)}),
    "CPUOffload": (ADAM, {"reduction": OVERLAPPED, "offload": zero_opt.CPUOffload()}),
    "WorkerOffload": (ADAM, {"reduction": OVERLAPPED, "offload": zero_opt.WorkerOffload(threads=1)}),
    "NVMeOffload": (ADAM, {"reduction": OVERLAPPED}),
    "selective": (ADAM, {"reduction": OVERLAPPED, "offload": zero_opt.CPUOffload(selective=SELECTIVE)}),
}
DEFAULTS = ("meta", "float64", "bfloat16")


def _params(dtype: torch.dtype) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(param.detach().to(dtype)) for param in make_params()]


def _optimizer(name: str, params: list[torch.nn.Parameter], folder: Path) -> zero_opt.ShardedOptimizer:
    (cls, hypers), policies = CASES[name]
    if name == "NVMeOffload":
        policies = {**policies, "offload": zero_opt.NVMeOffload(folder)}
    return zero_opt.ShardedOptimizer(two_groups(params), cls, **hypers, **policies)


def _train(rank: int, world_size: int, name: str, default: str, folder: Path) -> list[Any]:
    """Parameters, norms and state of a training that saves and loads in the middle, in every way."""
    dtype = torch.bfloat16 if name == "masters" else torch.float32
    runs = [
        [values(n, 0, rank * ("reduced" not in name), i, s).to(dtype) for i, s in enumerate(SHAPES)] for n in range(6)
    ]
    params, others = _params(dtype), _params(dtype)
    if default == "meta":
        torch.set_default_device(default)
    elif default:
        torch.set_default_dtype(getattr(torch, default))
    seen: list[Any] = []
    opt = _optimizer(name, params, folder)
    for number, grads in enumerate(runs):
        if number == 3:
            state, sharded = opt.state_dict(), zero_opt.sharded_state_dict(opt)
            opt.consolidate_state_dict()
            opt.close()
            opt = _optimizer(name, others, folder)
            with torch.no_grad():
                for param, other in zip(params, others, strict=True):
                    other.copy_(param)
            opt.load_state_dict(state)
            zero_opt.load_sharded_state_dict(opt, sharded)
            params = others
        if "reduced" in name:
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad.clone()
        else:
            torch.autograd.backward(params, [grad.clone() for grad in grads])
        seen.append(opt.clip_grad_norm_(0.5))
        opt.step()
        opt.zero_grad()
    state = opt.state_dict()
    opt.close()
    return [*seen, *(param.detach() for param in params), state["state"]]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", CASES)
def test_a_default_device_or_dtype_changes_nothing(name: str, tmp_path: Path) -> None:
    plain, *others = (run_processes(2, _train, name, default, tmp_path) for default in ("", *DEFAULTS))
    for default, found in zip(DEFAULTS, others, strict=True):
        assert_bitwise(found, plain, default)
