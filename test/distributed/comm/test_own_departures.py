"""What a rank says of its own departure after it has lost another rank, given it up, or been given up."""

from __future__ import annotations

import gc
import time

import pytest
import torch.distributed as dist

import zero_opt
from test.support.failures import PATIENCE_S
from test.support.harness import run_processes
from test.support.stepped import lost_in, make_stepped, service_of, take_step
from zero_opt.comm import process_exit
from zero_opt.comm.departures import Departure, How
from zero_opt.system.waiting import until


def _drops_one_that_was_given_up(rank: int, world_size: int) -> None:
    """Rank 1 gives rank 0 up, which lets go of its optimizer and lives on; both make another one."""
    params, optimizer = make_stepped(2, checks=zero_opt.Checks(timeout=1.0))
    known = service_of(optimizer)._departures
    if rank == 1:
        assert lost_in(lambda: take_step(params, optimizer))[0] == "PeerSilent"
    else:
        assert until(lambda: known.failed, PATIENCE_S)
        del optimizer
        gc.collect()
    dist.barrier()
    if rank == 1:
        assert until(lambda: known.of(0) is not None, PATIENCE_S)
        assert known.of(0).became("rank 0") == "rank 0 has closed this optimizer after 2 steps"
    else:
        time.sleep(2)  # a rank that waits asks, after a second, whether this one has ended
    take_step(*make_stepped(2))


def test_a_rank_that_was_given_up_and_drops_its_optimizer_has_not_ended() -> None:
    run_processes(2, _drops_one_that_was_given_up)


def _gives_up_and_ends(rank: int, world_size: int) -> str:
    params, optimizer = make_stepped(2, checks=zero_opt.Checks(timeout=1.0))
    known = service_of(optimizer)._departures
    if rank == 0:
        assert lost_in(lambda: take_step(params, optimizer))[0] == "PeerSilent"
        process_exit.serve_to_the_end()
        return ""
    assert until(lambda: known.of(0) is not None, PATIENCE_S)
    return str(known.of(0).became("rank 0"))


def test_a_program_that_gives_up_and_ends_in_order_has_raised_nothing() -> None:
    wanted = "rank 0 has ended its program after 2 steps, once a rank was lost or given up"
    assert run_processes(2, _gives_up_and_ends)[1] == wanted


def _closes_because_of_another(rank: int, world_size: int, cause: How) -> list[Departure]:
    """What rank 2 hears, in order, where rank 1 alone has read in the store why it closes."""
    _, optimizer = make_stepped(2)
    known = service_of(optimizer)._departures
    heard, hear = list[Departure](), known.hear
    known.hear = lambda departure: heard.append(departure) or hear(departure)
    dist.barrier()
    if rank == 1:
        known.hear(Departure(0, cause, from_rank=2))
        optimizer.close()
    if rank == 2:
        assert until(lambda: known.of(1) is not None, PATIENCE_S)
    dist.barrier()
    return heard


@pytest.mark.parametrize("cause", [How.LOST, How.CUT_OFF, How.SILENT, How.STOPPED])
def test_the_next_rank_hears_why_a_rank_closes_before_it_hears_that(cause: How) -> None:
    first, *_, last = run_processes(3, _closes_because_of_another, cause)[2]
    assert (first.rank, first.how) == (0, cause)
    assert first.from_rank == (2 if cause in (How.LOST, How.CUT_OFF) else 1)
    assert (last.rank, last.how) == (1, How.CLOSED)
