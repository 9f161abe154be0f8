"""How well the demo model learns with gradients in bf16 between hosts, beside fp32.

    python docs/benchmarks/hosts_convergence.py [--write]

The GPT of docs/examples/train_text.py is trained by two hosts with one rank each, with either kind of gradients on the
same batches, from each of several seeds. Hosts are namespaces of this machine (test/hosts/network.py): this needs root.
bf16 is judged by its held-out bits per byte less those of fp32 from the same seed, and by the bytes a host sends.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import statistics
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from adam_convergence import held_out_bits
from support.machine import command, machine, today, write_result
from support.ranks import interface_bytes

import zero_opt

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # before the standard library, which has a "test" too
from text_data import load_corpus, random_batch
from text_model import GPT, ModelSize, parameter_groups

from test.hosts.network import INTERFACE, Network, Unavailable

RESULTS = Path(__file__).parent / "results"
SCRIPT = "docs/benchmarks/hosts_convergence.py"
DTYPES = {"fp32": None, "bf16": torch.bfloat16}
HOSTS, ROWS = 2, 16


def train(network: Network, rank: int, seed: int, steps: int, dtype: torch.dtype | None) -> tuple[float, float]:
    """The held-out bits per byte after so many steps, and the bytes that this host has sent per step."""
    network.join(rank)
    torch.set_num_threads(1)
    address = f"tcp://{network.addresses[0]}:29500"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=HOSTS)
    corpus, model = load_corpus(), GPT(ModelSize(), seed=seed)
    optimizer = zero_opt.ShardedOptimizer(
        parameter_groups(model),
        torch.optim.AdamW,
        lr=5e-3,
        betas=(0.9, 0.95),
        max_grad_norm=1.0,
        precision=zero_opt.MixedPrecision(between_hosts_dtype=dtype),
    )
    sent = interface_bytes(INTERFACE)
    for step in range(steps):
        for group in optimizer.param_groups:
            warm_up = min(1.0, (step + 1) / max(1, steps // 20))
            group["lr"] = 5e-3 * warm_up * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        tokens, targets = random_batch(corpus.train, ROWS, model.size.context, (seed * steps + step) * HOSTS + rank)
        model.loss(tokens, targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    sent = interface_bytes(INTERFACE) - sent
    bits = held_out_bits(model, corpus) if rank == 0 else math.nan
    dist.barrier()
    optimizer.close()
    dist.destroy_process_group()
    return bits, sent / steps


def _run(network: Network, rank: int, seed: int, steps: int, dtype: torch.dtype | None, results: Connection) -> None:
    found = train(network, rank, seed, steps, dtype)
    if rank == 0:
        results.send(found)


def train_on_hosts(seed: int, steps: int, dtype: torch.dtype | None) -> tuple[float, float]:
    """What :func:`train` returns on host 0."""
    ours, theirs = multiprocessing.Pipe()
    fork = multiprocessing.get_context("fork")
    with Network(HOSTS) as network:
        common = seed, steps, dtype, theirs
        ranks = [fork.Process(target=_run, args=(network, rank, *common)) for rank in range(HOSTS)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    return ours.recv()  # type: ignore[no-any-return]


def report(results: dict[str, list[tuple[float, float]]], steps: int) -> str:
    """The result as markdown."""
    lines = [
        f"### Gradients in bf16 between hosts beside fp32, {today()}",
        "",
        f"`{command(SCRIPT)}`",
        "",
        f"{machine()}. Held-out bits per byte of the demo model after {steps} steps, {len(results['fp32'])} seeds, "
        f"{HOSTS} hosts with one rank each.",
        "",
        "| gradients between hosts | mean | from seed to seed (standard deviation) | less fp32 from the same seed | "
        "sent per host and step, MB |",
        "| --- | ---: | ---: | --- | ---: |",
    ]
    for name, found in results.items():
        bits, sent = zip(*found, strict=True)
        differences = ", ".join(f"{a - b:+.4f}" for a, (b, _) in zip(bits, results["fp32"], strict=True))
        spread = statistics.stdev(bits) if len(bits) > 1 else math.nan
        cells = [
            name,
            f"{statistics.mean(bits):.4f}",
            f"{spread:.4f}",
            differences,
            f"{statistics.mean(sent) / 1e6:.2f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Train, print, and write if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--write", type=Path, nargs="?", const=RESULTS, metavar="FOLDER", help="write the result")
    arguments = parser.parse_args()
    results: dict[str, list[tuple[float, float]]] = {name: [] for name in DTYPES}
    try:
        for seed in range(arguments.seeds):
            for name, dtype in DTYPES.items():
                results[name].append(train_on_hosts(seed, arguments.steps, dtype))
                print(f"seed {seed}, {name}: {results[name][-1]}", file=sys.stderr, flush=True)
    except Unavailable as why:
        print(f"not measured: {why}", file=sys.stderr)
        return
    text = report(results, arguments.steps)
    print(text)
    if arguments.write:
        write_result(arguments.write, "hosts_convergence", text)


if __name__ == "__main__":
    main()
