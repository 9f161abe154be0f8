"""The extension's hook takes usual gradients, and with it a step has the bits that it has with Python's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import zero_opt
from test.support.failures import PATIENCE_S
from test.support.rank_processes import run_processes
from zero_opt.errors import StepDesync
from zero_opt.layout import ALIGN
from zero_opt.reduction import autograd_hooks, overlapped

PARAMS, NUMEL = 12, 7


class Odd(nn.Parameter):
    """A parameter of a class of the user's."""


def _model() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [(Odd if at == 3 else nn.Parameter)(torch.randn(NUMEL)) for at in range(PARAMS)]


def _loss(params: list[nn.Parameter], rank: int) -> Tensor:
    return torch.stack([(param * (at + rank + 1)).sin().sum() for at, param in enumerate(params)]).sum()


def _plain(params: list[nn.Parameter], rank: int, optimizer: zero_opt.ShardedOptimizer) -> None:
    _loss(params, rank).backward()


def _twice(params: list[nn.Parameter], rank: int, optimizer: zero_opt.ShardedOptimizer) -> None:
    for _ in range(2):
        _loss(params, rank).backward()


def _beside_no_sync(params: list[nn.Parameter], rank: int, optimizer: zero_opt.ShardedOptimizer) -> None:
    with optimizer.no_sync():
        _loss(params, rank).backward()
    _loss(params, rank).backward()


def _unused(params: list[nn.Parameter], rank: int, optimizer: zero_opt.ShardedOptimizer) -> None:
    _loss(params[rank + 1 : 9], rank).backward()


def _zeroed_between(params: list[nn.Parameter], rank: int, optimizer: zero_opt.ShardedOptimizer) -> None:
    _loss(params, rank).backward()
    optimizer.zero_grad()
    _loss(params[2:], rank).backward()


def _zeroed_within(params: list[nn.Parameter], rank: int, optimizer: zero_opt.ShardedOptimizer) -> None:
    """Drop a gradient within a backward; the next backward of the step brings it again."""
    first, last = params[0], params[PARAMS - 1]

    def drop(_: Tensor) -> None:
        last.grad = None

    handle = first.register_post_accumulate_grad_hook(drop)
    _loss(params, rank).backward()
    handle.remove()
    _loss(params, rank).backward()


def _views(params: list[nn.Parameter], rank: int, optimizer: zero_opt.ShardedOptimizer) -> None:
    flat = torch.zeros(PARAMS * NUMEL)
    for param, part in zip(params, flat.split(NUMEL), strict=True):
        param.grad = part
    _loss(params, rank).backward()


def _retained(params: list[nn.Parameter], rank: int, optimizer: zero_opt.ShardedOptimizer) -> None:
    loss = _loss(params, rank)
    for _ in range(2):
        loss.backward(retain_graph=True)


def _in_threads(params: list[nn.Parameter], rank: int, optimizer: zero_opt.ShardedOptimizer) -> None:
    """Two backwards at the same time would come in any order; here one is over before the other begins."""
    for _ in range(2):
        thread = threading.Thread(target=lambda: _loss(params, rank).backward())
        thread.start()
        thread.join(PATIENCE_S)


def _in_inference_mode(params: list[nn.Parameter], rank: int, optimizer: zero_opt.ShardedOptimizer) -> None:
    loss = _loss(params, rank)
    with torch.inference_mode():
        loss.backward()


Backwards = Callable[[list[nn.Parameter], int, zero_opt.ShardedOptimizer], None]
WAYS: list[Backwards] = [
    _plain,
    _twice,
    _beside_no_sync,
    _unused,
    _zeroed_between,
    _zeroed_within,
    _views,
    _retained,
    _in_threads,
    _in_inference_mode,
]


def _trained(rank: int, world_size: int, backwards: Backwards, native: bool) -> list[Tensor]:
    params = _model()
    reduction = zero_opt.Overlapped(bucket_mb=5 * ALIGN * 4 / 2**20)  # five parameters, each padded to ALIGN
    with mock.patch.object(autograd_hooks, "native_available", return_value=native):
        optimizer = zero_opt.ShardedOptimizer(params, torch.optim.AdamW, lr=0.1, reduction=reduction)
        for _ in range(3):
            backwards(params, rank, optimizer)
            optimizer.step()
            optimizer.zero_grad()
    found = [param.detach().clone() for param in params]
    optimizer.close()
    return found


@pytest.mark.parametrize("backwards", WAYS, ids=lambda way: way.__name__.strip("_"))
def test_bits_are_those_of_hooks_of_python(backwards: Backwards) -> None:
    by_extension, by_python = (run_processes(2, _trained, backwards, native) for native in (True, False))
    for found, expected in zip(by_extension, by_python, strict=True):
        assert all(map(torch.equal, found, expected))


def _python_calls(rank: int, world_size: int, hooked: bool) -> list[int]:
    """Return per backward how many gradients went through Python."""
    params, found = [nn.Parameter(torch.randn(NUMEL)) for _ in range(PARAMS)], []
    for param in params if hooked else ():
        param.register_post_accumulate_grad_hook(lambda _: None)
    with mock.patch.object(autograd_hooks, "_announce", wraps=autograd_hooks._announce) as announce:
        optimizer = zero_opt.ShardedOptimizer(params, torch.optim.AdamW)
        for _ in range(4):
            announce.reset_mock()
            _loss(params, rank).backward()
            found.append(announce.call_count)
            optimizer.step()
            optimizer.zero_grad()
    optimizer.close()
    return found


def test_python_sees_the_first_and_the_last_gradient_of_a_bucket() -> None:
    for calls in run_processes(2, _python_calls, False):
        assert calls[1:] == [2, 2, 2]


