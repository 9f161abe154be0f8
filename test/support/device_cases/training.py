"""A small model, and how a case trains it on one rank.

Every gradient is elementwise in the parameter: it has the same bits on every device, and shows which value of the
parameter the forward read. The last layer's gradient comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import zero_opt
from test.support.device_cases.places import Place, on_host
from test.support.scenario import BUCKET_MB, values

# With buckets of 2 KiB: two that a parameter has to itself, four more, odd sizes and padding.
ODD = ((130, 7), (65,), (), (300,), (64,), (3, 5, 7, 2), (1000,), (1,), (200,))
# Torch's fused kernels step what is left of a slice after its last full vector with other bits than ours.
EVEN = ((128, 8), (64,), (320,), (64, 3), (16,), (1024,), (256,), (128,))
MATRICES = ((33, 9), (40, 3), (7, 64), (12, 5), (16, 40))
# A quarter of the columns of any slice is a whole number of vectors.
COLUMNS = ((56, 16), (64,), (20, 16), (6, 2, 32), (16, 32), (16,), (8, 64))
STEPS = 4
FOR_LOOP: Mapping[str, Any] = {"lr": 0.02, "foreach": False}
FUSED: Mapping[str, Any] = {"lr": 0.02, "fused": True}


class Layer(nn.Module):
    """One parameter, whose forward adds a scalar to what it is given."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(value)

    def forward(self, total: Tensor, noise: Tensor) -> Tensor:
        """Return ``total`` plus a function of the weight; ``noise`` is most of its gradient."""
        term = self.weight * noise + self.weight * self.weight / 8
        if term.is_complex():
            term = torch.view_as_real(term)
        added: Tensor = total + term.float().sum()
        return added


@dataclass(frozen=True)
class Case:
    """What is trained, with which policies, by which program.

    Attributes:
        reduction: name of the policy; "DDP" is AlreadyReduced under DistributedDataParallel.
        arguments: of the optimizer class. options: further arguments of ShardedOptimizer.
        formats: of each parameter in turn: "rows", "columns" (transposed memory), "channels_last".
        program: called with a :class:`Rank`; what it returns must have the same bits on every device. ``None``:
            :func:`train`.
        backwards: per step; within ``no_sync`` all but the last, if :attr:`no_sync`.
        clip: max_norm of ``clip_grad_norm_`` between backward and step.
        late: the model for ``overlap_param_gather``.
        unused: whether some ranks use some parameters in some steps only, and no rank the one before the last.
        world_sizes, relayed, several_devices: where it runs.
        producers: of how many streams gradients come.
        fsdp: whether FSDP2 shards the parameters.
    """

    name: str
    reduction: str = "Overlapped"
    offload: Any = None
    cls: Any = torch.optim.AdamW
    arguments: Mapping[str, Any] = field(default_factory=lambda: FOR_LOOP)
    options: Mapping[str, Any] = field(default_factory=dict)
    shapes: tuple[tuple[int, ...], ...] = ODD
    dtype: torch.dtype = torch.float32
    formats: tuple[str, ...] = ("rows",)
    program: Callable[[Rank], Any] | None = None
    backwards: int = 1
    no_sync: bool = False
    clip: float | None = None
    late: bool = False
    unused: bool = True
    world_sizes: tuple[int, ...] = (1, 2)
    relayed: bool = True
    several_devices: bool = True
    producers: int = 0
    fsdp: bool = False

    @property
    def readable(self) -> bool:
        """Whether parameters may be read after ``step()`` without ``flush()``."""
        return not self.late and not getattr(self.offload, "delay", 0)

    def runs_at(self, place: Place) -> bool:
        """Return whether the case can run at a place."""
        return (self.relayed or place.direct) and (self.several_devices or len(place.devices) == 1)


