"""Networks between hosts that are slow, lossy, or gone: training goes on with the same bits, or ends in an error."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable

import pytest
import torch

import zero_opt
from test.hosts.network import Network
from test.hosts.training import PATIENCE_S, Layout, Trained, connect, host_of, train, trained_on_one_host
from test.support.harness import Failure, assert_bitwise, run_processes
from test.support.sampling import long_form
from zero_opt.comm import process_exit

LONG = long_form("HOSTS")
LAYOUTS: list[Layout] = [(1, 1), (2, 2), (1, 1, 1)] if LONG else [(1, 1)]
FAULT_STEP = 3
# Of the process group. Connections to a host that does not answer end after three fifths of it, and a rank that
# cannot tell why one has ended waits for a fifth of it for the news of others.
TIMEOUT_S, LATE_S = 24.0, 30.0

Fault = Callable[[Network], None]


def _spelled(layout: Layout) -> str:
    return "+".join(map(str, layout))


def _some(faults: dict[str, Fault]) -> list[str]:
    """The first fault, or in the long form all."""
    return list(faults) if LONG else list(faults)[:1]


def _all_ports(network: Network, **fields: float) -> None:
    for port in network.ports:
        for name, value in fields.items():
            setattr(port, name, value)


STEADY: dict[str, Fault] = {
    "one frame of a hundred is lost": lambda network: _all_ports(network, loss=0.005),
    "50 to 70 ms there and back": lambda network: _all_ports(network, delay_ns=12_500_000, jitter_ns=5_000_000),
    "2 Mbit/s": lambda network: _all_ports(network, rate=2e6),
    "a short queue": lambda network: _all_ports(network, rate=20e6, queue_bytes=20_000),
    "an MTU of 600": lambda network: network.set_mtu(600),
}


def _train_on_hosts(rank: int, world_size: int, network: Network, layout: Layout) -> Trained:
    connect(rank, network, layout)
    return train(rank)


def _require_bits(found: list[Trained], layout: Layout) -> None:
    for trained in found:
        assert_bitwise(trained.params, trained_on_one_host(sum(layout)).params)


@pytest.mark.parametrize("layout", LAYOUTS, ids=_spelled)
@pytest.mark.parametrize("fault", _some(STEADY))
def test_a_bad_network_shows_in_no_bit(fault: str, layout: Layout, make_network: Callable[[int], Network]) -> None:
    network = make_network(len(layout))
    STEADY[fault](network)
    ranks = sum(layout), _train_on_hosts, network, layout
    _require_bits(run_processes(*ranks, timeout=PATIENCE_S, backend=None), layout)


def _down_for_a_while(network: Network) -> None:
    network.ports[1].down = 1
    time.sleep(2.0)
    network.ports[1].down = 0


def _down_and_up(network: Network) -> None:
    for _ in range(20):
        network.ports[0].down ^= 1
        time.sleep(0.1)


PASSING: dict[str, Fault] = {"down for a while": _down_for_a_while, "down and up": _down_and_up}


def _train_through(rank: int, world_size: int, network: Network, layout: Layout, fault: str) -> Trained:
    """Let the fault pass on a thread of rank 0, while all ranks train."""
    passing = threading.Thread(target=PASSING[fault], args=(network,))

    def begin(step: int) -> None:
        if rank == 0 and step == FAULT_STEP:
            passing.start()

    connect(rank, network, layout)
    trained = train(rank, begin)
    if rank == 0:
        passing.join()
    return trained


@pytest.mark.parametrize("layout", LAYOUTS, ids=_spelled)
@pytest.mark.parametrize("fault", _some(PASSING))
def test_training_goes_on_when_the_network_is_back(
    fault: str, layout: Layout, make_network: Callable[[int], Network]
) -> None:
    ranks = sum(layout), _train_through, make_network(len(layout)), layout, fault
    _require_bits(run_processes(*ranks, timeout=PATIENCE_S, backend=None), layout)


FOR_GOOD: dict[str, Fault] = {
    "the host is killed": lambda network: network.kill(1),
    "the network is down": lambda network: setattr(network.ports[1], "down", 1),
    "large packets are lost": lambda network: setattr(network.ports[1], "mtu", 600),
}


def _train_until_lost(rank: int, world_size: int, network: Network, layout: Layout, fault: str) -> tuple[str, float]:
    """Rank 0 has the test bring about the fault; what the error says, and after how long."""
    begun = [0.0]

    def disturb(step: int) -> None:
        if step == FAULT_STEP and rank == 0:
            (network.folder / "begin").touch()
            while not (network.folder / "begun").exists():
                time.sleep(0.01)
        begun[0] = time.monotonic()

    connect(rank, network, layout, TIMEOUT_S)
    with pytest.raises(zero_opt.PeerLost) as caught:
        train(rank, disturb)
    return str(caught.value), time.monotonic() - begun[0]


def _bring_about(fault: str, network: Network) -> None:
    end = time.monotonic() + PATIENCE_S
    while not (network.folder / "begin").exists() and time.monotonic() < end:
        time.sleep(0.01)
    FOR_GOOD[fault](network)
    (network.folder / "begun").touch()


@pytest.mark.skipif(not LONG, reason="takes minutes: ZERO_OPT_HOSTS=long")
@pytest.mark.parametrize("layout", LAYOUTS, ids=_spelled)
@pytest.mark.parametrize("fault", FOR_GOOD)
def test_what_does_not_pass_is_a_typed_error_on_every_survivor(
    fault: str, layout: Layout, make_network: Callable[[int], Network]
) -> None:
    network = make_network(len(layout))
    helper = threading.Thread(target=_bring_about, args=(fault, network))
    helper.start()
    ranks = sum(layout), _train_until_lost, network, layout, fault
    found = run_processes(*ranks, timeout=PATIENCE_S, backend=None, expect_errors=True)
    helper.join()
    for rank, answer in enumerate(found):
        host = host_of(rank, layout)
        if fault == "the host is killed" and host == 1:
            assert isinstance(answer, Failure) and answer.type_name == "Died"
            continue
        assert isinstance(answer, tuple), answer
        text, seconds = answer
        print(rank, f"{seconds:.1f} s:", text)
        named = {host_of(int(other), layout) for other in re.findall(r"rank (\d)", text)}
        assert (1 in named) if host != 1 else (named - {1}), text
        assert seconds < TIMEOUT_S + LATE_S, text


def _ask_for_shards(rank: int, world_size: int, network: Network, layout: Layout) -> str:
    """Large packets are lost as shards of state travel. A rank that has caught the error ends its program."""
    connect(rank, network, layout, TIMEOUT_S)
    param = torch.nn.Parameter(torch.ones(3, 20000))  # ranks own parts of a row
    optimizer = zero_opt.ShardedOptimizer([param], torch.optim.SGD, lr=0.1, momentum=0.9)
    param.sum().backward()
    optimizer.step()
    optimizer.consolidate_state_dict()
    if rank == 0:
        network.ports[1].mtu = 600
    optimizer.flush()
    with pytest.raises(zero_opt.PeerLost) as caught:
        zero_opt.sharded_state_dict(optimizer)
    process_exit.serve_to_the_end()
    return str(caught.value)


@pytest.mark.parametrize("layout", LAYOUTS[:2], ids=_spelled)
def test_a_network_that_loses_shards_is_what_all_ranks_name(
    layout: Layout, make_network: Callable[[int], Network]
) -> None:
    ranks = sum(layout), _ask_for_shards, make_network(len(layout)), layout
    for text in run_processes(*ranks, timeout=PATIENCE_S, backend=None):
        assert "cannot reach each other any more: the network drops packets" in text, text
        assert {host_of(int(rank), layout) for rank in re.findall(r"rank (\d)", text)} == {0, 1}
