"""English text that comes with Python, as bytes, and how well a byte-bigram model predicts it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

VOCABULARY = 256
PASSAGE_PARAGRAPHS = 20
HELD_OUT_EVERY = 10


@dataclass(frozen=True)
class Corpus:
    """Two disjoint byte sequences (uint8): what the model learns from and what it is judged by."""

    train: torch.Tensor
    held_out: torch.Tensor


def load_corpus() -> Corpus:
    """The reference text of Python's `help()` topics; every tenth passage of twenty paragraphs is held out.

    Topics quote each other at length. Each paragraph is kept once, where it first appears, so that no held-out
    paragraph can be found in the training text.
    """
    from pydoc_data.topics import topics

    paragraphs = dict.fromkeys(p.strip("\n") for name in sorted(topics) for p in topics[name].split("\n\n"))
    kept = list(paragraphs)
    train, held_out = [], []
    for index, start in enumerate(range(0, len(kept), PASSAGE_PARAGRAPHS)):
        text = "\n\n".join(kept[start : start + PASSAGE_PARAGRAPHS]).encode()
        (held_out if index % HELD_OUT_EVERY == HELD_OUT_EVERY - 1 else train).append(text)
    return Corpus(_as_tensor(train), _as_tensor(held_out))


def _as_tensor(texts: list[bytes]) -> torch.Tensor:
    return torch.frombuffer(bytearray(b"\n\n".join(texts)), dtype=torch.uint8)


def random_batch(text: torch.Tensor, batch: int, context: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`batch` random windows of `context` bytes and, for each byte, the one that follows it."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - context - 1, (batch, 1), generator=generator)
    windows = text[starts + torch.arange(context + 1)].long()
    return windows[:, :-1], windows[:, 1:]


def scoring_windows(text: torch.Tensor, context: int, batch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Windows that score every byte of `text` but the first once, each byte with at least half a context before it.

    Yields inputs and targets, the targets of bytes that the window before has scored being -100.
    """
    half = context // 2
    starts = list(range(0, max(1, len(text) - 1 - half), half))
    for at in range(0, len(starts), batch):
        inputs, targets = [], []
        for start in starts[at : at + batch]:
            window = text[start : start + context + 1].long()
            padding = context + 1 - len(window)
            window = torch.cat([window, window.new_zeros(padding)])
            target = window[1:].clone()
            target[context - padding :] = -100
            if start:
                target[: context - half] = -100
            inputs.append(window[:-1])
            targets.append(target)
        yield torch.stack(inputs), torch.stack(targets)


def bigram_bits_per_byte(fit_on: torch.Tensor, judge_by: torch.Tensor, pseudo_count: float = 4.0) -> float:
    """Bits per byte of `judge_by` under a byte-bigram model fitted on `fit_on`.

    A byte's distribution is its counts plus `pseudo_count` draws from the byte frequencies, those smoothed by one.
    """
    counts = _pair_counts(fit_on)
    single = counts.sum(0) + 1
    single = single / single.sum()
    smoothed = (counts + pseudo_count * single) / (counts.sum(1, keepdim=True) + pseudo_count)
    return _cross_entropy(_pair_counts(judge_by), smoothed)


def bigram_entropy(text: torch.Tensor) -> float:
    """The entropy of a byte given the one before it, in `text` itself: no bigram model can do better on it."""
    counts = _pair_counts(text)
    return _cross_entropy(counts, counts / counts.sum(1, keepdim=True).clamp(min=1))


def _pair_counts(text: torch.Tensor) -> torch.Tensor:
    pairs = text[:-1].long() * VOCABULARY + text[1:].long()
    return torch.bincount(pairs, minlength=VOCABULARY**2).view(VOCABULARY, VOCABULARY).double()


def _cross_entropy(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    bits = torch.where(counts > 0, -torch.log2(probabilities) * counts, 0.0)
    return float(bits.sum() / counts.sum())
