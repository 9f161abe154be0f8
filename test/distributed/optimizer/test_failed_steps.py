"""A step that fails on one rank alone: on no rank does step() return as if it had not, or state cannot be read."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zero_opt
from test.support.harness import assert_bitwise, copies_of, run_processes, run_threads
from test.support.scenario import values
from zero_opt.placement.worker import process
from zero_opt.sharding.gather import ParamGather

BUCKET_MB = 0.001


class Stumbles(torch.optim.Adam):
    """Fails at the n-th call of its step from now on, once."""

    __module__ = "torch.optim"  # whose classes step one bucket after the other
    left = 0

    def step(self, closure: Any = None) -> Any:
        """As Adam, or not at all."""
        type(self).left -= 1
        if self.left == 0:
            raise MemoryError("no more of it")
        return super().step(closure)


class WholeStumbles(Stumbles):
    """Steps all buckets in one call, since nothing is known of it."""

    __module__ = __name__


class Layer(nn.Module):
    """Two parameters, and a forward without BLAS, whose locks a fork may find taken."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(shape)), nn.Parameter(torch.empty(shape[0]))

    def forward(self, inputs: Tensor) -> Tensor:
        """Multiply by one mean, add another."""
        return inputs * self.weight.mean() + self.bias.mean()


def _model() -> nn.Sequential:
    model = nn.Sequential(Layer(90, 6), Layer(40, 90), Layer(3, 40))
    for number, param in enumerate(model.parameters()):
        param.data = values(1, 0, 0, number, tuple(param.shape)).clone()
    return model


