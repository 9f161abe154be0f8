"""How well the demo model learns with gradients in bf16 between hosts, beside fp32.

    python docs/benchmarks/hosts_convergence.py [--write]

Two hosts with one rank each train it, with either kind of gradients on the same batches. Hosts are namespaces of this
machine (test/hosts/network.py): this needs root. bf16 is also judged by the bytes a host sends.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from support.convergence import Study, Trained, train_rank
from support.forked import forked
from support.machine import say
from support.ranks import interface_bytes

import zero_opt

# The root of the repository is in sys.path since support.forked was imported.
from test.hosts.network import INTERFACE, Network, Unavailable  # isort: skip

HOSTS = 2
DTYPES = {"fp32": None, "bf16": torch.bfloat16}


def _trained(rank: int, _: int, network: Network, dtype: torch.dtype | None, seed: int, steps: int) -> Trained:
    network.join(rank)
    address = f"tcp://{network.addresses[0]}:29500"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=HOSTS)
    sent = interface_bytes(INTERFACE)
    precision = zero_opt.MixedPrecision(between_hosts_dtype=dtype)
    bits = train_rank(seed, steps, torch.optim.AdamW, precision=precision)
    return Trained(bits, ((interface_bytes(INTERFACE) - sent) / steps / 1e6,))


def train(dtype: torch.dtype | None, seed: int, steps: int) -> Trained:
    """Train on hosts of their own."""
    with Network(HOSTS) as network:
        found: Trained = forked(_trained, HOSTS, network, dtype, seed, steps, backend=None)[0]
    return found


if __name__ == "__main__":
    title, who = "Gradients in bf16 between hosts beside fp32", f"{HOSTS} hosts with one rank each"
    study = Study("hosts_convergence", title, who, DTYPES, train, {"sent per host and step, MB": 2})
    try:
        study.main(__doc__)
    except Unavailable as why:
        say(f"not measured: {why}")
