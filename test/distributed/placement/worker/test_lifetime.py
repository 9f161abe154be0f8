"""WorkerOffload beside everything else an optimizer goes through: failures, forks, checkpoints, new parameters."""

from __future__ import annotations

import gc
import logging
import os
import re
import signal
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_opt
from test.support.failures import PATIENCE_S
from test.support.harness import assert_bitwise, run_processes
from test.support.scenario import OVERLAPPED, values
from test.support.tripwire import Failed, Tripwire
from test.support.worker_training import (
    DTYPES,
    LATER,
    NOW,
    backward,
    make,
    make_params,
    simulate,
    train,
    train_ranks,
    values_of,
    worker_of,
)
from zero_opt.placement import native_rules
from zero_opt.placement.worker import process
from zero_opt.system import shared_memory

Optimizer = zero_opt.ShardedOptimizer
EACH = pytest.mark.parametrize("offload", [NOW, LATER])


# -- failures ---------------------------------------------------------------------------------------------------------


def _die_for_good(rank: int, world_size: int, folder: Path, delay: int) -> Any:
    """On rank 1 no worker starts for a while."""
    params = make_params()
    optimizer = make(params, offload=zero_opt.WorkerOffload(delay, max_deaths=2))
    train(optimizer, params, range(3), rank)
    optimizer.flush()
    broken = folder / "main.py"
    broken.write_text("raise SystemExit('this machine is too old')")
    optimizer.zero_grad()
    backward(params, 3, rank)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(process, "_MAIN", broken)
            os.kill(worker_of(optimizer)._handles.child.pid, signal.SIGKILL)
        if delay:
            optimizer.step()
            call: Any = optimizer.flush
        else:
            call = optimizer.step
        with pytest.raises(zero_opt.WorkerDied if rank == 1 or delay else zero_opt.StepFailed, match="2 in a row"):
            call()
    optimizer.flush()  # tries again
    train(optimizer, params, range(4, 6), rank)
    optimizer.consolidate_state_dict()
    found = values_of(params)
    optimizer.close()
    return found


@pytest.mark.parametrize("delay", [0, 1])
def test_a_step_that_no_worker_could_take_is_taken_at_last(tmp_path: Path, delay: int) -> None:
    found = run_processes(2, _die_for_good, tmp_path, delay)
    assert_bitwise(found[0], found[1])
    assert_bitwise(found, run_processes(2, _undisturbed, delay))


def _undisturbed(rank: int, world_size: int, delay: int) -> Any:
    params = make_params()
    optimizer = make(params, offload=zero_opt.WorkerOffload(delay))
    for steps in (range(3), range(3, 4), range(4, 6)):
        train(optimizer, params, steps, rank)
        optimizer.flush()
    optimizer.close()
    return values_of(params)


def _fail_and_step_on(rank: int, world_size: int, folder: Path) -> Any:
    """Nobody calls flush(): the step is an error on every rank, and the next one goes on."""
    params = make_params()
    optimizer = make(params, offload=zero_opt.WorkerOffload(max_deaths=1))
    train(optimizer, params, range(3), rank)
    broken = folder / "main.py"
    broken.write_text("raise SystemExit(1)")
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(process, "_MAIN", broken)
            os.kill(worker_of(optimizer)._handles.child.pid, signal.SIGKILL)
        message = "rank 1: step 3 failed with WorkerDied"
        with pytest.raises(zero_opt.WorkerDied) if rank == 1 else pytest.raises(zero_opt.StepFailed, match=message):
            train(optimizer, params, range(3, 4), rank)
    train(optimizer, params, range(4, 5), rank)
    found = values_of(params)
    optimizer.close()
    return found


def test_a_failed_step_is_made_up_for_by_the_next(tmp_path: Path) -> None:
    found = run_processes(2, _fail_and_step_on, tmp_path)
    assert_bitwise(found[0], found[1])


def test_an_interrupted_step_is_finished_by_a_flush() -> None:
    params = make_params()
    optimizer = make(params)
    train(optimizer, params, range(2))
    optimizer.zero_grad()
    backward(params, 2, 0)
    pid = worker_of(optimizer)._handles.child.pid
    os.kill(pid, signal.SIGSTOP)
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    timer.join(PATIENCE_S)
    os.kill(pid, signal.SIGCONT)
    optimizer.flush()
    train(optimizer, params, range(3, 5))
    optimizer.close()
    again = make_params()
    optimizer = make(again)
    train(optimizer, again, range(5))
    optimizer.close()
    assert_bitwise(values_of(params), values_of(again))


