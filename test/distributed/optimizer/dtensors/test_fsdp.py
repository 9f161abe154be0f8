"""Parameters sharded by ``fully_shard``: the bits of torch's optimizers, wherever the shard lives."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch.distributed.tensor.debug import CommDebugMode

import zero_opt
from test.support.fsdp_models import (
    BF16,
    FP32,
    backward,
    groups_of,
    local_state,
    locals_of,
    mesh_of,
    set_lr,
    sharded_net,
    sharded_optimizer,
)
from test.support.harness import assert_bitwise, run_processes
from zero_opt.optimizer.dtensors.mesh_group import MeshGroup

STEPS = 5
WORKER = zero_opt.WorkerOffload()
MESHES = {"uneven": (2,), "three": (3,), "replicas": (2, 2)}


def _trained(net: Any, optimizer: Any, rank: int, *, clip: bool) -> list[Any]:
    """This rank's parameters after every step; torch's function clips."""
    seen = []
    for step in range(STEPS):
        set_lr(optimizer, step)
        optimizer.zero_grad()
        backward(net, step, rank)
        if clip:
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.05)
        optimizer.step()
        seen.append(locals_of(net.parameters()))
    return seen


def _steps_as_torch(rank: int, world_size: int, shape: tuple[int, ...]) -> None:
    mesh = mesh_of(shape)
    for policy in (FP32, BF16):
        net = sharded_net(mesh, policy)
        plain = torch.optim.AdamW(groups_of(net), lr=0.02, fused=True)
        expected, state = _trained(net, plain, rank, clip=True), local_state(plain)
        for offload in (None, WORKER, zero_opt.CPUOffload()):
            net = sharded_net(mesh, policy)
            optimizer = sharded_optimizer(net, offload=offload)
            assert_bitwise(_trained(net, optimizer, rank, clip=True), expected, f"{policy}, {offload}")
            assert_bitwise(local_state(optimizer), state, f"state, {policy}, {offload}")
            optimizer.close()


@pytest.mark.parametrize("shape", MESHES.values(), ids=MESHES)
def test_steps_are_those_of_torch(shape: tuple[int, ...]) -> None:
    """Groups that differ, a schedule, clipping, frozen and unused parameters, parts that are uneven or empty."""
    run_processes(torch.Size(shape).numel(), _steps_as_torch, shape)


def _delayed(rank: int, world_size: int, shape: tuple[int, ...], factor: float) -> None:
    """Gradients of predictions, applied a step later to what they predict, which ``flush()`` shows; two backwards."""
    mesh = mesh_of(shape)
    net = sharded_net(mesh)
    params = list(net.parameters())
    plain = torch.optim.AdamW(groups_of(net), lr=0.02, fused=True)
    expected, waiting = [], None
    true = shown = locals_of(params)
    for step in range(STEPS + 1):
        _put(params, shown)
        if step < STEPS:
            _backwards(net, plain, step, rank)
            new = [param.grad for param in params]
        _put(params, true)
        shown = true
        if waiting is not None:
            set_lr(plain, step - 1)
            for param, grad in zip(params, waiting, strict=True):
                param.grad = grad
            plain.step()
            true = locals_of(params)
            moved, ahead = [grad is not None for grad in waiting], _stepped_again(plain, params)
            shown = [p + factor * (r - p) if m else p for p, r, m in zip(true, ahead, moved, strict=True)]
        waiting = new
        expected.append(shown)

    for reduction in (zero_opt.Overlapped(bucket_mb=0.01), zero_opt.AtStep()):
        net = sharded_net(mesh)
        optimizer = sharded_optimizer(
            net, offload=zero_opt.WorkerOffload(delay=1, prediction=factor), reduction=reduction
        )
        for step in range(STEPS):
            _backwards(net, optimizer, step, rank)
            set_lr(optimizer, step)
            optimizer.step()
            assert_bitwise(locals_of(net.parameters()), expected[step], f"{reduction}, step {step}")
        optimizer.flush()
        assert_bitwise(locals_of(net.parameters()), true, f"{reduction}, flushed")
        assert_bitwise(local_state(optimizer), local_state(plain))
        optimizer.close()


def _stepped_again(plain: torch.optim.Optimizer, params: Sequence[Any]) -> list[torch.Tensor]:
    """What another step with the same gradients makes of the parameters; the state is as before it."""
    kept = [(entry, {key: value.clone() for key, value in entry.items()}) for entry in plain.state.values()]
    plain.step()
    for entry, values in kept:
        for key, value in values.items():
            entry[key].copy_(value)
    return locals_of(params)


def _put(params: Sequence[Any], values: Sequence[torch.Tensor]) -> None:
    for param, value in zip(params, values, strict=True):
        param.to_local().detach().copy_(value)


def _backwards(net: Any, optimizer: torch.optim.Optimizer, step: int, rank: int) -> None:
    optimizer.zero_grad()
    for part in range(1 + step % 2):
        backward(net, step + 100 * part, rank)


@pytest.mark.parametrize(("shape", "factor"), [((1,), 1.5), ((2,), 0.0), ((2,), 1.5), ((2, 2), 1.5)])
def test_a_delayed_step_applies_the_gradient_before(shape: tuple[int, ...], factor: float) -> None:
    run_processes(torch.Size(shape).numel(), _delayed, shape, factor)


def _parts_of_any_size(rank: int, world_size: int) -> None:
    """An oracle per rank steps the parts by themselves; torch's kernel has other bits at their ends."""
    mesh = mesh_of((world_size,))
    for cls, offload in ((zero_opt.CPUAdamW, None), (zero_opt.CPUAdamW, WORKER), (torch.optim.AdamW, WORKER)):
        net = sharded_net(mesh, ragged=True)
        optimizer = zero_opt.ShardedOptimizer(net.parameters(), cls, lr=0.02, offload=offload)
        parts = [torch.nn.Parameter(part) for part in locals_of(net.parameters())]
        oracle = zero_opt.CPUAdamW(parts, lr=0.02)
        for step in range(STEPS):
            optimizer.zero_grad()
            backward(net, step, rank)
            for part, param in zip(parts, net.parameters(), strict=True):
                part.grad = None if param.grad is None else param.grad.to_local().clone()
            oracle.step()
            optimizer.step()
            assert_bitwise(locals_of(net.parameters()), [part.detach() for part in parts], f"{cls}, {offload}")
        assert_bitwise(local_state(optimizer), [dict(oracle.state.get(part, {})) for part in parts])
        optimizer.close()


