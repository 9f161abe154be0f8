"""Waits for a worker where the system refuses them, as where the kernel lacks memory for a moment."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest

from test.support.descriptors import no_descriptors
from test.support.failures import PATIENCE_S
from test.support.worker_beside import Trainer
from zero_opt.placement.worker import process as worker_process


def test_polls_that_the_system_refuses_are_repeated() -> None:
    trainer = Trainer()
    os.kill(trainer.pid, signal.SIGSTOP)
    sequence = trainer.submit()
    timer = threading.Timer(0.3, os.kill, (trainer.pid, signal.SIGCONT))
    timer.start()
    with no_descriptors():
        trainer.worker.wait(sequence)
    timer.join(PATIENCE_S)
    trainer.check()
    assert trainer.worker.deaths == 0
    trainer.worker.close()


def test_a_worker_gets_ready_where_the_system_refuses_a_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    dead = worker_process._Child.dead
    looks = list[bool]()

    def refused(child: Any, patience_ms: int) -> bool:
        with no_descriptors():
            looks.append(dead(child, patience_ms))
        return looks[-1]

    monkeypatch.setattr(worker_process._Child, "dead", refused)
    trainer = Trainer()
    assert looks
    assert not any(looks)
    trainer.step()
    trainer.check()
    trainer.worker.close()
