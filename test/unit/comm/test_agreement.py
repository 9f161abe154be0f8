"""What ranks compare: a digest that sees every bit and its place, and messages that name the first difference."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, cast

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from zero_opt.comm.agreement import Agreement, StepReport, edits_digest, value_digest
from zero_opt.comm.groups import Group
from zero_opt.errors import (
    ConfigConflict,
    ConfigError,
    PeerLost,
    RankMismatch,
    StepDesync,
    UnsupportedParam,
    ZeroOptError,
)
from zero_opt.optimizer.user_edits import uneven_edits

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64]
sizes = st.one_of(st.integers(1, 40), st.sampled_from([4095, 4096, 4097, 8192, 3 * 4096 + 5]))


def random_values(size: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def as_bytes(tensor: Tensor) -> Tensor:
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1).view(torch.uint8)


@given(size=sizes, dtype=st.sampled_from(DTYPES), seed=st.integers(0, 2**31), data=st.data())
def test_the_digest_changes_when_any_byte_does(size: int, dtype: torch.dtype, seed: int, data: st.DataObject) -> None:
    values = random_values(size, dtype, seed)
    before = value_digest(values)
    at = data.draw(st.integers(0, as_bytes(values).numel() - 1))
    as_bytes(values)[at] ^= data.draw(st.integers(1, 255))
    assert value_digest(values) != before


@given(size=sizes, dtype=st.sampled_from(DTYPES), seed=st.integers(0, 2**31), data=st.data())
def test_the_digest_changes_when_two_elements_swap(
    size: int, dtype: torch.dtype, seed: int, data: st.DataObject
) -> None:
    values = random_values(size, dtype, seed)
    one, other = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, size - 1))
    assume(values[one] != values[other])
    before = value_digest(values)
    values[[one, other]] = values[[other, one]]
    assert value_digest(values) != before


@pytest.mark.parametrize("width", [64, 4093, 4096, 8186, 8192])
def test_the_digest_tells_permutations_apart(width: int) -> None:
    one = torch.eye(width, dtype=torch.bfloat16)[: 2**26 // width]
    other = one.flip(0)
    assert len({value_digest(each) for each in (one, other, one.roll(1, 0), other.roll(1, 0))}) == 4


@pytest.mark.parametrize(
    "flip",
    [
        lambda: torch.randn(1024, 1024, dtype=torch.float64),
        lambda: torch.randn(512, 64, dtype=torch.float64),
        lambda: torch.view_as_real(torch.randn(512, 512, dtype=torch.complex64))[..., 1],
        lambda: torch.randn(512, 512)[:, 1::2],
        lambda: torch.randn(512, 512).bfloat16()[:, 3::4],
        lambda: torch.randn(1024, 1024, dtype=torch.float64)[:512],
        lambda: torch.randn(64, 4096, dtype=torch.float64)[:2],
    ],
)
def test_the_digest_tells_signs_apart(flip: Callable[[], Tensor]) -> None:
    """They are the highest bits of words, which sums that wrap around lose."""
    torch.manual_seed(0)
    part = flip()
    whole = torch.empty(0, dtype=part.dtype).set_(part.untyped_storage())
    before = value_digest(whole)
    part.neg_()
    assert value_digest(whole) != before


def test_the_digest_sees_bits_not_values() -> None:
    assert value_digest(torch.tensor([0.0])) != value_digest(torch.tensor([-0.0]))
    assert value_digest(torch.tensor([torch.nan])) == value_digest(torch.tensor([torch.nan]))


@given(dtype=st.sampled_from(DTYPES), offset=st.integers(0, 9), step=st.integers(1, 3))
def test_the_digest_does_not_depend_on_where_or_how_values_lie(dtype: torch.dtype, offset: int, step: int) -> None:
    values = random_values(24, dtype, 0)
    backing = torch.zeros(offset + 24 * step, dtype=dtype)
    placed = backing[offset::step]
    placed.copy_(values)
    assert value_digest(placed) == value_digest(values)
    assert value_digest(values.view(4, 6)) == value_digest(values)
    assert value_digest(values.view(6, 4).t().contiguous().t()) == value_digest(values)
    assert value_digest(placed[:: 24 * step]) == value_digest(values[:1])  # strides of one element may be any


@pytest.mark.parametrize("shape", [(0,), (0, 3), (), (1,)])
def test_empty_and_0_dim_params_have_digests(shape: tuple[int, ...]) -> None:
    assert value_digest(torch.zeros(shape)) == value_digest(torch.zeros(shape))


class RecordedGroup:
    """Stands for a group in which the other ranks sent what was recorded; this is rank 0 of two."""

    rank, world_size = 0, 2

    def __init__(self, other: list[bytes]) -> None:
        self._other = list(other)

    def in_step(self, step: int) -> None:
        """What a message about a wait would say."""

    def all_gather_bytes(self, payload: bytes, call: str = "", called: str = "") -> list[bytes]:
        return [payload, self._other.pop(0)]

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        payload = bytearray(self._other.pop(0))
        return [tensor, torch.frombuffer(payload, dtype=torch.uint8).view(tensor.dtype)]


class Sink(RecordedGroup):
    """Keeps what a rank sends."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def all_gather_bytes(self, payload: bytes, call: str = "", called: str = "") -> list[bytes]:
        self.sent.append(payload)
        return [payload]

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        self.sent.append(bytes(tensor.view(torch.uint8).tolist()))
        # Different bytes, so that whoever compares goes on to send all it has.
        return [tensor, tensor ^ 1] if tensor.dtype is torch.uint8 and tensor.numel() == 32 else [tensor]