def test_parts_of_any_size_are_stepped_as_tensors_by_themselves() -> None:
    run_processes(3, _parts_of_any_size)


def _compact_parts(rank: int, world_size: int) -> None:
    """Likewise with compact state, which is shown as DTensors of values; the user edits one in place."""
    mesh = mesh_of((world_size,))
    forms = [(torch.float32, zero_opt.AdamState("block8")), (torch.bfloat16, zero_opt.AdamState("bfloat16", "split"))]
    for (dtype, form), offload in product(forms, (None, zero_opt.CPUOffload(), WORKER)):
        net = sharded_net(mesh, ragged=True, dtype=dtype)
        optimizer = zero_opt.ShardedOptimizer(net.parameters(), zero_opt.CPUAdamW, lr=0.02, offload=offload, state=form)
        parts = [torch.nn.Parameter(part.clone()) for part in locals_of(net.parameters())]
        oracle = zero_opt.CPUAdamW(parts, lr=0.02, state=form)
        for step in range(STEPS):
            optimizer.zero_grad()
            backward(net, step, rank)
            for part, param in zip(parts, net.parameters(), strict=True):
                part.grad = None if param.grad is None else param.grad.to_local().clone()
            if step == 3:
                optimizer.state[net.down.weight]["exp_avg"].mul_(3)
                saved, at = oracle.state_dict(), [name for name, _ in net.named_parameters()].index("down.weight")
                saved["state"][at]["exp_avg"].mul_(3)
                oracle.load_state_dict(saved)
            oracle.step()
            optimizer.step()
            assert_bitwise(locals_of(net.parameters()), [part.detach() for part in parts], f"{form}, {offload}")
        states = oracle.state_dict()["state"]
        assert_bitwise(local_state(optimizer), [states.get(at, {}) for at in range(len(parts))])
        optimizer.close()


