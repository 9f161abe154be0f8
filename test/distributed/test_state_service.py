"""state_dict() on one rank alone, or on all at once, while the others are anywhere."""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zero_opt
from test.distributed.harness import assert_bitwise, run_processes, run_threads
from test.distributed.scenario import BUCKET_MB, SHAPES, Case, case, expected, local_backwards, sum_of_means
from zero_opt import consolidate, state_service

SECONDS = 40  # nothing hangs
STEPS = 5
ADAMW = case(torch.optim.AdamW, {"lr": 0.02}, lr=0.01)
CASES = {
    "AdamW": ADAMW,
    "Adagrad": case(torch.optim.Adagrad, {"lr": 0.02}, lr=0.01),
    "Adafactor": replace(  # it cannot step an empty parameter
        case(torch.optim.Adafactor, {"lr": 0.02}, lr=0.01), shapes=tuple(shape for shape in SHAPES if 0 not in shape)
    ),
    "SGD": case(torch.optim.SGD, {"lr": 0.02}, lr=0.01, momentum=0.9),
}
REDUCTIONS = {
    "Overlapped": zero_opt.Overlapped(BUCKET_MB),
    "AtStep": zero_opt.AtStep(BUCKET_MB),
    "AlreadyReduced": zero_opt.AlreadyReduced(),
}


def _backward(case: Case, params: Any, reduction: Any, step: int, rank: int, world_size: int) -> None:
    if isinstance(reduction, zero_opt.AlreadyReduced):
        for index, param in enumerate(params):
            param.grad = sum_of_means(case, world_size, step, index)
    else:
        for used, grads in local_backwards(case, params, step, rank):
            torch.autograd.backward(used, grads)


def _alone(rank: int, world_size: int, case: Case, reduction: Any, asks: Callable[[int, int], bool]) -> Any:
    """The state dicts that this rank asked for, by step, while the others went on."""
    delays = random.Random(rank)
    params = case.params()
    optimizer = case.sharded(params, reduction)
    found = {0: optimizer.state_dict()} if asks(rank, 0) else {}
    for step in range(STEPS):
        optimizer.zero_grad()
        _backward(case, params, reduction, step, rank, world_size)
        time.sleep(delays.choice([0, 0, 0.001, 0.01]))
        optimizer.step()
        time.sleep(delays.choice([0, 0, 0.001, 0.01]))
        if asks(rank, step + 1):
            found[step + 1] = optimizer.state_dict()
    optimizer.close()
    return found


def _check(found: Any, case: Case, world_size: int, reduction: Any) -> None:
    for rank, dicts in enumerate(found):
        for step, state_dict in dicts.items():
            assert_bitwise(state_dict, expected(case, world_size, reduction, step)[1], f"rank {rank}, step {step}")


def _rank_0(rank: int, step: int) -> bool:
    return rank == 0


def _in_turn(rank: int, step: int) -> bool:
    return rank == step % 3


def _all(rank: int, step: int) -> bool:
    return True


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("asks", [_rank_0, _in_turn, _all])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_the_ranks_that_ask_have_the_state_of_their_step(world_size: int, asks: Any, reduction: str) -> None:
    found = run_processes(world_size, _alone, ADAMW, REDUCTIONS[reduction], asks, timeout=SECONDS)
    assert any(len(dicts) > 1 for dicts in found)
    _check(found, ADAMW, world_size, REDUCTIONS[reduction])


@pytest.mark.parametrize("name", CASES)
def test_whatever_the_class_keeps(name: str) -> None:
    reduction = REDUCTIONS["Overlapped"]
    found = run_processes(3, _alone, CASES[name], reduction, _rank_0, timeout=SECONDS)
    _check(found, CASES[name], 3, reduction)


def _in_small_messages(rank: int, world_size: int) -> Any:
    consolidate._CHUNK_BYTES = 256  # type: ignore[misc]
    return _alone(rank, world_size, ADAMW, REDUCTIONS["AtStep"], _rank_0)


def test_tensors_may_take_many_messages() -> None:
    found = run_processes(2, _in_small_messages, timeout=SECONDS)
    _check(found, ADAMW, 2, REDUCTIONS["AtStep"])