def _train(model: nn.Module, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    inputs = values(step + 1, 0, 0, 99, (4, 6))  # the same on all ranks, as AlreadyReduced wants it
    model(inputs).square().mean().backward()
    optimizer.step()


def _policy(name: str, model: nn.Module | None, exchange: Any) -> Any:
    if name == "AlreadyReduced":
        return zero_opt.AlreadyReduced(exchange=exchange, overlap_param_gather=model)
    return getattr(zero_opt, name)(BUCKET_MB, exchange=exchange, overlap_param_gather=model)


def _refuses(call: Callable[[], Any], what: str) -> None:
    for _ in range(2):
        with pytest.raises(zero_opt.StepFailed, match=what):
            call()


def _fail(
    rank: int, world_size: int, name: str, late: bool, cls: type[Stumbles], bucket: int, options: dict[str, Any]
) -> list[Tensor]:
    """Rank 1's class fails in step 2, at the given bucket; what every rank has after two more."""
    zero_opt.register_elementwise(Stumbles)
    model = _model()
    reduction = _policy(name, model if late else None, options.pop("exchange", "auto"))
    optimizer = zero_opt.ShardedOptimizer(model.parameters(), cls, lr=0.01, reduction=reduction, **options)
    for step in range(2):
        _train(model, optimizer, step)
    cls.left = bucket + 1 if rank == 1 else 0
    if rank == 1:
        with pytest.raises(MemoryError, match="no more of it"):
            _train(model, optimizer, 2)
    elif not late:
        with pytest.raises(zero_opt.StepFailed, match=r"^rank 1: step 2 failed with MemoryError: no more of it"):
            _train(model, optimizer, 2)
    else:
        _train(model, optimizer, 2)
    _refuses(optimizer.state_dict, "no more of it")
    if late:
        _refuses(model.state_dict, "step 2 failed on rank 1, where")
        _refuses(model[1].state_dict, "step 2 failed on rank 1, where")
        if bucket:
            _refuses(optimizer.flush, "step 2 failed with MemoryError: no more of it")
        else:  # or the next step says it
            with pytest.raises(zero_opt.StepFailed, match="step 2 failed with MemoryError: no more of it"):
                _train(model, optimizer, 3)
        _refuses(model.state_dict, "step 2 failed on rank 1, where")
    _refuses(optimizer.flush, "no more of it")
    _refuses(optimizer.consolidate_state_dict, "no more of it")
    for step in (3, 4):
        _train(model, optimizer, step)
    assert len(optimizer.state_dict()["state"]) == len(list(model.parameters()))
    optimizer.flush()
    found = list(model.state_dict().values())
    optimizer.close()
    return found


def _same_on_all(world_size: int, *args: Any) -> None:
    first, *others = run_processes(world_size, _fail, *args)
    for other in others:
        assert_bitwise(first, other)


@pytest.mark.parametrize("offload", [None, zero_opt.CPUOffload()], ids=["device", "host"])
@pytest.mark.parametrize("late", [False, True], ids=["gathered in step()", "gathered after it"])
@pytest.mark.parametrize("name", ["Overlapped", "AtStep", "AlreadyReduced"])
def test_a_class_that_fails_on_one_rank(name: str, late: bool, offload: Any) -> None:
    _same_on_all(2, name, late, Stumbles, 0, {"offload": offload})


@pytest.mark.parametrize("late", [False, True], ids=["gathered in step()", "gathered after it"])
@pytest.mark.parametrize("bucket", [1, -1], ids=["the second", "all"])
def test_at_whatever_bucket_it_fails_and_over_gloo_alone(bucket: int, late: bool) -> None:
    cls, call = (WholeStumbles, 0) if bucket < 0 else (Stumbles, bucket)
    _same_on_all(3, "AtStep", late, cls, call, {"exchange": "backend"})


def test_masters_on_the_device() -> None:
    _same_on_all(2, "Overlapped", False, Stumbles, 1, {"precision": zero_opt.MixedPrecision(torch.float32)})


def _alone(rank: int, world_size: int, offload: Any, precision: Any) -> None:
    zero_opt.register_elementwise(Stumbles)
    model = _model()
    optimizer = zero_opt.ShardedOptimizer(
        model.parameters(), Stumbles, lr=0.01, offload=offload, precision=zero_opt.MixedPrecision(precision)
    )
    _train(model, optimizer, 0)
    for refused in (optimizer.flush, None):  # another step makes up for it
        Stumbles.left = 1
        with pytest.raises(MemoryError, match="no more of it"):
            _train(model, optimizer, 1)
        if refused:
            _refuses(refused, "step 1 failed with MemoryError: no more of it")
        _train(model, optimizer, 2)
        optimizer.flush()
    optimizer.close()


@pytest.mark.parametrize(("offload", "precision"), [(zero_opt.CPUOffload(), None), (None, torch.float32)])
def test_a_rank_alone_is_told_once_by_each_call(offload: Any, precision: Any) -> None:
    run_processes(1, _alone, offload, precision)


def _counts(rank: int, world_size: int) -> list[tuple[float, int]]:
    """State is cleared on every rank before the step that fails on rank 1; counts and elements here, two steps on."""
    zero_opt.register_elementwise(Stumbles)
    model = _model()
    reduction = zero_opt.AtStep(BUCKET_MB)
    optimizer = zero_opt.ShardedOptimizer(model.parameters(), Stumbles, lr=0.01, reduction=reduction)
    _train(model, optimizer, 0)
    optimizer.state.clear()
    Stumbles.left = rank
    with pytest.raises(MemoryError if rank else zero_opt.StepFailed, match="no more of it"):
        _train(model, optimizer, 1)
    for step in (2, 3):
        _train(model, optimizer, step)
    shown = [optimizer.state[param] for param in model.parameters()]
    optimizer.close()
    return [(float(entry["step"]), entry["exp_avg"].numel()) for entry in shown]


def test_a_rank_whose_own_step_fails_counts_it_for_parameters_of_other_ranks() -> None:
    owner, failed = run_processes(2, _counts)
    elsewhere = [index for index, (_, numel) in enumerate(failed) if not numel]
    assert elsewhere
    for index in elsewhere:
        assert failed[index][0] == owner[index][0] == 3


# ---------------------------------------------------------------------------------------------------------------------
# several ranks


class Grumbles(torch.optim.SGD):
    """Fails once it has stepped."""

    why = ""

    def step(self, closure: Any = None) -> Any:
        """As SGD."""
        found = super().step(closure)
        if self.why:
            raise ValueError(self.why)
        return found


def _several(rank: int, world_size: int, fails: Sequence[int]) -> tuple[str, list[Tensor]]:
    zero_opt.register_elementwise(Grumbles)
    model = _model()
    optimizer = zero_opt.ShardedOptimizer(model.parameters(), Grumbles, lr=0.01)
    _train(model, optimizer, 0)
    Grumbles.why = f"rank {rank} grumbles" if rank in fails else ""
    with pytest.raises(ValueError if rank in fails else zero_opt.StepFailed) as caught:
        _train(model, optimizer, 1)
    Grumbles.why = ""
    _train(model, optimizer, 2)
    optimizer.close()
    return str(caught.value), copies_of(model)


def test_each_rank_that_failed_raises_why_and_the_others_name_the_first() -> None:
    found = run_processes(4, _several, [1, 3])
    assert [message[:50] for message, _ in found[1::2]] == ["rank 1 grumbles", "rank 3 grumbles"]
    for message, _ in found[0::2]:
        assert message.startswith("rank 1: step 1 failed with ValueError: rank 1 grumbles; parameters are the")
    for _, after in found[1:]:
        assert_bitwise(after, found[0][1])


class OnceForAll(torch.optim.SGD):
    """Fails wherever it is stepped, on ranks that are threads."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        """As SGD, or not at all."""
        if self.fails:
            raise ValueError("not today")
        return super().step(closure)


def _all_fail(rank: int, world_size: int) -> None:
    zero_opt.register_elementwise(OnceForAll)
    model = _model()
    optimizer = zero_opt.ShardedOptimizer(model.parameters(), OnceForAll, lr=0.01)
    _train(model, optimizer, 0)
    engine: Any = optimizer._engine
    engine.placement._optimizer.fails = True
    with pytest.raises(ValueError, match="not today"):
        _train(model, optimizer, 1)
    engine.placement._optimizer.fails = False
    _train(model, optimizer, 2)
    optimizer.close()


def test_a_class_that_fails_on_all_ranks() -> None:
    run_threads(3, _all_fail)


# ---------------------------------------------------------------------------------------------------------------------
# what makes up for it


def _load(rank: int, world_size: int, late: bool) -> list[Tensor]:
    zero_opt.register_elementwise(Stumbles)
    model = _model()
    reduction = _policy("Overlapped", model if late else None, "auto")
    optimizer = zero_opt.ShardedOptimizer(model.parameters(), Stumbles, lr=0.01, reduction=reduction)
    _train(model, optimizer, 0)
    saved = {key: value.clone() for key, value in model.state_dict().items()}, optimizer.state_dict()
    Stumbles.left = rank
    with contextlib.suppress(MemoryError, zero_opt.StepFailed):
        _train(model, optimizer, 1)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    assert_bitwise(dict(model.state_dict()), saved[0])
    assert_bitwise(optimizer.state_dict()["state"], saved[1]["state"])
    _train(model, optimizer, 1)
    optimizer.flush()
    optimizer.close()
    return copies_of(model)


@pytest.mark.parametrize("late", [False, True], ids=["gathered in step()", "gathered after it"])
def test_a_checkpoint_makes_up_for_it(late: bool) -> None:
    first, second = run_processes(2, _load, late)
    assert_bitwise(first, second)


def _worker_fails(rank: int, world_size: int, name: str, late: bool, folder: Path | None) -> list[Tensor]:
    """With a folder, rank 1's worker cannot be had for a while."""
    model = _model()
    reduction = _policy(name, model if late else None, "auto")
    optimizer = zero_opt.ShardedOptimizer(
        model.parameters(),
        torch.optim.AdamW,
        fused=True,
        reduction=reduction,
        offload=zero_opt.WorkerOffload(max_deaths=1),
    )
    for step in range(2):
        _train(model, optimizer, step)
    if folder is None:
        _train(model, optimizer, 2)
    else:
        _without_a_worker(rank, model, optimizer, folder, late)
    optimizer.flush()
    assert len(optimizer.state_dict()["state"]) == len(list(model.parameters()))
    found = list(model.state_dict().values())
    optimizer.close()
    return found


def _without_a_worker(rank: int, model: nn.Module, optimizer: Any, folder: Path, late: bool) -> None:
    (folder / "main.py").write_text("raise SystemExit(1)")
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(process, "_MAIN", folder / "main.py")
            os.kill(optimizer._engine.placement._worker._handles.child.pid, signal.SIGKILL)
            with pytest.raises(zero_opt.WorkerDied):
                _train(model, optimizer, 2)
        elif not late:
            with pytest.raises(zero_opt.StepFailed, match=r"^rank 1: step 2 failed with WorkerDied"):
                _train(model, optimizer, 2)
        else:
            _train(model, optimizer, 2)
        if late:
            _refuses(model.state_dict, "step 2 failed on rank 1, where")
        if rank == 0:
            _refuses(optimizer.state_dict, "the last step failed on it with WorkerDied")
        dist.barrier()
        with pytest.raises(zero_opt.WorkerDied):
            optimizer.flush()


@pytest.mark.parametrize("late", [False, True], ids=["gathered in step()", "gathered after it"])
@pytest.mark.parametrize("name", ["Overlapped", "AtStep", "AlreadyReduced"])
def test_a_worker_that_dies_on_one_rank(name: str, late: bool, tmp_path: Path) -> None:
    found = run_processes(2, _worker_fails, name, late, tmp_path)
    assert_bitwise(found, run_processes(2, _worker_fails, name, late, None))


class EndsIteration(torch.optim.SGD):
    """Fails in a step as a class does in whose step ``next()`` finds nothing."""

    error: StopIteration | None = None

    def step(self, closure: Any = None) -> Any:
        """As SGD, or not at all."""
        if self.error is not None:
            raise self.error
        return super().step(closure)


def _ends_iteration(rank: int, world_size: int, offload: Any) -> None:
    params = [nn.Parameter(torch.ones(90)), nn.Parameter(torch.ones(70))]
    opt = zero_opt.ShardedOptimizer(params, EndsIteration, lr=0.1, offload=offload)
    error = StopIteration("nothing left") if rank == world_size - 1 else None
    EndsIteration.error = error
    sum(param.sum() for param in params).backward()  # type: ignore[union-attr]
    with pytest.raises(StopIteration if error else zero_opt.StepFailed) as caught:
        opt.step()
    assert caught.value is error or "StopIteration: nothing left" in str(caught.value)


@pytest.mark.parametrize("offload", [None, zero_opt.CPUOffload()])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_class_that_raises_stop_iteration_has_its_own_error(world_size: int, offload: Any) -> None:
    """Generators turn it into another."""
    run_processes(world_size, _ends_iteration, offload)


def _left_half_way(rank: int, world_size: int) -> list[str]:
    """What calls say after an error that no step expects, once this rank's shard was stepped."""
    model = _model()
    optimizer = zero_opt.ShardedOptimizer(model.parameters(), torch.optim.Adam, lr=0.1, reduction=zero_opt.AtStep())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ParamGather, "end", Mock(side_effect=zero_opt.OutOfResources("no more of it")))
        with pytest.raises(zero_opt.OutOfResources):
            optimizer.step()
    said = []
    for call in (optimizer.flush, optimizer.consolidate_state_dict, optimizer.state_dict):
        with pytest.raises(zero_opt.StepDesync) as caught:
            call()
        said.append(str(caught.value))
    optimizer.step()
    optimizer.flush()
    optimizer.consolidate_state_dict()
    optimizer.close()
    return said


def test_no_call_returns_as_if_a_step_that_was_left_half_way_were_whole() -> None:
    for said in run_processes(2, _left_half_way):
        assert ["step 0 was left half-way with OutOfResources" in text for text in said] == [True] * 3, said
