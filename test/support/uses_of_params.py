"""Ways to read and to change parameters that are no forward of the model."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import zero_opt


class Model(nn.Module):
    """Two layers, and a method that is no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 12)
        with torch.no_grad():
            for number, param in enumerate(self.parameters()):
                param.copy_(torch.linspace(-1, 1, param.numel()).reshape(param.shape) * (number + 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))  # type: ignore[no-any-return]

    def encode(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.second.weight, self.first.bias)


Way = Callable[[Model], Any]
ONES = torch.ones(2, 12)


def _weight(way: Callable[[nn.Parameter], Any]) -> Way:
    return lambda model: way(model.second.weight)


def _average(model: Model) -> Any:
    average = AveragedModel(Model(), multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    average.update_parameters(Model())
    average.update_parameters(model)
    return list(average.parameters())


def _averaged_by_hand(model: Model) -> Any:
    average = torch.zeros(12, 12)
    average.lerp_(model.second.weight, 0.25)
    return average


def _saved(model: Model) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return list(torch.load(file, weights_only=False).parameters())


def _into(param: nn.Parameter) -> Any:
    return torch.add(param, 1, out=torch.empty(12, 12))


def _new_tensor(param: nn.Parameter) -> Any:
    with warnings.catch_warnings(action="ignore"):  # that there are better ways
        return param.new_tensor(param)


def _graph() -> tuple[Tensor, Tensor]:
    leaf = torch.zeros(12, 12, requires_grad=True)
    with torch.enable_grad():
        return leaf, leaf * 3


def _given_to_grad(param: nn.Parameter) -> Any:
    leaf, made = _graph()
    return torch.autograd.grad(made, leaf, param)


def _given_to_backward(param: nn.Parameter) -> Any:
    leaf, made = _graph()
    made.backward(param)
    return leaf.grad


def _gradient(model: Model) -> Any:
    def loss(params: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, params, (ONES,)).square().mean()

    return list(torch.func.grad(loss)({name: param.detach() for name, param in model.named_parameters()}).values())


READS: dict[str, Way] = {
    "state_dict": lambda model: model.state_dict(),
    "state_dict of a child": lambda model: model.second.state_dict(),
    "deepcopy": lambda model: list(copy.deepcopy(model).parameters()),
    "deepcopy of one": _weight(copy.deepcopy),
    "copy": _weight(copy.copy),
    "pickle": lambda model: list(pickle.loads(pickle.dumps(model)).parameters()),
    "pickle of one": _weight(lambda param: pickle.loads(pickle.dumps(param))),
    "torch.save": _saved,
    "AveragedModel": _average,
    "lerp_ from": _averaged_by_hand,
    "detach": _weight(lambda param: param.detach().clone()),
    "data": _weight(lambda param: param.data.clone()),
    "clone": _weight(torch.clone),
    "numpy": _weight(lambda param: torch.from_numpy(param.detach().numpy().copy())),
    "np.asarray": _weight(lambda param: torch.from_numpy(np.asarray(param.data).copy())),
    "tolist": _weight(lambda param: param.tolist()),
    "item": _weight(lambda param: param[3, 4].item()),
    "unbind": _weight(lambda param: [row.clone() for row in param]),
    "norm": _weight(lambda param: param.norm()),
    "foreach_norm": lambda model: torch._foreach_norm(list(model.parameters())),
    "parameters_to_vector": lambda model: nn.utils.parameters_to_vector(model.parameters()),
    "functional_call": lambda model: torch.func.functional_call(model, dict(model.named_parameters()), (ONES,)),
    "torch.func.grad": _gradient,
    "torch.func.grad of one": _weight(torch.func.grad(lambda param: param.pow(3).sum())),
    "torch.func.vmap": _weight(torch.func.vmap(lambda row: row * 2)),
    "torch.func.vjp": _weight(lambda param: torch.func.vjp(torch.tanh, param)[0]),
    "torch.func.vjp with": _weight(lambda param: torch.func.vjp(torch.tanh, torch.zeros(12, 12))[1](param)[0]),
    "grad_outputs": _weight(_given_to_grad),
    "the gradient of a backward": _weight(_given_to_backward),
    "torch.func.jvp": _weight(lambda param: torch.func.jvp(torch.tanh, (param,), (torch.ones(12, 12),))[0]),
    "torch.func.jacrev": _weight(torch.func.jacrev(lambda param: param.pow(3).sum())),
    "torch.func.functionalize": _weight(torch.func.functionalize(lambda param: param * 2)),
    "a method": lambda model: model.encode(ONES),
    "new_tensor of itself": _weight(_new_tensor),
    "type by name": _weight(lambda param: param.type(dtype="torch.DoubleTensor")),
    "double": _weight(lambda param: param.double()),
    "comparison": _weight(lambda param: param > 0.5),
    "equal": _weight(lambda param: torch.equal(param, Model().second.weight)),
    "out=": _weight(_into),
    "copy_ from": _weight(lambda param: torch.zeros(12, 12).copy_(param)),
    "cat": lambda model: torch.cat([model.first.weight, model.second.weight]),
    "einsum": _weight(lambda param: torch.einsum("ij,kj->ik", ONES, param)),
    "storage": _weight(lambda param: param.untyped_storage().tolist()),
    "from_dlpack": _weight(lambda param: torch.from_dlpack(param.detach()).clone()),
    "repr": _weight(repr),
    "Parameter": _weight(lambda param: nn.Parameter(param)),
    "type(param)": _weight(lambda param: type(param)(param)),
    "torch.ops": _weight(torch.ops.aten.clone.default),
    "isnan": _weight(lambda param: param.isnan().any()),
    "max": _weight(lambda param: param.max(dim=0)),
    "weight by name": lambda model: model.get_parameter("first.weight").sum(),
}


def _assign(param: nn.Parameter) -> None:
    param.data = torch.full((12, 12), 0.5)


def _share(param: nn.Parameter) -> None:
    param.set_(torch.full((12, 12), 0.5))


def _subtract(param: nn.Parameter) -> None:
    param -= 0.25


def _set(param: nn.Parameter) -> None:
    param[2] = 3.0


def _fill_vector(model: Model) -> None:
    nn.utils.vector_to_parameters(torch.linspace(-1, 1, 312), model.parameters())


WRITES: dict[str, Way] = {
    "clamp_": _weight(lambda param: param.clamp_(-0.1, 0.1)),
    "foreach_mul_": lambda model: torch._foreach_mul_(list(model.parameters()), 0.5),
    "copy_": _weight(lambda param: param.copy_(torch.ones(12, 12))),
    "init": _weight(lambda param: nn.init.constant_(param, 0.75)),
    "setitem": _weight(_set),
    "subtract": _weight(_subtract),
    "data.mul_": _weight(lambda param: param.data.mul_(0.5)),
    "detach().zero_": _weight(lambda param: param.detach().zero_()),
    "assign data": _weight(_assign),
    "vector_to_parameters": _fill_vector,
    "out= to it": _weight(lambda param: torch.add(torch.ones(12, 12), 1, out=param)),
    "load_state_dict": lambda model: model.load_state_dict(Model().state_dict()),
    "set_": _weight(_share),
    "swap_tensors": _weight(lambda param: torch.utils.swap_tensors(param, nn.Parameter(torch.full((12, 12), 0.25)))),
    "broadcast_params": zero_opt.broadcast_params,
}


def values_of(found: Any) -> Any:
    """Return what a way has returned, tensors as plain tensors."""
    if isinstance(found, Tensor):
        return found.detach().clone()
    if isinstance(found, dict):
        return {key: values_of(value) for key, value in found.items()}
    return [values_of(value) for value in found] if isinstance(found, (list, tuple)) else found