def test_parts_have_compact_state() -> None:
    run_processes(2, _compact_parts)


def _no_messages(rank: int, world_size: int) -> None:
    net = sharded_net(mesh_of((world_size,)))
    optimizer = sharded_optimizer(net, offload=WORKER)
    told: list[Any] = []
    gather: Any = MeshGroup.all_gather
    MeshGroup.all_gather = lambda *given: told.append(given) or gather(*given)  # type: ignore[assignment,method-assign]
    for step in range(2):
        backward(net, step, rank)
        with CommDebugMode() as sent:
            optimizer.step()
            optimizer.zero_grad()
        assert sent.get_total_counts() == 0 and not told
    optimizer.clip_grad_norm_(1.0)
    assert len(told) == 1
    optimizer.close()
    with CommDebugMode() as sent:
        net.down.weight.full_tensor()  # type: ignore[operator]
    assert sent.get_total_counts() == 1  # so it does count


def test_a_step_sends_nothing() -> None:
    run_processes(2, _no_messages)


def _clipped(rank: int, world_size: int, shape: tuple[int, ...]) -> list[Any]:
    """Norms, and parameters, with the norm of the whole gradient from an oracle that gathers it."""
    mesh, found = mesh_of(shape), []
    for offload, folded in ((None, False), (WORKER, False), (None, True), (WORKER, True)):
        net = sharded_net(mesh)
        optimizer = sharded_optimizer(net, offload=offload, max_grad_norm=0.05 if folded else None)
        norms = []
        for step in range(3):
            optimizer.zero_grad()
            backward(net, step, rank)
            whole = [p.grad.full_tensor().double().square().sum() for p in net.parameters() if p.grad is not None]
            exact = torch.stack(whole).sum().sqrt()
            theirs = torch.nn.utils.get_total_norm([p.grad for p in net.parameters() if p.grad is not None])
            if not folded:
                norms.append(optimizer.clip_grad_norm_(0.05))
                assert norms[-1].dtype is torch.float32
                # Rounded once from fp64, whose own error is far below; theirs sums n numbers in fp32.
                assert abs(norms[-1].double() - exact) <= exact * 2**-24
                assert abs(norms[-1] - theirs.full_tensor()) <= exact * 2**-16
            optimizer.step()
        found.append([norms, locals_of(net.parameters())])
        optimizer.close()
    assert_bitwise(found[0], found[1], "offload")
    assert_bitwise(found[2], [[], found[0][1]], "folded")
    assert_bitwise(found[3], found[2], "folded, offload")
    return found[0][0]


@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=["shards", "replicas"])
def test_the_norm_is_that_of_the_whole_gradient_and_the_same_everywhere(shape: tuple[int, ...]) -> None:
    """Every element counts once, however many ranks have it."""
    norms = run_processes(torch.Size(shape).numel(), _clipped, shape)
    for other in norms[1:]:
        assert_bitwise(other, norms[0])


def _accumulated(rank: int, world_size: int) -> None:
    """Gradients of several backwards, a group added later, a parameter unfrozen, values edited between steps."""
    found = []
    for offload in (False, None, WORKER):
        net = sharded_net(mesh_of((world_size,)))
        first, second = groups_of(net)
        options: Any = {"lr": 0.02, "fused": True}
        optimizer: Any = (
            torch.optim.AdamW([first], **options)
            if offload is False
            else zero_opt.ShardedOptimizer([first], torch.optim.AdamW, offload=offload, **options)
        )
        for step in range(4):
            if step == 1:
                optimizer.add_param_group(second)
            if step == 2:
                net.idle.requires_grad_(True)
                with torch.no_grad():
                    net.up.weight.mul_(0.5)  # a DTensor's own counter of changes
                    net.down.weight.to_local().mul_(2)  # its part's
            for part in range(2):
                net.set_requires_gradient_sync(part == 1)
                backward(net, 10 * part + step, rank)
            optimizer.step()
            optimizer.zero_grad()
            found.append([locals_of(net.parameters()), local_state(optimizer)])
    assert_bitwise(found[4:8], found[:4], "device")
    assert_bitwise(found[8:], found[:4], "worker")


