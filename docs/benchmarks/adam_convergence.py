"""How well the demo model learns with compact Adam state, beside fp32.

    python docs/benchmarks/adam_convergence.py [--write]

Two ranks of one host train it under ShardedOptimizer, with each form of AdamState on the same batches.
"""

from __future__ import annotations

import math
import multiprocessing
import tempfile
from multiprocessing.connection import Connection

import torch
import torch._dynamo  # every optimizer would import it, on every rank
import torch.distributed as dist
from support.convergence import Study, Trained, train_rank

import zero_opt

RANKS = 2
FORMS = {
    "fp32 moments": zero_opt.AdamState(),
    "bf16 moments": zero_opt.AdamState("bfloat16"),
    "8-bit moments": zero_opt.AdamState("block8"),
}


def _run(rank: int, folder: str, form: zero_opt.AdamState, seed: int, steps: int, answer: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", RANKS), rank=rank, world_size=RANKS)
    bits = train_rank(seed, steps, zero_opt.CPUAdamW, state=form)
    if rank == 0:
        answer.send(bits)
    dist.destroy_process_group()


def train(form: zero_opt.AdamState, seed: int, steps: int) -> Trained:
    """Train on forked ranks."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        given = folder, form, seed, steps, theirs
        ranks = [fork.Process(target=_run, args=(rank, *given)) for rank in range(RANKS)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    return Trained(ours.recv() if ours.poll() else math.nan)


if __name__ == "__main__":
    who = "two ranks of one host"
    Study("adam_convergence", "Compact Adam moments beside fp32", who, FORMS, train, {}).main(__doc__)
