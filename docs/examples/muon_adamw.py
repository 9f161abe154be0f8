"""Train the demo's GPT with two sharded optimizers: Muon for the matrices of its blocks, AdamW for all else.

    torchrun --nproc-per-node 2 docs/examples/muon_adamw.py [--optimizers adamw]

Gradients of both are clipped by one norm. Prints held-out bits per byte; `--optimizers adamw` trains with AdamW alone,
for comparison.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import text_ranks
import torch
from text_data import load_corpus, random_batch
from text_model import GPT, ModelSize, parameter_groups
from text_training import add_training_arguments, held_out_bits_per_byte, learning_rate_factor
from torch import Tensor

import zero_opt


def parse_arguments() -> argparse.Namespace:
    """What can be chosen on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizers", choices=("muon+adamw", "adamw"), default="muon+adamw")
    add_training_arguments(parser)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--score", type=int, default=sys.maxsize, help="bytes of the held-out text that are scored")
    return parser.parse_args()


def build_optimizers(model: GPT, arguments: argparse.Namespace) -> list[zero_opt.ShardedOptimizer]:
    """Muon, if asked for, and AdamW for what it does not take: embeddings, norms and biases."""
    matrices = [p for p in model.blocks.parameters() if p.dim() == 2] if arguments.optimizers == "muon+adamw" else []
    taken = set(map(id, matrices))
    rest = [
        {**group, "params": [p for p in group["params"] if id(p) not in taken]} for group in parameter_groups(model)
    ]
    optimizers = [zero_opt.ShardedOptimizer(rest, torch.optim.AdamW, lr=arguments.lr, betas=(0.9, 0.95))]
    if matrices:
        muon = zero_opt.ShardedOptimizer(
            matrices, torch.optim.Muon, lr=arguments.lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
        )
        optimizers.insert(0, muon)
    return optimizers


def train(
    model: GPT, optimizers: Sequence[zero_opt.ShardedOptimizer], text: Tensor, arguments: argparse.Namespace
) -> Tensor:
    """The training loop: all optimizers clip together, then step one after the other. Returns the last norm."""
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, arguments.steps))
        for optimizer in optimizers
    ]
    rank, norm = text_ranks.this_rank(), torch.zeros(())
    for step in range(arguments.steps):
        seed = (arguments.seed + 1) * 1_000_000 + step * 64 + rank  # every rank and step its own windows
        tokens, targets = random_batch(text, arguments.batch, arguments.context, seed)
        model.loss(tokens, targets).backward()
        norm = zero_opt.clip_grad_norm_(optimizers, arguments.max_norm)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return norm


def main() -> int:
    """Train, and score; 0 once that is done."""
    arguments = parse_arguments()
    rank, world_size = text_ranks.start()
    corpus = load_corpus()
    model = GPT(ModelSize(arguments.width, arguments.layers, arguments.heads, arguments.context), arguments.seed)
    zero_opt.broadcast_params(model, src=0)
    optimizers = build_optimizers(model, arguments)
    norm = train(model, optimizers, corpus.train, arguments)
    bits = held_out_bits_per_byte(model, corpus.held_out[: arguments.score], rank, world_size)
    if rank == 0:
        print(f"{arguments.optimizers}, {world_size} ranks, {arguments.steps} steps, seed {arguments.seed}:")
        print(f"held-out bits per byte: {bits:.3f}; norm of the last gradients: {norm:.3f}")
    for optimizer in optimizers:
        optimizer.close()
    text_ranks.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
