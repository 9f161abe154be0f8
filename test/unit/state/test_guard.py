"""Who may read the state, who may change it, and at which point of training it is."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch

from zero_opt.errors import PeerLost, PeerSilent, StepDesync, StepFailed, WorkerDied
from zero_opt.state.guard import StateGuard, Verdict


def test_only_the_state_after_as_many_changes_is_given() -> None:
    guard = StateGuard()
    guard.commit(step=1)
    assert guard.admit(0) is Verdict.AHEAD
    assert guard.admit(2) is Verdict.BEHIND
    assert guard.admit(1) is Verdict.READY
    assert guard.step == 1


def test_state_that_is_being_changed_is_not_given() -> None:
    guard = StateGuard()
    guard.begin(1)
    assert guard.admit(0) is Verdict.AHEAD
    with pytest.raises(StepDesync, match="between steps"), guard.reading():
        pass
    guard.commit(step=1)
    with guard.reading() as changes:
        assert changes == 1


def test_a_change_waits_for_readers() -> None:
    guard = StateGuard()
    assert guard.admit(0) is Verdict.READY
    seen: list[str] = []

    def change() -> None:
        guard.begin(20)
        seen.append("changed")

    thread = threading.Thread(target=change)
    thread.start()
    time.sleep(0.1)
    seen.append("read")
    guard.leave()
    thread.join(20)
    assert seen == ["read", "changed"]


def test_state_moves_once_it_is_read_and_readers_that_come_meanwhile_get_it_then() -> None:
    guard, seen = StateGuard(), list[str]()
    assert guard.admit(0) is Verdict.READY

    def read() -> None:
        assert guard.admit(0) is Verdict.READY
        seen.append("read again")

    def move() -> None:
        with guard.moving(600):
            seen.append("moves")
            reader.start()
            reader.join(0.1)
            seen.append("moved")

    reader, mover = threading.Thread(target=read), threading.Thread(target=move)
    mover.start()
    while not guard._waiting:
        time.sleep(0.001)
    seen.append("read")
    guard.leave()
    mover.join()
    reader.join()
    assert seen == ["read", "moves", "moved", "read again"]
    assert guard.changes == 0


def test_a_reader_that_stays_is_not_waited_for_for_ever() -> None:
    guard = StateGuard()
    with guard.reading(), pytest.raises(PeerLost, match=r"step 0 .*give it longer with checks=Checks"):
        guard.begin(0.05)
    guard.begin(0.05)


def test_a_change_that_waits_goes_before_a_new_reader() -> None:
    guard, refused = StateGuard(), ""
    thread = threading.Thread(target=guard.begin, args=(300,))
    with guard.reading():
        thread.start()
        end = time.monotonic() + 20
        while not refused and time.monotonic() < end:
            try:
                with guard.reading():
                    time.sleep(0.01)
            except StepDesync as error:
                refused = str(error)
        assert refused.startswith("state_dict() was called while step 0 is being taken; call it between steps")
        assert guard.admit(0) is Verdict.READY  # another rank's reader, whose own change has begun to wait
        guard.leave()
        assert thread.is_alive()
    thread.join(300)
    guard.commit(step=1)
    with guard.reading() as changes:
        assert changes == 1


def test_after_a_change_that_has_waited_in_vain_there_may_be_readers() -> None:
    guard = StateGuard()
    assert guard.admit(0) is Verdict.READY
    with pytest.raises(PeerLost, match=r"^another rank has been reading the state of step 0 "):
        guard.begin(0.05)
    with guard.reading():
        pass


def test_a_change_names_the_thread_of_its_own_rank_that_reads() -> None:
    guard = StateGuard()
    with (
        guard.reading(),
        pytest.raises(PeerLost, match=r"^state_dict\(\) on another thread of this rank has been reading"),
    ):
        guard.begin(0.05)


def test_a_reader_waits_for_what_is_to_come() -> None:
    guard = StateGuard()
    found: list[Verdict] = []
    thread = threading.Thread(target=lambda: found.append(guard.wait_for(2, 20)))
    thread.start()
    guard.commit(step=1)
    guard.commit(step=2)
    thread.join(20)
    assert found == [Verdict.READY]


def test_what_will_not_come_is_not_waited_for() -> None:
    guard = StateGuard()
    assert guard.wait_for(1, 0.02) is Verdict.BEHIND
    guard.finish()
    assert guard.wait_for(1, 20) is Verdict.BEHIND


def test_a_change_that_is_taken_back_is_none() -> None:
    guard = StateGuard()
    with pytest.raises(ZeroDivisionError), guard.changing(1, step=0):
        _ = 1 / 0
    with guard.reading() as changes:
        assert changes == 0
    with guard.changing(1, step=7):
        pass
    assert (guard.changes, guard.step) == (1, 7)


def test_a_step_that_was_left_half_way_says_so_to_those_that_ask() -> None:
    guard = StateGuard()
    guard.commit(step=4)

    def leave(error: BaseException, call: str = "") -> None:
        with guard.telling_why(call):
            guard.begin(1)
            raise error

    guard.begin(1)
    with pytest.raises(StepDesync, match="while step 4 is being taken; call it between steps"), guard.reading():
        pass
    for lost in (PeerLost("rank 1 has ended; restart"), PeerSilent("rank 1 is stopped; let it go on")):
        with pytest.raises(type(lost)):
            leave(lost)
        with pytest.raises(type(lost), match=rf"step 4 was left half-way: {lost}$"), guard.reading():
            pass
    with pytest.raises(KeyboardInterrupt):
        leave(KeyboardInterrupt())
    again = r"step 4 was left half-way with KeyboardInterrupt.*restart all ranks from the last checkpoint{}$"
    with pytest.raises(StepDesync, match=again.format(", or load it on all ranks")), guard.reading():
        pass
    guard.commit(step=5)
    with guard.reading():
        pass
    guard.begin(1)
    goes_on = r"while load_state_dict\(\) before step 5 goes on"
    with guard.telling_why("load_state_dict()"), pytest.raises(StepDesync, match=goes_on), guard.reading():
        pass
    guard.take_back()
    guard.begin(1)
    with pytest.raises(StepDesync, match="while step 5 is being taken"), guard.reading():
        pass
    guard.take_back()
    with pytest.raises(KeyboardInterrupt):
        leave(KeyboardInterrupt(), "load_state_dict()")
    with pytest.raises(StepDesync, match=r"since load_state_dict\(\) before step 5 was left half-way"), guard.reading():
        pass
    with pytest.raises(KeyboardInterrupt):
        leave(KeyboardInterrupt())
    guard.finish()  # as a rank that leaves training does: no load would be of all ranks
    with pytest.raises(StepDesync, match=again.replace("step 4", "step 5").format("")), guard.reading():
        pass


def test_what_cannot_be_made_up_for_is_still_a_failure() -> None:
    guard = StateGuard()
    guard.note_failure(MemoryError("no more of it"))
    with pytest.raises(OSError, match="the disk"), guard.making_up(1):
        raise OSError("the disk")
    guard.take_back()
    with guard.reading():
        assert isinstance(guard.failure, OSError)
        assert guard.untold_failure() is None
    with guard.making_up(1):
        pass
    guard.commit(step=1)
    assert guard.missing_part() is None


def test_a_failure_is_told_once_and_stays_until_there_is_another_step() -> None:
    guard = StateGuard()
    assert guard.untold_failure() is guard.missing_part() is None and guard.failure is None
    failure = MemoryError("no more of it")
    guard.begin(1)
    guard.note_failure(failure)
    guard.commit(step=4)
    told = guard.untold_failure()
    assert isinstance(told, StepFailed) and told.__cause__ is failure and "step 3 failed with Mem" in str(told)
    assert str(guard.untold_failure()) == str(told)  # they have raised another rank's error
    guard.note_told()
    assert guard.untold_failure() is None
    assert str(guard.missing_part()) == str(told) and guard.failure is not None
    assert str(told).endswith(": load a checkpoint, or go on")
    guard.note_failure(WorkerDied("opt.flush(), on every rank, tries again"))
    assert str(guard.missing_part()).endswith("but without a part of that step")  # the worker's error has the advice
    guard.note_failure(None)
    assert guard.untold_failure() is guard.missing_part() is None and guard.failure is None


class _Stream:
    def record_event(self) -> str:
        return "an event after all that the user has enqueued"


class _Edited:
    def __init__(self) -> None:
        self.count: dict[int, int] = {}

    def edits(self) -> dict[int, int]:
        return self.count


def test_readers_wait_for_the_users_stream_only_where_the_user_has_written_to_parameters() -> None:
    device, stream, edited = torch.device("cuda", 0), _Stream(), _Edited()
    here = [(device, stream, "the event of the last step")]
    guard = StateGuard(lambda: here)
    guard.notice_edits(_Edited().edits, edited.edits)
    guard.commit(step=1)
    assert not guard.edit_marks()
    edited.count = {3: 1}
    here = [(device, "the default stream", "an event of it")]
    assert guard.edit_marks() == [(device, stream, stream.record_event()), *here]
    del edited  # which a guard that serves on does not keep
    assert not guard.edit_marks()


class _Interrupt:
    """A trace function that raises at one line of the functions that wait, as a signal handler may.

    ``begun`` is called at the first line: what it starts, the wait does not miss.
    """

    def __init__(self, at: int, begun: Callable[[], object]) -> None:
        self._line, self._at, self._begun = 0, at, begun

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_name != "wait" or threading.current_thread() is not threading.main_thread():
            return None
        if event == "line":
            self._line += 1
            if self._line == 1:
                self._begun()
            if self._line == self._at:
                raise KeyboardInterrupt
        return self


def _interrupted_change(guard: StateGuard, interrupt: _Interrupt) -> bool:
    """Return whether a change was interrupted, if its wait has so many lines."""
    before = sys.gettrace()
    sys.settrace(interrupt)
    try:
        guard.begin(60)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_an_interrupt_ends_the_wait_for_readers_and_no_other() -> None:
    at, was_interrupted = 1, True
    while was_interrupted:
        guard = StateGuard()
        assert guard.admit(0) is Verdict.READY
        reader = threading.Timer(0.05, guard.leave)
        was_interrupted = _interrupted_change(guard, _Interrupt(at, reader.start))
        assert guard.is_changing is not was_interrupted
        reader.join(60)
        assert not reader.is_alive()
        at += 1
    assert at > 3
