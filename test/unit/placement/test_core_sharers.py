"""Which ranks step on the same cores."""

from __future__ import annotations

import pytest

from zero_opt.comm.alone_group import AloneGroup
from zero_opt.placement import core_sharers


class _Told(AloneGroup):
    """One of three ranks, that are told alike."""

    def all_gather_bytes(self, payload: bytes, call: str = "", called: str = "") -> list[bytes]:
        return [payload] * 3


@pytest.mark.parametrize(("host", "sharers"), [("some host", 3), ("", 1)])
def test_ranks_whose_hosts_have_no_name_are_not_known_to_share_one(
    host: str, sharers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_sharers, "host_if_known", lambda: host)
    monkeypatch.setattr(core_sharers, "meet_sharers", lambda count: count)
    assert core_sharers.agreed_sharers(_Told(), (0, 1)) == sharers
