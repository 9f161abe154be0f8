"""The kernels called on bare arrays, by name of instruction set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zero_opt import _native

HYPERS: dict[str, Any] = {
    "lr": 1e-2,
    "beta1": 0.9,
    "beta2": 0.999,
    "eps": 1e-8,
    "weight_decay": 0.1,
    "decoupled": True,
    "maximize": False,
}
SGD = {"lr": 0.1, "momentum": 0.9, "dampening": 0.2, "weight_decay": 0.1, "nesterov": 0}
ADAGRAD = {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.1, "eps": 1e-10}
LION = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1}
BLOCK = 64
HALVES = (torch.bfloat16, torch.float16)
GRAD_DTYPES = (torch.float32, *HALVES)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def arrays(numel: int, seed: int = 0) -> list[Tensor]:
    """param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq over many magnitudes, subnormal to huge."""
    generator = torch.Generator().manual_seed(seed)

    def values() -> Tensor:
        scale = torch.randint(-44, 18, (numel,), generator=generator).float()
        return torch.randn(numel, generator=generator) * 10.0**scale

    return [values(), values(), values(), values().abs(), values().abs()]


def run_of(written: Mapping[str, Tensor], grad: Tensor, step: float) -> _native.UpdateRun:
    """The run over these 1-D tensors, by role."""
    out = written.get("out")
    return _native.UpdateRun(
        grad.numel(),
        {role: tensor.data_ptr() for role, tensor in written.items()},
        grad_dtype=name_of(grad.dtype),
        moment_dtype=name_of(written["exp_avg"].dtype if "exp_avg" in written else torch.float32),
        out_dtype="float32" if out is None else name_of(out.dtype),
        step=step,
    )


def step(written: Mapping[str, Tensor], grad: Tensor, **options: Any) -> int:
    """One native step of Adam on 1-D tensors by role, in place.

    Args:
        written: all but the gradient. options: hyperparameters, grad_scale, step, isa, threads, flush_denormals.
    """
    return step_of("adam", {**HYPERS, **options}, written, grad)


def step_of(update: str, options: Mapping[str, Any], written: Mapping[str, Tensor], grad: Tensor) -> int:
    """The same of any update."""
    options = dict(options)
    call = {key: options.pop(key) for key in ("isa", "threads", "flush_denormals") if key in options}
    number = options.pop("step", 3.0)
    hypers = _native.Hypers(update, **options)
    return _native.update_step([(hypers, [run_of(written, grad, number)], [grad.data_ptr()])], **call)


def adam(tensors: Sequence[Tensor], *, amsgrad: bool = True, **options: Any) -> int:
    """One native fp32 step on tensors as ``arrays`` gives them, in place."""
    param, grad, *moments = tensors if amsgrad else tensors[:4]
    return step({"param": param, **dict(zip(("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), moments))}, grad, **options)


def fma(a: Tensor, b: Tensor, c: Tensor, isa: str) -> Tensor:
    """a * b + c, rounded once, by the kernels' own multiply-add."""
    out = torch.empty_like(a)
    _native.fma(a.numel(), a.data_ptr(), b.data_ptr(), c.data_ptr(), out.data_ptr(), isa)
    return out


def converted(values: Tensor, dtype: torch.dtype, isa: str) -> Tensor:
    """The values in another dtype, by the kernels' own conversion."""
    out = torch.empty(values.shape, dtype=dtype)
    source, target = ((t.data_ptr(), name_of(t.dtype)) for t in (values, out))
    _native.convert(values.numel(), source, target, isa)
    return out


def blocks(numel: int) -> int:
    return -(-numel // BLOCK)


def moments(numel: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Zero moments of a dtype, with the bases that 8-bit ones need."""
    found = {role: torch.zeros(numel, dtype=dtype) for role in ("exp_avg", "exp_avg_sq")}
    if dtype is torch.uint8:
        found |= {f"{role}_base": torch.zeros(blocks(numel), dtype=torch.int16) for role in ("exp_avg", "exp_avg_sq")}
    return found


def _moment_run(compact: Mapping[str, Tensor], plain: Sequence[Tensor], number: float) -> _native.MomentRun:
    addresses = {role: tensor.data_ptr() for role, tensor in compact.items()}
    addresses |= {"plain_exp_avg": plain[0].data_ptr(), "plain_exp_avg_sq": plain[1].data_ptr()}
    return _native.MomentRun(plain[0].numel(), name_of(compact["exp_avg"].dtype), addresses, step=number)


def packed(plain: Sequence[Tensor], dtype: torch.dtype, *, number: float = 1.0, isa: str = "") -> dict[str, Tensor]:
    """fp32 exp_avg and exp_avg_sq in a compact form."""
    compact = moments(plain[0].numel(), dtype)
    _native.pack_moments(_moment_run(compact, plain, number), isa)
    return compact


def unpacked(compact: Mapping[str, Tensor], isa: str = "") -> list[Tensor]:
    """exp_avg and exp_avg_sq in fp32."""
    plain = [torch.empty(compact["exp_avg"].numel()) for _ in range(2)]
    _native.unpack_moments(_moment_run(compact, plain, 1.0), isa)
    return plain


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equality of every bit, except that any NaN is any other."""
    if not a.dtype.is_floating_point:
        return torch.equal(a, b)
    integer = torch.int32 if a.dtype is torch.float32 else torch.int16
    nan = a.isnan() & b.isnan()
    return bool(((a.view(integer) == b.view(integer)) | nan).all())
