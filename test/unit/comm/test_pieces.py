"""How buckets travel by messages: the size of pieces, and how many are under way."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zero_opt.comm.exchange import Flow
from zero_opt.comm.pieces import flow_of

MIB = 1 << 20


@given(st.floats(1e-6, 1e9))
def test_what_is_under_way_is_bounded(bucket_mb: float) -> None:
    piece_bytes, lanes = flow_of(bucket_mb)
    assert 6 * MIB <= piece_bytes <= 25 * MIB and lanes >= 2
    assert piece_bytes * lanes <= 50 * MIB


def test_buckets_of_the_default_size_between_hosts_are_many_and_those_on_one_host_whole() -> None:
    assert flow_of(5) == Flow() == (6 * MIB, 8)
    assert flow_of(25) == (25 * MIB, 2)
