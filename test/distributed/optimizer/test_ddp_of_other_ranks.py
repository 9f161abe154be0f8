"""DDPHook where DDP and the optimizer are over different ranks: the mean would be over the optimizer's alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zero_opt
from test.support.harness import run_processes

HOOK = zero_opt.DDPHook()


def _other_ranks(rank: int, world_size: int) -> list[str]:
    halves = [torch.distributed.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    found = []
    for of_ddp, of_optimizer in ((None, halves[rank // 2]), (halves[rank // 2], None)):
        model = nn.Linear(4, 3)
        wrapped = DistributedDataParallel(model, process_group=of_ddp)
        optimizer = zero_opt.ShardedOptimizer(model.parameters(), torch.optim.SGD, of_optimizer, lr=0.1, reduction=HOOK)
        wrapped.register_comm_hook(optimizer, zero_opt.ddp_hook)
        with pytest.raises(zero_opt.ConfigConflict) as caught:
            wrapped(torch.ones(2, 4)).sum().backward()
        found.append(str(caught.value))
        optimizer.close()
    same = nn.Linear(4, 3)
    wrapped = DistributedDataParallel(same, process_group=halves[rank // 2])
    optimizer = zero_opt.ShardedOptimizer(same.parameters(), torch.optim.SGD, halves[rank // 2], lr=0.1, reduction=HOOK)
    wrapped.register_comm_hook(optimizer, zero_opt.ddp_hook)
    wrapped(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.close()
    return found


def test_ddp_over_other_ranks_is_refused() -> None:
    for rank, (more, fewer) in enumerate(run_processes(4, _other_ranks)):
        half = [0, 1] if rank < 2 else [2, 3]
        assert "is over ranks [0, 1, 2, 3]," in more and f"over ranks {half}, which alone" in more
        assert f"is over ranks {half}," in fewer and "over ranks [0, 1, 2, 3], which alone" in fewer
