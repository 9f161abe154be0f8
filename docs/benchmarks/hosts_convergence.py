"""How well the demo model learns with gradients in bf16 between hosts, beside fp32.

    python docs/benchmarks/hosts_convergence.py [--write]

Two hosts with one rank each train it, with either kind of gradients on the same batches. Hosts are namespaces of this
machine (test/hosts/network.py): this needs root. bf16 is also judged by the bytes a host sends.
"""

from __future__ import annotations

import multiprocessing
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from support.convergence import Study, Trained, train_rank
from support.ranks import interface_bytes

import zero_opt

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # before the standard library, which has a "test" too

from test.hosts.network import INTERFACE, Network, Unavailable

HOSTS = 2
DTYPES = {"fp32": None, "bf16": torch.bfloat16}


def _run(network: Network, rank: int, dtype: torch.dtype | None, seed: int, steps: int, results: Connection) -> None:
    network.join(rank)
    torch.set_num_threads(1)
    address = f"tcp://{network.addresses[0]}:29500"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=HOSTS)
    sent = interface_bytes(INTERFACE)
    precision = zero_opt.MixedPrecision(between_hosts_dtype=dtype)
    bits = train_rank(seed, steps, torch.optim.AdamW, precision=precision)
    sent = interface_bytes(INTERFACE) - sent
    if rank == 0:
        results.send(Trained(bits, (sent / steps / 1e6,)))
    dist.destroy_process_group()


def train(dtype: torch.dtype | None, seed: int, steps: int) -> Trained:
    """Train on hosts of their own."""
    ours, theirs = multiprocessing.Pipe()
    fork = multiprocessing.get_context("fork")
    with Network(HOSTS) as network:
        given = dtype, seed, steps, theirs
        ranks = [fork.Process(target=_run, args=(network, rank, *given)) for rank in range(HOSTS)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    return ours.recv()  # type: ignore[no-any-return]


if __name__ == "__main__":
    title, who = "Gradients in bf16 between hosts beside fp32", f"{HOSTS} hosts with one rank each"
    study = Study("hosts_convergence", title, who, DTYPES, train, {"sent per host and step, MB": 2})
    try:
        study.main(__doc__)
    except Unavailable as why:
        print(f"not measured: {why}", file=sys.stderr)
