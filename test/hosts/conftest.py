"""Hosts for tests, or the reason why there can be none."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from test.hosts.network import HOST, Kind, Network, Unavailable


@pytest.fixture
def make_network() -> Iterator[Callable[..., Network]]:
    """Make hosts of a kind, until the test ends; it is skipped where there can be none."""
    with contextlib.ExitStack() as ends:

        def make(hosts: int, kind: Kind = HOST) -> Network:
            try:
                return ends.enter_context(Network(hosts, kind))
            except Unavailable as why:
                pytest.skip(str(why))

        yield make


@pytest.fixture
def two_hosts(make_network: Callable[..., Network]) -> Network:
    return make_network(2)


@pytest.fixture
def three_hosts(make_network: Callable[..., Network]) -> Network:
    return make_network(3)
