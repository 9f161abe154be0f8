"""Counters of a worker's control area, each started just below where it had an end."""

from __future__ import annotations

import pytest
import torch

from test.native.forms import group_of
from test.native.workers import Arena, all_same, arena_for, copied, worker_on
from zero_opt import _native

# Words of the control area, by byte: of steps and of drafts.
SUBMITTED, COMPLETED, DRAFTED, DRAFTS_DONE = 48, 56, 64, 72


def _word(arena: Arena, at: int) -> torch.Tensor:
    return arena.bytes[at : at + 8].view(torch.int64)


@pytest.mark.parametrize("killed", [False, True])
def test_a_workers_steps_go_on_past_32_bits(killed: bool) -> None:
    """The log's word has the lower 32 of the number of the step that a successor is to finish."""
    groups = [group_of([70_000, 77, 5_000], "fp32")]
    expected = copied(groups)
    with arena_for(groups, 2) as (arena, placed):
        for number in range(1, 7):
            _native.update_step([group.batch() for group in expected])
            sequence = arena.submit(placed)
            if not killed:
                arena.control.finish(2)
            while arena.control.completed != sequence:
                with worker_on(arena) as worker:
                    if number % 2:
                        worker.kill()
                    worker.wait(sequence)
                    number += 1
            assert all_same(placed, expected)
            if sequence == 1:
                assert (_word(arena, SUBMITTED).item(), _word(arena, COMPLETED).item()) == (1, 1)
                for at in (SUBMITTED, COMPLETED):
                    _word(arena, at).fill_(2**32 - 3)
        assert sequence == 2**32 + 2


def test_drafts_go_on_past_32_bits() -> None:
    group = group_of([5_000], "fp32")
    with arena_for([group], 2) as (arena, placed):
        grad, sums = placed[0].grads[0], arena.place(torch.zeros(2, dtype=torch.float64))

        def draft() -> int:
            sums.zero_()
            return arena.control.draft_sums([(grad.data_ptr(), "float32", 4096)], [sums.data_ptr()], arena.wake)

        grad.nan_to_num_(posinf=1.0)
        assert draft() == 1
        arena.control.finish(1)
        first = sums[0].item()
        assert first > 0
        assert (_word(arena, DRAFTED).item(), _word(arena, DRAFTS_DONE).item()) == (1, 1)
        for at in (DRAFTED, DRAFTS_DONE):
            _word(arena, at).fill_(2**32 - 2)
        for number in range(2**32 - 1, 2**32 + 3):
            assert draft() == number
            arena.control.finish(1)
            assert sums[0].item() == first
            arena.control.void_drafts()
