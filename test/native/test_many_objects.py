"""What native code reads of many Python objects at once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from zero_opt.system.extension import native
from zero_opt.system.placing import placing_of
from zero_opt.system.same_objects import flattened


def square() -> Tensor:
    return torch.arange(9.0).reshape(3, 3)


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "another address": torch.clone,
    "an offset": lambda data: data.reshape(9)[1:].as_strided((2, 4), (4, 1)),
    "another shape": lambda data: data.view(9),
    "fewer elements": lambda data: data[:2],
    "other strides": torch.t,
    "another dtype": lambda data: data.view(torch.int32),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_tensor_that_is_re_pointed_is_placed_otherwise(change: str) -> None:
    held, others = square(), [Parameter(square()), torch.tensor(1.0), torch.empty(0)]
    before = placing_of([held, *others])
    assert isinstance(before[1], bytes), "native code has read them"
    assert placing_of([held, *others]) == before
    held.add_(1.0)
    assert placing_of([held, *others]) == before, "the values do not count"
    held.data = CHANGES[change](held)
    assert placing_of([held, *others]) != before


def test_the_placing_of_tensors_has_their_addresses() -> None:
    tensors = [square(), square()[1:], torch.empty(0)]
    addresses, _ = native.placing(Tensor.__dlpack_c_exchange_api__, tensors)
    assert [int.from_bytes(addresses[at : at + 8], "little") for at in (0, 8, 16)] == [t.data_ptr() for t in tensors]


def test_tensors_that_native_code_cannot_read_are_placed_too() -> None:
    held = [square(), torch.empty(2, device="meta")]
    before = placing_of(held)
    assert placing_of(held) == before
    held[0].data = torch.t(held[0])
    assert placing_of(held) != before


def test_dicts_are_flattened_unless_one_is_of_another_class() -> None:
    assert flattened([{1: "a", 2: "b"}, {}, {3: "c"}]) == [1, "a", 2, "b", 3, "c"]
    assert flattened([{1: "a"}, OrderedDict[int, str]()]) is None


def dimensions(values: list[Tensor], likes: list[Tensor]) -> bool | None:
    return native.dimensions(Tensor.__dlpack_c_exchange_api__, values, likes)


def test_values_have_the_dimensions_of_their_likes_or_none() -> None:
    likes = [square(), torch.ones(2)]
    assert dimensions([square(), torch.zeros(2)], likes) is True
    assert dimensions([torch.tensor(1.0), torch.tensor(2.0)], likes) is False
    assert dimensions([square()[:, :1], torch.zeros(1)], [torch.ones(3, 1), torch.ones(1)]) is None, "not dense"
    assert dimensions([square().t(), torch.zeros(2)], likes) is None, "not row by row"
    assert dimensions([square(), torch.zeros(3)], likes) is None
    assert dimensions([square(), torch.tensor(1.0)], likes) is None
    assert dimensions([torch.tensor(1.0), torch.zeros(2)], likes) is None
    assert dimensions([square(), torch.zeros(2).double()], likes) is None
    assert dimensions([square()], likes) is None
    assert dimensions([torch.empty(0)], [torch.empty(0)]) is None, "no memory"


def test_bytes_of_tensors_are_joined_if_they_are_dense() -> None:
    tensors = [square()[1:], torch.tensor(2.0), torch.tensor([3, 4], dtype=torch.uint8), square().bfloat16()]
    joined = native.joined_bytes(Tensor.__dlpack_c_exchange_api__, tensors)
    assert joined == b"".join(bytes(tensor.reshape(-1).view(torch.uint8).tolist()) for tensor in tensors)
    with pytest.raises(ValueError, match="not dense"):
        native.joined_bytes(Tensor.__dlpack_c_exchange_api__, [square().t()])
