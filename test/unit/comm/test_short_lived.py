"""What ranks that have lost connections find out from what each has said."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from zero_opt.comm.departures import Departure, How
from zero_opt.comm.short_lived import _found_out


@given(st.integers(3, 6), st.data())
def test_a_killed_rank_is_lost_whoever_leaves_first(world_size: int, data: st.DataObject) -> None:
    killed, *order = data.draw(st.permutations(range(world_size)))
    late = data.draw(st.integers(0, world_size - 3))  # of those that live, so many have not come
    left = order[: len(order) - late]
    # A rank has lost its connections to the killed one, and to those that have left before.
    lost = {rank: [killed, *left[:turn]] for turn, rank in enumerate(left)}
    absent = [killed, *order[len(left) :]]
    assert _found_out(lost, absent, is_final=True) == Departure(killed, How.LOST)
    assert _found_out(lost, absent, is_final=False) == (None if late else Departure(killed, How.LOST))


@given(st.integers(3, 6), st.data())
def test_two_that_have_lost_each_other_are_cut_off_whoever_is_late(world_size: int, data: st.DataObject) -> None:
    first, second, *order = data.draw(st.permutations(range(world_size)))
    late = data.draw(st.integers(0, len(order)))
    left = [first, second, *order[late:]]
    lost = {rank: left[:turn] for turn, rank in enumerate(left)} | {first: [second]}
    found = _found_out(lost, order[:late], is_final=False)
    assert found is not None and found.how is How.CUT_OFF and {found.rank, found.from_rank} == {first, second}


@given(st.integers(2, 6))
def test_where_connections_do_not_tell_the_only_one_that_says_nothing_is_lost(world_size: int) -> None:
    for absent in (ranks for count in range(3) for ranks in combinations(range(world_size), count)):
        silent = {rank: list[int]() for rank in range(world_size) if rank not in absent}
        expected = Departure(absent[0], How.LOST) if len(absent) == 1 else None
        assert _found_out(silent, absent, is_final=True) == expected
