"""Ranks spread over hosts in several ways: which exchange they choose, and that it does not show in any bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from test.hosts.network import (
    CONTAINER,
    CONTAINER_OF_ALL_PROCESSES,
    CONTAINER_WITH_OTHERS_PROC,
    HOST,
    NETWORK_ALONE,
    Kind,
    Network,
)
from test.hosts.training import PATIENCE_S, Layout, Trained, connect, train, trained_on_one_host
from test.support.harness import assert_bitwise, run_processes
from test.support.sampling import long_form
from zero_opt.comm import process_identity

LONG = long_form("HOSTS")
SHARED_MEMORY, MESSAGES, IN_TWO_STAGES = "HostExchange", "PairwiseExchange", "HierarchicalExchange"

# What each host is, and the exchange that is right between them: memory of processes that cannot be seen cannot be
# mapped.
KINDS: dict[str, tuple[Kind, str]] = {
    "hosts": (HOST, MESSAGES),
    "containers": (CONTAINER, MESSAGES),
    "containers with others' proc": (CONTAINER_WITH_OTHERS_PROC, MESSAGES),
    "containers of all processes": (CONTAINER_OF_ALL_PROCESSES, SHARED_MEMORY),
    "networks": (NETWORK_ALONE, SHARED_MEMORY),
}
LAYOUTS: list[Layout] = [(1, 1), (2, 2), (1, 1, 1, 1), (2, 1, 1)]
UNEVEN: list[Layout] = [(3, 3), (4, 2, 2), (6, 2)]
CASES = [((1, 1), "hosts"), ((2, 2), "hosts"), ((2, 1, 1), "hosts"), ((1, 1), "containers of all processes")]
if LONG:
    CASES = [(layout, kind) for layout in LAYOUTS for kind in KINDS]
    CASES += [(layout, "hosts") for layout in UNEVEN]


def _train_on_hosts(rank: int, world_size: int, network: Network, layout: Layout, late: bool) -> Trained:
    connect(rank, network, layout)
    return train(rank, late=late)


@pytest.mark.parametrize("late", [False, True] if LONG else [False])
@pytest.mark.parametrize(
    ("layout", "kind"), CASES, ids=lambda part: part if isinstance(part, str) else "+".join(map(str, part))
)
def test_the_exchange_is_right_and_the_bits_are_those_of_one_host(
    layout: Layout, kind: str, late: bool, make_network: Callable[..., Network]
) -> None:
    what, exchange = KINDS[kind]
    if exchange == MESSAGES and layout == (2, 2) and what is HOST:
        exchange = IN_TWO_STAGES
    process_identity.host_id()  # what this process has found holds for none of its children
    network = make_network(len(layout), what)
    ranks = sum(layout), _train_on_hosts, network, layout, late
    expected = trained_on_one_host(sum(layout))
    assert expected.exchange == SHARED_MEMORY
    for trained in run_processes(*ranks, timeout=PATIENCE_S, backend=None):
        assert trained.exchange == exchange
        assert_bitwise(trained.params, expected.params)
