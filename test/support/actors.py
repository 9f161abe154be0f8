"""One training script, played by the ranks of a sharded optimizer and by one plain optimizer that sees their mean."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import zero_opt
from test.support.harness import assert_bitwise, run_threads
from test.support.scenario import OVERLAPPED, SHAPES, add_locally, gradient, mean, values

Shapes = Sequence[tuple[int, ...]]


def make_params(shapes: Shapes = SHAPES) -> list[torch.nn.Parameter]:
    """The same parameters every time."""
    generator = torch.Generator().manual_seed(7)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def two_groups(params: Sequence[Tensor]) -> list[dict[str, Any]]:
    """The parameters as two param groups."""
    return [{"params": params[:4], "lr": 0.02}, {"params": params[4:], "lr": 0.01, "weight_decay": 0.1}]


@dataclass
class Actor:
    """A player of a script: one rank with its own gradients, or a plain optimizer with the mean of all ranks'.

    Attributes:
        ranks: those whose gradients the player sees.
        local_sums: gradients are summed up on each rank before the mean is taken.
    """

    params: list[torch.nn.Parameter]
    optimizer: torch.optim.Optimizer
    ranks: Sequence[int]
    local_sums: bool = False
    _sums: dict[int, list[Tensor | None]] = field(default_factory=dict)

    def backward(self, number: int, only: Container[int] | None = None, everyone: bool = False) -> None:
        """Accumulate the gradients of backward ``number``, of all parameters or only of some.

        ``everyone``: give every parameter a gradient on every rank.
        """
        grad_of = values if everyone else gradient
        for index in range(len(self.params)):
            self._forget_dropped(index)
        used, grads = [], []
        for index, param in enumerate(self.params):
            if (only is not None and index not in only) or not param.requires_grad:
                continue
            parts = [grad_of(number, 0, rank, index, tuple(param.shape)) for rank in self.ranks]
            if self.local_sums:
                grad = add_locally(self._sums, index, parts)
                if grad is not None:
                    param.grad = grad
            elif (grad := mean(parts)) is not None:
                used.append(param)
                grads.append(grad)
        if used:
            torch.autograd.backward(used, grads)

    def set_by_hand(self, number: int, index: int) -> None:
        """Assign ``p.grad``."""
        shape = tuple(self.params[index].shape)
        self._sums.pop(index, None)
        self.params[index].grad = mean([gradient(number, 0, rank, index, shape) for rank in self.ranks])

    def _forget_dropped(self, index: int) -> None:
        grad = self.params[index].grad
        if self.local_sums and (grad is None or not grad.any()):
            self._sums.pop(index, None)

    def play(self, script: Script) -> tuple[list[Tensor], Any]:
        """Parameters after the script, and the optimizer's state where it is to be had."""
        script(self)
        state = None
        if isinstance(self.optimizer, zero_opt.ShardedOptimizer):
            self.optimizer.consolidate_state_dict(to=0)
            if self.ranks[0] == 0:
                state = self.optimizer.state_dict()
            self.optimizer.close()
        else:
            state = self.optimizer.state_dict()
        return [param.detach().clone() for param in self.params], state


Script = Callable[[Actor], None]


def rank_actor(rank: int, reduction: Any = OVERLAPPED, cls: Any = torch.optim.Adam, **kwargs: Any) -> Actor:
    """One rank."""
    params = make_params()
    optimizer = zero_opt.ShardedOptimizer(two_groups(params), cls, reduction=reduction, **kwargs)
    return Actor(params, optimizer, [rank])


def plain_actor(world_size: int, reduction: Any = OVERLAPPED, cls: Any = torch.optim.Adam, **kwargs: Any) -> Actor:
    """The plain optimizer that stands for all ranks."""
    params = make_params()
    return Actor(params, cls(two_groups(params), **kwargs), range(world_size), isinstance(reduction, zero_opt.AtStep))


def _play_rank(rank: int, world_size: int, script: Script, reduction: Any, kwargs: dict[str, Any]) -> Any:
    return rank_actor(rank, reduction, **kwargs).play(script)


def assert_same_as_plain(
    script: Script,
    reduction: Any = OVERLAPPED,
    world_size: int = 3,
    run: Callable[..., Any] = run_threads,
    **kwargs: Any,
) -> None:
    """Fail unless the script ends with the same bits on every rank and in the plain optimizer."""
    params, state = plain_actor(world_size, reduction, **kwargs).play(script)
    for rank, (found, found_state) in enumerate(run(world_size, _play_rank, script, reduction, kwargs)):
        assert_bitwise(found, params, f"rank {rank}")
        if rank == 0:
            assert_bitwise(found_state, state, "state")