def agreement(group: RecordedGroup) -> Agreement:
    return Agreement(cast(Group, group), lambda index: f"parameter {index} (layer.{index})")


def step_of_rank_1(report: StepReport, params: int) -> RecordedGroup:
    sink = Sink()
    agreement(sink).agree_on_step(report, params)
    return RecordedGroup(sink.sent)


def test_a_step_takes_the_most_rounds_and_what_any_rank_used() -> None:
    group = step_of_rank_1(StepReport(3, 1, 2, 0b101, 0b111), 3)
    agreed = agreement(group).agree_on_step(StepReport(3, 1, 1, 0b001, 0b111), 3)
    used_by = [report.used for report in agreed.reports]
    assert (agreed.rounds, agreed.used, agreed.trainable, used_by) == (2, 0b101, 0b111, [0b001, 0b101])


@pytest.mark.parametrize("params", [0, 1, 7, 8, 9, 100_000])
def test_masks_travel_whole_whatever_the_number_of_params(params: int) -> None:
    mask = sum(1 << i for i in range(0, params, 3))
    group = step_of_rank_1(StepReport(0, 0, 0, mask, (1 << params) - 1), params)
    agreed = agreement(group).agree_on_step(StepReport(0, 0, 0, 0, (1 << params) - 1), params)
    assert agreed.used == mask


def test_a_second_difference_counts_from_the_first() -> None:
    theirs = [step_of_rank_1(StepReport(3, epoch, 0, 0, 3), 2)._other[0] for epoch in (2, 2)]
    both = agreement(RecordedGroup(theirs))
    with pytest.raises(StepDesync, match=r"since step 3 rank 1 .* 2 times and rank 0 0 times") as first:
        both.agree_on_step(StepReport(3, 0, 0, 0, 3), 2)
    assert first.value.epoch == 2
    with pytest.raises(StepDesync, match=r"since the last StepDesync rank 1 .* 0 times and rank 0 1 times"):
        both.agree_on_step(StepReport(3, 3, 0, 0, 3), 2)


@pytest.mark.parametrize(
    ("theirs", "kind", "message"),
    [
        (StepReport(4, 0, 0, 0, 3), StepDesync, "rank 1 is in step 4 while rank 0 is in step 3"),
        (StepReport(3, 2, 0, 0, 3), StepDesync, r"since step 3 rank 1 has called zero_grad\(\) 2 times and rank 0 0"),
        (
            StepReport(3, 0, 0, 0, 3, unscales=True),
            RankMismatch,
            r"^rank 0 called step\(\) where rank 1 called scaler\.unscale_\(\); use GradScaler on every rank",
        ),
        (StepReport(3, 0, 0, 0, 3, inv_scale=0.25), RankMismatch, r"loss scale .* 1\.0 on rank 0, 4\.0 on rank 1"),
        (StepReport(3, 0, 0, 0, 3, inv_scale=0.0), RankMismatch, r"loss scale .* 1\.0 on rank 0, inf on rank 1"),
        (StepReport(3, 0, 0, 0, 1), RankMismatch, r"parameter 1 \(layer\.1\): requires_grad is True on rank 0 and Fal"),
    ],
)
def test_ranks_that_differ_in_a_step_are_told_how(theirs: StepReport, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message) as caught:
        agreement(step_of_rank_1(theirs, 2)).agree_on_step(StepReport(3, 0, 0, 0, 3), 2)
    if isinstance(caught.value, StepDesync):
        assert caught.value.epoch == (2 if theirs.epoch else None)