def _break_backward(rank: int, world_size: int, offload: Any, broken: bool) -> Any:
    params = make_params()
    optimizer = make(params, offload=offload)
    for step in range(4):
        optimizer.zero_grad()
        if broken and step == 2:
            with pytest.raises(Failed):
                (Tripwire.apply(params[0]).sum() + params[3] * 7 + params[2].sum()).backward()
            optimizer.zero_grad()
        backward(params, step, rank)
        optimizer.step()
    optimizer.flush()
    optimizer.close()
    return values_of(params)


@EACH
def test_a_broken_backward_leaves_nothing(offload: Any) -> None:
    runs = [run_processes(2, _break_backward, offload, broken) for broken in (True, False)]
    assert_bitwise(*runs)


def _too_much(rank: int, world_size: int) -> str:
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(shared_memory, "memory_left", lambda: 1000)
        with pytest.raises(zero_opt.OutOfMemory) as caught:
            make(make_params())
    return str(caught.value)


def test_too_little_memory_on_one_rank_is_an_error_on_all() -> None:
    for message in run_processes(2, _too_much):
        assert "this rank's worker (optimizer state and gradients) needs " in message
        assert re.search(r"needs [\d,]+ bytes of host memory, and 1,000 bytes may", message)
        assert "; use compact state (state=zero_opt.AdamState(...)), NVMeOffload or more ranks, or raise" in message
        assert "offload=None" not in message


def _add_too_much(rank: int, world_size: int, offload: Any) -> Any:
    """A group for which rank 1 has no memory at first."""
    params = make_params()
    optimizer = make(params[:3], offload=offload)
    train(optimizer, params[:3], range(2), rank)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(shared_memory, "memory_left", lambda: 10)
        with pytest.raises(zero_opt.OutOfMemory):
            optimizer.add_param_group({"params": params[3:], "amsgrad": True})
    train(optimizer, params[:3], range(2, 4), rank)
    optimizer.add_param_group({"params": params[3:], "lr": 0.1})
    train(optimizer, params, range(4, 6), rank)
    optimizer.flush()
    optimizer.close()
    return values_of(params)


@EACH
def test_a_group_without_memory_is_not_added(offload: Any) -> None:
    found = run_processes(2, _add_too_much, offload)
    assert_bitwise(found[0], found[1])
    assert not torch.equal(found[0][3], make_params()[3])


# -- processes --------------------------------------------------------------------------------------------------------


def _fork_and_step(rank: int, world_size: int, offload: Any) -> Any:
    params = make_params()
    optimizer = make(params, offload=offload)
    train(optimizer, params, range(2), rank)
    child = os.fork()
    if not child:
        code = 1
        try:
            backward(params, 2, rank)
            for call in (optimizer.step, optimizer.flush):
                with pytest.raises(zero_opt.WorkerFailed, match="is a fork"):
                    call()
            optimizer.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    train(optimizer, params, range(2, 4), rank)
    optimizer.flush()
    assert worker_of(optimizer).deaths == 0
    optimizer.close()
    return values_of(params)


@EACH
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_fork_of_the_trainer_cannot_step(world_size: int, offload: Any) -> None:
    found = run_processes(world_size, _fork_and_step, offload)
    assert_bitwise(found, run_processes(world_size, _train_flushed, 4, offload))


def _train_flushed(rank: int, world_size: int, steps: int, offload: Any) -> Any:
    params = make_params()
    optimizer = make(params, offload=offload)
    train(optimizer, params, range(steps), rank)
    optimizer.flush()
    optimizer.close()
    return values_of(params)


def test_cores_come_back_and_no_worker_stays(caplog: pytest.LogCaptureFixture) -> None:
    cores = os.sched_getaffinity(0)
    for closed in (True, False):
        with caplog.at_level(logging.INFO, "zero_opt"):
            optimizer = make(make_params(), offload=LATER)
        pidfd = os.pidfd_open(worker_of(optimizer)._handles.child.pid)
        assert (os.sched_getaffinity(0) < cores) == (len(cores) > 1)
        if closed:
            optimizer.close()
        else:
            del optimizer
            gc.collect()
        assert os.sched_getaffinity(0) == cores
        with pytest.raises(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, 0)
        os.close(pidfd)
    assert "worker with" in caplog.text


# -- checkpoints ------------------------------------------------------------------------------------------------------


def _resume(rank: int, world_size: int, saved: Any, dtype: torch.dtype, steps: range, offload: Any) -> Any:
    params = make_params(dtype)
    with torch.no_grad():
        for param, value in zip(params, saved["params"], strict=True):
            param.copy_(value)
    optimizer = make(params, offload=offload)
    optimizer.load_state_dict(saved["optimizer"])
    train(optimizer, params, steps)
    optimizer.consolidate_state_dict()
    state = optimizer.state_dict() if rank == 0 else None
    optimizer.close()
    return {"params": values_of(params), "optimizer": state}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("first", "second"), [(1, 2), (2, 1)])
