"""Try an installed zero_opt: ``python smoke.py``, in an environment that has nothing else but torch.

Two ranks train, with every offload; what they end with is compared with plain ``torch.optim``, bit by bit.
"""

from __future__ import annotations

import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import zero_opt
from zero_opt.kernels import native_isas

RANKS = 2
STEPS = 3
OFFLOADS = (None, zero_opt.CPUOffload(), zero_opt.WorkerOffload())


def a_model() -> nn.Module:
    """Return the same model on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters after some steps on the same data everywhere."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        model(torch.randn(8, 64, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach().clone() for param in model.parameters()]


def rank_main(rank: int, store: str) -> None:
    """Train as one of the ranks, with every offload."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    plain = a_model()
    wanted = trained(plain, torch.optim.AdamW(plain.parameters(), fused=True))
    for offload in OFFLOADS:
        model = a_model()
        optimizer = zero_opt.ShardedOptimizer(model.parameters(), torch.optim.AdamW, fused=True, offload=offload)
        found = trained(model, optimizer)
        optimizer.close()
        assert all(map(torch.equal, found, wanted)), f"other bits with {offload}"
    dist.destroy_process_group()


def main() -> None:
    """Try everything; print what ran."""
    place = Path(zero_opt.__file__).resolve()
    assert place.is_relative_to(Path(sys.prefix).resolve()), f"{place} is not the installed package"
    isas = native_isas()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, args=(str(Path(folder) / "store"),), nprocs=RANKS)
    doctor = [sys.executable, "-m", "zero_opt", "doctor"]
    subprocess.run(doctor, check=True, timeout=600, stdout=subprocess.DEVNULL)
    versions = f"zero_opt {zero_opt.__version__}, Python {platform.python_version()}, torch {torch.__version__}"
    print(f"   works: {versions}, kernels {isas.chosen} of {', '.join(isas.compiled)}", flush=True)


if __name__ == "__main__":
    main()
