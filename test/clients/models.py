"""Tiny models and data, made on the spot."""

from __future__ import annotations

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel

VOCABULARY = 61
_TOKENS = 12


def gpt2() -> GPT2LMHeadModel:
    """A GPT-2 with random weights and dropout; its embedding is also its head."""
    torch.manual_seed(11)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=_TOKENS, n_embd=24, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return GPT2LMHeadModel(config)


def mlp() -> torch.nn.Module:
    """A classifier of vectors of 20 into 5 classes."""
    torch.manual_seed(12)
    return torch.nn.Sequential(torch.nn.Linear(20, 33), torch.nn.GELU(), torch.nn.LayerNorm(33), torch.nn.Linear(33, 5))


class Text(Dataset):
    """Sequences of random tokens."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(13)
        self._tokens = torch.randint(VOCABULARY, (count, _TOKENS), generator=generator)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._tokens[index], "labels": self._tokens[index]}


class Vectors(Dataset):
    """Random vectors with random classes."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(14)
        self._vectors = torch.randn(count, 20, generator=generator)
        self._classes = torch.randint(5, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self._vectors)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._vectors[index], self._classes[index]


def decayed_apart(model: torch.nn.Module) -> list[dict[str, object]]:
    """Two param groups, of matrices and of the rest, as training programs make them."""
    params = [param for param in model.parameters() if param.requires_grad]
    return [
        {"params": [param for param in params if param.dim() > 1]},
        {"params": [param for param in params if param.dim() < 2], "weight_decay": 0.0},
    ]
