"""Plans: every element has one owner, cuts are aligned, padding is bounded, and nothing moves once it is placed."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero_opt.layout import (
    ALIGN,
    BucketLayout,
    OwnerBounds,
    ParamSpec,
    Span,
    aligned,
    assign_owners,
    footprint,
    plan_flat,
    plan_whole_params,
)

Planner = Callable[..., list[BucketLayout]]
Specs = dict[int, ParamSpec]

ITEMSIZE = {"torch.float32": 4, "torch.bfloat16": 2, "torch.float64": 8}
both_planners = pytest.mark.parametrize("planner", [plan_flat, plan_whole_params])

numels = st.one_of(st.sampled_from([0, 1, ALIGN - 1, ALIGN, ALIGN + 1]), st.integers(0, 3000))
kinds = st.tuples(st.integers(0, 2), st.sampled_from(sorted(ITEMSIZE)), st.sampled_from(["cpu", "cuda:0"]))
worlds = st.integers(1, 9)
bucket_sizes = st.sampled_from([1.0, 256.0, 4096.0, 2.0**20])


def spec_of(numel: int, kind: tuple[int, str, str] = (0, "torch.float32", "cpu")) -> ParamSpec:
    group, dtype, device = kind
    return ParamSpec(numel, ITEMSIZE[dtype], group, dtype, device)


@st.composite
def spec_maps(draw: st.DrawFn, first: int = 0, min_size: int = 1) -> Specs:
    chosen = draw(st.lists(st.tuples(numels, kinds), min_size=min_size, max_size=20))
    return {first + i: spec_of(numel, kind) for i, (numel, kind) in enumerate(chosen)}


def owners_of(layouts: Sequence[BucketLayout], world_size: int) -> dict[int, list[tuple[int, Span]]]:
    """(rank, elements) of every slice, by parameter."""
    found: dict[int, list[tuple[int, Span]]] = defaultdict(list)
    for layout, rank in itertools.product(layouts, range(world_size)):
        for piece in layout.slices(rank):
            found[piece.param].append((rank, piece.in_param))
    return found


def plain(layouts: Sequence[BucketLayout]) -> list[tuple[object, ...]]:
    return [(b.index, b.group, b.dtype, b.device, b.params, b.offsets, b.numels, tuple(b.bounds)) for b in layouts]


@both_planners
@given(specs=spec_maps(), world_size=worlds, bucket_bytes=bucket_sizes)
def test_every_element_of_every_param_has_exactly_one_owner(
    planner: Planner, specs: Specs, world_size: int, bucket_bytes: float
) -> None:
    owners = owners_of(planner(specs, world_size, bucket_bytes), world_size)
    assert owners.keys() == specs.keys()
    for param, pieces in owners.items():
        spans = sorted(span for _, span in pieces)
        assert spans[0].start == 0
        assert spans[-1].stop == specs[param].numel
        assert all(before.stop == after.start for before, after in itertools.pairwise(spans))
        assert len(pieces) == 1 or all(span.numel for span in spans)


@both_planners
@given(specs=spec_maps(), world_size=worlds, bucket_bytes=bucket_sizes)
def test_offsets_shards_and_cuts_are_multiples_of_the_alignment(
    planner: Planner, specs: Specs, world_size: int, bucket_bytes: float
) -> None:
    for layout in planner(specs, world_size, bucket_bytes):
        assert len(layout.bounds) == world_size + 1
        assert list(layout.bounds) == sorted(layout.bounds)
        assert layout.bounds[0] == 0
        assert all(bound % ALIGN == 0 for bound in layout.bounds)
        assert all(offset % ALIGN == 0 for offset in layout.offsets)
        for rank in range(world_size):
            for piece in layout.slices(rank):
                stop = specs[piece.param].numel
                assert all(cut % ALIGN == 0 or cut == stop for cut in piece.in_param)


@both_planners
@given(specs=spec_maps(), world_size=worlds, bucket_bytes=bucket_sizes)
def test_the_three_coordinates_of_a_slice_agree(
    planner: Planner, specs: Specs, world_size: int, bucket_bytes: float
) -> None:
    for layout in planner(specs, world_size, bucket_bytes):
        offset_of = dict(zip(layout.params, layout.offsets, strict=True))
        for rank in range(world_size):
            shard = layout.shard(rank)
            end = 0
            for piece in layout.slices(rank):
                assert piece.group == layout.group == specs[piece.param].group
                assert piece.in_bucket.start == offset_of[piece.param] + piece.in_param.start
                assert piece.in_shard.start == piece.in_bucket.start - shard.start
                assert piece.in_param.numel == piece.in_bucket.numel == piece.in_shard.numel
                assert end <= piece.in_shard.start
                assert piece.in_shard.stop <= shard.numel
                end = piece.in_shard.stop


@both_planners
@given(specs=spec_maps(), world_size=worlds, bucket_bytes=bucket_sizes)
def test_a_bucket_never_mixes_groups_dtypes_or_devices(
    planner: Planner, specs: Specs, world_size: int, bucket_bytes: float
) -> None:
    for layout in planner(specs, world_size, bucket_bytes):
        kinds_in_bucket = {(specs[p].group, specs[p].dtype, specs[p].device) for p in layout.params}
        assert kinds_in_bucket == {(layout.group, layout.dtype, layout.device)}
        assert layout.numels == tuple(specs[p].numel for p in layout.params)


@both_planners
@given(specs=spec_maps(), world_size=worlds, bucket_bytes=bucket_sizes)
def test_a_bucket_holds_several_params_only_within_its_size(
    planner: Planner, specs: Specs, world_size: int, bucket_bytes: float
) -> None:
    for layout in planner(specs, world_size, bucket_bytes):
        nbytes = sum(footprint(specs[p].numel) * specs[p].itemsize for p in layout.params)
        assert nbytes <= bucket_bytes or len(layout.params) == 1


@given(specs=spec_maps(), world_size=worlds, bucket_bytes=bucket_sizes)
def test_flat_shards_are_equal_and_padding_is_bounded(specs: Specs, world_size: int, bucket_bytes: float) -> None:
    for layout in plan_flat(specs, world_size, bucket_bytes):
        assert len({layout.shard(rank).numel for rank in range(world_size)}) == 1
        # Less than one alignment per param, a whole one for an empty param, and less than one per rank at the end.
        per_param = sum(ALIGN if numel == 0 else ALIGN - 1 for numel in layout.numels)
        assert 0 <= layout.numel - sum(layout.numels) <= per_param + ALIGN * (world_size - 1)


@given(specs=spec_maps(), world_size=worlds, bucket_bytes=bucket_sizes)
def test_whole_params_are_never_cut_and_pad_only_themselves(specs: Specs, world_size: int, bucket_bytes: float) -> None:
    layouts = plan_whole_params(specs, world_size, bucket_bytes)
    for param, pieces in owners_of(layouts, world_size).items():
        assert [span for _, span in pieces] == [Span(0, specs[param].numel)]
    for layout in layouts:
        assert layout.numel == sum(footprint(numel) for numel in layout.numels)


def transformer(width: int, layers: int, vocabulary: int) -> Specs:
    """The parameters of a GPT in registration order."""
    sizes = [vocabulary * width, 1024 * width]
    for _ in range(layers):
        sizes += [width, width, 3 * width * width, 3 * width, width * width, width]
        sizes += [width, width, 4 * width * width, 4 * width, 4 * width * width, width]
    return {i: spec_of(numel) for i, numel in enumerate([*sizes, width, width])}


@pytest.mark.parametrize("world_size", range(1, 9))
@pytest.mark.parametrize(("width", "layers", "vocabulary"), [(100, 8, 257), (192, 3, 256), (768, 12, 50257)])
def test_flat_padding_is_under_one_percent_above_a_million_elements(
    world_size: int, width: int, layers: int, vocabulary: int
) -> None:
    specs = transformer(width, layers, vocabulary)
    real = sum(spec.numel for spec in specs.values())
    planned = sum(layout.numel for layout in plan_flat(specs, world_size, 25 * 2**20))
    assert real > 10**6
    assert planned <= 1.01 * real


@both_planners
@given(specs=spec_maps(), world_size=worlds, bucket_bytes=bucket_sizes)
def test_the_same_specs_give_the_same_plan(
    planner: Planner, specs: Specs, world_size: int, bucket_bytes: float
) -> None:
    """A planner is not told its rank, so all that could differ between ranks is the order of a dict."""
    backwards = dict(reversed(specs.items()))
    assert plain(planner(specs, world_size, bucket_bytes)) == plain(planner(backwards, world_size, bucket_bytes))


@both_planners
@given(specs=spec_maps(), added=st.data(), world_size=worlds, bucket_bytes=bucket_sizes)
def test_an_added_group_moves_nothing_that_was_there(
    planner: Planner, specs: Specs, added: st.DataObject, world_size: int, bucket_bytes: float
) -> None:
    before = planner(specs, world_size, bucket_bytes)
    snapshot = plain(before)
    more = added.draw(spec_maps(first=len(specs)))
    after = planner(more, world_size, bucket_bytes, len(before))
    assert plain(before) == snapshot
    assert [layout.index for layout in [*before, *after]] == list(range(len(before) + len(after)))
    assert sorted(p for layout in [*before, *after] for p in layout.params) == [*specs, *more]


@both_planners
def test_buckets_come_in_reverse_registration_order(planner: Planner) -> None:
    """Backward finishes late layers first, so their buckets must be the first to be complete."""
    specs = {i: spec_of(ALIGN) for i in range(8)}
    layouts = planner(specs, 2, 2 * ALIGN * 4)
    assert [set(layout.params) for layout in layouts] == [{7, 6}, {5, 4}, {3, 2}, {1, 0}]


def test_an_oversize_param_is_a_bucket_of_its_own() -> None:
    specs = {0: spec_of(64), 1: spec_of(10_000), 2: spec_of(64)}
    assert [layout.params for layout in plan_flat(specs, 2, 1024)] == [(2,), (1,), (0,)]


@both_planners
def test_no_params_is_no_bucket(planner: Planner) -> None:
    assert planner({}, 4, 1024) == []


@both_planners
@pytest.mark.parametrize("world_size", [1, 2, 7])
def test_zero_size_and_0_dim_params_have_exactly_one_owner(planner: Planner, world_size: int) -> None:
    specs = {i: spec_of(numel) for i, numel in enumerate([0, 1, 0, 0, 1, 64, 0])}
    owners = owners_of(planner(specs, world_size, 2**20), world_size)
    assert {param: len(pieces) for param, pieces in owners.items()} == dict.fromkeys(specs, 1)


@both_planners
def test_fewer_elements_than_ranks(planner: Planner) -> None:
    owners = owners_of(planner({0: spec_of(3), 1: spec_of(1)}, 16, 2**20), 16)
    assert {param: [span for _, span in pieces] for param, pieces in owners.items()} == {0: [(0, 3)], 1: [(0, 1)]}


@given(st.integers(0, 10**12))
def test_aligned_and_footprint(numel: int) -> None:
    assert aligned(numel) % ALIGN == footprint(numel) % ALIGN == 0
    assert numel <= aligned(numel) < numel + ALIGN
    assert footprint(numel) == (aligned(numel) or ALIGN)


# -- balance of whole parameters --------------------------------------------------------------------------------------


def rank_loads(numels: Mapping[int, int], owners: Mapping[int, int], start: Sequence[int]) -> list[int]:
    loads = list(start)
    for param, rank in owners.items():
        loads[rank] += numels[param]
    return loads


def least_largest_load(numels: Sequence[int], start: Sequence[int]) -> int:
    """The best largest load there is, by trying every assignment (up to the names of the ranks)."""
    reached = {tuple(sorted(start))}
    for numel in numels:
        reached = {
            tuple(sorted([*loads[:rank], loads[rank] + numel, *loads[rank + 1 :]]))
            for loads in reached
            for rank in range(len(start))
        }
    return min(loads[-1] for loads in reached)


small_numels = st.lists(st.integers(0, 30), min_size=1, max_size=7)


@given(sizes=small_numels, world_size=st.integers(1, 3))
def test_whole_params_are_within_four_thirds_of_the_best_balance(sizes: list[int], world_size: int) -> None:
    numels_of = dict(enumerate(sizes))
    idle = [0] * world_size
    largest = max(rank_loads(numels_of, assign_owners(numels_of, idle), idle))
    bound = Fraction(4, 3) - Fraction(1, 3 * world_size)
    assert largest <= bound * least_largest_load(sizes, idle)


@given(earlier=small_numels, later=st.lists(st.integers(0, 30), min_size=1, max_size=4), world_size=st.integers(1, 3))
def test_an_added_group_stays_within_two_of_the_best_balance(
    earlier: list[int], later: list[int], world_size: int
) -> None:
    """Compared with the best for all parameters together, as if those placed earlier could still move."""
    first, second = dict(enumerate(earlier)), dict(enumerate(later, len(earlier)))
    idle = [0] * world_size
    start = rank_loads(first, assign_owners(first, idle), idle)
    largest = max(rank_loads(second, assign_owners(second, start), start))
    bound = 2 - Fraction(1, world_size)
    assert largest <= bound * least_largest_load([*earlier, *later], idle)


def test_later_plans_fill_up_the_ranks_with_less() -> None:
    layouts = plan_whole_params({5: spec_of(10)}, 3, 2**20, 4, loads=[100, 7, 50])
    assert [len(layouts[0].slices(rank)) for rank in range(3)] == [0, 1, 0]


@given(sizes=st.lists(st.integers(0, 5).map(ALIGN.__mul__), min_size=1, max_size=12))
def test_owner_bounds_are_the_running_total_of_all_ranks(sizes: list[int]) -> None:
    expected = [0, *itertools.accumulate(sizes)]
    owners = tuple(rank for rank, size in enumerate(sizes) if size)
    bounds = OwnerBounds(len(sizes), owners, tuple(expected[rank + 1] for rank in owners))
    assert list(bounds) == bounds[:] == expected
    assert [bounds[-1], bounds[-2], bounds[1:]] == [expected[-1], expected[-2], expected[1:]]
    with pytest.raises(IndexError):
        bounds[len(sizes) + 1]


@pytest.mark.parametrize("world_size", [1, 5])
@both_planners
def test_the_owner_of_a_param_is_the_rank_with_its_first_element(planner: Planner, world_size: int) -> None:
    specs = {i: spec_of(numel) for i, numel in enumerate([0, 700, 1, 64, 0, 1300])}
    for layout in planner(specs, world_size, 2**20):
        for position, param in enumerate(layout.params):
            rank = layout.owner(position)
            assert [p.in_param.start for p in layout.slices(rank) if p.param == param] == [0]


# -- size -------------------------------------------------------------------------------------------------------------


@both_planners
def test_a_large_plan_costs_a_rank_only_its_own_slices(planner: Planner) -> None:
    """Work is counted, not timed: what a rank looks at must not grow with what the others own."""
    count, world_size = 20_000, 4096
    specs = {i: spec_of(1000 + i % 7) for i in range(count)}
    layouts = planner(specs, world_size, 25 * 2**20)
    looked_at = 0

    class Counting(tuple[int, ...]):
        def __getitem__(self, key: object) -> object:  # type: ignore[override]
            nonlocal looked_at
            looked_at += 1
            return super().__getitem__(key)  # type: ignore[index]

    found = 0
    for layout in layouts:
        object.__setattr__(layout, "offsets", Counting(layout.offsets))
        found += len(layout.slices(1234))
    searches = 2 * sum(1 + math.ceil(math.log2(len(layout.params) + 1)) for layout in layouts)
    assert 0 < found <= count // world_size + 2 * len(layouts) + 4
    assert looked_at <= searches + found + 2 * len(layouts)


@both_planners
def test_small_buckets_of_several_groups_are_made_one(planner: Planner) -> None:
    small, large = 64, 5 * 64
    sizes = [small, small, large, small, small, small]
    specs = {i: spec_of(numel, (i, "torch.float32", "cpu")) for i, numel in enumerate(sizes)}
    specs[4] = spec_of(small, (4, "torch.bfloat16", "cpu"))
    apart = planner(specs, 2, 16 * 4 * small)
    assert sorted(layout.params for layout in apart) == [(i,) for i in range(6)]
    mixed = planner(specs, 2, 16 * 4 * small, mixed=True)
    assert sorted(sorted(layout.params) for layout in mixed) == [[0, 1], [2], [3], [4], [5]]
    found = {piece.param: piece.group for layout in mixed for rank in range(2) for piece in layout.slices(rank)}
    assert found == {i: i for i in range(6)}


def test_mixed_buckets_are_no_larger_than_others() -> None:
    specs = {i: spec_of(64, (i, "torch.float32", "cpu")) for i in range(40)}
    sizes = [len(layout.params) for layout in plan_flat(specs, 2, 16 * 4 * 64, mixed=True)]
    assert sizes == [16, 16, 8]
