"""How well the demo model learns with compact Adam state, beside fp32.

    python docs/benchmarks/adam_convergence.py [--write]

Two ranks of one host train it under ShardedOptimizer, with each form of AdamState on the same batches.
"""

from __future__ import annotations

from support.convergence import Study, Trained, train_rank
from support.forked import forked

import zero_opt

RANKS = 2
FORMS = {
    "fp32 moments": zero_opt.AdamState(),
    "bf16 moments": zero_opt.AdamState("bfloat16"),
    "8-bit moments": zero_opt.AdamState("block8"),
}


def train(form: zero_opt.AdamState, seed: int, steps: int) -> Trained:
    """Train on forked ranks."""
    return Trained(forked(lambda *_: train_rank(seed, steps, zero_opt.CPUAdamW, state=form), RANKS)[0])


if __name__ == "__main__":
    who = "two ranks of one host"
    Study("adam_convergence", "Compact Adam moments beside fp32", who, FORMS, train, {}).main(__doc__)