def test_loss_scales_of_nan_are_alike() -> None:
    mine = StepReport(3, 0, 0, 0, 3, inv_scale=math.nan, scaled=True)
    assert math.isnan(agreement(step_of_rank_1(mine, 2)).agree_on_step(mine, 2).grad_scale)


def test_a_rank_without_inputs_has_the_loss_scale_of_the_others() -> None:
    for scaled, factor in ((True, 0.25), (False, 1.0)):
        group = step_of_rank_1(StepReport(3, 0, 0, 0, 3, inv_scale=0.25, scaled=scaled), 2)
        assert agreement(group).agree_on_step(StepReport(3, 0, 0, 0, 3, absent=True), 2).grad_scale == factor


def test_an_overflow_on_one_rank_is_known_to_all() -> None:
    for mine, theirs in product((False, True), repeat=2):
        group = step_of_rank_1(StepReport(3, 0, 0, 0, 3, overflows=theirs), 2)
        agreed = agreement(group).agree_on_step(StepReport(3, 0, 0, 0, 3, overflows=mine), 2)
        assert agreed.overflows is (mine or theirs)


def test_every_rank_is_told_that_gradients_cannot_be_unscaled_without_one() -> None:
    group = step_of_rank_1(StepReport(3, 0, 0, 0, 3, unscales=True), 2)
    with pytest.raises(ConfigConflict, match="cannot unscale while ranks have run out of inputs"):
        agreement(group).agree_on_step(StepReport(3, 0, 0, 0, 3, absent=True), 2)


def test_a_rank_without_inputs_is_not_the_one_to_compare_with() -> None:
    group = step_of_rank_1(StepReport(4, 0, 0, 0, 3), 2)
    with pytest.raises(StepDesync, match="rank 0 is in step 3 while rank 1 is in step 4"):
        agreement(group).agree_on_step(StepReport(3, 0, 0, 0, 3, absent=True), 2)


def test_an_error_of_another_rank_is_raised_here_as_its_type_with_its_rank() -> None:
    other = json.dumps(["UnsupportedParam", "layer.0 is sparse"]).encode()
    with pytest.raises(UnsupportedParam, match=r"rank 1: layer\.0 is sparse"):
        agreement(RecordedGroup([other])).raise_first_error(None)


def test_ones_own_error_is_raised_as_it_is() -> None:
    error = ConfigError("mine")
    with pytest.raises(ConfigError) as caught:
        agreement(RecordedGroup([b""])).raise_first_error(error)
    assert caught.value is error


def test_an_error_of_a_type_we_do_not_know_is_one_of_ours_elsewhere() -> None:
    other = json.dumps(["KeyError", "'lr'"]).encode()
    with pytest.raises(ZeroOptError, match=r"rank 1: 'lr' \(KeyError\)"):
        agreement(RecordedGroup([other])).raise_first_error(None)


def test_ones_own_error_is_in_that_of_a_rank_that_is_lost() -> None:
    class Lost(RecordedGroup):
        def all_gather_bytes(self, payload: bytes, call: str = "", called: str = "") -> list[bytes]:
            raise PeerLost("rank 1 has ended")

    with pytest.raises(PeerLost) as caught:
        agreement(Lost([])).raise_first_error(ValueError("mine"))
    assert caught.value.__notes__ == ["this rank would have raised ValueError: mine"]
    with pytest.raises(PeerLost) as caught:
        agreement(Lost([])).raise_first_error(None)
    assert not hasattr(caught.value, "__notes__")


def test_no_error_is_no_error() -> None:
    agreement(RecordedGroup([b""])).raise_first_error(None)


def test_digests_are_the_same_where_every_rank_has_one_and_all_are_equal() -> None:
    def unreadable() -> bytes:
        raise OSError

    for other, mine, same in [(b"a", b"a", True), (b"a", b"b", False), (b"a", None, False), (b"\0", b"\0", False)]:
        ranks = agreement(RecordedGroup([other * 32]))
        assert ranks.same(unreadable if mine is None else partial(bytes, mine * 32)) == same


Entries = list[tuple[str, Any]]


