"""Rules of a state machine that plays one training script on threaded ranks and on one plain optimizer.

A script is a list of operations; each is a tuple whose first element names it. The plain optimizer sees the mean of the
ranks' gradients, so both must hold the same bits at any point.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import zero_opt
from test.support.harness import assert_bitwise, run_threads
from test.support.scenario import AT_STEP, OVERLAPPED, add_locally, mean, values

SHAPES = ((70, 3), (65,), (), (300,), (64,))
ADDED = ((33, 2), (5,), (129,), ())
Operation = tuple[Any, ...]


def make_param(index: int) -> torch.nn.Parameter:
    """The parameter with a number, those of added groups included; the same every time."""
    shape = (*SHAPES, *ADDED)[index]
    return torch.nn.Parameter(values(77, 0, 0, index, shape).clone())


def local_grad(number: int, rank: int, index: int, mask: int, bad: bool) -> Tensor | None:
    """A rank's gradient in backward ``number``; ``mask`` seeds which parameters each rank uses."""
    if mask and random.Random(f"{mask} {rank} {index}").random() < 0.4:
        return None
    grad = values(number, 0, rank, index, (*SHAPES, *ADDED)[index]).clone()
    if bad and rank == 0 and grad.numel():
        grad.view(-1)[-1] = torch.nan
    return grad


class How(NamedTuple):
    """What a script is played with."""

    cls: Any
    reduction: Any
    offload: Any = None


class Player:
    """Plays a script: as one rank of a sharded optimizer, or as the plain one that stands for all ``world_size``."""

    def __init__(self, how: How, rank: int | None, board: dict[int, Any] | None = None) -> None:
        """``board`` is the same on all ranks."""
        self.how, self.rank, self.skipped = how, rank, 0
        self._board, self._saves = {} if board is None else board, 0
        self.params = [make_param(index) for index in range(len(SHAPES))]
        self.opt = self._made([{"params": self.params[:3]}, {"params": self.params[3:], "lr": 0.02}])
        self._sums: dict[int, list[Tensor | None]] = {}

    def _made(self, groups: Any) -> Any:
        if self.rank is None:
            return self.how.cls(groups, lr=0.01, **OPTIONS.get(self.how.cls, {}))
        options = {"reduction": self.how.reduction, "offload": self.how.offload, **OPTIONS.get(self.how.cls, {})}
        checks = zero_opt.Checks(nonfinite="skip")
        return zero_opt.ShardedOptimizer(groups, self.how.cls, lr=0.01, checks=checks, **options)

    def play(self, segment: Sequence[Operation], world_size: int) -> None:
        """Do one operation after the other."""
        for name, *arguments in segment:
            getattr(self, f"do_{name}")(*arguments, world_size=world_size)

    def do_backward(self, number: int, mask: int, bad: bool, world_size: int) -> None:
        """Every rank's own gradients, or their mean."""
        ranks = range(world_size) if self.rank is None else [self.rank]
        used, grads = [], []
        local = [self._local(number, rank, mask, bad) for rank in ranks]
        for index in local[0]:
            param, parts = self.params[index], [found[index] for found in local]
            if self.rank is None and isinstance(self.how.reduction, zero_opt.AtStep):
                param.grad = add_locally(self._sums, index, parts)
            elif (grad := mean(parts) if self.rank is None else parts[0]) is not None:
                used.append(param)
                grads.append(grad)
        if used:
            torch.autograd.backward(used, grads)

    def _local(self, number: int, rank: int, mask: int, bad: bool) -> dict[int, Tensor | None]:
        """A rank's gradients by parameter. A rank that uses none uses all: each has a part in every backward, or its
        next one would be added to another of the other ranks', which is the same sum, but not the same bits.
        """
        trainable = [index for index, param in enumerate(self.params) if param.requires_grad]
        found = {index: local_grad(number, rank, index, mask, bad) for index in trainable}
        if all(grad is None for grad in found.values()):
            found = {index: local_grad(number, rank, index, 0, bad) for index in trainable}
        return found

    def do_step(self, world_size: int) -> None:
        """step(), and zero_grad() after it; the plain one leaves out what the ranks skip."""
        if self.rank is None:
            grads = [param.grad for param in self.params if param.grad is not None]
            if all(bool(grad.isfinite().all()) for grad in grads):
                self.opt.step()
            else:
                self.skipped += 1
        else:
            self.opt.step()
        self.do_zero_grad(world_size)

    def do_zero_grad(self, world_size: int) -> None:
        """zero_grad()."""
        self.opt.zero_grad()
        self._sums.clear()

    def do_scale(self, world_size: int) -> None:
        """A clip to so large a norm that it changes nothing: gradients are reduced earlier."""
        if self.rank is not None:
            self.opt.clip_grad_norm_(1e30)

    def do_hyper(self, group: int, lr: float, world_size: int) -> None:
        """Another lr."""
        groups = self.opt.param_groups
        groups[group % len(groups)]["lr"] = lr

    def do_freeze(self, index: int, frozen: bool, world_size: int) -> None:
        """Freeze a parameter, or unfreeze it."""
        param = self.params[index % len(self.params)]
        param.requires_grad_(not frozen)
        param.grad = None
        self._sums.pop(index % len(self.params), None)

    def do_add(self, world_size: int) -> None:
        """Add a param group of one parameter, while there are any left."""
        if len(self.params) < len(SHAPES) + len(ADDED):
            self.params.append(make_param(len(self.params)))
            self.opt.add_param_group({"params": [self.params[-1]], "lr": 0.03})

    def do_reload(self, world_size: int) -> None:
        """Save, and load into what is there."""
        if self.rank is None:
            self.opt.load_state_dict(copy.deepcopy(self.opt.state_dict()))
        else:
            self.opt.load_state_dict(self.state())
        self.do_zero_grad(world_size)

    def state(self) -> Any:
        """The full state, on every rank."""
        if self.rank is None:
            return copy.deepcopy(self.opt.state_dict())
        group, to = self.opt._group, self._saves % self.opt._group.world_size
        self._saves += 1
        self.opt.consolidate_state_dict(to=to)
        if to == self.rank:
            self._board[self._saves] = self.opt.state_dict()
        group.all_gather(torch.zeros(1))  # it is there on all
        return self._board[self._saves]

    def resume(self, saved: Any) -> None:
        """Become what another player was, as far as a checkpoint says."""
        frozen, tensors, state = saved
        while len(self.params) < len(tensors):
            self.do_add(world_size=0)
        for param, tensor, fixed in zip(self.params, tensors, frozen, strict=True):
            with torch.no_grad():
                param.copy_(tensor)
            param.requires_grad_(not fixed)
        self.opt.load_state_dict(state)

    def saved(self) -> Any:
        """What :meth:`resume` takes."""
        frozen = [not param.requires_grad for param in self.params]
        return frozen, [param.detach().clone() for param in self.params], self.state()


