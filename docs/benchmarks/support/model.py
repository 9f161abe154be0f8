"""The transformer language model of the benchmarks, and its seeded data."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, LAYERS, VOCABULARY = 512, 8, 8, 8192


@dataclass(frozen=True)
class Batch:
    """Size of one rank's batch; so small that compute takes about half of a step of DDP."""

    rows: int = 1
    tokens: int = 64


class Block(nn.Module):
    """Pre-norm attention and perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attend, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.widen, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) to the same."""
        rows, tokens, _ = x.shape
        heads = self.attend(self.norm1(x)).view(rows, tokens, 3 * HEADS, WIDTH // HEADS).transpose(1, 2)
        query, key, value = heads.chunk(3, dim=1)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).reshape(rows, tokens, WIDTH))
        return x + self.narrow(F.gelu(self.widen(self.norm2(x))))


class LanguageModel(nn.Module):
    """A decoder of 33.6 M parameters whose forward returns the loss."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.place = nn.Embedding(tokens, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy of the next token."""
        x = self.embed(inputs) + self.place.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def make_model(tokens: int) -> LanguageModel:
    """The model, with the same values on every rank."""
    torch.manual_seed(0)
    return LanguageModel(tokens)


def make_data(rank: int, steps: int, batch: Batch) -> list[tuple[Tensor, Tensor]]:
    """Inputs and targets of one rank: a noisy cyclic text, so that there is something to learn."""
    generator = torch.Generator().manual_seed(1000 + rank)
    pairs = []
    for _ in range(steps):
        start = torch.randint(VOCABULARY, (batch.rows, 1), generator=generator)
        text = (start + 7 * torch.arange(batch.tokens + 1)) % VOCABULARY % 97
        noise = torch.rand(text.shape, generator=generator) < 0.1
        text = torch.where(noise, torch.randint(VOCABULARY, text.shape, generator=generator), text)
        pairs.append((text[:, :-1].contiguous(), text[:, 1:].contiguous()))
    return pairs
