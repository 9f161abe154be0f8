"""Which keys a store has, asked of it in few calls."""

from __future__ import annotations

import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from zero_opt.comm.store_keys import missing, values


@given(there=st.sets(st.integers(0, 40)), size=st.integers(0, 41))
def test_what_is_missing_is_found_in_order(there: set[int], size: int) -> None:
    store, asked = dist.HashStore(), list[list[str]]()

    def check(some: list[str]) -> bool:
        asked.append(some)
        return bool(store.check(some))

    for number in there:
        store.set(f"at/{number}", f"{number}")
    keys = [f"at/{number}" for number in range(size)]
    absent = [key for number, key in enumerate(keys) if number not in there]
    assert missing(check, keys) == absent
    halvings = max(len(keys) - 1, 0).bit_length()  # to come to one key; each asks for both halves
    assert len(asked) <= 1 + 2 * len(absent) * halvings
    assert values(store, [key for key in keys if key not in absent]) == [
        f"{number}".encode() for number in range(size) if number in there
    ]
