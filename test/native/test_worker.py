"""A worker process makes the steps it is handed, and its successors those that it was killed in, to the same bits."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch

from test.native.forms import FORMS, group_of
from test.native.workers import Arena, Group, all_same, arena_for, copied, worker_on
from test.support.failures import PATIENCE_S
from zero_opt import _native

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs memfd and pidfd")


MOST_DEATHS = 40


def wait_for_progress(arena: Arena, sequence: int) -> None:
    """Until the worker has begun with what is left of the step."""
    before, deadline = arena.control.progress, time.monotonic() + PATIENCE_S
    while arena.control.progress == before and arena.control.completed != sequence:
        assert time.monotonic() < deadline
        time.sleep(1e-5)


def stepped(groups: list[Group]) -> int:
    return _native.update_step([group.batch() for group in groups])


@pytest.mark.parametrize("form", FORMS)
def test_steps_of_a_worker_have_the_bits_of_steps_here(form: str) -> None:
    groups = [group_of([70_000, 1000, 0, 1], form), group_of([513], form, amsgrad=True, decoupled=False)]
    expected = copied(groups)
    with arena_for(groups, 2) as (arena, placed), worker_on(arena) as worker:
        for number in range(1, 4):
            nonfinite = stepped(expected)
            assert arena.submit(placed) == number
            assert worker.wait(number) == "done"
            assert arena.control.nonfinite == nonfinite
            assert all_same(placed, expected)
        assert arena.control.generation == 1


@pytest.mark.parametrize("isa", _native.isas())
def test_the_instruction_set_is_the_trainers(isa: str) -> None:
    groups = [group_of([3000], "bf16 in and out")]
    expected = copied(groups)
    stepped(expected)
    with arena_for(groups, 3) as (arena, placed), worker_on(arena) as worker:
        assert worker.wait(arena.submit(placed, isa=isa)) == "done"
        assert all_same(placed, expected)


def test_a_step_submitted_before_there_is_a_worker_is_made() -> None:
    groups = [group_of([1000], "fp32")]
    expected = copied(groups)
    stepped(expected)
    with arena_for(groups, 1) as (arena, placed):
        sequence = arena.submit(placed)
        with worker_on(arena) as worker:
            worker.wait_ready()
            assert arena.control.completed == sequence, "a worker is ready when nothing is left to be done"
            assert worker.wait(sequence) == "done"
        assert all_same(placed, expected)


@pytest.mark.parametrize("form", FORMS)
def test_successors_of_killed_workers_finish_the_step(form: str) -> None:
    """Kills at random places; what must come out does not depend on where."""
    chance = random.Random(form)
    groups = [group_of([400_000, 77, 100_001], form)]
    expected = copied(groups)
    with arena_for(groups, 2) as (arena, placed):
        deaths = 0
        for _ in range(6):
            nonfinite = stepped(expected)
            sequence = arena.submit(placed)
            while arena.control.completed != sequence:
                with worker_on(arena) as worker:
                    if deaths == MOST_DEATHS:
                        assert worker.wait(sequence) == "done"
                        break
                    wait_for_progress(arena, sequence)
                    time.sleep(chance.uniform(0, 2e-3))
                    worker.kill()
                    deaths += worker.wait(sequence) == "dead"
            assert arena.control.nonfinite == nonfinite
            assert all_same(placed, expected)


def test_the_trainer_hears_of_a_death() -> None:
    with arena_for([], 1) as (arena, _), worker_on(arena) as worker:
        worker.wait_ready()
        worker.process.send_signal(signal.SIGSTOP)
        sequence = arena.submit([])
        assert arena.control.wait(sequence, arena.done, worker.pidfd, 0.01) == "waiting"
        worker.kill()
        assert worker.wait(sequence) == "dead"
        with worker_on(arena) as successor:
            assert successor.wait(sequence) == "done"
            successor.wait_ready()
        assert arena.control.generation == 2


def test_a_worker_goes_when_asked_and_the_next_one_stays() -> None:
    with arena_for([], 1) as (arena, _):
        for _ in range(2):
            with worker_on(arena) as worker:
                worker.wait_ready()
                assert worker.wait(arena.submit([])) == "done"
                arena.control.stop(arena.wake)
                assert worker.ended() == (0, "")


def test_a_worker_goes_with_its_trainer() -> None:
    trainer = subprocess.Popen([sys.executable, "-I", "-S", "-c", "input()"], stdin=subprocess.PIPE)
    try:
        with arena_for([], 2) as (arena, _), worker_on(arena, trainer_pid=trainer.pid) as worker:
            worker.wait_ready()
            assert worker.wait(arena.submit([])) == "done"
            trainer.kill()
            assert worker.ended() == (0, "")
    finally:
        trainer.kill()
        trainer.communicate(timeout=PATIENCE_S)


def test_signals_for_the_trainers_group_pass_by() -> None:
    with arena_for([], 2) as (arena, _), worker_on(arena) as worker:
        worker.wait_ready()
        for name in ("SIGINT", "SIGHUP", "SIGQUIT", "SIGTSTP", "SIGTERM", "SIGUSR1", "SIGALRM", "SIGPIPE"):
            worker.process.send_signal(getattr(signal, name))
        assert worker.wait(arena.submit([])) == "done"


def test_only_one_worker_at_a_time_has_the_arena() -> None:
    groups = [group_of([100], "fp32")]
    with arena_for(groups, 1) as (arena, placed), worker_on(arena) as first:
        first.wait_ready()
        with worker_on(arena) as second:
            status, text = second.ended()
        assert status == 1
        assert "another worker still has the arena" in text
        assert first.wait(arena.submit(placed)) == "done"


def test_what_a_worker_cannot_do_it_says() -> None:
    group = group_of([100], "fp32")
    arena = Arena(1, 1 << 16)
    try:
        with worker_on(arena) as worker:
            worker.wait_ready()
            arena.grow(1 << 16)
            assert worker.wait(arena.submit(copied([group], arena.place))) == "dead"
            assert worker.ended()[0] == 1
        assert arena.control.error == "the arena has grown since this worker was started"
    finally:
        arena.close()


def test_taking_the_pages_changes_nothing() -> None:
    arena = Arena(3, 1 << 20)
    try:
        arena.bytes[-(1 << 20) :] = torch.arange(1 << 20).to(torch.uint8)
        before = arena.bytes[-(1 << 20) :].clone()
        with worker_on(arena) as worker:
            worker.wait_ready()
        assert torch.equal(arena.bytes[-(1 << 20) :], before)
        blocks = os.fstat(arena.fd).st_blocks * 512
        assert blocks >= 1 << 20
    finally:
        arena.close()


def test_a_worker_keeps_to_its_cpus() -> None:
    cpu = min(os.sched_getaffinity(0))
    with arena_for([], 1) as (arena, _), worker_on(arena, cpus=[cpu]) as worker:
        worker.wait_ready()
        assert os.sched_getaffinity(worker.process.pid) == {cpu}


def test_a_worker_is_small() -> None:
    with arena_for([], 2) as (arena, _), worker_on(arena) as worker:
        worker.wait_ready()
        with open(f"/proc/{worker.process.pid}/statm") as file:
            resident = int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")
        assert resident < 20 << 20


def test_a_run_with_a_kept_count_of_minus_1_has_the_hyperparameters_of_its_own_group() -> None:
    def after(lr_before: float) -> list[Group]:
        count = {"step": torch.tensor([-1.0])}
        last = group_of([1000], "fp32")
        groups = [group_of([100], "fp32", lr=lr_before), Group([{**last.runs[0], **count}], last.grads, last.options)]
        with arena_for(groups, 2) as (arena, placed):
            arena.submit(placed)
            arena.control.finish(1)
            return copied(placed[1:])

    assert all_same(after(0.5), after(0.01))
