"""The actions of the model, done to real processes: the bits are always those of steps taken here."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from test.crash.programs import LONG
from test.support.worker_beside import UPDATES, Trainer, ends
from zero_opt import WorkerDied

NUMEL = 14_000  # of each update: enough for the worker's threads to take part
EXAMPLES, ACTIONS = (60, 30) if LONG else (6, 12)


class RealWorkers(RuleBasedStateMachine):
    """A trainer with a worker that steps every update at once.

    Its own arrays are a step ahead of the arena's while a step is pending.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pending = 0
        self.struck = False

    @initialize(lanes=st.integers(1, 3), max_deaths=st.integers(1, 3))
    def begin(self, lanes: int, max_deaths: int) -> None:
        self.trainer = Trainer(NUMEL, lanes, list(UPDATES), hang_timeout=0.2, max_deaths=max_deaths)

    def teardown(self) -> None:
        """End every example with a step that is checked, unless the worker has died too often for one."""
        trainer: Trainer | None = getattr(self, "trainer", None)
        if trainer is None:
            return
        try:
            with contextlib.suppress(WorkerDied):
                trainer.worker.wait(self.pending or trainer.submit())
                trainer.check()
        finally:
            trainer.worker.close()

    def _strike(self, sent: int) -> None:
        child = self.trainer.worker._handles.child
        if child is not None:
            self.struck = True
            os.kill(child.pid, sent)  # not reaped, so the number is still its own

    @rule()
    def kill(self) -> None:
        self._strike(signal.SIGKILL)

    @rule()
    def kill_and_wait_for_its_end(self) -> None:
        child = self.trainer.worker._handles.child
        self._strike(signal.SIGKILL)
        assert child is None or child.dead(60_000)

    @rule()
    def stop(self) -> None:
        self._strike(signal.SIGSTOP)

    @rule()
    def go_on(self) -> None:
        self._strike(signal.SIGCONT)

    @rule()
    def ask_to_go(self) -> None:
        self.trainer.worker.control.stop(self.trainer.worker._handles.wake)
        self.struck = True

    @precondition(lambda self: not self.pending)
    @rule()
    def submit(self) -> None:
        self.pending = self.trainer.submit()

    @precondition(lambda self: self.pending)
    @rule()
    def wait(self) -> None:
        try:
            self.trainer.worker.wait(self.pending)
        except WorkerDied:
            assert self.struck
            return
        self.pending = 0
        self.trainer.check()

    @precondition(lambda self: not self.pending)
    @rule()
    def extend(self) -> None:
        before = self.trainer.worker._handles.child
        self.trainer.worker.extend(1 << 16)
        assert before is None or ends(before.pid)
        self.trainer.worker.start()

    @invariant()
    def one_step_at_most_is_pending(self) -> None:
        trainer: Any = getattr(self, "trainer", None)
        if trainer is not None:
            control = trainer.worker.control
            assert control.submitted == trainer.steps
            assert control.submitted - 1 <= control.completed <= control.submitted
            if not self.pending:
                trainer.check()


def test_whatever_is_done_to_workers_the_bits_are_right(caplog: pytest.LogCaptureFixture) -> None:
    run_state_machine_as_test(
        RealWorkers,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=ACTIONS,
            suppress_health_check=list(HealthCheck),
        ),
    )
