"""A step of a worker that cannot be brought into the parameters at first."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zero_opt
from test.support.harness import assert_bitwise
from test.support.scenario import BUCKET_MB, values
from test.support.worker_training import NOW, make_params
from zero_opt.placement.worker.results import ParamWriter

SPECULATING = zero_opt.WorkerOffload(speculate=True)


@pytest.mark.parametrize("offload", [SPECULATING, NOW])
@pytest.mark.parametrize("compact", [False, True])
def test_a_step_that_cannot_be_brought_in_at_once_is_brought_in_once(
    compact: bool, offload: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first write of a result fails: as where an accelerator has no memory for it."""

    def run(fails: bool) -> list[Any]:
        form = zero_opt.AdamState("block8") if compact else zero_opt.AdamState()
        params = make_params()
        options = {"state": form, "offload": offload, "reduction": zero_opt.Overlapped(BUCKET_MB)}
        optimizer = zero_opt.ShardedOptimizer(params, zero_opt.CPUAdamW, **options)
        write = ParamWriter.write

        def refuse(writer: ParamWriter, made: Any) -> None:
            monkeypatch.setattr(ParamWriter, "write", write)
            raise RuntimeError("no memory")

        for step in range(4):
            torch.autograd.backward(params, [values(step, 1, 0, i, tuple(p.shape)) for i, p in enumerate(params)])
            if step == 2 and fails:
                monkeypatch.setattr(ParamWriter, "write", refuse)
                with pytest.raises(RuntimeError, match="no memory"):
                    optimizer.step()
                optimizer.flush()
            else:
                optimizer.step()
            optimizer.zero_grad()
        state = optimizer.state_dict()
        optimizer.close()
        return [param.detach() for param in params], state

    assert_bitwise(run(fails=True), run(fails=False))
