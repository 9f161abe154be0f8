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
        counts = self.steps > 0 or any(found.columns and found.param.grad is not None for found, _ in self.all)
        warm = self.steps >= self.policy.warmup_steps
        due = self.last_selection is None or self.steps - self.last_selection >= self.policy.select_interval
        if counts and warm and due and not self.in_window:
            self._select()
        closes = counts and (not warm or self.in_window + 1 >= self.interval)
        for found, group in self.all:
            hypers = hypers_of(group)
            everything = torch.ones_like(found.chosen)
            if found.param.grad is not None:
                now = found.chosen if found.columns else everything
                found.step(now, found.param.grad, hypers, scale)
                found.show(now)
                found.waiting.append(found.param.grad.float() * scale)
            if closes and found.waiting and found.columns:
                total = found.waiting[0].clone()
                for grad in found.waiting[1:]:
                    total += grad
                count = len(found.waiting)
                found.step(~found.chosen, total / count, hypers_of(group, count), gradients=count)
                self.late.append((found, ~found.chosen))
            if closes:
                found.waiting = []
        self.in_window = 0 if closes else self.in_window + counts
        self.steps += counts
        if not self.delay:
            self.flush()

    def clear(self) -> None:
        """Forget what was stepped and what waits; what is selected stays."""
        for found, _ in self.all:
            found.waiting = []
            found.counts.zero_()
            found.stepped = False
            for key in MOMENTS:
                found.arrays[key].zero_()
            found.arrays["master"] = found.param.detach().float().clone(memory_format=torch.contiguous_format)

    def flush(self) -> None:
        """Bring in what was stepped off device."""
        for found, which in self.late:
            found.show(which)
        self.late = []

    def _select(self) -> None:
        self.last_selection = self.steps
        left = total = 0.0
        for found, _ in self.all:
            if not found.columns:
                continue
            grad = torch.zeros(found.param.shape) if found.param.grad is None else found.param.grad
            sums = grad.double().square().sum(tuple(range(grad.dim() - 1)))
            ratio = self.policy.topk_ratio
            count = max(round(ratio * found.columns), 1) if ratio else 0
            best = sorted(range(found.columns), key=lambda c: (-float(sums[c].float()), c))[:count]
            found.chosen = torch.zeros(found.columns, dtype=torch.bool)
            found.chosen[best] = True
            left, total = left + float(sums[~found.chosen].sum()), total + float(sums.sum())
        if self.policy.update_interval == "auto":
            if left > 0.75**2 * total:
                self.interval = max(self.interval // 2, 1)
            elif left < 0.5**2 * total:
                self.interval = min(self.interval * 2, 16)

    def state(self) -> dict[int, dict[str, Tensor]]:
        """What stock ``torch.optim`` has of it, and the counts of columns."""
        states: dict[int, dict[str, Tensor]] = {}
        for index, (found, _) in enumerate(self.all):
            if found.stepped or (found.waiting and found.columns):
                states[index] = {"step": found.counts.max(), **{key: found.arrays[key] for key in MOMENTS}}
                if found.param.dtype is not torch.float32:
                    states[index]["master"] = found.arrays["master"]
                if found.columns:
                    states[index]["column_steps"] = found.counts.view(*[1] * (found.param.dim() - 1), -1)
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
