"""What the example shows: bytes that are alive, as a table, and the loss curve, as a picture."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn


@dataclass
class History:
    """What training went through."""

    train_bits: list[float] = field(default_factory=list)
    held_out_bits: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Memory:
    """Bytes of live tensors on one rank, between backward and step.

    As backward returns, exchanges may still be under way: the gradients in them are whole yet.
    """

    parameters: int
    gradients: int
    optimizer_state: int
    gradients_as_backward_returns: int = 0

    @property
    def total(self) -> int:
        """All that is held when the step begins."""
        return self.parameters + self.gradients + self.optimizer_state


class MemoryScan:
    """Finds every tensor that is alive, so that no buffer is forgotten, whoever holds it.

    What is neither a parameter nor optimizer state, and was not there when the scan was made, counts as gradient:
    an optimizer's staging buffers too. Memory that several ranks map is shared out among them, as the kernel does.
    """

    def __init__(self) -> None:
        self._before = set(_storages(_live_tensors()))

    def measure(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, ignore: Iterable[torch.Tensor] = ()
    ) -> Memory:
        """The bytes alive now, leaving out `ignore`: the batch and the loss."""
        parameters = _storages(model.parameters())
        values = [value for state in optimizer.state.values() for value in state.values()]
        state = _storages(v for v in values if isinstance(v, torch.Tensor))
        grads = [p.grad for p in model.parameters() if p.grad is not None]  # a grad has no Python object until asked
        known = self._before | parameters.keys() | state.keys() | _storages(ignore).keys()
        others = {at: size for at, size in _storages(_live_tensors()).items() if at not in known}
        del grads
        return Memory(sum(parameters.values()), sum(others.values()), sum(state.values()))


def _live_tensors() -> list[torch.Tensor]:
    gc.collect()
    return [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor)]


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Bytes by address, so that what shares memory counts once."""
    found = {}
    shared = _shared_mappings()
    for tensor in tensors:
        try:
            storage = tensor.untyped_storage()
        except RuntimeError:  # a gradient that has moved into its shard: a tensor without memory
            continue
        if storage.device.type != "meta" and storage.nbytes():
            found[storage.data_ptr()] = shared.get(storage.data_ptr(), storage.nbytes())
    return found


def _shared_mappings() -> dict[int, int]:
    """By address, this process's part of each memory mapping it shares: Linux's "proportional set size"."""
    parts: dict[int, int] = {}
    start, shared = 0, False
    smaps = Path("/proc/self/smaps")
    for line in smaps.read_text().splitlines() if smaps.exists() else ():
        name, *values = line.split()
        if name == "Pss:" and shared:
            parts[start] = int(values[0]) * 1024
        elif not name.endswith(":"):
            start, shared = int(name.split("-")[0], 16), values[0].endswith("s")
    return parts


def memory_table(unsharded: Memory, ranks: list[Memory]) -> str:
    """Bytes per rank beside those of one unsharded process."""
    columns = [("unsharded", unsharded)] + [(f"rank {rank}", memory) for rank, memory in enumerate(ranks)]
    rows = [["bytes"] + [name for name, _ in columns]]
    named = {
        "parameters": "parameters",
        "gradients as backward returns": "gradients_as_backward_returns",
        "gradients as the step begins": "gradients",
        "optimizer state": "optimizer_state",
        "total as the step begins": "total",
    }
    for title, name in named.items():
        rows.append([title] + [f"{getattr(memory, name):,}" for _, memory in columns])
    rows.append(["total, share of unsharded"] + [f"{memory.total / unsharded.total:.1%}" for _, memory in columns])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])] + [c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True)]
        lines.append("| " + " | ".join(cells) + " |")
    lines.insert(1, "| " + " | ".join("-" * w for w in widths) + " |")
    return "\n".join(lines)


def draw_loss_curve(history: History, bigram_bits: float, path: Path) -> None:
    """A PNG of bits per byte over steps, with the bigram model's as the line to get under."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    steps = range(1, len(history.train_bits) + 1)
    axes.plot(steps, history.train_bits, color="0.75", linewidth=0.8, label="training batches")
    axes.plot(
        list(history.held_out_bits), list(history.held_out_bits.values()), "o-", color="C0", label="held-out text"
    )
    axes.axhline(bigram_bits, color="C3", linestyle="--", linewidth=1, label="byte bigrams on held-out text")
    axes.set(xlabel="step", ylabel="bits per byte", ylim=(0, min(9.0, max(history.train_bits) + 0.5)))
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