def compare(mine: Entries, theirs: Entries) -> None:
    sink = Sink()
    agreement(sink).require_same_contents(theirs)
    agreement(RecordedGroup(sink.sent)).require_same_contents(mine)


def test_equal_contents_are_compared_by_a_digest_of_fixed_size() -> None:
    entries: Entries = [(f"p{i} shape", [i]) for i in range(1000)]
    sink = Sink()
    agreement(sink).require_same_contents(entries)
    assert len(sink.sent[0]) == 32
    agreement(RecordedGroup(sink.sent[:1])).require_same_contents(entries)


@pytest.mark.parametrize(
    ("mine", "theirs", "message"),
    [
        ([("w shape", [2])], [("w shape", [3])], r"w shape: \[2\] on rank 0, \[3\] on rank 1"),
        ([("w dtype", "a")], [("v dtype", "a")], "rank 0 has w dtype where rank 1 has v dtype"),
        ([("a", 1), ("b", 2)], [("a", 1)], "b exists on rank 0 alone"),
        ([("a", 1)], [("a", 1), ("b", 2)], "b exists on rank 1 alone"),
        ([("w values", "x")], [("w values", "y")], r"w values: .*call zero_opt\.broadcast_params\(model\) first"),
    ],
)
def test_the_first_difference_is_named_with_both_values(mine: Entries, theirs: Entries, message: str) -> None:
    with pytest.raises(RankMismatch, match=message):
        compare(mine, theirs)


# ---------------------------------------------------------------------------------------------------------------------
# what users have written to


def test_a_digest_tells_what_was_written_to_and_how_often() -> None:
    edits: list[dict[int, int]] = [{}, {0: 1}, {1: 1}, {0: 2}, {0: 1, 1: 1}, {11: 1}, {1: 11}]
    assert len({edits_digest(one) for one in edits}) == len(edits)
    assert edits_digest({}) == 0 and edits_digest({3: 1}) == edits_digest({3: 1})


@pytest.mark.parametrize("theirs", [{}, {0: 1}, {0: 2}])
def test_a_step_says_whether_ranks_have_written_to_the_same(theirs: dict[int, int]) -> None:
    other = step_of_rank_1(StepReport(3, 0, 0, 0, 3, edits=edits_digest(theirs)), 2)
    agreed = agreement(other).agree_on_step(StepReport(3, 0, 0, 0, 3, edits=edits_digest({0: 1})), 2)
    assert agreed.same_edits == (theirs == {0: 1})


def edited(mine: dict[int, int], theirs: dict[int, int], differ: set[int]) -> set[int]:
    """What is alike of five parameters after all, of which rank 1 has other values for some."""
    params = [torch.full((3,), float(index)) for index in range(5)]
    digests = [
        value_digest(param + (index in differ))
        for index, param in enumerate(params)
        if mine.get(index, 0) != theirs.get(index, 0)
    ]
    other = RecordedGroup([json.dumps([*theirs.items()]).encode(), b"", json.dumps(digests).encode()])
    uneven = uneven_edits(agreement(other).edit_counts(mine))
    agreement(other).require_same_values(uneven, params)
    return set(uneven)


def test_parameters_written_to_on_one_rank_may_be_alike_after_all() -> None:
    assert edited({0: 1, 2: 1}, {2: 1, 3: 7}, set()) == {0, 3}
    assert edited({}, {4: 1}, {0, 1, 2, 3}) == {4}


@pytest.mark.parametrize(
    ("mine", "theirs", "differ", "message"),
    [
        (
            {0: 1},
            {},
            {0},
            r"values of parameter 0 \(layer\.0\) differ .* written to on rank 0 alone; .*broadcast_params",
        ),
        ({0: 1}, {1: 2}, {0, 1}, r"parameter 0 \(layer\.0\), parameter 1 \(layer\.1\) differ .* on rank 0 alone"),
        ({0: 1}, {0: 2}, {0}, "written to on rank 1 more often than on rank 0;"),
        (
            {},
            {0: 1, 1: 1, 2: 1, 3: 1, 4: 1},
            {1, 2, 3, 4},
            r"values of parameter 1 .*parameter 3 \(layer\.3\) and 1 more",
        ),
    ],
)
def test_parameters_that_differ_are_named_with_who_has_written(
    mine: dict[int, int], theirs: dict[int, int], differ: set[int], message: str
) -> None:
    with pytest.raises(RankMismatch, match=message):
        edited(mine, theirs, differ)
