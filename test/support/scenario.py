"""Twenty steps of training with everything mixed in, run by ranks and by one plain optimizer that plays them all.

Gradients are a fixed function of (step, backward, rank, parameter), so that every rank, and the oracle, can compute
anyone's. Some parameters have none: differing per rank and per backward; some on no rank at all in a step.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

import zero_opt

STEPS = 20

# Small buckets, so that there are many; shapes that are cut inside, that fit a rank, and that are odd.
SHAPES = ((130, 7), (65,), (), (0, 3), (300,), (64,), (3, 5, 7, 2), (1000,), (1,))
BUCKET_MB = 2048 / 2**20
OVERLAPPED, AT_STEP = zero_opt.Overlapped(BUCKET_MB), zero_opt.AtStep(BUCKET_MB)

NEVER_USED = 5

Groups = list[dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """An optimizer class with arguments, and how its groups differ.

    Attributes:
        kwargs: constructor arguments. second: what the second param group has of its own.
        shapes: of the parameters. sparse: gradients are sparse.
    """

    cls: type[torch.optim.Optimizer]
    kwargs: tuple[tuple[str, Any], ...]
    second: tuple[tuple[str, Any], ...]
    shapes: tuple[tuple[int, ...], ...] = SHAPES
    sparse: bool = False

    def groups(self, params: Sequence[Tensor]) -> Groups:
        """Three param groups with different hyperparameters."""
        count = len(params)
        third = {"lr": dict(self.second)["lr"] / 3}
        return [
            {"params": params[: count // 3]},
            {"params": params[count // 3 : count - 2], **dict(self.second)},
            {"params": params[count - 2 :], **third},
        ]

    def params(self) -> list[torch.nn.Parameter]:
        """Freshly made parameters, the same every time."""
        generator = torch.Generator().manual_seed(len(self.shapes))
        return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in self.shapes]

    def plain(self, params: Sequence[Tensor]) -> torch.optim.Optimizer:
        """The wrapped class itself."""
        return self.cls(self.groups(params), **dict(self.kwargs))

    def sharded(self, params: Sequence[Tensor], reduction: Any, **options: Any) -> zero_opt.ShardedOptimizer:
        """The class, sharded."""
        return zero_opt.ShardedOptimizer(
            self.groups(params), self.cls, reduction=reduction, **options, **dict(self.kwargs)
        )


def case(cls: type[torch.optim.Optimizer], second: dict[str, Any], **kwargs: Any) -> Case:
    """A :class:`Case` over the default shapes."""
    return Case(cls, tuple(kwargs.items()), tuple(second.items()))


def backwards(step: int) -> int:
    """How many backward passes a step has."""
    return 1 + step % 3


@lru_cache(maxsize=200_000)
def gradient(step: int, turn: int, rank: int, index: int, shape: tuple[int, ...]) -> Tensor | None:
    """A rank's gradient of one parameter in one backward; ``None`` where that backward does not use it."""
    if index == NEVER_USED or random.Random(f"{step} {index}").random() < 0.1:
        return None
    # Every rank takes part in every backward: parameter 0 is used whenever any is.
    if index and random.Random(f"{step} {turn} {rank} {index}").random() < 0.3:
        return None
    return values(step, turn, rank, index, shape)


@lru_cache(maxsize=200_000)
def values(step: int, turn: int, rank: int, index: int, shape: tuple[int, ...]) -> Tensor:
    """Normal values that depend on the arguments alone: a rank's gradient of a parameter, or its first values."""
    seed = ((step * 7 + turn) * 13 + rank) * 103 + index
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def sparsified(dense: Tensor, seed: int) -> Tensor:
    """A few rows of ``dense`` as a sparse tensor, some of them twice."""
    rows = [random.Random(seed + i).randrange(len(dense)) for i in range(4)]
    return torch.sparse_coo_tensor(torch.tensor([rows]), dense[:4].clone(), dense.shape, check_invariants=False)