class Rank:
    """One rank's model and optimizer for a case at a place.

    Attributes:
        inputs: the rank whose data this one has.
    """

    def __init__(self, case: Case, place: Place) -> None:
        self.case, self.place = case, place
        self.rank = self.inputs = place.rank
        self.world_size = place.world_size
        self.producers = place.streams(case.producers) if len(place.devices) == 1 else []
        self.make()

    def make(self) -> None:
        """Make the model and the optimizer anew."""
        self.layers = nn.ModuleList(Layer(self._value(index)) for index in range(len(self.case.shapes)))
        self.model: nn.Module = _Chain(self)
        if self.case.fsdp:
            mesh = DeviceMesh.from_group(self.place.group, self.place.devices[0].type)
            for module in (*self.layers, self.model):
                fully_shard(module, mesh=mesh)
        self.params = list(self.layers.parameters())
        self.optimizer = self._optimizer()

    def _value(self, index: int) -> Tensor:
        case = self.case
        value = values(91, 0, 0, index, case.shapes[index])
        if case.dtype.is_complex:
            value = torch.complex(value, values(92, 0, 0, index, case.shapes[index]))
        value = value.to(self.place.device(index), case.dtype, copy=True)
        layout = case.formats[index % len(case.formats)]
        if layout == "columns" and value.dim() > 1:
            return value.transpose(0, -1).contiguous().transpose(0, -1)
        return value.contiguous(memory_format=torch.channels_last) if layout == "channels_last" else value

    def _optimizer(self) -> zero_opt.ShardedOptimizer:
        case, sharded = self.case, self.case.reduction in ("DDP", "DDPHook") and self.world_size > 1
        groups = [{"params": self.params[:3]}, {"params": self.params[3:], "lr": 0.03}]
        options = {**case.options, **case.arguments}
        among = None if case.fsdp else self.place.mesh or self.place.group
        optimizer = zero_opt.ShardedOptimizer(
            groups, case.cls, among, reduction=self._reduction(), offload=case.offload, **options
        )
        if sharded:
            wrapped = DistributedDataParallel(
                self.model, process_group=self.place.group, bucket_cap_mb=0.004, find_unused_parameters=case.unused
            )
            if case.reduction == "DDPHook":
                wrapped.register_comm_hook(optimizer, zero_opt.ddp_hook)
            self.model = wrapped
        return optimizer

    def _reduction(self) -> Any:
        kind = "AlreadyReduced" if self.case.reduction == "DDP" else self.case.reduction
        options: dict[str, Any] = {"exchange": self.place.exchange}
        if self.case.late:
            options["overlap_param_gather"] = self.model
        if kind != "AlreadyReduced":
            options["bucket_mb"] = BUCKET_MB
        return getattr(zero_opt, kind)(**options)

    def used(self, step: int, turn: int) -> list[int]:
        """Return the parameters that this rank's backward uses."""
        everything = range(len(self.params))
        if not self.case.unused:
            return list(everything)
        never = len(self.params) - 2
        return [i for i in everything if i != never and (i == 0 or (step + turn + i + 2 * self.inputs) % 4)]

    def noise(self, index: int, step: int, turn: int) -> Tensor:
        """Return most of a gradient, on the parameter's device."""
        shape = self.case.shapes[index]
        noise = values(step, turn, self.inputs, index, shape)
        if self.case.dtype.is_complex:
            noise = torch.complex(noise, values(step + 50, turn, self.inputs, index, shape))
        return noise.to(self.params[index].dtype).to(self.place.device(index))

    def loss(self, step: int, turn: int = 0) -> Tensor:
        """Return the loss of one forward."""
        loss: Tensor = self.model(step, turn)
        return loss

    def backward(self, step: int) -> None:
        """Run a step's backwards."""
        for turn in range(self.case.backwards):
            if self.case.no_sync and turn + 1 < self.case.backwards:
                wrapped = isinstance(self.model, DistributedDataParallel)
                with self.model.no_sync() if wrapped else self.optimizer.no_sync():  # type: ignore[operator]
                    self.loss(step, turn).backward()
            else:
                self.loss(step, turn).backward()
        if self.case.reduction == "AlreadyReduced":
            self.reduce_by_hand()

    def reduce_by_hand(self) -> None:
        """Put the mean over ranks into ``p.grad``, as DDP does."""
        for param in self.params:
            if self.case.unused and self.world_size > 1 and param.grad is None:
                param.grad = torch.zeros_like(param)
            if param.grad is not None:
                self.place.all_reduce_mean(_real(param.grad))

    def step(self, step: int) -> Any:
        """Train one step; return the parameters after it, where they may be read."""
        self.backward(step)
        if self.case.clip is not None:
            self.optimizer.clip_grad_norm_(self.case.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self.snapshot() if self.case.readable else None

    def snapshot(self) -> list[Tensor]:
        """Copy all parameters; the host does not wait."""
        return [_own_part(param).clone() for param in self.params]

    def restore(self, values: Sequence[Tensor]) -> None:
        """Write the values of a snapshot to the parameters."""
        with torch.no_grad():
            for param, value in zip(self.params, values, strict=True):
                _own_part(param).copy_(value)

    def end(self) -> Any:
        """Return the parameters and, on rank 0, the state, all in host memory; close the optimizer."""
        self.optimizer.flush()
        self.optimizer.consolidate_state_dict(to=0)
        state = self.optimizer.state_dict() if self.rank == 0 else None
        ended = on_host([self.snapshot(), state])
        self.optimizer.close()
        return ended


class _Chain(nn.Module):
    """All layers of a rank, one after the other on each device, on the streams of the case."""

    def __init__(self, rank: Rank) -> None:
        super().__init__()
        self.layers = rank.layers
        self._run = [rank]  # in a list, so that it is no submodule's business

    def forward(self, step: int, turn: int) -> Tensor:
        """Return the loss."""
        run = self._run[0]
        if run.producers:
            return self._on_streams(run, step, turn)
        totals = [torch.zeros((), device=device) for device in run.place.devices]
        for index in run.used(step, turn):
            at = index % len(totals)
            totals[at] = self.layers[index](totals[at], run.noise(index, step, turn))
        return torch.stack([total.to(totals[0].device) for total in totals]).sum()

    def _on_streams(self, run: Rank, step: int, turn: int) -> Tensor:
        """Run the layers of one device in turn on streams of their own, each ordered after the one before."""
        main = torch.accelerator.current_stream(run.place.devices[0])
        before, total = main, torch.zeros((), device=run.place.devices[0])
        for index in run.used(step, turn):
            stream = run.producers[index % len(run.producers)]
            stream.wait_stream(before)
            with stream:
                total.record_stream(stream)
                total = self.layers[index](total, run.noise(index, step, turn))
            before = stream
        main.wait_stream(before)
        total.record_stream(main)
        return total


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _own_part(param: Tensor) -> Tensor:
    part: Tensor = param.detach()
    return part.to_local() if isinstance(part, DTensor) else part


def train(rank: Rank) -> Any:
    """Train a few steps."""
    seen = [rank.step(step) for step in range(STEPS)]
    return [on_host(seen), rank.end()]


def run(case: Case, place: Place) -> Any:
    """Run a case at a place; return what must have the same bits everywhere."""
    with place.training():
        return (case.program or train)(Rank(case, place))


def differs(case: Case, **changes: Any) -> Case:
    """Return a case with some fields replaced."""
    return replace(case, **changes)
