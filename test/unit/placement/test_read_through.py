"""What users see of state that is made when they ask for it."""

from __future__ import annotations

import torch

from zero_opt.placement.read_through import MadeState, ReadThrough


class Made(dict[str, torch.Tensor], MadeState):
    """Values that are there already."""

    @property
    def nbytes(self) -> int:
        return 0


def test_data_that_come_to_lie_where_those_before_lay_are_an_edit() -> None:
    memory = bytearray(64)
    shown = ReadThrough(Made(exp_avg=torch.frombuffer(memory, dtype=torch.float32)))
    value = shown["exp_avg"]
    assert not shown.edited()
    value.data = torch.empty(0)
    value.data = torch.frombuffer(memory, dtype=torch.float32)
    assert shown.edited()
