"""Arguments of the constructor that one of two ranks gets wrong, and the error that both of them get."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import zero_opt
from test.support.faults import Config, ConfigType, Error, Mismatch
from zero_opt import errors


@dataclass(frozen=True)
class ConstructorFault:
    """A wrong argument of rank 1, and the error that both ranks raise.

    Attributes:
        change: makes the arguments wrong, in place.
    """

    error: Error
    change: Callable[[dict[str, Any]], object]


def _set(**options: Any) -> Callable[[dict[str, Any]], None]:
    return lambda arguments: arguments.update(options)


def _params(make: Callable[[], Any]) -> Callable[[dict[str, Any]], None]:
    return lambda arguments: arguments.update(params=make())


def _param(index: int, make: Callable[[Tensor], Tensor], **how: Any) -> Callable[[dict[str, Any]], None]:
    def change(arguments: dict[str, Any]) -> None:
        name, param = arguments["params"][index]
        arguments["params"][index] = (name, nn.Parameter(make(param.detach().clone()), **how))

    return change


def _swap(arguments: dict[str, Any]) -> None:
    params = arguments["params"]
    params[0], params[2] = params[2], params[0]


def _rename(arguments: dict[str, Any]) -> None:
    arguments["params"][1] = ("first.offset", arguments["params"][1][1])


def _regroup(arguments: dict[str, Any]) -> None:
    arguments["params"] = [{"params": arguments["params"][:2]}, {"params": arguments["params"][2:]}]


def _of_no_model() -> Any:
    return zero_opt.Overlapped(overlap_param_gather=nn.Linear(2, 2))


def _non_leaf() -> list[Tensor]:
    return [nn.Parameter(torch.ones(3)) * 2]


def _mesh(arguments: dict[str, Any]) -> None:
    arguments["process_group"] = DeviceMesh("cpu", [[[0], [1]]], _init_backend=False)


def _another_group(arguments: dict[str, Any]) -> None:
    arguments["process_group"] = next(
        group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD
    )


CONSTRUCTOR: dict[str, ConstructorFault] = {
    "reduction is a string": ConstructorFault(ConfigType, _set(reduction="overlapped")),
    "reduction is a class": ConstructorFault(ConfigType, _set(reduction=zero_opt.AtStep)),
    "offload is a string": ConstructorFault(ConfigType, _set(offload="cpu")),
    "precision is a dtype": ConstructorFault(ConfigType, _set(precision=torch.bfloat16)),
    "checks is a bool": ConstructorFault(ConfigType, _set(checks=True)),
    "class is none": ConstructorFault(ConfigType, _set(optimizer_class=None)),
    "max_grad_norm is negative": ConstructorFault(Config, _set(max_grad_norm=-1.0)),
    "max_grad_norm is a string": ConstructorFault(ConfigType, _set(max_grad_norm="1")),
    "lr is negative": ConstructorFault(Config, _set(lr=-1.0)),
    "betas out of range": ConstructorFault(Config, _set(betas=(0.9, 1.0))),
    "misspelt argument": ConstructorFault(ConfigType, _set(momentun=0.9)),
    "differentiable": ConstructorFault(errors.UnsupportedOptimizer, _set(differentiable=True)),
    "capturable": ConstructorFault(errors.UnsupportedOptimizer, _set(capturable=True)),
    "foreach and fused": ConstructorFault(errors.ConfigConflict, _set(foreach=True, fused=True)),
    "LBFGS on one rank": ConstructorFault(errors.UnsupportedOptimizer, _set(optimizer_class=torch.optim.LBFGS)),
    "process_group is a string": ConstructorFault(ConfigType, _set(process_group="gloo")),
    "process_group is a mesh of three dimensions": ConstructorFault(ConfigType, _mesh),
    "process_group is another group": ConstructorFault(Mismatch, _another_group),
    "no parameters": ConstructorFault(Config, _params(list)),
    "group without params": ConstructorFault(Config, _params(lambda: [{"lr": 1}])),
    "parameter is None": ConstructorFault(ConfigType, _params(lambda: [None])),
    "parameters are numbers": ConstructorFault(ConfigType, _params(lambda: [1, 2])),
    "parameters are one tensor": ConstructorFault(ConfigType, _params(lambda: torch.ones(3))),
    "parameters are a set": ConstructorFault(ConfigType, _params(lambda: {nn.Parameter(torch.ones(3))})),
    "parameter is no leaf": ConstructorFault(Config, _params(_non_leaf)),
    "sparse parameter": ConstructorFault(
        errors.UnsupportedParam, _params(lambda: [torch.ones(3).to_sparse().requires_grad_()])
    ),
    "overlapping parameter": ConstructorFault(
        errors.UnsupportedParam, _params(lambda: [nn.Parameter(torch.ones(1).expand(3))])
    ),
    "parameter on meta": ConstructorFault(
        errors.UnsupportedParam, _params(lambda: [nn.Parameter(torch.ones(3, device="meta"))])
    ),
    "gather for another model": ConstructorFault(Config, _set(reduction=_of_no_model())),
    "name": ConstructorFault(Mismatch, _rename),
    "order": ConstructorFault(Mismatch, _swap),
    "shape": ConstructorFault(Mismatch, _param(0, lambda p: p.view(6, 40))),
    "number of elements": ConstructorFault(Mismatch, _param(1, lambda p: p[1:].clone())),
    "strides": ConstructorFault(Mismatch, _param(0, lambda p: p.t().contiguous().t())),
    "dtype": ConstructorFault(Mismatch, _param(2, lambda p: p.double())),
    "requires_grad": ConstructorFault(Mismatch, _param(3, lambda p: p, requires_grad=False)),
    "values": ConstructorFault(Mismatch, _param(2, lambda p: p + 1)),
    "one bit": ConstructorFault(Mismatch, _param(3, lambda p: p * (1 + 2**-23))),
    "number of parameters": ConstructorFault(Mismatch, lambda arguments: arguments["params"].pop()),
    "groups": ConstructorFault(Mismatch, _regroup),
    "hyperparameter keys": ConstructorFault(Mismatch, lambda w: w.update(params=[{"params": w["params"], "scale": 1}])),
    "lr": ConstructorFault(Mismatch, _set(lr=0.5)),
    "weight_decay": ConstructorFault(Mismatch, _set(weight_decay=0.5)),
    "amsgrad": ConstructorFault(Mismatch, _set(amsgrad=True)),
    "class": ConstructorFault(Mismatch, _set(optimizer_class=torch.optim.Adamax)),
    "reduction": ConstructorFault(Mismatch, _set(reduction=zero_opt.AtStep())),
    "bucket_mb": ConstructorFault(Mismatch, _set(reduction=zero_opt.Overlapped(1))),
    "exchange": ConstructorFault(Mismatch, _set(reduction=zero_opt.Overlapped(exchange="backend"))),
    "reduce_dtype": ConstructorFault(Mismatch, _set(precision=zero_opt.MixedPrecision(reduce_dtype=torch.float64))),
    "max_grad_norm": ConstructorFault(Mismatch, _set(max_grad_norm=1.0)),
    "nonfinite": ConstructorFault(Mismatch, _set(checks=zero_opt.Checks(nonfinite="skip"))),
    "offload": ConstructorFault(Mismatch, _set(offload=zero_opt.WorkerOffload())),
}
