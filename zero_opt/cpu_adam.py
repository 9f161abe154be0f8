"""The typed door to the native Adam kernel, and ``CPUAdam`` / ``CPUAdamW`` on top of it.

Tensors reach the kernel as bare addresses, so everything that could make an address mean something else (device,
dtype, layout, overlap, a missing storage) is checked here, before anything is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from .errors import NativeUnavailable

__all__ = ["AdamHypers", "AdamUpdate", "CPUAdam", "CPUAdamW", "adam_update_", "require_native"]

TENSOR_NAMES = ("param", "grad", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
GRAD = TENSOR_NAMES.index("grad")

ParamsT = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


def require_native() -> None:
    """Raises NativeUnavailable if the extension was not built or cannot be loaded here."""
    try:
        from . import _native

        _native.isa()
    except (ImportError, RuntimeError) as error:
        raise NativeUnavailable(
            f"the native extension zero_opt._native is not usable here ({error}); it is compiled when zero_opt is "
            "installed from source with a C++17 compiler, or use torch.optim.Adam/AdamW(fused=True)"
        ) from error


def native_available() -> bool:
    """Whether the native extension can be used here."""
    try:
        require_native()
    except NativeUnavailable:
        return False
    return True


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamHypers:
    """The hyperparameters of one group for one step, as in ``torch.optim.Adam``.

    Attributes:
        decoupled: AdamW's weight decay; otherwise weight_decay times the param is added to the gradient.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    maximize: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamUpdate:
    """One tensor's step: fp32, dense CPU tensors of one shape and any non-overlapping strides.

    Attributes:
        name: what error messages call it.
        step: the step number t of this update, counted from 1.
        max_exp_avg_sq: given for amsgrad, else None.
    """

    name: str
    hypers: AdamHypers
    step: float
    param: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    max_exp_avg_sq: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        """The tensors in the order of TENSOR_NAMES; the last one only if it is given."""
        four = [self.param, self.grad, self.exp_avg, self.exp_avg_sq]
        return four if self.max_exp_avg_sq is None else [*four, self.max_exp_avg_sq]


def check_tensor(what: str, tensor: Any, shape: torch.Size | None = None) -> None:
    """Raises TypeError or ValueError, naming ``what``, unless the kernel can work on this tensor.

    Args:
        what: the tensor's name in the message.
        tensor: should be an fp32, strided CPU tensor whose elements do not overlap.
        shape: the shape that it must have, if any.
    """
    if (
        type(tensor) in (Tensor, Parameter)
        and tensor.dtype is torch.float32
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and (shape is None or tensor.shape == shape)
        and (tensor.data_ptr() or not tensor.numel())
    ):
        return  # the usual case, at a third of the price
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{what} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.layout is not torch.strided:
        raise TypeError(f"{what} must be dense, got layout {tensor.layout}; SparseAdam takes sparse gradients")
    if tensor.device.type != "cpu":
        raise TypeError(f"{what} must be on the CPU, got device {tensor.device}")
    if tensor.dtype is not torch.float32:
        raise TypeError(f"{what} must be torch.float32, got {tensor.dtype}")
    if shape is not None and tensor.shape != shape:
        raise ValueError(f"{what} must have shape {tuple(shape)}, got {tuple(tensor.shape)}")
    if tensor.numel() and not tensor.data_ptr():
        raise TypeError(f"{what} has no memory of its own ({type(tensor).__name__}); pass the local tensor")
    if _overlaps(tensor):
        raise ValueError(
            f"{what} has elements that may share memory (shape {tuple(tensor.shape)}, stride {tensor.stride()}); "
            "pass a clone"
        )


def _by_stride(tensor: Tensor) -> list[tuple[int, int]]:
    """(stride, size) of every dimension longer than 1, innermost first."""
    return sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape) if size > 1)


