"""Values that ranks compare travel with their reports, in the room that the reports have."""

from __future__ import annotations

from zero_opt.comm.agreement import SAMPLE_NBYTES
from zero_opt.reduction import grad_samples


def test_a_sample_fits_into_a_report() -> None:
    assert grad_samples._TOLD.size == SAMPLE_NBYTES
