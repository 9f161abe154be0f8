"""Leaving ``torch.inference_mode()``."""

from __future__ import annotations

import torch

from zero_opt.system.inference_mode import outside_inference_mode, version_of


def test_a_tensor_made_within_has_a_version_counter_and_the_mode_comes_back() -> None:
    with torch.inference_mode():
        with outside_inference_mode():
            assert not torch.zeros(1).is_inference()
        assert torch.zeros(1).is_inference()


def test_without_inference_mode_nothing_changes_and_contexts_nest() -> None:
    with outside_inference_mode(), outside_inference_mode():
        assert not torch.zeros(1).is_inference()
    assert not torch.is_inference_mode_enabled()


def test_version_of_counts_writes_where_torch_does() -> None:
    tensor = torch.zeros(1)
    tensor.add_(1)
    with torch.inference_mode():
        assert version_of(torch.zeros(1).add_(1)) == 0
    assert version_of(tensor) == 1
