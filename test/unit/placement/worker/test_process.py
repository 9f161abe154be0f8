"""The worker process: it steps, it is replaced when it dies or hangs, and it never outlives its trainer."""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import multiprocessing
import os
import resource
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from test.support.failures import PATIENCE_S
from test.support.harness import assert_bitwise
from test.support.worker_beside import NUMEL, Trainer, ends
from zero_opt import OutOfMemory, OutOfResources, WorkerDied, WorkerFailed
from zero_opt.placement.worker import process as worker_process
from zero_opt.system import shared_memory

BIG = 1 << 21  # takes the worker long enough to be met in the middle


@pytest.fixture
def trainers() -> Iterator[Callable[..., Trainer]]:
    made: list[Trainer] = []

    def make(*args: Any, **options: Any) -> Trainer:
        made.append(Trainer(*args, **options))
        return made[-1]

    yield make
    for trainer in made:
        trainer.worker.close()


def start(process: BaseProcess) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer versions of Python warn of forks beside threads
        process.start()


def in_fork(call: Callable[[], Any], *, daemon: bool = False) -> Any:
    """What ``call`` returns in a forked process."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def run() -> None:
        with contextlib.suppress(BrokenPipeError):
            theirs.send(call())

    process = context.Process(target=run, daemon=daemon)
    start(process)
    theirs.close()
    try:
        assert ours.poll(PATIENCE_S)
        return ours.recv()
    except EOFError:
        return None
    finally:
        process.join(PATIENCE_S)
        ours.close()


def test_a_worker_that_may_not_be_ended_is_an_error_of_the_library(trainers: Callable[..., Trainer]) -> None:
    worker = trainers().worker
    child = worker._handles.child
    assert child is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(child._popen, "kill", Mock(side_effect=PermissionError(1, "Operation not permitted")))
        with pytest.raises(WorkerFailed, match=rf"^worker process {child.pid} cannot be ended: .*os\.setuid\(\)$"):
            child.end()


@pytest.mark.parametrize("lanes", [1, 2, 4])
def test_the_bits_are_those_of_a_step_in_process(trainers: Callable[..., Trainer], lanes: int) -> None:
    trainer = trainers(lanes=lanes)
    for _ in range(3):
        trainer.step()
    assert trainer.worker.deaths == 0


def test_memory_is_added_and_nothing_moves(trainers: Callable[..., Trainer]) -> None:
    trainer = trainers()
    trainer.step()
    before = trainer.arrays()
    start = trainer.worker.extend(1 << 16)
    trainer.worker.start()
    assert start >= trainer.start + 4 * NUMEL * len(trainer.roles["adam"])
    assert not trainer.worker.arena.view(start, 1 << 16, torch.uint8).any()
    trainer.step()
    assert_bitwise(before, trainer.own)  # views from before see it too


def test_too_little_memory_is_said_before_any_is_taken(
    trainers: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainers()
    before = trainer.pid
    monkeypatch.setattr(shared_memory, "memory_left", lambda: 3 << 20)
    with pytest.raises(OutOfMemory, match=r"needs 5\.0 MiB .* 3\.0 MiB may"):
        trainer.worker.extend(5 << 20)
    assert trainer.pid == before
    trainer.step()


def test_a_limit_of_the_process() -> None:
    def train() -> list[str]:
        trainer, said = Trainer(), []
        resource.setrlimit(resource.RLIMIT_FSIZE, (trainer.worker.arena.bytes.numel() + 4096,) * 2)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        for call in (lambda: trainer.worker.extend(5 << 20), lambda: Trainer(BIG)):
            try:
                call()
            except OutOfMemory as error:
                said.append(str(error))
        trainer.worker.start()
        trainer.step()
        trainer.worker.close()
        return said

    said = in_fork(train)
    assert len(said) == 2
    assert all("MiB of host memory, and the system refuses it" in text for text in said)


def test_a_killed_worker_is_replaced(trainers: Callable[..., Trainer], caplog: pytest.LogCaptureFixture) -> None:
    trainer = trainers(BIG)
    with caplog.at_level(logging.WARNING, "zero_opt"):
        for deaths in range(1, 6):
            sequence = trainer.submit()
            victim = trainer.pid
            os.kill(victim, signal.SIGKILL)
            trainer.worker.wait(sequence)
            trainer.check()
            trainer.step()
            assert ends(victim)
            assert trainer.worker.deaths <= deaths
    assert trainer.worker.deaths
    assert len(caplog.records) == trainer.worker.deaths
    assert "died (signal 9); a successor" in caplog.text


def test_a_worker_that_dies_between_steps_is_replaced(trainers: Callable[..., Trainer]) -> None:
    trainer = trainers()
    trainer.step()
    victim = trainer.pid
    os.kill(victim, signal.SIGKILL)
    assert ends(victim)
    trainer.step()
    assert trainer.worker.deaths == 1


def test_a_stopped_worker_is_replaced(trainers: Callable[..., Trainer], caplog: pytest.LogCaptureFixture) -> None:
    trainer = trainers(hang_timeout=3.0)
    victim = trainer.pid
    os.kill(victim, signal.SIGSTOP)
    with caplog.at_level(logging.WARNING, "zero_opt"):
        trainer.step()
    assert "made no progress for 3 s and was killed" in caplog.text
    assert ends(victim)


def _broken_main(folder: Path) -> Path:
    path = folder / "main.py"
    path.write_text("raise SystemExit('no such instruction')")
    return path


def test_workers_that_cannot_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "_MAIN", _broken_main(tmp_path))
    with pytest.raises(WorkerFailed, match=r"did not become ready \(exit status 1\): no such instruction"):
        Trainer()


@pytest.mark.parametrize("kills", [2, 3])
def test_workers_that_are_killed_while_they_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kills: int) -> None:
    path, count = tmp_path / "main.py", tmp_path / "count"
    count.write_text("")
    path.write_text(
        f"import os, runpy\nopen({str(count)!r}, 'a').write('x')\n"
        f"if os.path.getsize({str(count)!r}) <= {kills}: os.kill(os.getpid(), 9)\n"
        f"runpy.run_path({str(worker_process._MAIN)!r}, run_name='__main__')\n"
    )
    monkeypatch.setattr(worker_process, "_MAIN", path)
    if kills == 3:
        with pytest.raises(WorkerDied, match=r"did not become ready \(signal 9\)"):
            Trainer(max_deaths=3)
        return
    trainer = Trainer(max_deaths=3)
    trainer.step()
    assert trainer.worker.deaths == kills
    trainer.worker.close()


def test_a_limit_of_processes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> Any:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(worker_process.subprocess, "Popen", refused)
    with pytest.raises(OutOfResources, match=r"cannot start a worker process .*'ulimit -u', pids.max of the container"):
        Trainer()


def test_an_interpreter_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for executable in ("/nowhere/python", ""):
        monkeypatch.setattr("sys.executable", executable)
        with pytest.raises(WorkerFailed, match="cannot start a worker"):
            Trainer()


def test_descriptors_that_the_program_has_closed_do_not_keep_it_from_closing(
    trainers: Callable[..., Trainer], caplog: pytest.LogCaptureFixture
) -> None:
    trainer = trainers()
    worker, victim = trainer.worker, trainer.pid
    for fd in (worker.arena.fd, worker._handles.wake, worker._handles.done):
        os.close(fd)
    with pytest.raises(WorkerFailed, match=r"Bad file descriptor; has the program closed"):
        trainer.submit()
    worker.close()
    assert ends(victim)
    assert caplog.text.count("the program has closed file descriptor") == 3


def test_memory_and_successors_that_need_descriptors_which_the_program_has_closed(
    trainers: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(*_: Any, **__: Any) -> None:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    trainer = trainers(max_deaths=3)
    victim, handles = trainer.pid, trainer.worker._handles
    assert handles.child is not None
    for fd in (trainer.worker.arena.fd, handles.done, handles.child._stderr):
        os.close(fd)
    with pytest.raises(
        WorkerFailed, match=r"memory cannot be made longer .*Bad file descriptor\); has the program closed"
    ):
        trainer.worker.extend(1 << 16)
    assert ends(victim)
    monkeypatch.setattr(worker_process.subprocess, "Popen", closed)
    with pytest.raises(WorkerFailed, match=r"cannot start a worker: .*Bad file descriptor; has the program closed"):
        trainer.worker.start()
    trainer.worker.close()


def test_a_worker_that_ends_for_a_closed_descriptor_says_who_may_have_closed_it(
    trainers: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainers(max_deaths=1)
    text = "zero_opt worker: an event of the worker: Bad file descriptor"
    monkeypatch.setattr(worker_process._Child, "said", lambda _: text)
    os.kill(trainer.pid, signal.SIGKILL)
    with pytest.raises(WorkerDied, match=rf"{text}; has the program closed"):
        trainer.step()


def test_a_successor_without_descriptors_names_the_limit(trainers: Callable[..., Trainer]) -> None:
    trainer = trainers(max_deaths=3)
    victim = trainer.pid
    os.kill(victim, signal.SIGKILL)
    assert ends(victim)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    sequence = trainer.submit()
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(OutOfResources, match=r"a worker process needs a file descriptor .*'ulimit -n'"):
            trainer.worker.wait(sequence)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    trainer.worker.wait(sequence)


def test_deaths_at_one_place_are_an_error_and_nothing_is_lost(
    trainers: Callable[..., Trainer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainers(max_deaths=3)
    victim = trainer.pid
    os.kill(victim, signal.SIGKILL)
    assert ends(victim)
    sequence = trainer.submit()
    with monkeypatch.context() as patch:
        patch.setattr(worker_process, "_MAIN", _broken_main(tmp_path))
        for _ in range(2):
            with pytest.raises(
                WorkerDied, match="no such instruction; 3 in a row have not got on with the step that is pending"
            ) as caught:
                trainer.worker.wait(sequence)
            assert isinstance(caught.value, RuntimeError)
    trainer.worker.wait(sequence)
    trainer.check()
    trainer.step()


def test_an_interrupted_wait_goes_on(trainers: Callable[..., Trainer]) -> None:
    trainer = trainers()
    os.kill(trainer.pid, signal.SIGSTOP)
    sequence = trainer.submit()
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        trainer.worker.wait(sequence)
    timer.join(PATIENCE_S)
    os.kill(trainer.pid, signal.SIGCONT)
    trainer.worker.wait(sequence)
    trainer.check()
    assert trainer.worker.deaths == 0


def test_a_terminal_does_not_reach_it(trainers: Callable[..., Trainer]) -> None:
    trainer = trainers()
    assert os.getpgid(trainer.pid) != os.getpgid(0)
    for sent in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP, signal.SIGTERM):
        os.kill(trainer.pid, sent)
    trainer.step()
    assert trainer.worker.deaths == 0


def test_a_fork_leaves_it_alone(trainers: Callable[..., Trainer]) -> None:
    trainer = trainers()

    def child() -> list[str]:
        said = []
        for call in (trainer.worker.start, trainer.submit, lambda: trainer.worker.wait(1)):
            try:
                call()
            except WorkerFailed as error:
                said.append(str(error))
        trainer.worker.close()
        return said

    said = in_fork(child)
    assert len(said) == 3
    assert all("is a fork" in text for text in said)
    trainer.step()
    assert trainer.worker.deaths == 0


@pytest.mark.parametrize("moment", ["Popen", "pidfd_open"])
def test_ctrl_c_loses_no_worker(trainers: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """Just after the process has come into being."""
    trainer = trainers()
    os.kill(trainer.pid, signal.SIGKILL)
    assert ends(trainer.pid)
    sequence = trainer.submit()
    main, begun = threading.main_thread().ident, []
    assert main is not None
    module: Any = worker_process.subprocess if moment == "Popen" else worker_process.os
    real = getattr(module, moment)

    def interrupted(*args: Any, **options: Any) -> Any:
        found = real(*args, **options)
        begun.append(found.pid if moment == "Popen" else args[0])
        if len(begun) == 1:
            signal.pthread_kill(main, signal.SIGINT)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(module, moment, interrupted)
        with pytest.raises(KeyboardInterrupt):
            trainer.worker.wait(sequence)
        trainer.worker.wait(sequence)
    trainer.check()
    assert begun == [trainer.pid]
    trainer.worker.extend(4096)
    trainer.worker.start()
    trainer.step()
    assert ends(begun[0])


@pytest.mark.parametrize("stopped", [False, True])
def test_it_goes_with_its_trainer(stopped: bool) -> None:
    """Even in the middle of a step, and when it is stopped."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def train() -> None:
        trainer = Trainer(BIG)
        if stopped:
            os.kill(trainer.pid, signal.SIGSTOP)
        trainer.submit()
        theirs.send(trainer.pid)
        signal.pause()

    process = context.Process(target=train)
    start(process)
    assert ours.poll(PATIENCE_S)
    pid = ours.recv()
    process.kill()
    process.join(PATIENCE_S)
    assert ends(pid)


