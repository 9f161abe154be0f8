"""A class of optimizers that is not registered as elementwise."""

from __future__ import annotations

from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    """An elementwise class that is not registered, so it is given whole parameters; keeps a number in its group."""

    def __init__(self, params: Any, lr: float = 1e-3, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "decay": 1.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["momentum"], state["count"] = torch.zeros_like(param), 0
                state["count"] += 1
                # The norm sees the whole parameter: a cut one would go elsewhere.
                direction = param.grad / (param.grad.norm() + 1e-8)
                state["momentum"].mul_(group["beta"]).add_(direction, alpha=1 - group["beta"])
                param.sub_(state["momentum"].sign() * group["decay"], alpha=group["lr"])
            group["decay"] *= 0.99