def test_checkpoints_go_to_any_number_of_ranks(first: int, second: int, dtype: torch.dtype) -> None:
    empty = {"params": make_params(dtype), "optimizer": make_plain(make_params(dtype)).state_dict()}
    whole = run_processes(1, _resume, empty, dtype, range(5), NOW)[0]
    half = run_processes(first, _resume, empty, dtype, range(3), NOW)[0]
    rest = run_processes(second, _resume, half, dtype, range(3, 5), NOW)
    assert_bitwise(rest[0]["params"], whole["params"])
    assert_bitwise(rest[0]["optimizer"]["state"], whole["optimizer"]["state"])


def make_plain(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, fused=True)


def test_checkpoints_go_to_and_from_torch() -> None:
    """Up to torch's own ragged tail."""
    params, plain_params = make_params(), make_params()
    optimizer, plain = make(params), make_plain(plain_params)
    train(optimizer, params, range(3))
    train(plain, plain_params, range(3))
    other_params, plain_other_params = make_params(), make_params()
    other, plain_other = make(other_params), make_plain(plain_other_params)
    for target, source in ((other_params, plain_params), (plain_other_params, params)):
        torch._foreach_copy_([param.detach() for param in target], [param.detach() for param in source])
    other.load_state_dict(plain.state_dict())
    plain_other.load_state_dict(optimizer.state_dict())
    for trained, their_params in ((optimizer, params), (other, other_params), (plain_other, plain_other_params)):
        train(trained, their_params, range(3, 5))
        if isinstance(trained, Optimizer):
            trained.close()
    train(plain, plain_params, range(3, 5))
    for their_params in (params, other_params, plain_other_params):
        torch.testing.assert_close(values_of(their_params), values_of(plain_params))


def test_parameters_without_a_saved_master_are_their_own(caplog: pytest.LogCaptureFixture) -> None:
    params = make_params(torch.bfloat16)
    optimizer = make(params)
    train(optimizer, params, range(3))
    saved = optimizer.state_dict()
    for state in saved["state"].values():
        del state["master"]
    with caplog.at_level(logging.WARNING, "zero_opt"):
        optimizer.load_state_dict(saved)
    assert "no master was saved for 4 parameters" in caplog.text
    train(optimizer, params, range(3, 4))
    optimizer.close()
    plain_params = make_params(torch.bfloat16)
    plain = zero_opt.CPUAdamW(plain_params, state=zero_opt.AdamState(master="float32"))
    train(plain, plain_params, range(3))
    for param in plain_params:
        plain.state[param]["master"].copy_(param.detach())
    train(plain, plain_params, range(3, 4))
    assert_bitwise(values_of(params), values_of(plain_params))


def test_state_that_does_not_fit() -> None:
    params = make_params(torch.bfloat16)
    optimizer = make(params)
    train(optimizer, params, range(2))
    saved = optimizer.state_dict()
    del saved["state"][1]["exp_avg"]
    with pytest.raises(zero_opt.StateDictError, match="exp_avg"):
        optimizer.load_state_dict(saved)
    unfused = optimizer.state_dict()
    unfused["param_groups"][0]["fused"] = False
    with pytest.raises(zero_opt.StateDictError, match="fused=True alone"):
        optimizer.load_state_dict(unfused)
    optimizer.close()


# -- parameters that come, and what is refused ------------------------------------------------------------------------


def _grow(rank: int, world_size: int, offload: Any) -> Any:
    """A group is added and a parameter unfrozen while a step is pending; the third has gaps."""
    params = make_params()
    gaps = nn.Parameter(torch.arange(40.0).view(4, 10)[:, ::2])
    params[1].requires_grad_(False)
    cls: Any = zero_opt.CPUAdamW
    optimizer: Any = cls(params[:2]) if offload is None else make(params[:2], offload=offload)
    for step in range(6):
        if step == 2:
            optimizer.add_param_group({"params": [*params[2:], gaps], "lr": 0.02, "amsgrad": True})
        if step == 4:
            params[1].requires_grad_(True)
        there = params[:2] if step < 2 else [*params, gaps]
        trained = [param for param in there if param.requires_grad]
        optimizer.zero_grad()
        torch.autograd.backward(trained, [values(step, 1, 0, 0, tuple(param.shape)) for param in trained])
        optimizer.step()
    if offload is not None:
        optimizer.flush()
        optimizer.consolidate_state_dict()
        state = optimizer.state_dict()["state"] if rank == 0 else None
        optimizer.close()
    else:
        state = optimizer.state_dict()["state"]
    return values_of([*params, gaps]), state


