"""WorkerOffload over DTensors: what a step copies, with the norm in the same pass, is ``p.grad`` as it is then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import zero_opt
from test.support.fsdp_models import (
    BF16,
    FP32,
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
from zero_opt.placement.worker.arena_shard import ArenaShard
from zero_opt.sharding.buckets import GradBucket

WORKER = zero_opt.WorkerOffload()
# Reached by nearly all steps; by none.
OFTEN, NEVER = 0.05, 1e9


def _parts(net: Net) -> list[Any]:
    return [param.grad.to_local() for param in net.parameters() if param.grad is not None]  # type: ignore[attr-defined]


def _multiplied(net: Net) -> None:
    for param in net.parameters():
        if param.grad is not None:
            param.grad.mul_(1.5)


def _through_data(net: Net) -> None:
    """As no version counter tells."""
    for part in _parts(net):
        part.data[: part.shape[0] // 2] = 0.125


def _replaced(net: Net) -> None:
    for param in net.parameters():
        if param.grad is not None:
            param.grad = param.grad * 0.5 + 0.01


def _clipped_by_torch(net: Net) -> None:
    torch.nn.utils.clip_grad_norm_(net.parameters(), OFTEN)


def _dropped(net: Net) -> None:
    net.down.weight.grad = None


EDITS: dict[str, Callable[[Net], None]] = {
    "multiplied": _multiplied,
    "through data": _through_data,
    "replaced": _replaced,
    "clipped by torch": _clipped_by_torch,
    "dropped": _dropped,
}
KINDS = (
    *("plain", "plain", "clip call", "plain", "accumulated", "again", "zeroed", "scaled", "scaled", "overflow"),
    *("plain", *EDITS, "clipped, then multiplied", "clipped, then through data", "plain"),
)


class Training:
    """One rank's training, in which a step's kind says what happens."""

    def __init__(self, net: Net, optimizer: Any, rank: int) -> None:
        self.net, self.optimizer, self.rank = net, optimizer, rank
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)

    def run(self) -> list[Any]:
        """Return what there is after every step."""
        seen = []
        for number, kind in enumerate(KINDS):
            set_lr(self.optimizer, number // 3)
            self.optimizer.zero_grad(set_to_none=kind != "zeroed")
            norms = self.step(number, kind)
            seen.append((kind, norms, locals_of(self.net.parameters()), local_state(self.optimizer)))
        return seen

    def step(self, number: int, kind: str) -> list[Any]:
        """All backwards, edits and the step."""
        net, optimizer, norms = self.net, self.optimizer, []
        if kind in ("accumulated", "again"):
            backward(net, 100 + number, self.rank)
            if kind == "again":
                optimizer.zero_grad()
        scales = kind in ("scaled", "overflow")
        size = self.scaler.scale(torch.ones(())) if scales else torch.ones(())
        backward(net, number, self.rank, size=size * torch.inf if kind == "overflow" and self.rank == 0 else size)
        if kind.startswith("clip"):
            norms.append(optimizer.clip_grad_norm_(OFTEN) if "torch" not in kind else torch.zeros(()))
        for name, edit in EDITS.items():
            if kind.endswith(name):
                edit(net)
        if scales:
            self.scaler.step(optimizer)
            self.scaler.update()
        else:
            optimizer.step()
        return norms


def _steps_as_torch(rank: int, world_size: int, policy: Any, max_norm: float | None) -> None:
    mesh = mesh_of((world_size,))
    net = sharded_net(mesh, policy)
    expected = Training(net, sharded_optimizer(net, max_grad_norm=max_norm), rank).run()
    net = sharded_net(mesh, policy)
    optimizer = sharded_optimizer(net, offload=WORKER, max_grad_norm=max_norm)
    for mine, theirs in zip(Training(net, optimizer, rank).run(), expected, strict=True):
        assert_bitwise(mine[1:], theirs[1:], f"{policy}, {max_norm}, {mine[0]}")
    optimizer.close()


@pytest.mark.parametrize(
    ("world_size", "policy", "max_norm"), [(1, FP32, NEVER), (2, FP32, OFTEN), (2, BF16, NEVER), (2, FP32, None)]
)
def test_edits_of_gradients_before_the_step_count(world_size: int, policy: Any, max_norm: float | None) -> None:
    """The bits of torch's optimizers, with edits of all kinds, clipping, a loss scale and several backwards."""
    run_processes(world_size, _steps_as_torch, policy, max_norm)


