"""What the programs that train the small GPT share: how it is made and trained, and how its text is scored."""

from __future__ import annotations

import argparse
import math

import text_ranks
import torch
from text_data import scoring_windows
from text_model import GPT, ModelSize
from torch import Tensor


def add_training_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, and how long and on how much it is trained."""
    size = ModelSize()
    parser.add_argument("--steps", type=int, default=230)
    parser.add_argument("--width", type=int, default=size.width)
    parser.add_argument("--layers", type=int, default=size.layers)
    parser.add_argument("--heads", type=int, default=size.heads)
    parser.add_argument("--context", type=int, default=size.context, help="bytes the model sees at once")
    parser.add_argument("--batch", type=int, default=16, help="windows per rank and step")
    parser.add_argument("--lr", type=float, default=5e-3, help="peak learning rate")
    parser.add_argument("--max-norm", type=float, default=1.0, help="gradients are clipped to this norm")


def learning_rate_factor(step: int, steps: int) -> float:
    """Up over the first twentieth, then down a cosine to a tenth."""
    warm_up = min(1.0, (step + 1) / max(1, steps // 20))
    return warm_up * (0.55 + 0.45 * math.cos(math.pi * min(1.0, step / steps)))


@torch.no_grad()
def held_out_bits_per_byte(model: GPT, text: Tensor, rank: int, world_size: int) -> float:
    """Over every byte of a text but the first, each rank scoring its part of the windows."""
    nats = scored = 0.0
    for index, (tokens, targets) in enumerate(scoring_windows(text, model.size.context, batch=32)):
        if index % world_size == rank:
            nats += model.loss(tokens, targets, reduction="sum").item()
            scored += int((targets >= 0).sum())
    nats, scored = text_ranks.add_up([nats, scored])
    return nats / scored / math.log(2)
