"""State listed in batches, and packed into messages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from zero_opt.errors import StateDictError
from zero_opt.state import entries
from zero_opt.state.entries import (
    Batch,
    Field,
    _forms_of,
    _sent_of,
    batches_of,
    listed,
    listing,
    packets,
    packets_apart,
    small_values,
)


def _listed(states: dict[int, dict[Any, Any]], starts: dict[int, int] | None = None, numel: int = 20) -> list[Batch]:
    parts = {index: torch.zeros(numel) for index in states}
    return listed(listing(batches_of(states, parts, starts or dict.fromkeys(states, 0), whole_params=False)))


def _adam(count: float, numel: int = 20) -> dict[str, Any]:
    return {"step": torch.tensor(count), "exp_avg": torch.ones(numel)}


def test_state_of_one_form_is_one_batch() -> None:
    odd = {**_adam(3.0), "more": 0.5}
    first, second = _listed({4: _adam(1.0), 5: odd, 7: _adam(2.0)})
    assert (first.params, second.params) == ([4, 7], [5])
    assert [(field.key, field.kind) for field in first.fields] == [("step", "inline"), ("exp_avg", "slice")]
    assert [float(value) for value in small_values(first, first.fields[0])] == [1.0, 2.0]
    assert small_values(second, second.fields[2]) == [0.5]


def test_small_values_share_no_memory() -> None:
    (batch,) = _listed({0: _adam(1.0), 1: _adam(1.0)})
    ours, others = small_values(batch, batch.fields[0])
    ours.add_(1)
    assert float(others) == 1.0


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        torch.tensor([[True], [False]]),
        torch.tensor(1 + 2j),
        torch.zeros(0, 3, dtype=torch.int64),
    ],
)
def test_small_tensors_of_any_dtype_and_shape_arrive(value: Tensor) -> None:
    (batch,) = _listed({3: {"key": value}, 8: {"key": value.clone()}})
    for arrived in small_values(batch, batch.fields[0]):
        assert arrived.dtype is value.dtype and torch.equal(arrived, value)


def test_what_is_not_cut_is_sent_by_the_owner_of_the_first_element() -> None:
    first, rest = _listed({0: _adam(1.0), 1: _adam(1.0)}, {0: 0, 1: 64})
    assert [field.key for field in first.fields] == ["step", "exp_avg"]
    assert [field.key for field in rest.fields] == ["exp_avg"]
    assert rest.starts == [64]


def test_keys_of_other_types_stay_apart() -> None:
    assert [batch.fields[0].key for batch in _listed({0: {1: 0.5}, 1: {True: 0.5}, 2: {"1": 0.5}})] == [1, True, "1"]


@pytest.mark.parametrize("state", [{"key": object()}, {(1,): 0.5}])
def test_what_cannot_be_sent_is_named(state: dict[Any, Any]) -> None:
    with pytest.raises(StateDictError, match=r"parameter 2 .*cannot be part of the full state; let the class keep"):
        _listed({2: state})


def _packed(numels: list[int], monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """First member, last and number of elements of each message, where messages have at most 40 bytes."""
    monkeypatch.setattr(entries, "_CHUNK_BYTES", 40)
    monkeypatch.setattr(entries, "_SMALL_BYTES", 16)
    field = Field("key", "slice", "torch.float32", [], None)
    batch = Batch([*range(len(numels))], [0] * len(numels), numels, [field])
    return [(packet.first, packet.stop - 1, packet.numel) for packet in packets([batch])]


def test_small_ones_share_messages_and_large_ones_have_several(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _packed([3, 4, 3, 1], monkeypatch) == [(0, 2, 10), (3, 3, 1)]
    assert _packed([1, 25, 2, 0], monkeypatch) == [(0, 0, 1), (1, 1, 10), (1, 1, 10), (1, 1, 5), (2, 3, 2)]
    assert _packed([0, 0], monkeypatch) == []


def test_one_packet_per_value() -> None:
    (batch,) = _listed({0: _adam(1.0), 1: _adam(2.0)})
    assert [(packet.params, packet.numel) for packet in packets_apart(batch)] == [([0], 20), ([1], 20)]


def test_block_bases_are_counted_in_blocks() -> None:
    codes = {"exp_avg": torch.ones(200, dtype=torch.uint8), "exp_avg_base": torch.ones(4, dtype=torch.int16)}
    (batch,) = _listed({0: codes, 1: codes}, {0: 0, 1: 192}, numel=200)
    assert [field.kind for field in batch.fields] == ["slice", "blocks"]
    together = list(packets([batch]))[-1]
    assert (together.numel, together.numels, together.starts) == (8, [4, 4], [0, 3])


_PARTS = st.lists(st.sampled_from([(), (3,), (0,), (2, 2), (20,)]), min_size=1, max_size=4)


@given(_PARTS, st.booleans(), st.data())
def test_what_is_sent_is_seen_alike_by_the_column_and_one_by_one(
    shapes: list[tuple[int, ...]], whole_params: bool, data: st.DataObject
) -> None:
    values = st.sampled_from(["shape", "scalar", "other", "bf16"])

    def value(shape: tuple[int, ...]) -> Tensor:
        made = {"scalar": torch.zeros(()), "other": torch.zeros(5), "bf16": torch.zeros(shape).bfloat16()}
        return made.get(data.draw(values), torch.zeros(shape))

    parts = {index: torch.zeros(shape) for index, shape in enumerate(shapes)}
    starts = {index: data.draw(st.sampled_from([0, 64])) for index in parts}
    names = data.draw(st.lists(st.sampled_from(["step", "exp_avg", "exp_avg_base"]), unique=True))
    alike = data.draw(st.booleans())
    states = {
        index: {
            name: torch.zeros(()) if name == "step" else torch.zeros(shape) if alike else value(shape) for name in names
        }
        for index, shape in enumerate(shapes)
    }
    apart = [
        (index, _sent_of(index, states[index], part, starts[index], whole_params=whole_params))
        for index, part in parts.items()
    ]
    assert [*_forms_of(states, parts, starts, whole_params=whole_params)] == apart
