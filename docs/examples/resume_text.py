"""Resume a checkpoint of train_text.py at any number of ranks, and hold its next step against plain torch.optim.

python docs/examples/resume_text.py --checkpoint out/checkpoint.pt
torchrun --nproc-per-node 3 docs/examples/resume_text.py --checkpoint out/checkpoint.pt
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import text_ranks
import torch
from text_data import load_corpus, random_batch
from text_model import GPT, ModelSize, parameter_groups
from text_report import Memory, MemoryScan

import zero_opt

_LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Comparison:
    """One step of the sharded optimizer beside the same step of the plain one."""

    compared: int
    differing: int
    plain_memory: Memory

    def __str__(self) -> str:
        what = "the same to the bit" if self.differing == 0 else f"{self.differing:,} DIFFER"
        return f"{self.compared:,} parameter and state elements, {what}"


def compare_next_step(
    model: GPT, optimizer: zero_opt.ShardedOptimizer, checkpoint: dict[str, Any], text: torch.Tensor
) -> Comparison:
    """Take the step after `checkpoint` twice, from the ranks' gradients on fresh batches.

    Once with the sharded optimizer, as in training; once with a plain torch.optim.AdamW that loads the same
    checkpoint and is fed the mean of the ranks' gradients. Collective: every rank calls this.
    """
    rank = text_ranks.this_rank()
    tokens, targets = random_batch(text, 8, model.size.context, seed=1_000_000 + rank)
    scan = MemoryScan()
    plain_model = build_model(checkpoint)
    plain = torch.optim.AdamW(parameter_groups(plain_model))
    plain.load_state_dict(checkpoint["optimizer"])
    plain_model.loss(tokens, targets).backward()
    plain_memory = scan.measure(plain_model, plain)
    plain_memory = replace(plain_memory, gradients_as_backward_returns=plain_memory.gradients)
    for p in plain_model.parameters():
        assert p.grad is not None
        p.grad.copy_(text_ranks.mean(p.grad))
    plain.step()

    optimizer.zero_grad()
    model.loss(tokens, targets).backward()
    optimizer.step()
    optimizer.consolidate_state_dict(to=0)
    pairs = list(zip(model.parameters(), plain_model.parameters(), strict=True))
    if rank == 0:
        pairs += _state_pairs(optimizer.state_dict()["state"], plain.state_dict()["state"])
    differing = sum(_elements_that_differ(a, b) for a, b in pairs)
    differing_anywhere = int(text_ranks.add_up([differing])[0])
    return Comparison(sum(a.numel() for a, _ in pairs), differing_anywhere, plain_memory)


def _state_pairs(
    ours: dict[int, dict[str, Any]], plain: dict[int, dict[str, Any]]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    assert ours.keys() == plain.keys()
    return [(ours[index][name], value) for index, state in plain.items() for name, value in state.items()]


@torch.no_grad()
def _elements_that_differ(a: torch.Tensor, b: torch.Tensor) -> int:
    """Compared as integers: equal numbers need not be equal bits."""
    assert a.dtype == b.dtype == torch.float32 and a.shape == b.shape
    return int((a.contiguous().view(torch.int32) != b.contiguous().view(torch.int32)).sum())


def build_model(checkpoint: dict[str, Any]) -> GPT:
    """The model as it was saved."""
    model = GPT(ModelSize(**checkpoint["size"]))
    model.load_state_dict(checkpoint["model"])
    return model


def save_checkpoint(path: Path, model: GPT, optimizer_state: dict[str, Any], size: dict[str, int]) -> None:
    """Nothing in the file is zero_opt's: the state is what torch.optim.AdamW itself would have written."""
    torch.save({"size": size, "model": model.state_dict(), "optimizer": optimizer_state}, path)


def run_at_world_size(world_size: int, checkpoint: Path) -> tuple[bool, str]:
    """Run this script on `world_size` new processes: whether the bits were the same, and its last line."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
    command = [sys.executable, *(launcher if world_size > 1 else []), __file__, "--checkpoint", str(checkpoint)]
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in _LAUNCHER_VARIABLES and not name.startswith("TORCHELASTIC_")
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    lines = (done.stdout if done.returncode == 0 else done.stdout + done.stderr).strip().splitlines()
    return done.returncode == 0, lines[-1] if lines else f"exit code {done.returncode}"


def main() -> int:
    """Resume, compare, and say so: the exit code is 0 if every bit was the same."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=Path("out/checkpoint.pt"))
    arguments = parser.parse_args()
    rank, world_size = text_ranks.start()
    checkpoint = torch.load(arguments.checkpoint, weights_only=True)
    model = build_model(checkpoint)
    optimizer = zero_opt.ShardedOptimizer(parameter_groups(model), torch.optim.AdamW)
    optimizer.load_state_dict(checkpoint["optimizer"])
    comparison = compare_next_step(model, optimizer, checkpoint, load_corpus().train)
    if rank == 0:
        print(f"resumed at world size {world_size}: {comparison}")
    optimizer.close()
    text_ranks.stop()
    return 1 if comparison.differing else 0


if __name__ == "__main__":
    sys.exit(main())