def test_what_the_user_does_between_steps_counts_as_in_torch() -> None:
    run_processes(2, _accumulated)


def _whole_classes(rank: int, world_size: int) -> None:
    """With torch 2.13 Adafactor takes no matrices."""
    for cls, name in ((torch.optim.Muon, "wide"), (torch.optim.Adafactor, "scale"), (torch.optim.NAdam, "up")):
        found = []
        for make in (cls, lambda params, cls=cls: zero_opt.ShardedOptimizer(params, cls)):
            net = sharded_net(mesh_of((world_size,)))
            params = [p for n, p in net.named_parameters() if n.startswith(name) and (p.dim() == 2 or name != "wide")]
            optimizer = make(params)
            for step in (0, 2, 3):
                backward(net, step, rank)
                optimizer.step()
                optimizer.zero_grad()
            found.append([locals_of(params), local_state(optimizer)])
        assert_bitwise(found[1], found[0], cls.__name__)


def test_without_an_offload_the_class_steps_the_dtensors() -> None:
    run_processes(2, _whole_classes)


def _scaled(rank: int, world_size: int) -> None:
    """An overflow on one rank skips the step on all, as with torch's optimizer."""
    found = []
    for offload in (False, None, WORKER):
        net = sharded_net(mesh_of((world_size,)))
        options: Any = {"lr": 0.02, "fused": True}
        optimizer = (
            torch.optim.AdamW(groups_of(net), **options)
            if offload is False
            else sharded_optimizer(net, offload=offload)
        )
        scaler: Any = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(3):
            optimizer.zero_grad()
            x = torch.full((4, 48), torch.inf if (rank, step) == (1, 1) else 0.1 + 0.1 * step)
            scaler.scale(net(x).square().mean()).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        found.append([locals_of(net.parameters()), local_state(optimizer), scaler.get_scale()])
    assert found[0][2] == 512.0
    assert_bitwise(found[1], found[0], "device")
    assert_bitwise(found[2], found[0], "worker")


def test_gradients_are_unscaled_as_in_torch() -> None:
    run_processes(2, _scaled)


def _scaled_halves(rank: int, world_size: int) -> None:
    """GradScaler leaves fp16 gradients scaled for the step: no power of two changes a bit of what comes of them."""
    found = []
    for scale in (4.0, 8.0):
        net = sharded_net(mesh_of((world_size,)), dtype=torch.float16)
        optimizer = zero_opt.ShardedOptimizer(net.parameters(), torch.optim.SGD, lr=0.05, offload=zero_opt.CPUOffload())
        scaler: Any = torch.amp.GradScaler("cpu", init_scale=scale)
        for step in range(3):
            optimizer.zero_grad()
            x = torch.full((4, 48), 0.1 + 0.1 * step + rank, dtype=torch.float16)
            scaler.scale(net(x).float().square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == scale
        found.append(locals_of(net.parameters()))
        optimizer.close()
    assert_bitwise(found[1], found[0])


def test_fp16_gradients_are_unscaled_by_the_step() -> None:
    run_processes(2, _scaled_halves)


def _not_finite(rank: int, world_size: int) -> None:
    """The only part of the head, which has one row, is on rank 0."""
    found: list[Any] = []
    for offload in (None, WORKER):
        net = sharded_net(mesh_of((world_size,)))
        optimizer = sharded_optimizer(
            net, offload=offload, checks=zero_opt.Checks(nonfinite="skip"), max_grad_norm=0.05
        )
        for step in range(3):
            before = [locals_of(net.parameters()), local_state(optimizer)]
            optimizer.zero_grad()
            backward(net, step, rank)
            if step == 1 and rank == 0:
                net.head.weight.grad.to_local()[0, 5] = torch.inf  # type: ignore[operator, union-attr]
            optimizer.step()
            if step == 1:
                assert_bitwise([locals_of(net.parameters()), local_state(optimizer)], before)
        assert optimizer.skipped_steps == 1
        found.append(locals_of(net.parameters()))
        optimizer.close()
    assert_bitwise(found[1], found[0])


def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_on_all() -> None:
    run_processes(2, _not_finite)
