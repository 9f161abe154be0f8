"""What a rank says of others that it has waited for."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from zero_opt.comm import departures, peer_watch
from zero_opt.comm.departures import Departure, Departures, How, Posted
from zero_opt.comm.peer_watch import Watch
from zero_opt.comm.process_identity import ProcessIdentity
from zero_opt.comm.stops import Stops
from zero_opt.errors import PeerLost, PeerSilent


class _EmptyStore:
    def check(self, keys: list[str]) -> bool:
        return False

    def set(self, key: str, value: str) -> None:
        pass

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return desired.encode()


@pytest.fixture(params=["one host"])
def watch(request: pytest.FixtureRequest) -> Iterator[Watch]:
    processes = [ProcessIdentity(f"host {0 if request.param == 'one host' else pid}", pid, pid) for pid in (10, 11, 12)]
    watch = Watch(_EmptyStore(), 0, processes, (60.0, 30.0))
    yield watch
    watch.close()


def test_stopped_ranks_are_named_in_the_singular_and_in_the_plural(watch: Watch) -> None:
    one, two = str(watch.hung([1], 31.0)), str(watch.hung([1, 2], 31.0))
    assert one.startswith(
        "rank 1 (pid 11) has been stopped for 31 s while step 0 waits for it, and it has taken no step"
    )
    assert "; restart all ranks from the last checkpoint (kill -CONT lets it end), or wait longer" in one
    assert two.startswith(
        "rank 1 (pid 11), rank 2 (pid 12) have been stopped for 31 s while step 0 waits for them, and "
    )
    assert "and they have taken no step; restart all ranks from the last checkpoint (kill -CONT lets them end)" in two


@pytest.mark.parametrize("watch", ["several hosts"], indirect=True)
@pytest.mark.parametrize("step", [0, 4])
def test_missing_ranks_are_named_in_the_plural(watch: Watch, step: int) -> None:
    watch.step = step
    both = str(watch._explain_error(RuntimeError("Timed out waiting 60000ms"), 60.0))
    last = "their last step is 3" if step else "they have taken no step"
    assert both.startswith(f"rank 1, rank 2 have not come to step {step} in 60.0 s, and {last}: rank 0 called")
    assert "look at what they do" in both


@pytest.mark.parametrize("watch", ["several hosts"], indirect=True)
@pytest.mark.parametrize("step", [0, 4])
def test_a_missing_rank_is_named_in_the_singular(watch: Watch, step: int) -> None:
    watch.step = step
    watch.departures.silent[:] = [2]
    one = str(watch._explain_error(RuntimeError("Timed out waiting 60000ms"), 0.0))
    last = "its last step is 3" if step else "it has taken no step"
    assert one.startswith(f"rank 2 has not come to step {step}, and {last}: rank 0 called")
    assert "look at what it does" in one


@pytest.mark.parametrize("watch", ["several hosts"], indirect=True)
def test_a_connection_that_breaks_is_no_matter_of_patience(watch: Watch) -> None:
    error = watch._explain_error(RuntimeError("Connection closed by peer [127.0.0.1]:4321"), 60.0)
    assert type(error) is PeerLost
    assert str(error).startswith("one of rank 1, rank 2 has ended, or its host does not answer, or the network drops")
    assert "wait longer" not in str(error)
    assert watch.departures.failed  # so this rank's exit waits for no rank


@pytest.mark.parametrize("watch", ["several hosts"], indirect=True)
def test_one_rank_that_misses_when_a_connection_breaks_is_cut_off(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Departure] = []
    watch.departures.tell, watch.departures.news = told.append, True
    monkeypatch.setattr(watch, "missing", lambda waited: [2])
    monkeypatch.setattr(peer_watch.time, "sleep", lambda seconds: None)
    watch._news_s = 0.0
    error = watch._explain_error(RuntimeError("Read error [127.0.0.1]:4321: Connection timed out"), 60.0)
    assert str(error).startswith("rank 0, rank 2 cannot reach each other any more: the network drops packets")
    assert [(each.rank, each.how, each.from_rank) for each in told] == [(2, How.CUT_OFF, 0)]


@pytest.fixture
def told(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> list[Departure]:
    """What a rank tells the others round the ring. Its waits for news take no time."""
    told, clock = list[Departure](), [0.0]
    watch.departures.tell, watch.departures.news = told.append, True
    monkeypatch.setattr(peer_watch.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(peer_watch.time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    return told


CLOSED = "Connection closed by peer [127.0.0.1]:4321"
RESET = "Read error [127.0.0.1]:4321: Connection reset by peer"


@pytest.mark.parametrize("watch", ["several hosts"], indirect=True)
@pytest.mark.parametrize("text", [CLOSED, RESET])
def test_a_rank_that_ends_a_connection_and_says_nothing_is_lost(watch: Watch, told: list[Departure], text: str) -> None:
    error = watch.message_failed(1, text)
    assert str(error).startswith("rank 1 has ended, or its host does not answer, while step 0 waits for it")
    assert [(each.rank, each.how) for each in told] == [(1, How.LOST)]


@pytest.mark.parametrize("watch", ["several hosts"], indirect=True)
@pytest.mark.parametrize("text", [CLOSED, RESET])
def test_a_rank_that_ends_a_connection_after_it_has_waited_for_news_is_not_lost(
    watch: Watch, told: list[Departure], monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """It says what it has found once its own wait for news is over, and that takes a little."""
    late_s = watch._news_s + 1.0

    def read() -> None:
        if peer_watch.time.monotonic() > late_s:
            watch.departures.hear(Departure(2, How.LOST, from_rank=1))

    monkeypatch.setattr(watch.posted, "read", read)
    assert str(watch.message_failed(1, text)).startswith("rank 2 has ended, or its host does not answer, while step 0")


@pytest.mark.parametrize("watch", ["several hosts"], indirect=True)
def test_a_rank_whose_connection_the_network_ends_is_cut_off(watch: Watch, told: list[Departure]) -> None:
    error = watch.message_failed(1, "Read error [127.0.0.1]:4321: Connection timed out")
    assert str(error).startswith("rank 0, rank 1 cannot reach each other any more: the network drops packets")
    assert [(each.rank, each.how, each.from_rank) for each in told] == [(1, How.CUT_OFF, 0)]


@pytest.mark.parametrize("watch", ["several hosts"], indirect=True)
def test_a_rank_that_is_doubted_may_take_as_long_to_answer_with_a_short_timeout(
    watch: Watch, told: list[Departure], monkeypatch: pytest.MonkeyPatch
) -> None:
    """News of it follows: it is cut off from this rank only if it has answered, or nobody has asked."""
    shorter = Watch(watch._store, 0, [ProcessIdentity(f"host {pid}", pid, pid) for pid in (10, 11, 12)], (24.0, 30.0))
    shorter.departures.tell, shorter.departures.news = told.append, True

    def read() -> None:
        if peer_watch.time.monotonic() > peer_watch._ALIVE_S:
            shorter.departures.hear(Departure(1, How.LOST, from_rank=2))

    monkeypatch.setattr(shorter.posted, "read", read)
    shorter.doubt(1)
    text = str(shorter.message_failed(1, "Read error [127.0.0.1]:4321: Connection timed out"))
    assert text.startswith("rank 1 has ended, or its host does not answer, while step 0 waits for it")
    assert told == []


@pytest.mark.parametrize("watch", ["several hosts"], indirect=True)
def test_one_rank_that_misses_when_a_connection_is_reset_may_have_ended(
    watch: Watch, told: list[Departure], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "missing", lambda waited: [2])
    error = watch._explain_error(RuntimeError(RESET), 60.0)
    assert str(error).startswith("rank 2 has ended, or its host does not answer, or the network drops packets, while")


def test_ranks_that_have_come_to_a_call_are_not_said_to_be_in_another(watch: Watch) -> None:
    watch.begin("sharded_state_dict()")
    assert watch.alone([1]) == "rank 0 called sharded_state_dict(), rank 1 did not, of this optimizer"
    watch.wait(_Done)
    watch.begin("")
    assert watch.alone([1]) == "all ranks called sharded_state_dict()"
    watch.begin("step()")
    assert watch.alone([1]) == "rank 0 called step(), rank 1 did not, of this optimizer"
    watch.begin("ShardedOptimizer()")  # whose ranks have met before they wait for each other
    assert watch.alone([1]) == "all ranks called ShardedOptimizer()"


class _Done:
    """What is waited for, over."""

    def is_completed(self) -> bool:
        return True

    def wait(self, *_: object) -> bool:
        return True


class _CountedStore:
    """A store that counts what it is asked, per rank."""

    def __init__(self, store: HashStore) -> None:
        self._store, self.asked = store, 0

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._store, name)

        def counted(*arguments: Any) -> Any:
            self.asked += 1
            return call(*arguments)

        return counted


def test_of_many_ranks_one_looks_for_all_who_is_missing() -> None:
    world_size, absent, store = 100, [7, 50], HashStore()
    processes = [ProcessIdentity("", rank, rank) for rank in range(world_size)]
    stores = [_CountedStore(store) for _ in processes]
    watches = [Watch(own, rank, processes, (60.0, 30.0)) for rank, own in enumerate(stores)]
    waiting = [watch for rank, watch in enumerate(watches) if rank not in absent]
    for watch in waiting:
        watch._entered = 1
        watch.mark()
    for own in stores:
        own.asked = 0
    assert all(watch.missing() == absent for watch in waiting)
    assert stores[0].asked > 2 * len(absent) + 4
    assert all(own.asked <= 2 * len(absent) + 4 for own in stores[1:])
    watches[7]._entered = 1
    watches[7].mark()
    assert watches[3].missing() == [50]
    for watch in watches:
        watch.close()


def test_a_rank_that_waits_for_a_message_is_not_missing() -> None:
    store, processes = HashStore(), [ProcessIdentity("", rank, rank) for rank in range(3)]
    first, second, third = watches = [Watch(store, rank, processes, (60.0, 30.0)) for rank in range(3)]
    for watch, entered in zip(watches, (1, 2, 1), strict=True):
        watch._entered = entered
    second.mark()
    with first.awaiting_message():
        first.say_awaiting(0.5)  # not long
        assert second.missing() == [0, 2]
        first.say_awaiting(2.0)
        assert second.missing() == [2]
        with third.awaiting_message():
            third.say_awaiting(2.0)
            assert second.missing() == [0, 2]  # for each other, or for this one
        assert second.missing() == [2]
    assert second.missing() == [0, 2]
    for watch in watches:
        watch.close()


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[Watch], set[int]]]:
    """The watches of three ranks of one host before there is a ring, and the processes that have ended."""
    ended, store = set[int](), HashStore()
    monkeypatch.setattr(ProcessIdentity, "state", lambda process: "X" if process.pid in ended else "S")
    processes = [ProcessIdentity("host", 10 + rank, 1) for rank in range(3)]
    watches = [Watch(store, rank, processes, (60.0, 30.0)) for rank in range(3)]
    yield watches, ended
    for watch in watches:
        watch.close()


@pytest.mark.parametrize("found_by", ["a broken connection", "a look"])
@pytest.mark.parametrize("lost", [1, 2])
def test_a_rank_that_has_ended_because_of_another_is_not_named_before_there_is_a_ring(
    three: tuple[list[Watch], set[int]], lost: int, found_by: str
) -> None:
    watches, ended = three
    witness = 3 - lost
    ended.add(10 + lost)
    assert f"rank {lost} " in str(watches[witness].explain("", patience_s=0.0))
    ended.add(10 + witness)
    by_look = found_by == "a look"
    error = watches[0].leave_lost([witness, lost]) if by_look else watches[0].explain("", patience_s=0.0)
    assert str(error).startswith(f"rank {lost} (pid {10 + lost}) has ended while step 0 waits for it")


@pytest.mark.parametrize("by_look", [True, False])
def test_a_rank_that_ends_after_another_was_interrupted_is_not_named_before_there_is_a_ring(
    three: tuple[list[Watch], set[int]], by_look: bool
) -> None:
    watches, ended = three
    watches[2].interrupted(KeyboardInterrupt())
    ended.add(11)  # because of that
    first = watches[0]
    error = first.leave_lost(first.ended()) if by_look else first.explain("", patience_s=0.0)
    assert str(error).startswith("rank 2 has left training before its first step")


def test_what_ends_while_the_store_is_read_is_not_named(
    three: tuple[list[Watch], set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    watches, ended = three
    ended.add(12)
    first, read = watches[0], watches[0].posted.read

    def read_late() -> None:
        read()
        if 11 not in ended:  # it has said why just after this rank has asked
            watches[1].explain("", patience_s=0.0)
            ended.add(11)

    monkeypatch.setattr(first.posted, "read", read_late)
    assert str(first.explain("", patience_s=0.0)).startswith("rank 2 (pid 12) has ended")


def test_the_rank_that_was_seen_to_have_ended_first_is_named(three: tuple[list[Watch], set[int]]) -> None:
    watches, ended = three
    ended.add(12)
    assert watches[0].ended() == [2]
    ended.add(11)
    assert watches[0].ended() == [2, 1]
    assert str(watches[0].explain("", patience_s=0.0)).startswith("rank 2 (pid 12) has ended")


def test_of_two_that_were_seen_to_have_ended_together_both_are_named(three: tuple[list[Watch], set[int]]) -> None:
    watches, ended = three
    ended.update((11, 12))
    said = "rank 1 (pid 11), rank 2 (pid 12) have ended while step 0 waits for them, and they have taken no step; "
    assert str(watches[0].explain("", patience_s=0.0)).startswith(said)


@pytest.mark.parametrize("how", [How.STOPPED, How.SILENT])
def test_a_wait_ends_once_another_rank_has_given_up_and_its_news_does_not_come_round_the_ring(
    three: tuple[list[Watch], set[int]], monkeypatch: pytest.MonkeyPatch, how: How
) -> None:
    monkeypatch.setattr(peer_watch, "done_within", lambda *_: time.sleep(0.01))  # never
    first, _, last = watches = three[0]
    for watch in watches:
        watch.posted.begin_ring()
        watch.departures.news, watch.mark_after_s = True, 0.0
    first._entered = 1
    first.mark()
    first.leave_silent([1], "", how)
    said = "been stopped while step 0 waits for it" if how is How.STOPPED else "not come to step 0 in"
    with pytest.raises(PeerSilent, match=rf"^rank 1 \(pid 11\) has {said}"):
        last.wait(object)


def test_a_wait_for_state_ends_once_a_rank_is_known_to_be_lost(three: tuple[list[Watch], set[int]]) -> None:
    """Its connections may stay open, and another rank may have told of it first."""
    first, *_ = three[0]
    looks = [Stops(first, "this rank waits for its message", only) for only in (None, 1, 2)]
    first.departures.hear(Departure(1, How.LOST))
    for stops in looks:
        stops._apart_s = 0.0
    for stops in looks[:2]:
        with pytest.raises(PeerLost, match=r"^rank 1 \(pid 11\) has ended while this rank waits for its message"):
            stops.look()
    looks[2].look()


def test_what_ends_no_training_is_not_in_the_store(three: tuple[list[Watch], set[int]]) -> None:
    """There it could be read before the announcement, which comes round the ring."""
    first, _, last = watches = three[0]
    for watch in watches:
        watch.posted.begin_ring()
    first.departures.hear(Departure(1, How.CLOSED, 3, 40))
    first.departures.notice(Departure(1, How.LOST))
    last.posted.read()
    assert [*last.departures] == []
    first.departures.notice(Departure(2, How.LOST))
    watches[1].posted.read()
    assert [(each.rank, each.how, each.from_rank) for each in watches[1].departures] == [(2, How.LOST, 0)]


def test_a_rank_that_was_given_up_says_of_none_that_it_has_ended_as_connections_break() -> None:
    store, processes = HashStore(), [ProcessIdentity(f"host {rank // 2}", rank, 1) for rank in range(3)]
    first, _, last = watches = [Watch(store, rank, processes, (60.0, 30.0)) for rank in range(3)]
    for watch in watches:
        watch.posted.begin_ring()
    first.departures.notice(Departure(2, How.SILENT))
    last.posted.end_ring()
    last.leave_broken(1, "Connection closed by peer [127.0.0.1]:4321", None)
    assert list(last.departures) == []
    said = str(last._explain_error(RuntimeError("Connection closed by peer [127.0.0.1]:4321"), 0.0))
    assert said.startswith("the other ranks have given up waiting for this one, before step 0"), said
    for watch in watches:
        watch.close()


def test_a_watch_that_is_closed_asks_nothing() -> None:
    store = _CountedStore(HashStore())
    watch = Watch(store, 0, [ProcessIdentity("host", rank, rank) for rank in range(2)], (60.0, 30.0))
    watch.posted.begin_ring()
    watch.close()
    assert watch._ask(lambda: True) is None
    watch.departures.notice(Departure(1, How.LOST))
    assert store.asked == 0


def test_a_rank_that_waits_asks_the_store_ever_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds, store = 0.0, _CountedStore(HashStore())
    monkeypatch.setattr(departures.time, "monotonic", lambda: seconds)
    posted = Posted(Departures(), 0, store, lambda call: call())
    posted.begin_ring()
    counts = []
    for seconds in (tenths / 10 for tenths in range(20_000)):
        posted.read(seconds)
        counts.append(store.asked)
    assert counts[40] in (8, 9)
    assert counts[-1] - counts[-1001] in (25, 26)


def test_a_wait_for_a_backend_that_is_stuck_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_watch, "done_within", lambda *_: time.sleep(0.01))  # never
    processes = [ProcessIdentity(f"host {pid}", pid, pid) for pid in (10, 11)]
    watch, left = Watch(_EmptyStore(), 0, processes, (0.3, 30.0)), list[int]()
    watch.departures.leave = lambda: left.append(1)
    with pytest.raises(PeerLost, match=r"rank 1 has not come to step 0 .*the backend's limit of 0.3 s is long over"):
        watch.wait(object)
    assert left
    assert watch.overdue
    watch.close()
