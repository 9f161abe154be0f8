"""A parameter in storage order: aliased where it is dense, mirrored where it is not, and the way back."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter

from zero_opt.errors import UnsupportedParam
from zero_opt.kernels.strides import contiguous_strides, is_dense, overlaps
from zero_opt.layout import ParamSpec, Span
from zero_opt.sharding.flat_param import FlatParam, edits_of, own_writes, share_counters
from zero_opt.sharding.late_params import LateParams

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def tensors(draw: st.DrawFn, gaps: bool | None = None) -> Tensor:
    """Distinct values in any order of dimensions, at any offset, with or without gaps between elements."""
    shape = draw(shapes)
    order = draw(st.permutations(range(len(shape))))
    steps = [draw(st.integers(1, 3)) for _ in shape] if gaps is not False else [1] * len(shape)
    offset = draw(st.integers(0, 3))
    storage_shape = [shape[d] * steps[d] for d in order]
    count = torch.Size(storage_shape).numel()
    base = torch.arange(offset + count, dtype=torch.float32)[offset:].view(storage_shape)
    back = [order.index(d) for d in range(len(shape))]
    return base.permute(back)[tuple(slice(None, None, step) for step in steps)]


@given(tensors())
def test_density_is_counted_in_memory(tensor: Tensor) -> None:
    """Dense means: as many addresses between the first element and the last as there are elements."""
    touched = torch.as_strided(torch.arange(10_000), tensor.shape, tensor.stride()).flatten().tolist()
    assert not overlaps(tensor.shape, tensor.stride()) or tensor.numel() == 0
    assert len(set(touched)) == len(touched)
    if tensor.numel():
        assert is_dense(tensor.shape, tensor.stride()) == (sorted(touched) == list(range(tensor.numel())))


@given(shapes)
def test_contiguous_strides_are_torchs(shape: tuple[int, ...]) -> None:
    assert contiguous_strides(torch.Size(shape)) == torch.empty(shape).stride()


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(3).expand(4, 3), torch.zeros(9).as_strided((3, 3), (2, 1)), torch.zeros(1).expand(2)],
    ids=["expanded", "interleaved", "scalar"],
)
def test_elements_that_share_memory_are_refused_by_name(tensor: Tensor) -> None:
    assert overlaps(tensor.shape, tensor.stride())
    with pytest.raises(UnsupportedParam, match=r"layer\.weight has elements that share memory.*contiguous"):
        FlatParam(tensor, "layer.weight")


def test_sparse_params_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedParam, match=r"table is torch\.sparse_coo"):
        FlatParam(torch.zeros(3).to_sparse(), "table")


@given(tensors(gaps=False))
def test_a_dense_param_is_aliased_and_stays_where_it_is(tensor: Tensor) -> None:
    param = Parameter(tensor)
    before = (param.data_ptr(), param.stride(), param.storage_offset())
    flat = FlatParam(param, "p")
    assert (param.data_ptr(), param.stride(), param.storage_offset()) == before
    assert flat.flat.shape == (param.numel(),)
    if param.numel():
        assert not flat.mirrored
        assert flat.flat.data_ptr() == param.data_ptr()
        assert flat.flat.tolist() == sorted(param.flatten().tolist())  # values ascend with addresses
    version, edits = param._version, flat.edits
    with own_writes([flat]):
        flat.flat.zero_()
    assert param._version > version, "autograd must notice what is written through the alias"
    assert flat.edits == edits
    assert not param.count_nonzero()


@given(tensors())
def test_load_and_store_keep_param_and_flat_the_same(tensor: Tensor) -> None:
    param = Parameter(tensor.clone() if is_dense(tensor.shape, tensor.stride()) else tensor)
    flat = FlatParam(param, "p")
    with torch.no_grad():
        param.mul_(2)
        flat.load()
        assert torch.equal(flat.shaped(flat.flat), param)
        flat.flat.add_(1)
        expected = flat.shaped(flat.flat).clone()
        flat.store()
    assert torch.equal(param, expected)


@given(tensors(), st.data())
def test_flatten_and_shaped_are_inverse_for_values_of_any_strides(tensor: Tensor, data: st.DataObject) -> None:
    flat = FlatParam(Parameter(tensor), "p")
    order = data.draw(st.permutations(range(tensor.dim())))
    back = [order.index(d) for d in range(tensor.dim())]
    value = torch.randn([tensor.shape[d] for d in order]).permute(back)
    run = flat.flatten(value)
    assert run.is_contiguous()
    assert run.shape == (tensor.numel(),)
    assert torch.equal(flat.shaped(run), value)
    assert torch.equal(flat.flatten(flat.shaped(run)), run)


@given(tensors(gaps=False))
def test_flatten_copies_nothing_when_strides_are_the_params(tensor: Tensor) -> None:
    flat = FlatParam(Parameter(tensor), "p")
    value = flat.shaped(torch.zeros(tensor.numel()))
    assert flat.flatten(value).data_ptr() == value.data_ptr()


@given(tensors())
def test_a_part_is_the_param_where_whole_and_a_run_elsewhere(tensor: Tensor) -> None:
    flat = FlatParam(Parameter(tensor), "p")
    whole = flat.part(Span(0, tensor.numel()))
    assert whole.shape == tensor.shape
    assert whole.is_leaf
    assert not whole.requires_grad
    assert torch.equal(whole, tensor)
    if tensor.numel() > 1:
        part = flat.part(Span(1, tensor.numel()))
        assert part.shape == (tensor.numel() - 1,)
        assert part.data_ptr() == flat.flat[1:].data_ptr()


def test_channels_last_is_cut_in_its_own_order() -> None:
    param = Parameter(torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last))
    flat = FlatParam(param, "conv")
    assert not flat.mirrored
    assert flat.flat[:2].tolist() == [param[0, 0, 0, 0].item(), param[0, 1, 0, 0].item()]


def test_spec_is_what_the_planner_needs() -> None:
    assert FlatParam(torch.zeros(2, 3, dtype=torch.bfloat16), "p").spec(4) == ParamSpec(
        6, 2, 4, "torch.bfloat16", "cpu"
    )


def test_follow_remakes_the_views_of_data_that_was_repointed() -> None:
    param = Parameter(torch.zeros(2, 3))
    flat = FlatParam(param, "p")
    assert not flat.moved()
    with torch.no_grad():
        param.add_(1)  # written in place: nothing moved
    assert not flat.moved()
    param.data = torch.full((2, 3), 5.0)
    assert flat.moved()
    assert flat.moved()  # until it is followed
    flat.remake_views()
    assert not flat.moved()
    assert flat.flat.data_ptr() == param.data_ptr()
    flat.flat.zero_()
    assert not param.count_nonzero()


@pytest.mark.parametrize("data", [torch.zeros(3, 2), torch.zeros(2, 3, dtype=torch.float64)], ids=["shape", "dtype"])
def test_moved_refuses_data_that_the_plan_does_not_fit(data: Tensor) -> None:
    param = Parameter(torch.zeros(2, 3))
    flat = FlatParam(param, "encoder.weight")
    param.data = data
    with pytest.raises(UnsupportedParam, match=r"encoder\.weight was .* and is .* now"):
        flat.moved()


def test_moved_refuses_fewer_elements_in_the_same_place() -> None:
    param = Parameter(torch.zeros(6, 3))
    flat = FlatParam(param, "encoder.weight")
    param.data = param.data[:4]
    with pytest.raises(UnsupportedParam, match=r"encoder\.weight was .* and is .* now"):
        flat.moved()


def test_moved_refuses_data_that_came_to_share_memory() -> None:
    param = Parameter(torch.zeros(6, 3))
    flat = FlatParam(param, "encoder.weight")
    param.data = torch.zeros(3).expand(6, 3)
    with pytest.raises(UnsupportedParam, match=r"encoder\.weight has elements that share memory"):
        flat.moved()


def test_moved_refuses_memory_that_was_freed() -> None:
    param = Parameter(torch.zeros(6, 3))
    flat = FlatParam(param, "encoder.weight")
    param.untyped_storage().resize_(0)
    with pytest.raises(UnsupportedParam, match=r"encoder\.weight reaches beyond its storage of 0 bytes"):
        flat.moved()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (torch.zeros(2, 3), torch.zeros(3, 2).t()),
        (torch.zeros(3, 2).t(), torch.zeros(2, 3)),
        (torch.zeros(2, 3, 4, 4), torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)),
        (torch.zeros(2, 6)[:, ::2], torch.zeros(3, 2).t()),
    ],
    ids=["transposed", "contiguous", "channels_last", "from gaps"],
)
def test_moved_refuses_another_order_of_elements(before: Tensor, after: Tensor) -> None:
    """Gradients and state on their way, and on other ranks, are in the order that the plan was made with."""
    param = Parameter(before)
    flat = FlatParam(param, "encoder.weight")
    param.data = after
    with pytest.raises(UnsupportedParam, match=r"encoder\.weight was .* and is .* now; .*before constructing"):
        flat.moved()


def test_strides_that_order_nothing_may_change() -> None:
    pointwise, empty = Parameter(torch.zeros(4, 3, 1, 1)), Parameter(torch.zeros(0, 3))
    flats = [FlatParam(pointwise, "p"), FlatParam(empty, "e")]
    pointwise.data = torch.zeros(12).as_strided((4, 3, 1, 1), (3, 1, 7, 5))
    empty.data = torch.zeros(3, 0).t()
    for flat in flats:
        assert flat.moved()
        flat.remake_views()
        assert torch.equal(flat.shaped(flat.flat), flat.param)


def test_a_mirror_can_become_an_alias_and_back() -> None:
    param = Parameter(torch.arange(12.0).view(3, 4)[:, ::2])
    flat = FlatParam(param, "p")
    assert flat.mirrored
    assert flat.flat.tolist() == [0, 2, 4, 6, 8, 10]
    param.data = torch.ones(3, 2)
    assert flat.moved()
    flat.remake_views()
    assert not flat.mirrored
    param.data = torch.arange(12.0).view(3, 4)[:, 1::2]
    assert flat.moved()
    flat.remake_views()
    assert flat.mirrored
    assert flat.flat.tolist() == [1, 3, 5, 7, 9, 11]


def counted(params: list[Tensor], known: int) -> list[FlatParam]:
    flats = [FlatParam(param, f"parameter {number}") for number, param in enumerate(params)]
    share_counters([], flats[:known])
    share_counters(flats[:known], flats[known:])
    return flats


@pytest.mark.parametrize("known", range(6))
@pytest.mark.parametrize("parted", [False, True], ids=["views", "their memory has parted"])
def test_own_writes_to_a_parameter_are_no_edits_of_those_with_the_same_counter(known: int, parted: bool) -> None:
    first, second = torch.randn(20), torch.randn(20)
    params = [torch.nn.Parameter(t) for t in (first[:5], torch.randn(3), second[:9], first[5:], second[9:], first)]
    if parted:
        for param in params:
            param.data = param.data.clone()
    flats = counted(params, known)
    before = [flat.edits for flat in flats]
    with own_writes(flats[:2]), own_writes(flats[2:3]):  # of one counter, as two threads may
        for flat in flats[:3]:
            flat.flat.add_(1)
    assert [flat.edits for flat in flats] == before
    with torch.no_grad():
        params[4].add_(1)
    changed = [flat.edits != edits for flat, edits in zip(flats, before)]
    assert changed == [False, False, True, False, True, False]


def test_counters_that_are_looked_at_stay_as_they_were() -> None:
    """A graph from before the optimizer was made, which holds parameters, can still be run backward."""
    first = torch.randn(4, 4)
    params = [torch.nn.Parameter(t) for t in (first[:2], torch.randn(3, 3), first[2:], first)]
    with torch.no_grad():
        params[1].add_(1)
    loss = (params[1] @ params[1]).sum()
    before = [param._version for param in params]
    counted(list(params), 2)
    assert [param._version for param in params] == before
    loss.backward()


class _Refuses:
    def wait(self) -> None:
        raise AssertionError("a late parameter was used")


def test_a_late_parameter_can_be_looked_at_by_what_saves_state() -> None:
    param, owner = Parameter(torch.arange(6.0).reshape(2, 3)), _Refuses()
    flat, late = FlatParam(param, "p"), LateParams(owner.wait)
    late.mark([param])
    assert not flat.repointed
    assert flat.elements().tolist() == list(range(6))
    late.clear()
    param.data = torch.ones(2, 3)
    late.mark([param])
    assert flat.repointed
    assert flat.elements().tolist() == [1.0] * 6
    late.clear()


def test_a_signal_handler_may_fork_while_edits_are_counted() -> None:
    flats, statuses = counted([Parameter(torch.zeros(1))], 0), list[int]()

    class Forks(list[FlatParam]):
        """Parameters that are gone through within the count."""

        def __iter__(self) -> Iterator[FlatParam]:
            signal.raise_signal(signal.SIGUSR1)
            return super().__iter__()

    def fork(*_: object) -> None:
        child = os.fork()
        if child == 0:
            edits_of(flats)
            os._exit(7)
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    before = signal.signal(signal.SIGUSR1, fork)
    try:
        assert edits_of(Forks(flats)) == edits_of(flats)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert set(statuses) == {7}