def test_it_goes_when_exec_replaces_its_trainer() -> None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def train() -> None:
        theirs.send(Trainer().pid)
        os.execv("/bin/sleep", ["sleep", str(10 * PATIENCE_S)])

    process = context.Process(target=train)
    start(process)
    assert ours.poll(PATIENCE_S)
    assert ends(ours.recv())
    assert process.is_alive()
    process.kill()
    process.join(PATIENCE_S)


def test_it_outlives_the_thread_that_made_it(trainers: Callable[..., Trainer]) -> None:
    made: list[Trainer] = []
    thread = threading.Thread(target=lambda: made.append(trainers()))
    thread.start()
    thread.join(PATIENCE_S)
    made[0].step()
    assert made[0].worker.deaths == 0


@pytest.mark.parametrize("closed", [(0,), (1,), (0, 1, 2)])
def test_closed_standard_streams(closed: tuple[int, ...]) -> None:
    def train() -> int:
        for fd in closed:
            os.close(fd)
        trainer = Trainer()
        trainer.step()
        os.kill(trainer.pid, signal.SIGKILL)
        trainer.step()
        trainer.worker.close()
        return trainer.worker.deaths

    assert in_fork(train) == 1


def test_daemonic_processes_can_have_one() -> None:
    def train() -> int:
        trainer = Trainer()
        trainer.step()
        pid = trainer.pid
        trainer.worker.close()
        return pid

    assert ends(in_fork(train, daemon=True))


def test_closing_ends_it_and_keeps_its_memory() -> None:
    trainer = Trainer()
    trainer.step()
    pid, arrays = trainer.pid, trainer.arrays()
    trainer.worker.close()
    trainer.worker.close()
    assert ends(pid)
    assert_bitwise(arrays, trainer.own)


def test_one_that_nobody_has_any_more_is_ended() -> None:
    trainer = Trainer()
    pid = trainer.pid
    del trainer
    gc.collect()
    assert ends(pid)