def _make(**options: Any) -> tuple[list[nn.Parameter], zero_opt.ShardedOptimizer]:
    generator = torch.Generator().manual_seed(1)
    params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((130, 7), (65,), (), (1000,))]
    options = {"reduction": zero_opt.Overlapped(BUCKET_MB), "fused": True, **options}
    return params, zero_opt.ShardedOptimizer(params, torch.optim.AdamW, **options)


def _step(params: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    torch.autograd.backward(params, [torch.full_like(param, 0.5) * (1 + i) for i, param in enumerate(params)])
    optimizer.step()


def _stepped(steps: int = 1, **options: Any) -> tuple[list[nn.Parameter], zero_opt.ShardedOptimizer]:
    params, optimizer = _make(**options)
    for _ in range(steps):
        _step(params, optimizer)
    return params, optimizer


def _service(optimizer: Any) -> Any:
    return optimizer._sharded._groups.service


def _beside_consolidate(rank: int, world_size: int, offload: Any, flush: bool) -> Any:
    consolidate._CHUNK_BYTES = 512  # type: ignore[misc]
    params, optimizer = _stepped(2, offload=offload)
    if flush:
        with pytest.raises(zero_opt.StepPending, match="flush"):
            optimizer.state_dict()
        optimizer.flush()
    mine = optimizer.state_dict() if rank == 0 else None
    optimizer.consolidate_state_dict(to=0)
    theirs = optimizer.state_dict() if rank == 0 else None
    _step(params, optimizer)
    if flush:
        optimizer.flush()
    after = optimizer.state_dict() if rank == 0 else None
    optimizer.close()
    return mine, theirs, after


@pytest.mark.parametrize(
    ("offload", "flush"),
    [(None, False), (zero_opt.WorkerOffload(), False), (zero_opt.WorkerOffload(delay=1), True)],
)
def test_it_is_what_consolidate_brings(offload: Any, flush: bool) -> None:
    mine, theirs, after = run_processes(2, _beside_consolidate, offload, flush, timeout=SECONDS)[0]
    assert_bitwise(mine, theirs)
    assert [list(state) for state in mine["state"].values()] == [list(state) for state in theirs["state"].values()]
    assert after["state"][0]["step"] == mine["state"][0]["step"] + 1


def _after_changes(rank: int, world_size: int) -> Any:
    params, optimizer = _stepped()
    more = [nn.Parameter(torch.ones(70)), nn.Parameter(torch.ones(3), requires_grad=False)]
    optimizer.add_param_group({"params": more, "lr": 0.5})
    added = optimizer.state_dict() if rank == 1 else None
    _step([*params, more[0]], optimizer)
    stepped = optimizer.state_dict()
    loaded = {**stepped, "state": {i: {**s, "exp_avg": s["exp_avg"] + 1} for i, s in stepped["state"].items()}}
    optimizer.load_state_dict(loaded)
    again = optimizer.state_dict() if rank == 1 else None
    optimizer.close()
    return added, loaded, again


def test_groups_that_are_added_and_state_that_is_loaded_are_in_it() -> None:
    added, loaded, again = run_processes(2, _after_changes, timeout=SECONDS)[1]
    assert len(added["param_groups"]) == 2
    assert sorted(added["state"]) == [0, 1, 2, 3]
    assert sorted(loaded["state"]) == [0, 1, 2, 3, 4]
    assert_bitwise(again, loaded)


def _two_optimizers(rank: int, world_size: int) -> Any:
    (first_params, first), (second_params, second) = _stepped(), _stepped(2)
    found = None
    if rank == 0:
        found = first.state_dict(), second.state_dict()
        _scribble(first.state_dict())
    kept = {index: state["exp_avg"].clone() for index, state in found[0]["state"].items()} if found else {}
    _step(first_params, first)
    _step(second_params, second)
    if found is not None:
        assert all(torch.equal(found[0]["state"][index]["exp_avg"], value) for index, value in kept.items())
        assert first.state_dict()["state"][0]["step"] == 2
        assert float(first.state_dict()["state"][0]["exp_avg"].abs().max()) < 100
    first.close()
    second.close()
    return found


def _scribble(state_dict: Any) -> None:
    for state in state_dict["state"].values():
        state["exp_avg"].fill_(1e6)


def test_two_optimizers_are_asked_each_and_nothing_is_shared_with_them() -> None:
    found = run_processes(2, _two_optimizers, timeout=SECONDS)[0]
    assert [state_dict["state"][0]["step"] for state_dict in found] == [1, 2]


def _others_gone(rank: int, world_size: int, how: str) -> Any:
    _, optimizer = _stepped(2)
    if rank:
        if how == "closed":
            optimizer.close()
        elif how == "collected":
            gone = weakref.ref(optimizer)
            del optimizer
            gc.collect()
            assert gone() is None
        else:
            state_service._serve_to_the_end()
        return None
    time.sleep(0.3)
    found = optimizer.state_dict()
    optimizer.close()
    return found["state"][0]["step"].item()


@pytest.mark.parametrize("how", ["closed", "collected", "exit"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_that_are_done_serve_on(world_size: int, how: str) -> None:
    assert run_processes(world_size, _others_gone, how, timeout=SECONDS)[0] == 2


def _ends(rank: int, world_size: int) -> Any:
    _, optimizer = _stepped()
    thread = _service(optimizer)._thread
    time.sleep(0.2 * rank)
    optimizer.close()
    with pytest.raises(zero_opt.StateNotConsolidated, match="closed"):
        optimizer.state_dict()
    thread.join(10)
    return thread.is_alive() or bool(state_service._running)


@pytest.mark.parametrize("world_size", [2, 3])
def test_serving_ends_once_all_have_closed(world_size: int) -> None:
    assert not any(run_processes(world_size, _ends, timeout=SECONDS))


def _one_dies(rank: int, world_size: int, when: str) -> Any:
    _, optimizer = _stepped()
    if rank == 2:
        if when == "while asked":
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    if when == "before":
        time.sleep(0.5)
    if rank == 0:
        if when == "while asked":
            _service(optimizer)._guard.commit(2)  # the others are behind, and stay there
        begun = time.monotonic()
        with pytest.raises(zero_opt.PeerLost):
            optimizer.state_dict()
        return time.monotonic() - begun
    return None


@pytest.mark.parametrize("when", ["before", "while asked"])
def test_a_rank_that_is_killed_is_noticed_at_once(when: str) -> None:
    found = run_processes(3, _one_dies, when, timeout=SECONDS, expect_errors=True)
    assert found[0] < 5
    assert found[2].type_name == "Died"


def _one_is_slow(rank: int, world_size: int) -> Any:
    params, optimizer = _stepped()
    wiring: Any = optimizer._sharded
    if rank == 1:
        done = wiring.stepped

        def late() -> None:
            time.sleep(0.5)
            done()

        wiring.stepped = late
    _step(params, optimizer)
    begun = time.monotonic()
    step = optimizer.state_dict()["state"][0]["step"].item() if rank == 0 else None
    waited = time.monotonic() - begun
    optimizer.close()
    return step, waited


def test_a_rank_that_is_behind_is_waited_for() -> None:
    step, waited = run_processes(2, _one_is_slow, timeout=SECONDS)[0]
    assert step == 2
    assert 0.2 < waited < 10


def _one_stays_behind(rank: int, world_size: int) -> Any:
    _, optimizer = _stepped(checks=zero_opt.Checks(timeout=2.0))
    said = ""
    if rank == 0:
        state_service.WARN_AFTER_S = 0.3  # type: ignore[misc]
        logged: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("zero_opt").addHandler(handler)
        guard = _service(optimizer)._guard
        guard.commit(2)
        with pytest.raises(zero_opt.PeerLost, match="in step 2 of this rank, but rank 1 has stayed in step 1"):
            optimizer.state_dict()
        guard.changes, guard.step = guard.changes - 1, 1
        assert [text for text in logged if "rank 1 (in step 1)" in text]
        said = optimizer.state_dict()["state"][0]["step"].item()
    dist.barrier()
    optimizer.close()
    return said


def test_a_rank_that_stays_behind_is_named() -> None:
    assert run_processes(2, _one_stays_behind, timeout=SECONDS)[0] == 1


def _one_is_ahead(rank: int, world_size: int) -> Any:
    params, optimizer = _stepped(2)
    said = ""
    if rank == 0:
        guard = _service(optimizer)._guard
        guard.changes, guard.step = guard.changes - 1, 1
        with pytest.raises(zero_opt.StepDesync) as caught:
            optimizer.state_dict()
        guard.changes, guard.step = guard.changes + 1, 2
        said = str(caught.value)
        assert optimizer.state_dict()["state"][0]["step"] == 2
    _step(params, optimizer)
    optimizer.close()
    return said


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_that_is_ahead_is_named(world_size: int) -> None:
    said = run_processes(world_size, _one_is_ahead, timeout=SECONDS)[0]
    assert "in step 1 of this rank, but rank 1 has entered step 3" in said


class Moody(torch.optim.SGD):
    """Fails on one rank."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        """As SGD, or not at all."""
        if self.fails:
            raise ValueError("a mood")
        return super().step(closure)


def _one_fails(rank: int, world_size: int) -> Any:
    params = [nn.Parameter(torch.ones(130)), nn.Parameter(torch.ones(130))]
    optimizer = zero_opt.ShardedOptimizer(params, Moody, lr=0.1, momentum=0.9)
    _step(params, optimizer)
    if rank == 1:
        Moody.fails = True
        with pytest.raises(ValueError, match="a mood"):
            _step(params, optimizer)
        Moody.fails = False
    else:
        _step(params, optimizer)
    with pytest.raises(zero_opt.StepFailed, match="a mood"):
        optimizer.state_dict()
    dist.barrier()
    with pytest.raises(zero_opt.StepFailed):
        _step(params, optimizer)
    _step(params, optimizer)
    step = len(optimizer.state_dict()["state"])
    optimizer.close()
    return step


def test_state_that_lacks_a_step_is_refused() -> None:
    assert run_processes(2, _one_fails, timeout=SECONDS) == [2, 2]


def _from_a_thread(rank: int, world_size: int) -> Any:
    """Asked for from beside training: the state of some step, or an error that says what to do."""
    params, optimizer = _stepped()
    steps: list[set[float]] = []
    refused: list[str] = []
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            try:
                state = optimizer.state_dict()["state"]
                steps.append({entry["step"].item() for entry in state.values()})
            except zero_opt.StepDesync as error:
                refused.append(str(error))

    thread = threading.Thread(target=ask, daemon=True)
    if rank == 0:
        thread.start()
    for _ in range(40):
        _step(params, optimizer)
    stop.set()
    if rank == 0:
        thread.join(20)
    dist.barrier()
    optimizer.close()
    return steps, refused


def test_asking_beside_training_never_mixes_steps() -> None:
    steps, refused = run_processes(3, _from_a_thread, timeout=SECONDS)[0]
    assert steps
    assert all(len(found) == 1 for found in steps)
    assert all("between steps" in text for text in refused)


def _idle(rank: int, world_size: int) -> float:
    _, optimizer = _stepped()
    dist.barrier()
    begun = time.process_time()
    time.sleep(1)
    spent = time.process_time() - begun
    dist.barrier()
    optimizer.close()
    return spent


def test_waiting_to_be_asked_costs_nothing() -> None:
    assert max(run_processes(2, _idle, timeout=SECONDS)) < 0.02


def _at_threads(rank: int, world_size: int) -> str:
    _, optimizer = _stepped()
    with pytest.raises(zero_opt.StateNotConsolidated) as caught:
        optimizer.state_dict()
    optimizer.close()
    return str(caught.value)


def test_without_messages_between_ranks_it_says_to_consolidate() -> None:
    assert "consolidate_state_dict" in run_threads(2, _at_threads)[0]


SCRIPT = """
import os, sys, time, torch, torch.distributed as dist, zero_opt
rank, folder, how = int(sys.argv[1]), sys.argv[2], sys.argv[3]
torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.FileStore(folder + "/store", 2), rank=rank, world_size=2)
params = [torch.nn.Parameter(torch.ones(500))]
opt = zero_opt.ShardedOptimizer(params, torch.optim.AdamW)
params[0].sum().backward()
opt.step()
if rank == 0:
    time.sleep(1)
    if how == "return":
        torch.save(opt.state_dict(), folder + "/opt.pt")
elif how == "raise":
    raise SystemError("training went wrong")
"""


@pytest.mark.parametrize("how", ["return", "raise"])
def test_a_process_that_returns_from_main_is_asked_and_one_that_fails_is_not_kept(how: str, tmp_path: Path) -> None:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), str(tmp_path), how], env=environment, stderr=subprocess.PIPE
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=SECONDS)[1].decode() for process in (ranks[1], ranks[0])]
    codes = [process.returncode for process in ranks]
    if how == "return":
        assert codes == [0, 0], said
        saved = torch.load(tmp_path / "opt.pt", weights_only=True)
        assert saved["state"][0]["exp_avg"].shape == (500,)
    else:
        assert codes == [0, 1], said
