"""Models sharded by ``fully_shard``, and what ranks do with them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import zero_opt

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FP32 = MixedPrecisionPolicy()
LRS = (0.03, 0.01, 0.002)
# torch's fused kernel steps what is left of a tensor after its last full vector, of 16 elements at most, with other
# bits. Rows of 48 leave nothing; nor do 96 elements over 1, 2 or 3 ranks.
WIDTH, HIDDEN = 48, 96


class Net(nn.Module):
    """Uneven shards (21 rows), empty ones (1 row), a block of its own, and, if ragged, parts of any size.

    ``head`` has the single row, ``scale`` is used in some steps only, ``idle`` is frozen.
    """

    def __init__(self, *, ragged: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 21, bias=ragged)
        self.down = nn.Linear(21, WIDTH, bias=False) if ragged else nn.Linear(HIDDEN, WIDTH, bias=False)
        self.mix = nn.Parameter(torch.empty(21, 21 if ragged else HIDDEN)) if ragged else None
        self.wide = None if ragged else nn.Linear(WIDTH, HIDDEN)
        self.scale = nn.Parameter(torch.empty(HIDDEN))
        self.idle = nn.Parameter(torch.empty(HIDDEN), requires_grad=False)
        self.head = nn.Linear(WIDTH, 1, bias=False)
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=generator) / 4)

    def forward(self, x: Tensor, scaled: bool = True) -> Tensor:
        """x is (batch, WIDTH)."""
        if self.wide is None:
            assert self.mix is not None
            hidden = torch.tanh(self.up(x)) @ self.mix
        else:
            hidden = torch.tanh(self.wide(x))
            if scaled:
                hidden = hidden * (self.scale + self.idle)
        out: Tensor = self.head(torch.tanh(self.down(hidden))) + self.up(x).square().mean()
        return out


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    """Make a mesh of shards, or of replicas by shards."""
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])


def sharded_net(
    mesh: DeviceMesh, policy: MixedPrecisionPolicy = FP32, *, ragged: bool = False, dtype: torch.dtype = torch.float32
) -> Net:
    """A new model, the same on every rank."""
    net = Net(ragged=ragged).to(dtype)
    for block in (net.down, net.up):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(net, mesh=mesh, mp_policy=policy)  # type: ignore[return-value]


def groups_of(net: Net) -> list[dict[str, Any]]:
    """Two groups, which differ."""
    blocks = {id(param) for param in (*net.up.parameters(), *net.down.parameters())}
    rest = [param for param in net.parameters() if id(param) not in blocks]
    return [
        {"params": [*net.up.parameters(), *net.down.parameters()], "weight_decay": 0.2},
        {"params": rest, "betas": (0.8, 0.95)},
    ]


def backward(net: Net, step: int, rank: int, *, size: Tensor | float = 1.0) -> None:
    """Gradients of this rank's data times ``size``; ``scale`` has none in every third step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(8, WIDTH, generator=generator).to(net.idle.dtype)
    (net(inputs, scaled=step % 3 != 1).square().mean() * size).backward()


def set_lr(optimizer: torch.optim.Optimizer, step: int) -> None:
    """Set a step's learning rate, as a scheduler does."""
    for group in optimizer.param_groups:
        group["lr"] = LRS[step % len(LRS)]


def locals_of(tensors: Iterable[Any]) -> list[Tensor]:
    """Copies of this rank's parts."""
    return [value.to_local().detach().clone() for value in tensors]


def local_state(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Copies of this rank's parts of all state, in the order of the parameters."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return [
        {
            key: value.to_local().clone() if hasattr(value, "to_local") else torch.as_tensor(value).clone()
            for key, value in optimizer.state.get(param, {}).items()
        }
        for param in params
    ]


def sharded_optimizer(net: Net, cls: Any = torch.optim.AdamW, **options: Any) -> zero_opt.ShardedOptimizer:
    """A sharded optimizer over both groups."""
    options = {"lr": 0.02, **({"fused": True} if cls is torch.optim.AdamW else {}), **options}
    return zero_opt.ShardedOptimizer(groups_of(net), cls, **options)
