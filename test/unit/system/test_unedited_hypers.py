"""Hyperparameters that are remembered: every edit is noticed, and what may be edited in place is never known."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zero_opt.system.unedited_hypers import UneditedHypers


def test_edited_hyperparameters_are_noticed() -> None:
    groups: list[dict[str, Any]] = [{"params": [], "lr": 0.1, "betas": (0.9, 0.99)}, {"params": [], "lr": 0.1}]
    known = UneditedHypers()
    assert not known.are(groups)
    known.note(groups)
    assert known.are(groups)
    assert not known.are([groups[0], dict(groups[1])])
    for edit in ({"lr": 0.2}, {"betas": (0.9, 0.98)}, {"more": 1}):
        known.note(groups)
        groups[0].update(edit)
        assert not known.are(groups)


@pytest.mark.parametrize("value", [torch.tensor(0.1), [0.9, 0.99], (0.9, torch.tensor(0.99))])
def test_what_may_be_written_in_place_is_never_known(value: Any) -> None:
    groups = [{"params": [], "lr": value}]
    known = UneditedHypers()
    known.note(groups)
    assert not known.are(groups)
