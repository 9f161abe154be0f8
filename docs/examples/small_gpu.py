"""Train on one GPU that is too small for the optimizer's state: keep that in host memory, or in a file.

    python docs/examples/small_gpu.py --device-memory 0.4 --host-memory 1 --directory /a/fast/disk

Takes the first way that fits: state beside the parameters, CPUOffload, NVMeOffload. A larger GPU plays a small one:
torch may use no more of it than --device-memory. Without a GPU the parameters are in host memory, and the figures are
those of the estimate. Then it trains on the CPU with and without that offload; the exit code is 0 only if the bits are
the same.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

import zero_opt
from zero_opt import CPUOffload, MixedPrecision, NVMeOffload, ShardedOptimizer

GB = 1e9
# fp32 masters, which every offload has by itself.
MASTERS = MixedPrecision(master_dtype=torch.float32)
Offload = CPUOffload | NVMeOffload | None


def parse_arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """What can be chosen on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--device-memory", type=float, default=0.4, help="GB that the GPU is taken to have")
    parser.add_argument("--host-memory", type=float, default=8.0, help="GB that the optimizer may have of the host's")
    parser.add_argument("--directory", default=tempfile.gettempdir(), help="on a disk, for NVMeOffload")
    return parser.parse_args(given)


def make_model(arguments: argparse.Namespace, device: str) -> nn.Module:
    """The same in every call, in bf16."""
    torch.manual_seed(0)
    width = arguments.width
    layers = [layer for _ in range(arguments.layers) for layer in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*layers).to(device, torch.bfloat16)


def first_that_fits(arguments: argparse.Namespace, device: str) -> tuple[str, Offload]:
    """The way to go, by what each would hold.

    Raises:
        SystemExit: none fits.
    """
    ways: Mapping[str, Offload] = {
        "beside the parameters": None,
        "CPUOffload": CPUOffload(),
        "NVMeOffload": NVMeOffload(arguments.directory),
    }
    model = make_model(arguments, "meta")
    print(f"{'MB':<24}{'device':>10}{'host':>10}{'file':>10}")
    for name, offload in ways.items():
        held = zero_opt.estimate(
            model, 1, torch.optim.AdamW, offload=offload, precision=MASTERS, device=device, fused=True
        )
        places = (held.device_bytes, held.host_bytes, held.nvme_bytes)
        print(f"{name:<24}" + "".join(f"{nbytes / 1e6:10,.1f}" for nbytes in places))
        if places[0] <= arguments.device_memory * GB and places[1] <= arguments.host_memory * GB:
            return name, offload
    raise SystemExit("nothing fits: take a smaller model, or shard its parameters over several GPUs with FSDP2")


def train(arguments: argparse.Namespace, offload: Offload, device: str) -> list[Tensor]:
    """The parameters after some steps."""
    model = make_model(arguments, device)
    optimizer = ShardedOptimizer(
        model.parameters(), torch.optim.AdamW, lr=1e-3, fused=True, offload=offload, precision=MASTERS
    )
    data = torch.Generator().manual_seed(1)
    for step in range(arguments.steps):
        inputs = torch.randn(4, arguments.width, generator=data).to(device, torch.bfloat16)
        loss = (model(inputs) - inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}")
    optimizer.close()
    return [param.detach() for param in model.parameters()]


def main(given: Sequence[str] | None = None) -> int:
    """Choose, train, compare; returns the exit code."""
    arguments = parse_arguments(given)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name, offload = first_that_fits(arguments, device)
    print(f"state: {name}")
    if device == "cuda":
        there = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(arguments.device_memory * GB / there, 1.0))
        train(arguments, offload, device)
        print(f"at most {torch.cuda.max_memory_allocated() / 1e6:,.1f} MB of the GPU were in use")
    same = all(map(torch.equal, train(arguments, offload, "cpu"), train(arguments, None, "cpu")))
    print("same bits as with state beside the parameters" if same else "OTHER BITS")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