def _play_rank(
    rank: int, world_size: int, how: How, segment: Any, before: Any, board: dict[int, Any]
) -> tuple[Any, int]:
    player = Player(how, rank, board)
    if before is not None:
        player.resume(before)
    player.play(segment, world_size)
    found, skipped = player.saved(), player.opt.skipped_steps
    player.opt.close()
    return found, skipped


def check_script(how: How, script: Sequence[tuple[int, Sequence[Operation]]]) -> None:
    """Fail unless ranks end every segment with the bits of the plain optimizer.

    Args:
        script: (world size, operations) of segments, with a save and a load at that world size between them.
    """
    plain, before = Player(how, None), None
    for world_size, segment in script:
        plain.skipped = 0
        plain.do_zero_grad(world_size)
        plain.play(segment, world_size)
        expected = plain.saved()
        board: dict[int, Any] = {}
        if world_size == 1:  # needs no process group
            outcomes = [_play_rank(0, 1, how, segment, before, board)]
        else:
            outcomes = run_threads(world_size, _play_rank, how, segment, before, board)
        for rank, (found, skipped) in enumerate(outcomes):
            assert_bitwise(found, expected, f"rank {rank} of {world_size}")
            assert skipped == plain.skipped
        before = outcomes[0][0]


REDUCTIONS = (OVERLAPPED, AT_STEP)
CLASSES = (torch.optim.Adam, torch.optim.SGD, torch.optim.RMSprop)
# An offload would take the fused formula.
OPTIONS: dict[Any, dict[str, Any]] = {torch.optim.Adam: {"fused": False}}
# With these a rank alone does all that ranks do.
ALONE = (zero_opt.CPUOffload(pin_memory=False), zero_opt.CPUOffload(pin_memory=False, ratio=0.5))
