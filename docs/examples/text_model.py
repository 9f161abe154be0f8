"""A small GPT over bytes: plain PyTorch, nothing of zero_opt in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from text_data import VOCABULARY
from torch import nn
from torch.nn import functional


@dataclass(frozen=True)
class ModelSize:
    """What a checkpoint must know to build the model again."""

    width: int = 160
    layers: int = 4
    heads: int = 5
    context: int = 64


class Block(nn.Module):
    """Attention, then a two-layer perceptron, each added to what came in."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.heads = size.heads
        self.attention_norm = nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.attention_out = nn.Linear(size.width, size.width)
        self.mlp_norm = nn.LayerNorm(size.width)
        self.mlp_in = nn.Linear(size.width, 4 * size.width)
        self.mlp_out = nn.Linear(4 * size.width, size.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, time, width) to the same shape, each time seeing only itself and what is before it."""
        batch, time, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(seen.transpose(1, 2).reshape(batch, time, width))
        return x + self.mlp_out(functional.gelu(self.mlp_in(self.mlp_norm(x)), approximate="tanh"))


class GPT(nn.Module):
    """Bytes in, a distribution over the next byte out; the embedding is also the output layer."""

    def __init__(self, size: ModelSize, seed: int = 0) -> None:
        super().__init__()
        self.size = size
        self.embedding = nn.Embedding(VOCABULARY, size.width)
        self.position = nn.Parameter(torch.empty(size.context, size.width))
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self._initialize(torch.Generator().manual_seed(seed))

    @torch.no_grad()
    def _initialize(self, generator: torch.Generator) -> None:
        for name, p in self.named_parameters():
            if name.endswith("_out.weight"):
                p.zero_()  # a block starts out as the identity
            elif name.startswith("blocks") and p.dim() == 2:
                p.normal_(0.0, p.shape[1] ** -0.5, generator=generator)
            elif p.dim() == 2:
                p.normal_(0.0, 0.02, generator=generator)
            elif name.endswith("bias"):
                p.zero_()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits (batch, time, 256) for bytes (batch, time)."""
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
        """Cross entropy in nats; targets of -100 do not count."""
        logits = self(tokens).view(-1, VOCABULARY)
        return functional.cross_entropy(logits, targets.reshape(-1), reduction=reduction)


def parameter_groups(model: nn.Module, weight_decay: float = 0.1) -> list[dict[str, Any]]:
    """Matrices decay; biases and norms do not. An ordinary torch.optim argument."""
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
