"""Selective update by one process, as it is described: whole tensors, one column count after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import zero_opt
from zero_opt.kernels import AdamHypers, AdamUpdate, adam_update_

MOMENTS = ("exp_avg", "exp_avg_sq")


class Matrix:
    """A parameter and its state, elementwise, and per column what has happened to it."""

    def __init__(self, param: nn.Parameter) -> None:
        self.param, self.columns = param, param.shape[-1] if param.dim() >= 2 and param.numel() else 0
        self.arrays = {key: torch.zeros(param.shape) for key in MOMENTS}
        self.arrays["master"] = param.detach().float().clone(memory_format=torch.contiguous_format)
        self.counts = torch.zeros(max(self.columns, 1))
        self.chosen = torch.zeros(max(self.columns, 1), dtype=torch.bool)
        self.waiting: list[Tensor] = []
        self.stepped = False

    def step(self, which: Tensor, grad: Tensor, hypers: AdamHypers, scale: float = 1.0, gradients: int = 1) -> None:
        """Step these columns, those of one count at a time; ``grad`` is the mean of so many."""
        self.stepped |= bool(which.any())
        for count in self.counts[which].unique().tolist():
            now = which & (self.counts == count)
            at = (..., now) if self.columns else ...
            parts = {key: value[at].contiguous() for key, value in self.arrays.items()}
            adam_update_(
                [
                    AdamUpdate(
                        name="a column",
                        hypers=hypers,
                        step=torch.tensor((count + gradients) / gradients, dtype=torch.float32).item(),
                        param=parts["master"],
                        grad=grad[at].contiguous(),
                        exp_avg=parts["exp_avg"],
                        exp_avg_sq=parts["exp_avg_sq"],
                    )
                ],
                grad_scale=scale,
            )
            for key, value in parts.items():
                self.arrays[key][at] = value
        self.counts[which] += gradients

    def show(self, which: Tensor) -> None:
        """Let the parameter have these columns of its master."""
        with torch.no_grad():
            at = (..., which) if self.columns else ...
            self.param[at] = self.arrays["master"][at].to(self.param.dtype)


class Reference:
    """The optimizer. ``groups`` are torch's, ``options`` AdamW's defaults."""

    def __init__(self, groups: Sequence[dict[str, Any]], policy: zero_opt.Selective, delay: int = 0) -> None:
        self.groups, self.policy, self.delay = groups, policy, delay
        self.all = [(Matrix(param), group) for group in groups for param in group["params"]]
        self.steps = self.in_window = 0
        self.last_selection: int | None = None
        self.interval = 4 if isinstance(policy.update_interval, str) else policy.update_interval
        self.late: list[tuple[Matrix, Tensor]] = []

    def step(self, scale: float = 1.0) -> None:
        """One step with the gradients in ``p.grad``, multiplied by ``scale``."""
        self.flush()
        counts = self.steps > 0 or any(matrix.columns and matrix.param.grad is not None for matrix, _ in self.all)
        warm = self.steps >= self.policy.warmup_steps
        due = self.last_selection is None or self.steps - self.last_selection >= self.policy.select_interval
        if counts and warm and due and not self.in_window:
            self._select()
        closes = counts and (not warm or self.in_window + 1 >= self.interval)
        for matrix, group in self.all:
            hypers = hypers_of(group)
            everything = torch.ones_like(matrix.chosen)
            if matrix.param.grad is not None:
                now = matrix.chosen if matrix.columns else everything
                matrix.step(now, matrix.param.grad, hypers, scale)
                matrix.show(now)
                matrix.waiting.append(matrix.param.grad.float() * scale)
            if closes and matrix.waiting and matrix.columns:
                total = matrix.waiting[0].clone()
                for grad in matrix.waiting[1:]:
                    total += grad
                count = len(matrix.waiting)
                matrix.step(~matrix.chosen, total / count, hypers_of(group, count), gradients=count)
                self.late.append((matrix, ~matrix.chosen))
            if closes:
                matrix.waiting = []
        self.in_window = 0 if closes else self.in_window + counts
        self.steps += counts
        if not self.delay:
            self.flush()

    def clear(self) -> None:
        """Forget what was stepped and what waits; what is selected stays."""
        for matrix, _ in self.all:
            matrix.waiting = []
            matrix.counts.zero_()
            matrix.stepped = False
            for key in MOMENTS:
                matrix.arrays[key].zero_()
            matrix.arrays["master"] = matrix.param.detach().float().clone(memory_format=torch.contiguous_format)

    def flush(self) -> None:
        """Bring in what was stepped off device."""
        for matrix, which in self.late:
            matrix.show(which)
        self.late = []

    def _select(self) -> None:
        self.last_selection = self.steps
        left = total = 0.0
        for matrix, _ in self.all:
            if not matrix.columns:
                continue
            grad = torch.zeros(matrix.param.shape) if matrix.param.grad is None else matrix.param.grad
            sums = grad.double().square().sum(tuple(range(grad.dim() - 1)))
            ratio = self.policy.topk_ratio
            count = max(round(ratio * matrix.columns), 1) if ratio else 0
            best = sorted(range(matrix.columns), key=lambda c: (-float(sums[c].float()), c))[:count]
            matrix.chosen = torch.zeros(matrix.columns, dtype=torch.bool)
            matrix.chosen[best] = True
            left, total = left + float(sums[~matrix.chosen].sum()), total + float(sums.sum())
        if self.policy.update_interval == "auto":
            if left > 0.75**2 * total:
                self.interval = max(self.interval // 2, 1)
            elif left < 0.5**2 * total:
                self.interval = min(self.interval * 2, 16)

    def state(self) -> dict[int, dict[str, Tensor]]:
        """What stock ``torch.optim`` has of it, and the counts of columns."""
        states: dict[int, dict[str, Tensor]] = {}
        for index, (matrix, _) in enumerate(self.all):
            if matrix.stepped or (matrix.waiting and matrix.columns):
                states[index] = {"step": matrix.counts.max(), **{key: matrix.arrays[key] for key in MOMENTS}}
                if matrix.param.dtype is not torch.float32:
                    states[index]["master"] = matrix.arrays["master"]
                if matrix.columns:
                    states[index]["column_steps"] = matrix.counts.view(*[1] * (matrix.param.dim() - 1), -1)
        return states


def hypers_of(group: dict[str, Any], gradients: int = 1) -> AdamHypers:
    """AdamW's, with torch's defaults, for a step by the mean of so many gradients."""
    root = gradients**0.5
    return AdamHypers(
        lr=group["lr"] * root,
        beta1=0.9**gradients,
        beta2=0.999**gradients,
        eps=1e-8 / root,
        weight_decay=group.get("weight_decay", 1e-2) * root,
        decoupled=True,
    )