def _overlaps(tensor: Tensor) -> bool:
    if tensor.is_contiguous() or not tensor.numel():
        return False
    reach = 0  # the last offset that the inner dimensions get to
    for stride, size in _by_stride(tensor):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one stretch of memory, in whatever order."""
    expected = 1
    for stride, size in _by_stride(tensor):
        if stride != expected:
            return False
        expected *= size
    return True


def _storage_order(tensor: Tensor) -> tuple[int, ...]:
    """The strides in which a run covers this tensor: its own if they are dense, else those of a clone."""
    if tensor.is_contiguous() or _is_dense(tensor):
        return tensor.stride()
    return torch.empty_like(tensor, device="meta").stride()


def _has_order(tensor: Tensor, strides: tuple[int, ...]) -> bool:
    if tensor.is_neg():
        return False  # a lazy negation: the bytes are not the values
    own = tensor.stride()
    return own == strides or all(a == b for a, b, size in zip(own, strides, tensor.shape) if size > 1)


@torch.no_grad()
def adam_update_(updates: Sequence[AdamUpdate], *, isa: str = "") -> None:
    """Applies one Adam or AdamW step to every update, in place, in one native call.

    Kingma and Ba 2015, algorithm 1; decoupled decay as in Loshchilov and Hutter 2019, algorithm 2; amsgrad as in
    Reddi et al. 2018, algorithm 2. The bits are those of torch's fused CPU kernel. Tensors that do not share the
    param's storage order, and params that are not dense, go through a copy.

    Args:
        updates: param, exp_avg, exp_avg_sq and max_exp_avg_sq are written, grad is only read.
        isa: an instruction set out of ``_native.isas()`` instead of the one chosen for this processor.

    Raises:
        TypeError, ValueError: a tensor that the kernel cannot work on, by name; nothing has been written.
        NativeUnavailable: there is no native extension here.
    """
    for update in updates:
        shape = update.param.shape
        for role, tensor in zip(TENSOR_NAMES, update.tensors()):
            check_tensor(f"{role} of {update.name}", tensor, shape)
    require_native()
    from . import _native

    scalars: dict[tuple[int, float], _native.AdamScalars] = {}
    runs: list[_native.AdamRun] = []
    staged: list[tuple[Tensor, Tensor]] = []
    written: list[Tensor] = []
    for update in updates:
        key = (id(update.hypers), update.step)
        if key not in scalars:
            scalars[key] = _native_scalars(update.hypers, update.step)
        tensors = update.tensors()
        addresses = [run.data_ptr() for run in _in_one_order(tensors, staged)]
        runs.append(_native.AdamRun(scalars[key], update.param.numel(), *addresses))
        written += [tensor for index, tensor in enumerate(tensors) if index != GRAD]
    _native.adam_step(runs, isa)
    _copy_home(staged, written)


def _in_one_order(tensors: list[Tensor], staged: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """The tensors, each in one stretch of memory and all in one order; copies made for it are added to ``staged``."""
    if all(tensor.is_contiguous() and not tensor.is_neg() for tensor in tensors):
        return tensors
    order = _storage_order(tensors[0])
    runs = []
    for tensor in tensors:
        run = tensor
        if not _has_order(tensor, order):
            run = torch.empty_strided(tensor.shape, order, dtype=torch.float32).copy_(tensor)
            staged.append((tensor, run))
        runs.append(run)
    return runs


def _native_scalars(hypers: AdamHypers, step: float) -> Any:
    from . import _native

    return _native.AdamScalars(
        lr=hypers.lr,
        beta1=hypers.beta1,
        beta2=hypers.beta2,
        eps=hypers.eps,
        weight_decay=hypers.weight_decay,
        step=step,
        decoupled=hypers.decoupled,
        maximize=hypers.maximize,
    )


def _copy_home(staged: Sequence[tuple[Tensor, Tensor]], written: Sequence[Tensor]) -> None:
    """Brings staged results back, and tells autograd what changed behind its back."""
    changed = {id(tensor) for tensor in written}
    for tensor, run in staged:
        if id(tensor) in changed:
            tensor.copy_(run)
    versioned = [tensor for tensor in written if not tensor.is_inference()]
    if versioned:
        torch.autograd.graph.increment_version(versioned)


def _fused_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """torch's implementation switches, with ``fused`` on: what state_dict() shows and other optimizers load."""
    if options.get("fused") is False:
        raise ValueError(f"{name} is a fused kernel; for fused=False use torch.optim")
    if options.get("foreach"):
        raise ValueError(f"{name} is a fused kernel; for foreach=True use torch.optim")
    if options.get("differentiable"):
        raise ValueError(f"{name} cannot be differentiated through; for differentiable=True use torch.optim")
    return {**options, "fused": True}


