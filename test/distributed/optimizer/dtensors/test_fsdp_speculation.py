"""WorkerOffload(speculate=True) over DTensors: steps that begin as FSDP reduces, with the bits of FSDP2 and AdamW."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

import zero_opt
from test.support.fsdp_models import (
    BF16,
    FP32,
    WIDTH,
    Net,
    backward,
    local_state,
    locals_of,
    mesh_of,
    set_lr,
    sharded_net,
    sharded_optimizer,
)
from test.support.harness import assert_bitwise, run_processes

SPECULATING = zero_opt.WorkerOffload(speculate=True)
# Buckets of a few parameters each.
SMALL = zero_opt.Overlapped(bucket_mb=0.01)
# Reached by nearly all steps; by some; by none.
OFTEN, SOMETIMES, NEVER = 0.05, 12.0, 1e9
# One step each. Those that are "plain" let the next ones be drafted again.
KINDS = (
    *("plain", "plain", "clip call", "plain", "accumulated", "accumulated", "plain", "unsynced", "kept", "zeroed"),
    *("scaled", "scaled", "scaled", "overflow", "scaled", "scaled, accumulated", "plain", "dropped", "param", "state"),
    *("plain", "again", "frozen", "thawed", "plain", "plain"),
)
# Per mesh: mixed precision, max_grad_norm, and whether drafts become steps.
RUNS: dict[tuple[int, ...], tuple[tuple[Any, float | None, bool], ...]] = {
    (1,): ((BF16, None, True),),
    (2,): ((FP32, None, True), (BF16, SOMETIMES, True), (FP32, OFTEN, False)),
    (2, 2): ((FP32, NEVER, True),),
}


class Training:
    """One rank's training, in which a step's kind says what happens."""

    def __init__(self, net: Net, optimizer: Any, rank: int) -> None:
        self.net, self.optimizer, self.rank = net, optimizer, rank
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)

    def run(self, left_out: str) -> list[Any]:
        """Return what there is after every step of all kinds but one."""
        seen = []
        for number, kind in enumerate(kind for kind in KINDS if kind != left_out):
            set_lr(self.optimizer, number // 3)
            self.before(number, kind)
            norms = self.step(number, kind)
            seen.append((kind, norms, locals_of(self.net.parameters()), local_state(self.optimizer)))
        return seen

    def before(self, number: int, kind: str) -> None:
        """Everything until the last backward."""
        net, optimizer = self.net, self.optimizer
        if kind == "param":
            with torch.no_grad():
                net.down.weight.mul_(1.5)
        if kind == "state":
            optimizer.state[net.down.weight]["exp_avg"].mul_(3)
        if kind in ("frozen", "thawed"):
            net.down.weight.requires_grad_(kind == "thawed")
        if kind == "zeroed":
            optimizer.zero_grad(set_to_none=False)
        elif kind == "dropped":  # half of them, by the user
            for param in list(net.parameters())[::2]:
                param.grad = None
            optimizer.zero_grad()
        elif kind != "kept":
            optimizer.zero_grad()
        if kind == "again":  # what came of the first backward is void
            backward(net, 500 + number, self.rank)
            net.zero_grad()
        if "accumulated" in kind or kind == "unsynced":
            if kind == "unsynced":
                net.set_requires_gradient_sync(False)
            self.backward(100 + number, kind)
            net.set_requires_gradient_sync(True)

    def backward(self, number: int, kind: str) -> None:
        """Of a loss that may be scaled; ``scale`` is unused in some."""
        for param in self.net.parameters():
            assert kind == "kept" or param.grad is None or "accumulated" in kind or kind == "zeroed"
        size = self.scaler.scale(torch.ones(())) if self.scales(kind) else torch.ones(())
        if kind == "overflow" and self.rank == 0:
            size = size * torch.inf
        backward(self.net, number, self.rank, size=size)

    @staticmethod
    def scales(kind: str) -> bool:
        return kind.startswith("scaled") or kind == "overflow"

    def step(self, number: int, kind: str) -> list[Tensor]:
        """The last backward, and the step."""
        self.backward(number, kind)
        if self.scales(kind):
            self.scaler.unscale_(self.optimizer)
        norms = [self.optimizer.clip_grad_norm_(OFTEN)] if "clip" in kind else []
        if self.scales(kind):
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        return norms


def _steps_as_torch(rank: int, world_size: int, shape: tuple[int, ...]) -> None:
    mesh = mesh_of(shape)
    for policy, max_norm, keeps in RUNS[shape]:
        left_out = "" if max_norm is None else "kept"  # torch keeps clipped gradients, and zero_opt those before
        net = sharded_net(mesh, policy)
        plain = sharded_optimizer(net, max_grad_norm=max_norm)  # the wrapped class, which is given the DTensors
        expected = Training(net, plain, rank).run(left_out)
        net = sharded_net(mesh, policy)
        optimizer = sharded_optimizer(net, offload=SPECULATING, reduction=SMALL, max_grad_norm=max_norm)
        found = Training(net, optimizer, rank).run(left_out)
        for mine, theirs in zip(found, expected, strict=True):
            assert_bitwise(mine[1:], theirs[1:], f"{policy}, {max_norm}, {mine[0]}")
        placement: Any = optimizer._engine.placement  # type: ignore[attr-defined]
        assert (placement.kept > 0) == keeps, (max_norm, placement.kept)
        optimizer.close()


@pytest.mark.parametrize("shape", RUNS, ids=str)
def test_steps_are_those_of_torch(shape: tuple[int, ...]) -> None:
    """Groups that differ, a schedule, uneven and empty parts, and all that may become of a draft."""
    run_processes(torch.Size(shape).numel(), _steps_as_torch, shape)


def _consumed(rank: int, world_size: int) -> None:
    """Backward sends what it sends without the optimizer. ``p.grad`` refuses to be read until it is dropped."""
    net = sharded_net(mesh_of((world_size,)))

    def sent() -> int:
        loss = net(torch.ones(4, WIDTH)).square().mean()
        with CommDebugMode() as mode:
            loss.backward()
        count: int = mode.get_total_counts()
        return count

    alone = sent()
    net.zero_grad()
    optimizer = sharded_optimizer(net, offload=SPECULATING, reduction=SMALL)
    assert sent() == alone > 0
    grad: Any = net.down.weight.grad
    assert isinstance(grad, DTensor) and grad.placements == net.down.weight.placements  # type: ignore[attr-defined]
    for use in (grad.full_tensor, grad.to_local, grad.sum, partial(grad.mul_, 2), partial(torch.isnan, grad)):
        with pytest.raises(zero_opt.GradientConsumed, match="parameter"):
            use()
    with pytest.raises(zero_opt.GradientConsumed, match=r"opt.clip_grad_norm_"):
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    assert net.down.weight.grad is grad
    optimizer.close()
    assert all(param.grad is None for param in net.parameters())
    backward(net, 1, rank)
    assert torch.isfinite(torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0))


def test_gradients_are_consumed_as_those_of_plain_parameters() -> None:
    run_processes(2, _consumed)


def _raises_at_its_first_gradient(rank: int, world_size: int) -> None:
    net = sharded_net(mesh_of((1,)))

    def trip(_: Tensor) -> None:
        raise KeyError("of the user's")

    trained = [param for param in net.parameters() if param.requires_grad]
    handles = [param.register_post_accumulate_grad_hook(trip) for param in trained]
    optimizer = sharded_optimizer(net, offload=SPECULATING, reduction=SMALL)
    before = locals_of(net.parameters())
    with pytest.raises(KeyError):
        backward(net, 0, rank)
    for module in (net.down, net.up, net):
        module.reshard()  # type: ignore[operator]
    with pytest.raises(zero_opt.StepDesync, match="a backward ended in an exception"):
        optimizer.step()
    assert_bitwise(locals_of(net.parameters()), before)
    optimizer.zero_grad()
    for handle in handles:
        handle.remove()
    for param in trained:  # FSDP2 itself does not go on after an exception
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.close()


def test_a_backward_that_raises_before_its_first_gradient_is_handed_over_is_no_step() -> None:
    run_processes(1, _raises_at_its_first_gradient)
