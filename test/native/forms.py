"""Runs of Adam's state in every form that the native step takes."""

from __future__ import annotations

import torch
from torch import Tensor

from test.native.kernels import arrays, packed
from test.native.workers import Group
from zero_opt import _native

ISAS = _native.isas()
EDGES = [0, 1, 63, 511, 512, 513, 2000]
# Form of the state: dtypes of gradient, moments and output, and whether the master is split.
FORMS = {
    "fp32": (torch.float32, torch.float32, None, False),
    "fp16 gradient, fp32 output": (torch.float16, torch.float32, torch.float32, False),
    "bf16 in and out": (torch.bfloat16, torch.float32, torch.bfloat16, False),
    "fp16 in and out": (torch.float16, torch.float32, torch.float16, False),
    "split master": (torch.bfloat16, torch.float32, None, True),
    "split master, bf16 moments": (torch.bfloat16, torch.bfloat16, None, True),
    "bf16 moments": (torch.float32, torch.bfloat16, torch.bfloat16, False),
    "8-bit moments": (torch.bfloat16, torch.uint8, torch.bfloat16, False),
    "split master, 8-bit moments": (torch.bfloat16, torch.uint8, None, True),
}


def a_run(numel: int, form: str, *, seed: int = 0, amsgrad: bool = False) -> tuple[dict[str, Tensor], Tensor]:
    """Arrays of state in a form, by role, and a gradient with some elements that are not finite."""
    grad_dtype, moment_dtype, out_dtype, split = FORMS[form]
    param, grad, exp_avg, exp_avg_sq, largest = arrays(numel, seed)
    grad[::97] = float("inf")
    run = {"param": param, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    if moment_dtype is not torch.float32:
        run |= packed((exp_avg, exp_avg_sq), moment_dtype)
    if split:
        run |= {"param": param.bfloat16(), "remainder": torch.arange(numel).to(torch.int16)}
    if out_dtype is not None:
        run["out"] = torch.zeros(numel, dtype=out_dtype)
    if amsgrad:
        run["max_exp_avg_sq"] = largest
    return run, grad.to(grad_dtype)


def group_of(sizes: list[int], form: str, *, amsgrad: bool = False, **options: object) -> Group:
    runs, grads = zip(*(a_run(numel, form, seed=seed, amsgrad=amsgrad) for seed, numel in enumerate(sizes)))
    return Group(runs, grads, options)