class _NativeStep(torch.optim.Adam):
    """What CPUAdam and CPUAdamW share: torch's construction and state, our checks and our step."""

    # GradScaler unscales before step(), as the kernel does not.
    _step_supports_amp_scaling = False

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; also raises TypeError or ValueError for a param that the kernel cannot update."""
        super().add_param_group(param_group)
        try:
            self.param_groups[-1].update(_fused_options(type(self).__name__, self.param_groups[-1]))
            for name, param in self._named(len(self.param_groups) - 1):
                check_tensor(name, param)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        # A state dict of an unfused optimizer loads too, and leaves the switches as they are here.
        for group in self.param_groups:
            group["fused"], group["foreach"] = True, None

    def _named(self, index: int) -> Iterator[tuple[str, Tensor]]:
        group = self.param_groups[index]
        names = group.get("param_names")
        for position, param in enumerate(group["params"]):
            called = f" ({names[position]!r})" if names else ""
            yield f"{type(self).__name__} param {position} of group {index}{called}", param

    def _with_grad(self) -> Iterator[tuple[dict[str, Any], str, Tensor, Tensor]]:
        for index, group in enumerate(self.param_groups):
            for name, param in self._named(index):
                if param.grad is not None:
                    yield group, name, param, param.grad

    def _updates(self) -> list[AdamUpdate]:
        """This step's updates, all checked; state that is missing is made, and nothing else is written."""
        work = list(self._with_grad())
        for _, name, param, grad in work:
            if not self.state.get(param):  # else adam_update_ finds a bad one before anything is written
                check_tensor(name, param)
                check_tensor(f"grad of {name}", grad, param.shape)
        hypers = {id(group): _hypers(group) for group in self.param_groups}
        updates = []
        for group, name, param, grad in work:
            state = self.state[param]
            _init_state(state, param, group["amsgrad"])
            if group["amsgrad"] and "max_exp_avg_sq" not in state:
                raise ValueError(f"{name} has no max_exp_avg_sq: amsgrad cannot be switched on after the first step")
            updates.append(
                AdamUpdate(
                    name=name,
                    hypers=hypers[id(group)],
                    step=float(state["step"]) + 1.0,
                    param=param,
                    grad=grad,
                    exp_avg=state["exp_avg"],
                    exp_avg_sq=state["exp_avg_sq"],
                    max_exp_avg_sq=state["max_exp_avg_sq"] if group["amsgrad"] else None,
                )
            )
        return updates

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps every param that has a gradient, in place.

        Args:
            closure: re-evaluates the model and returns the loss, which is handed back.

        Raises:
            TypeError, ValueError: a param, gradient or state that is not an fp32, dense CPU tensor of the param's
                shape, by name; no param and no state has been changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        updates = self._updates()
        if updates:
            adam_update_(updates)
            torch._foreach_add_([self.state[update.param]["step"] for update in updates], 1.0)
        return loss


def _hypers(group: Mapping[str, Any]) -> AdamHypers:
    beta1, beta2 = group["betas"]
    return AdamHypers(
        lr=float(group["lr"]),
        beta1=float(beta1),
        beta2=float(beta2),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        decoupled=bool(group["decoupled_weight_decay"]),
        maximize=bool(group["maximize"]),
    )


def _init_state(state: dict[str, Any], param: Tensor, amsgrad: bool) -> None:
    """Fills an empty state in torch's own order: step fp32 0-dim, the rest as the param in shape and strides."""
    if state:
        return
    state["step"] = torch.zeros((), dtype=torch.float32)
    state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
    state["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)
    if amsgrad:
        state["max_exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)


class CPUAdam(_NativeStep):
    """``torch.optim.Adam(fused=True)`` for fp32 CPU params, stepped by the native kernel, to the same bits.

    Kingma and Ba 2015, algorithm 1, with L2 weight decay; ``amsgrad`` is Reddi et al. 2018, algorithm 2. State and
    ``state_dict()`` are torch's: ``step`` (fp32, 0-dim), ``exp_avg``, ``exp_avg_sq`` and, with amsgrad,
    ``max_exp_avg_sq`` (fp32, the param's shape and strides). Params of any strides are updated in place.

    Args:
        params: tensors, (name, tensor) pairs or group dicts; fp32, dense, on the CPU.
        lr: learning rate; a 1-element tensor may be used too.
        betas: decay rates of the two moments, each in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: L2 factor, added to the gradient.
        amsgrad: divide by the largest second moment so far.
        maximize: ascend.
        **torch_options: torch's other options. ``fused`` may be None or True; ``capturable`` changes nothing here.

    Raises:
        TypeError, ValueError: a param that the kernel cannot update, or a hyperparameter that torch refuses too.
        NativeUnavailable: the extension was not built.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        **torch_options: Any,
    ) -> None:
        require_native()
        options = _fused_options(type(self).__name__, torch_options)
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, **options)
        self._step_supports_amp_scaling = False


class CPUAdamW(_NativeStep, torch.optim.AdamW):
    """``torch.optim.AdamW(fused=True)`` for fp32 CPU params, stepped by the native kernel, to the same bits.

    As CPUAdam, with the decoupled weight decay of Loshchilov and Hutter 2019, algorithm 2: every step first scales
    the params by 1 - lr * weight_decay.

    Args:
        params: tensors, (name, tensor) pairs or group dicts; fp32, dense, on the CPU.
        lr: learning rate; a 1-element tensor may be used too.
        betas: decay rates of the two moments, each in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: decoupled decay per unit of lr.
        amsgrad: divide by the largest second moment so far.
        maximize: ascend.
        **torch_options: torch's other options. ``fused`` may be None or True; ``capturable`` changes nothing here.

    Raises:
        TypeError, ValueError: a param that the kernel cannot update, or a hyperparameter that torch refuses too.
        NativeUnavailable: the extension was not built.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        **torch_options: Any,
    ) -> None:
        require_native()
        options = _fused_options(type(self).__name__, torch_options)
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, **options)
        self._step_supports_amp_scaling = False