@EACH
@pytest.mark.parametrize("world_size", [1, 2])
def test_parameters_are_added_and_unfrozen(world_size: int, offload: Any) -> None:
    plain = _grow(0, 1, None)
    for rank, found in enumerate(run_processes(world_size, _grow, offload)):
        assert_bitwise(found[0], plain[0], f"rank {rank}")
        if rank == 0:
            assert_bitwise(found[1], plain[1], "state")


@EACH
def test_gathering_in_the_background(offload: Any) -> None:
    def run(rank: int, world_size: int) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 1))
        results = []
        for background in (model, None):
            own = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 1)) if background is None else model
            torch.manual_seed(1)
            for param in own.parameters():
                nn.init.uniform_(param)
            reduction = zero_opt.Overlapped(0.002, overlap_param_gather=background)
            optimizer = make(own.parameters(), reduction=reduction, offload=offload)
            for step in range(6):
                optimizer.zero_grad()
                own(values(step, 0, rank, 0, (5, 20))).sum().backward()
                optimizer.step()
            optimizer.flush()
            results.append(values_of(list(own.parameters())))
            optimizer.close()
        return results

    for one, other in run_processes(2, run):
        assert_bitwise(one, other)


def test_a_model_that_knows_its_optimizer_is_collected_with_it() -> None:
    def run(rank: int, world_size: int) -> list[bool]:
        model: Any = nn.Linear(20, 1)
        reduction = zero_opt.Overlapped(overlap_param_gather=model)
        model.optimizer = make(model.parameters(), reduction=reduction, offload=NOW)
        model(values(0, 0, rank, 0, (5, 20))).sum().backward()
        model.optimizer.step()
        model.optimizer.flush()
        gone = weakref.ref(model), weakref.ref(model.optimizer), weakref.ref(worker_of(model.optimizer))
        del model, reduction
        gc.collect()
        return [reference() is None for reference in gone]

    for gone in run_processes(2, run):
        assert gone == [True] * 3


@pytest.mark.parametrize(
    ("cls", "options", "error", "text"),
    [
        (torch.optim.RMSprop, {"lr": 0.1}, zero_opt.UnsupportedOptimizer, "not RMSprop; with offload=None any class"),
        (torch.optim.AdamW, {"fused": False}, zero_opt.UnsupportedOptimizer, "fused=False.* with offload=None"),
        (torch.optim.Adam, {"foreach": True}, zero_opt.UnsupportedOptimizer, "foreach=True"),
        (torch.optim.Adam, {"offload": zero_opt.WorkerOffload(cores=(4000,))}, zero_opt.ConfigError, "4000"),
        (torch.optim.Adam, {"offload": "worker"}, zero_opt.ConfigTypeError, "offload must be None"),
        (torch.optim.Adam, {"offload": zero_opt.WorkerOffload}, zero_opt.ConfigTypeError, "write WorkerOffload()"),
    ],
)
def test_what_is_refused(cls: Any, options: dict[str, Any], error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        zero_opt.ShardedOptimizer(make_params(), cls, **{"offload": NOW, **options})


def test_params_that_are_refused() -> None:
    with pytest.raises(zero_opt.UnsupportedParam, match=r"parameter 1 .* is torch.float64; WorkerOffload takes"):
        make([*make_params()[:1], nn.Parameter(torch.zeros(3, dtype=torch.float64))])
    optimizer = make(make_params())
    with pytest.raises(zero_opt.UnsupportedOptimizer):
        optimizer.add_param_group({"params": make_params(), "fused": False})
    optimizer.close()


def test_the_formula_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    native_rules.say_fused.cache_clear()
    found = []
    for _ in range(2):
        params = make_params()
        with caplog.at_level(logging.WARNING, "zero_opt"):
            optimizer = zero_opt.ShardedOptimizer(params, torch.optim.AdamW, offload=NOW, reduction=OVERLAPPED)
        train(optimizer, params, range(2))
        optimizer.close()
        found.append(values_of(params))
    assert caplog.text.count("steps AdamW as with fused=True") == 1
    fused = make_params()
    optimizer = make(fused)
    train(optimizer, fused, range(2))
    optimizer.close()
    assert_bitwise(found, [values_of(fused)] * 2)


@pytest.mark.parametrize("threads", [1, 3, 4])
def test_threads_change_no_bit(threads: int) -> None:
    def run(rank: int, world_size: int) -> Any:
        return train_ranks(rank, world_size, 4, offload=zero_opt.WorkerOffload(threads=threads))

    simulated = simulate(2, 4, 0)
    for seen, _, _ in run_processes(2, run):
        assert_bitwise(seen, simulated[0])