def test_python_sees_all_gradients_of_parameters_with_earlier_hooks() -> None:
    for calls in run_processes(2, _python_calls, True):
        assert calls[1:] == [PARAMS] * 3


def _after_exception(rank: int, world_size: int, register_first: bool) -> str:
    """A hook of the user's raises; what step() says."""
    params = _model()

    def fail(_: Tensor) -> None:
        raise RuntimeError("of the user's")

    def register() -> None:
        handles.append(params[5].register_post_accumulate_grad_hook(fail))

    handles: list[torch.utils.hooks.RemovableHandle] = []
    if register_first:
        register()
    optimizer = zero_opt.ShardedOptimizer(params, torch.optim.AdamW)
    if not register_first:
        register()
    with pytest.raises(RuntimeError, match="of the user's"):
        _loss(params, rank).backward()
    with pytest.raises(zero_opt.StepDesync) as caught:
        optimizer.step()
    handles[0].remove()
    optimizer.zero_grad()
    _loss(params, rank).backward()
    optimizer.step()
    optimizer.close()
    return str(caught.value)


@pytest.mark.parametrize("register_first", [True, False], ids=["before", "behind"])
def test_a_backward_that_a_hook_has_ended_is_not_stepped(register_first: bool) -> None:
    for message in run_processes(2, _after_exception, register_first):
        assert "a backward ended in an exception" in message


def _freed(rank: int, world_size: int) -> int:
    params = _model()
    optimizer = zero_opt.ShardedOptimizer(params, torch.optim.AdamW)
    _loss(params, rank).backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.close()
    del optimizer
    _loss(params, rank).backward()
    return sum(type(param.grad) is Tensor for param in params)


def test_hooks_of_an_optimizer_that_is_gone_leave_gradients() -> None:
    assert run_processes(2, _freed) == [PARAMS, PARAMS]


def _calls(params: list[nn.Parameter], rank: int, optimizer: zero_opt.ShardedOptimizer) -> dict[str, Callable[[], Any]]:
    """What the garbage collector, or a signal, may run wherever a hook allocates."""

    def backward() -> None:
        with torch.enable_grad():  # which is off in a hook
            _loss(params, rank).backward()

    return {
        "opt.zero_grad()": optimizer.zero_grad,
        "opt.step()": optimizer.step,
        "opt.clip_grad_norm_()": lambda: optimizer.clip_grad_norm_(1.0),
        "opt.close()": optimizer.close,
        "p.grad.zero_()": lambda: [param.grad.zero_() for param in params if param.grad is not None],
        "backward()": backward,
    }


CALLS = ["opt.zero_grad()", "opt.step()", "opt.clip_grad_norm_()", "opt.close()", "p.grad.zero_()", "backward()"]


def _interrupting(interrupt: Callable[[], Any]) -> Any:
    """A patch, to be started, that makes the call once, within the next hook that begins or goes on with a round."""
    made = overlapped.NativeRound

    def interrupted(*fields: Any) -> overlapped.NativeRound:
        patch.stop()
        interrupt()
        return made(*fields)

    patch = mock.patch.object(overlapped, "NativeRound", interrupted)
    return patch


def _interrupted(rank: int, world_size: int, call: str) -> tuple[list[str], list[Tensor]]:
    """Rank 0 makes the call within a hook, and lets its error end the backward."""
    params, said = _model(), list[str]()
    optimizer = zero_opt.ShardedOptimizer(params, torch.optim.AdamW, lr=0.1)
    patch = _interrupting(_calls(params, rank, optimizer)[call])
    for _ in range(3):
        if rank == 0:
            patch.start()
            with pytest.raises(StepDesync) as raised:
                _loss(params, rank).backward()
            said.append(str(raised.value))
        else:
            _loss(params, rank).backward()
        with pytest.raises(StepDesync):
            optimizer.step()
        optimizer.zero_grad()
        _loss(params, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = [param.detach().clone() for param in params]
    optimizer.close()
    return said, found


@pytest.mark.parametrize("call", CALLS)
def test_calls_within_a_hook_are_refused_and_the_step_can_be_repeated(call: str) -> None:
    ranks, untouched = run_processes(2, _interrupted, call), run_processes(2, _trained, _plain, True)
    for (_, found), expected in zip(ranks, untouched, strict=True):
        assert all(map(torch.equal, found, expected))
    for said in ranks[0][0]:
        assert said.startswith(f"{call} was called while ")


def _swallowed(
    rank: int, world_size: int, call: str, offload: zero_opt.CPUOffload | None
) -> tuple[list[str], list[Tensor]]:
    """What a finalizer raises is printed, and goes no further: here on rank 0, in the second backward of a step."""
    params, said = _model(), list[str]()
    optimizer = zero_opt.ShardedOptimizer(params, torch.optim.AdamW, lr=0.1, offload=offload)

    def interrupt() -> None:
        try:
            _calls(params, rank, optimizer)[call]()
        except StepDesync as error:
            said.append(str(error))

    patch = _interrupting(interrupt)
    for step in range(2):
        _loss(params, rank).backward()
        if rank == 0 and step == 1 and call:
            patch.start()
        _loss(params, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = [param.detach().clone() for param in params]
    optimizer.close()
    return said, found


@pytest.mark.parametrize(("world_size", "offload"), [(2, None), (1, zero_opt.CPUOffload())])
@pytest.mark.parametrize("call", CALLS[:-1])
def test_a_refused_call_drops_nothing(call: str, world_size: int, offload: zero_opt.CPUOffload | None) -> None:
    ranks, expected = (run_processes(world_size, _swallowed, made, offload) for made in (call, ""))
    for (_, found), (_, values) in zip(ranks, expected, strict=True):
        assert all(map(torch.equal, found, values))
    assert [text.startswith(f"{call} was called while ") for text in ranks[0][0]] == [True]
