"""Whether what all ranks list of state is all of it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from zero_opt.errors import StateDictError
from zero_opt.kernels.runs import BLOCK_NUMEL
from zero_opt.sharding.flat_param import FlatParam
from zero_opt.state.entries import Batch, Field
from zero_opt.state.incoming import checked_uncut


def _flats(*numels: int) -> dict[int, FlatParam]:
    return {index: FlatParam(nn.Parameter(torch.zeros(numel)), f"p{index}") for index, numel in enumerate(numels)}


def _batch(*members: tuple[int, int, int], kinds: dict[str, str]) -> Batch:
    """Members as parameter, start and number of elements."""
    params, starts, numels = map(list, zip(*members, strict=True))
    values = {"value": [7] * len(members)}
    fields = [Field(key, kind, "torch.float32", [], values.get(kind)) for key, kind in kinds.items()]
    return Batch(params, starts, numels, fields)


SLICES = {"exp_avg": "slice", "exp_avg_sq": "slice"}


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_every_slice_has_to_be_listed(cuts: list[int], data: st.DataObject) -> None:
    flats, start, listings = _flats(64 * sum(cuts), 3), 0, list[list[Batch]]()
    for cut in cuts:
        listings.append([_batch((0, start, 64 * cut), kinds=SLICES)])
        start += 64 * cut
    listings[0].append(_batch((1, 0, 3), kinds={"exp_avg": "slice"}))  # what is whole has no other slices
    assert checked_uncut(flats, listings) == {}
    lost = data.draw(st.integers(0, len(cuts) - 1))
    del listings[lost][0]
    if len(cuts) > 1:
        have = " and ".join(f"rank {rank} has {64 * cut}" for rank, cut in enumerate(cuts) if rank != lost)
        with pytest.raises(StateDictError, match=rf"state 'exp_avg' of p0 is not .* {64 * sum(cuts)} elements {have}"):
            checked_uncut(flats, listings)


def test_bases_count_as_the_elements_of_their_blocks() -> None:
    flats, numel = _flats(BLOCK_NUMEL + 64), {"exp_avg_base": "blocks"}
    listings = [[_batch((0, 0, BLOCK_NUMEL), kinds=numel)], [_batch((0, BLOCK_NUMEL, 64), kinds=numel)]]
    assert checked_uncut(flats, listings) == {}
    with pytest.raises(StateDictError, match="'exp_avg_base'"):
        checked_uncut(flats, listings[1:])


def test_state_of_no_elements_is_complete() -> None:
    assert checked_uncut(_flats(0), [[_batch((0, 0, 0), kinds=SLICES)], []]) == {}


@pytest.mark.parametrize("kind", ["inline", "value"])
def test_one_element_is_no_slice_where_the_first_owner_says_so(kind: str) -> None:
    flats, kinds = _flats(65), {"step": kind, "exp_avg": "slice"}
    listings = [[_batch((0, 0, 64), kinds=kinds)], [_batch((0, 64, 1), kinds={**kinds, "step": "slice"})]]
    assert checked_uncut(flats, listings) == {"step": {0}}


@pytest.mark.parametrize("first", [{"exp_avg": "slice"}, {"step": "tensor", "exp_avg": "slice"}])
def test_one_element_that_no_listing_has_is_missing(first: dict[str, str]) -> None:
    listings = [[_batch((0, 0, 64), kinds=first)], [_batch((0, 64, 1), kinds={"step": "slice", "exp_avg": "slice"})]]
    with pytest.raises(StateDictError, match=r"'step' of p0 .* of its 65 elements rank 1 has 1"):
        checked_uncut(_flats(65), listings)


def test_several_elements_are_a_slice_whatever_the_first_owner_says() -> None:
    listings = [[_batch((0, 0, 64), kinds={"exp_avg": "value"})], [_batch((0, 64, 2), kinds=SLICES)]]
    with pytest.raises(StateDictError, match=r"'exp_avg' of p0 .* rank 1 has 2"):
        checked_uncut(_flats(66), listings)