def mean(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Sum in tree order divided by the number of ranks, rounded once; ``None`` counts as zero unless all are."""
    there = [part for part in parts if part is not None]
    if not there:
        return None
    if there[0].is_sparse:  # rows that nobody sends are not rows of zeros
        total = tree_sum([part if part is None else part.coalesce() for part in parts])
    else:
        wide = torch.promote_types(there[0].dtype, torch.float32)
        total = tree_sum([(torch.zeros_like(there[0]) if part is None else part).to(wide) for part in parts])
    assert total is not None
    return (total / len(parts)).to(there[0].dtype)


def tree_sum(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Sum with a split at the largest power of two below the number of ranks."""
    if len(parts) == 1:
        return parts[0]
    middle = 1
    while 2 * middle < len(parts):
        middle *= 2
    total = add(tree_sum(parts[:middle]), tree_sum(parts[middle:]))
    return total.coalesce() if total is not None and total.is_sparse else total


def add(total: Tensor | None, more: Tensor | None) -> Tensor | None:
    """What autograd does with ``p.grad``."""
    if total is None or more is None:
        return more if total is None else total
    return total + more


def add_locally(sums: dict[int, list[Tensor | None]], index: int, parts: Sequence[Tensor | None]) -> Tensor | None:
    """Add each rank's gradient of a parameter to that rank's sum, as AtStep does, and return the mean of the sums."""
    sums[index] = [add(*pair) for pair in zip(sums.get(index, [None] * len(parts)), parts, strict=True)]
    return mean(sums[index])


GradOf = Callable[[int, int, int, int], Tensor | None]


def grad_source(case: Case) -> GradOf:
    """The case's gradients by (step, turn, rank, index)."""

    def grad_of(step: int, turn: int, rank: int, index: int) -> Tensor | None:
        found = gradient(step, turn, rank, index, case.shapes[index])
        if found is not None and case.sparse:
            return sparsified(found, ((step * 7 + turn) * 13 + rank) * 103 + index)
        return found

    return grad_of


def sum_of_means(case: Case, world_size: int, step: int, index: int) -> Tensor | None:
    """What a parameter's gradient is when every backward is reduced and the means are added up."""
    grad_of, total = grad_source(case), None
    for turn in range(backwards(step)):
        total = add(total, mean([grad_of(step, turn, rank, index) for rank in range(world_size)]))
    return total


def mean_of_sums(case: Case, world_size: int, step: int, index: int) -> Tensor | None:
    """What a parameter's gradient is when each rank accumulates by itself and the sums are reduced once."""
    sums = [local_sum(case, step, rank, index) for rank in range(world_size)]
    return mean(sums)


def local_sum(case: Case, step: int, rank: int, index: int) -> Tensor | None:
    """One rank's accumulated gradient."""
    grad_of, total = grad_source(case), None
    for turn in range(backwards(step)):
        total = add(total, grad_of(step, turn, rank, index))
    return total


def expected(case: Case, world_size: int, reduction: Any, steps: int = STEPS) -> tuple[list[Tensor], dict[str, Any]]:
    """Parameters and state dict of the plain class fed the same mean gradient."""
    combine = mean_of_sums if isinstance(reduction, zero_opt.AtStep) else sum_of_means
    params = case.params()
    optimizer = case.plain(params)
    for step in range(steps):
        for index, param in enumerate(params):
            param.grad = combine(case, world_size, step, index)
        optimizer.step()
    return [param.detach().clone() for param in params], optimizer.state_dict()


def backward_of(case: Case, params: Any, reduction: Any, step: int, rank: int, world_size: int) -> None:
    """A step's gradients as they come to a reduction: the mean in ``p.grad``, or by this rank's own backwards."""
    if isinstance(reduction, zero_opt.AlreadyReduced):
        for index, param in enumerate(params):
            param.grad = sum_of_means(case, world_size, step, index)
    else:
        for used, grads in local_backwards(case, params, step, rank):
            torch.autograd.backward(used, grads)


def train(
    case: Case, rank: int, world_size: int, reduction: Any, steps: int = STEPS, **options: Any
) -> tuple[list[Tensor], Any]:
    """One rank's run: its parameters at the end, and the state dict if it was brought here."""
    params = case.params()
    optimizer = case.sharded(params, reduction, **options)
    for step in range(steps):
        optimizer.zero_grad()
        backward_of(case, params, reduction, step, rank, world_size)
        optimizer.step()
    to = steps % world_size
    optimizer.consolidate_state_dict(to=to)
    state = optimizer.state_dict() if rank == to else None
    optimizer.close()
    return [param.detach().clone() for param in params], state


def local_backwards(
    case: Case, params: Sequence[Tensor], step: int, rank: int
) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Per backward, the parameters it uses on this rank and their gradients."""
    grad_of = grad_source(case)
    for turn in range(backwards(step)):
        found = {index: grad_of(step, turn, rank, index) for index in range(len(params))}
        used = [index for index, grad in found.items() if grad is not None]
        if used:
            yield [params[index] for index in used], [grad for grad in found.values() if grad is not None]