def _read_once(rank: int, world_size: int, reduction: Any) -> None:
    """The copy adds up the squares, and what the placement is given lies in the arena."""
    net = sharded_net(mesh_of((world_size,)))
    optimizer = sharded_optimizer(net, offload=WORKER, reduction=reduction, max_grad_norm=NEVER)
    copied: list[bool] = []
    take: Any = ArenaShard.take_grads

    def noted(shard: ArenaShard, grads: Any) -> None:
        for position, grad in enumerate(grads):
            if grad is not None and grad.numel():
                place = shard.grads[slice(*shard.pieces[position].in_shard)]
                copied.append(grad.data_ptr() != place.data_ptr())
        take(shard, grads)

    ArenaShard.take_grads = noted  # type: ignore[method-assign]
    engine: Any = optimizer._engine  # type: ignore[attr-defined]
    share, known = engine.share, list[bool]()

    def shared(shards: Any, limit: float) -> Any:
        for shard in shards:
            sums = engine.partition.buckets[shard.bucket].squares()
            known.extend(place is not None for place, grad in zip(sums, shard.grads, strict=True) if grad is not None)
        return share(shards, limit)

    engine.share = shared
    for step in range(3):
        copied.clear()
        known.clear()
        optimizer.zero_grad()
        backward(net, 3 * step, rank)
        before = [part.data_ptr() for part in _parts(net)]
        optimizer.step()
        assert copied and not any(copied)
        assert known and all(known) is (step > 0), "squares come once a step has asked for them"
        assert [part.data_ptr() for part in _parts(net)] == before, "p.grad stays the user's"
    optimizer.close()


def _asked_anew(rank: int, world_size: int) -> None:
    """What the user's clipping measures beforehand is no question of the step's."""
    net = sharded_net(mesh_of((world_size,)))
    optimizer = sharded_optimizer(net, offload=WORKER, checks=zero_opt.Checks(nonfinite="skip"))
    known = list[bool]()
    for step in range(3):
        optimizer.zero_grad()
        backward(net, step, rank)
        optimizer.clip_grad_norm_(OFTEN)
        squares: Any = GradBucket.squares

        def noted(bucket: GradBucket, squares: Any = squares) -> Any:
            found = squares(bucket)
            known.extend(place is not None for place in found)
            return found

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(GradBucket, "squares", noted)
            optimizer.step()
        assert known and all(known) is (step > 0)
        known.clear()
    optimizer.close()


def test_a_step_adds_up_squares_that_it_asks_for_itself() -> None:
    run_processes(1, _asked_anew)


@pytest.mark.parametrize("reduction", [zero_opt.Overlapped(), zero_opt.AtStep()], ids=str)
def test_a_step_reads_gradients_once(reduction: Any) -> None:
    run_processes(1, _read_once, reduction)


def _measured_anew(rank: int, world_size: int) -> None:
    """A step that is skipped has added up squares, and the next norm is of other values."""
    net = sharded_net(mesh_of((world_size,)))
    checks = zero_opt.Checks(nonfinite="skip")
    optimizer = sharded_optimizer(net, offload=WORKER, max_grad_norm=NEVER, checks=checks)
    for step in range(2):
        optimizer.zero_grad()
        backward(net, step, rank)
        optimizer.step()
    optimizer.zero_grad()
    backward(net, 2, rank)
    kept = [part.clone() for part in _parts(net)]
    _parts(net)[0].data[0] = torch.inf
    optimizer.step()
    assert optimizer.skipped_steps == 1
    for part, values in zip(_parts(net), kept, strict=True):
        part.data.copy_(2 * values)
    expected = torch.cat([2 * values.flatten() for values in kept]).double().norm().float()
    torch.testing.assert_close(optimizer.clip_grad_norm_(NEVER), expected)
    optimizer.step()
    assert optimizer.skipped_steps == 1
    optimizer.close()


def test_a_norm_after_a_skipped_step_is_of_the_gradients_as_they_are() -> None:
    run_processes(1, _measured_anew)
