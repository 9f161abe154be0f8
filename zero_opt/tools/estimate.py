"""How much memory an optimizer will take on a rank, before there is one."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..comm.groups import checked_rank
from ..errors import ConfigError, ConfigTypeError, UnsupportedOptimizer, quoted
from ..field_checks import check_choice, check_dtype, check_integer, plain_number
from ..layout import ALIGN
from ..optimizer.arguments import adopt_errors, template_of
from ..optimizer.config import Config
from ..placement import Offload
from ..policies import AdamState, Checks, MixedPrecision, Overlapped
from ..reduction import ReductionPolicy, bucket_mb_of
from ..sharding.param_groups import hypers_of, normalized, params_of
from ..sharding.wrapped_class import is_elementwise, needs_closure
from ..system.devices import HOST, is_meta
from .dry_run import sketch_of
from .memory_rows import Row, Sizing, steps_alone

# A bucket takes a tenth of a millisecond.
_MOST_BUCKETS = 1 << 18
# The default: as many as hosts of a cluster usually have accelerators.
MOST_RANKS_PER_HOST = 8
# A rank takes some milliseconds.
_MOST_RANKS = 1 << 16
# With 16 bytes of each, all that 57 bits of addresses reach.
_MOST_NUMEL = 1 << 53

PLACES = ("device", "host", "nvme")
_SIZES = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
KINDS = ("params", "grads", "grad_shards", "staging", "state", "masters", "buffers", "communicator")


@dataclass(frozen=True)
class Estimate:
    """Bytes on one rank; ``print`` shows them as a table.

    Attributes:
        title: what was estimated. rank: of ``world_size``; the one that needs most, unless asked otherwise.
        ranks_per_host: how many of the ranks share a host: all, up to 8, unless asked otherwise.
        rows: everything that is held between two steps, and gradients. Not what a step takes for its own time, as a
            class without a fused kernel does, nor activations, nor what torch and drivers take for themselves.
    """

    title: str
    rank: int
    world_size: int
    ranks_per_host: int
    rows: tuple[Row, ...]
    _sizing: Sizing = field(repr=False, compare=False)

    def on_rank(self, rank: int) -> Estimate:
        """The estimate for another rank.

        Args:
            rank: its number, from 0.

        Raises:
            ConfigError, ConfigTypeError: there is no such rank.
        """
        rank = checked_rank(rank, self.world_size, "rank")
        return replace(self, rank=rank, rows=self._sizing.rows(rank))

    def on_hosts_of(self, ranks: int) -> Estimate:
        """Return the estimate for hosts that have ``ranks`` ranks each.

        Ranks share their host's cores and, if all are on one host, memory to exchange through.

        Args:
            ranks: the number of ranks on each host; of more than there are, all share one host.

        Raises:
            ConfigError, ConfigTypeError: ``ranks`` is not a positive integer.
        """
        ranks = plain_number(ranks)
        check_integer("ranks_per_host", ranks, most=_MOST_RANKS)
        return self._of(replace(self._sizing, ranks_per_host=min(ranks, self.world_size), stages=1))

    def on_mesh_of(self, ranks: int) -> Estimate:
        """Return the estimate for a mesh of two dimensions as the process group: hosts, and ``ranks`` ranks of each.

        Collectives of accelerators then go in two stages.

        Args:
            ranks: the number of ranks on each host, which divides ``world_size``.

        Raises:
            ConfigError, ConfigTypeError: ``ranks`` is not a positive integer, or does not divide ``world_size``.
        """
        there, ranks = self.on_hosts_of(ranks), plain_number(ranks)
        if self.world_size % ranks:
            raise ConfigError(f"no mesh has {self.world_size} ranks, {ranks} to a host; pass a divisor")
        return self._of(replace(there._sizing, stages=2 if 1 < ranks < self.world_size else 1))

    def _of(self, sizing: Sizing) -> Estimate:
        """Return the estimate for other hosts."""
        return replace(self, ranks_per_host=sizing.ranks_per_host, rows=sizing.rows(self.rank), _sizing=sizing)

    def nbytes(self, kind: str | None = None, where: str | None = None) -> int:
        """Bytes of one kind, or in one place, or both; of all without either.

        Args:
            kind: ``"params"``, ``"grads"``, ``"grad_shards"``, ``"staging"``, ``"state"``, ``"masters"``,
                ``"buffers"`` or ``"communicator"``.
            where: ``"device"``, which is where the parameters are, ``"host"`` or ``"nvme"``.

        Raises:
            ConfigError: there is no such kind or place.
        """
        check_choice("kind", kind, (None, *KINDS))
        check_choice("where", where, (None, *PLACES))
        return sum(row.nbytes for row in self.rows if kind in (None, row.kind) and where in (None, row.where))

    @property
    def device_bytes(self) -> int:
        """Bytes where the parameters are; that is host memory too, if they are on the CPU."""
        return self.nbytes(where="device")

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that an offload takes."""
        return self.nbytes(where="host")

    @property
    def nvme_bytes(self) -> int:
        """Bytes of files."""
        return self.nbytes(where="nvme")

    def __str__(self) -> str:
        """A table by name and place, in KiB, MiB or GiB, whichever suits the total."""
        cells: dict[tuple[str, str], Counter[str]] = {}
        for row in sorted(self.rows, key=lambda row: KINDS.index(row.kind)):
            cells.setdefault((row.kind, row.name), Counter())[row.where] += row.nbytes
        hosts = f", {self.ranks_per_host} to a host" if self.ranks_per_host < self.world_size else ""
        totals = [self.nbytes(where=place) for place in PLACES]
        unit, size = next((unit for unit in _SIZES if max(totals) >= 10 * unit[1]), _SIZES[-1])
        lines = [self.title, f"rank {self.rank} of {self.world_size}{hosts}, in {unit}"]
        lines.append(_line("", "", PLACES))
        cells["total", ""] = Counter(dict(zip(PLACES, totals, strict=True)))
        for (kind, name), nbytes in cells.items():
            sizes = [f"{nbytes[place] / size:,.2f}" if nbytes[place] else "-" for place in PLACES]
            lines.append(_line(kind, name, sizes))
        return "\n".join(lines)


def _line(kind: str, name: str, cells: Iterable[str]) -> str:
    return f"{kind:<12} {name:<22}" + "".join(f"{cell:>14}" for cell in cells)


def estimate(
    model_or_numel: Any,
    world_size: int,
    optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
    *,
    reduction: ReductionPolicy = Overlapped(),  # noqa: B008  (frozen)
    offload: Offload = None,
    precision: MixedPrecision = MixedPrecision(),  # noqa: B008  (frozen)
    param_dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    **defaults: Any,
) -> Estimate:
    """Bytes per rank that ``ShardedOptimizer`` and what it works on will hold, by kind and place.

    Parameters are planned as the optimizer plans them, with padding; state is what the class makes of stand-ins.
    Nothing as large as a model is allocated, and no process group is needed. Accelerators are taken to use their own
    collectives, and up to 8 ranks to share a host; see :meth:`Estimate.on_hosts_of` and :meth:`Estimate.on_mesh_of`.
    One backward per step is reduced; where there are more, gloo messages take up to 50 MiB more staging.

    Args:
        model_or_numel: a module, parameters or param groups, which may be on the meta device; or a number of elements,
            in parameters as large as a bucket, of an elementwise class. For DTensors pass one rank's number, and 1.
        world_size: number of ranks.
        optimizer_class, reduction, offload, precision: as for ``ShardedOptimizer``.
        param_dtype: of floating-point parameters, once cast; ``None``: they stay, a number has torch's default dtype.
        device: where parameters will be; ``None``: they stay, and a number, or those on the meta device, will be on
            this machine's accelerator if it has one, else on the CPU.
        **defaults: as for ``ShardedOptimizer``, with ``state=`` of CPUAdam and CPUAdamW.

    Returns:
        The bytes of the rank that needs most; :meth:`Estimate.on_rank` has another one's.

    Raises:
        ConfigError, ConfigTypeError, ConfigConflict, UnsupportedOptimizer, UnsupportedParam: as ``ShardedOptimizer``
            does, or because of the arguments that are only here.
    """
    config = Config(optimizer_class, defaults, reduction, offload, precision, None, Checks())
    model_or_numel, world_size = plain_number(model_or_numel), plain_number(world_size)
    check_integer("world_size", world_size, most=_MOST_RANKS)
    check_dtype("param_dtype", param_dtype)
    target = _Target(param_dtype, None if device is None else checked_device(device))
    with adopt_errors():
        if isinstance(model_or_numel, (int, float)):
            groups = target.of_number(model_or_numel, config)
        else:
            groups = target.groups(model_or_numel)
        sizing = _sizing(groups, target, world_size, config)
    rank = sizing.fullest_rank()
    return Estimate(_title(sizing), rank, world_size, sizing.ranks_per_host, sizing.rows(rank), sizing)


def _sizing(groups: list[dict[str, Any]], target: _Target, world_size: int, config: Config) -> Sizing:
    """The plan's input: sketches of all parameters, and param groups as the class completes them."""
    listed = [(number, param) for number, group in enumerate(groups) for param in group["params"]]
    names = [f"parameter {index}" for index in range(len(listed))]
    sketches = {
        index: sketch_of(param, number, target.device_of(param), names[index])
        for index, (number, param) in enumerate(listed)
    }
    left = iter(sketches.values())
    stand_ins = [{**group, "params": [next(left).flat.param for _ in group["params"]]} for group in groups]
    cls, defaults = config.optimizer_class, config.defaults
    sharded = not steps_alone(world_size, config)
    made = template_of(cls, stand_ins, defaults) if sharded else cls(stand_ins, **defaults)
    hypers = [hypers_of(group) for group in made.param_groups]
    placed: list[dict[str, Any]] = [{**group, "params": []} for group in hypers]
    for sketch in sketches.values():
        placed[sketch.group]["params"].append(sketch)
    config.placement.check(placed, names.__getitem__)
    trainable = [index for index, sketch in sketches.items() if sketch.requires_grad]
    return Sizing(sketches, trainable, hypers, world_size, min(MOST_RANKS_PER_HOST, world_size), config)


def _title(sizing: Sizing) -> str:
    params = [sketch.flat.param for sketch in sizing.sketches.values()]
    dtypes = sorted({str(param.dtype).removeprefix("torch.") for param in params})
    devices = sorted({sketch.device.type for sketch in sizing.sketches.values()})
    config = sizing.config
    offload = "no offload" if config.offload is None else repr(config.offload)
    form = config.placement.inputs.form
    state = f"; {form!r}" if config.placement.inputs.is_native_class and form != AdamState() else ""
    return (
        f"{config.optimizer_class.__name__}, {sum(p.numel() for p in params):,} elements of {', '.join(dtypes)} "
        f"on {', '.join(devices)}; {offload}; {config.reduction!r}; {config.precision!r}{state}"
    )


def check_numel(numel: float) -> None:
    """Raise ConfigError for a number of elements that is not positive, or that no machine addresses."""
    if not numel >= 1:
        raise ConfigError(f"the number of elements must be positive, got {quoted(numel)}")
    if numel > _MOST_NUMEL:
        raise ConfigError(f"the number of elements must be at most {_MOST_NUMEL:.2g}, got {quoted(numel)}")


def checked_device(device: Any) -> torch.device:
    """Return the type of device that parameters will be on, without an index.

    Raises:
        ConfigError: torch knows no such device, or it has no memory.
    """
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device must be a torch device such as 'cuda' or 'cpu', got {quoted(device)}") from error
    if is_meta(parsed):
        raise ConfigError("device must be where parameters will be, such as 'cuda' or 'cpu', not 'meta'")
    return torch.device(parsed.type)


def _or_register(cls: type[torch.optim.Optimizer]) -> str:
    known = cls.__module__.startswith("torch.optim")  # not to be elementwise
    return "" if known else ", or register_elementwise() the class if it is elementwise"


class _Target(NamedTuple):
    """What parameters will be, where it is not what they are."""

    dtype: torch.dtype | None
    device: torch.device | None

    def groups(self, params: Any) -> list[dict[str, Any]]:
        """Param groups, each parameter in the dtype it will have."""
        if isinstance(params, (str, bytes)) or (not hasattr(params, "__iter__") and not isinstance(params, nn.Module)):
            raise ConfigTypeError(f"the model must be a module, its parameters or their number, got {params!r}")
        entries = normalized(params.parameters() if isinstance(params, nn.Module) else params)
        listed = entries if isinstance(entries[0], Mapping) else [{"params": entries}]
        return [{**group, "params": list(map(self._as, params_of([group])))} for group in listed]

    def _as(self, param: Tensor) -> Tensor:
        if self.dtype in (None, param.dtype) or not param.is_floating_point() or param.layout is not torch.strided:
            return param
        cast = torch.empty_strided(param.shape, param.stride(), dtype=self.dtype, device="meta")
        return cast.requires_grad_(param.requires_grad)

    def of_number(self, numel: float, config: Config) -> list[dict[str, Any]]:
        """A param group of so many elements, in parameters that fill a bucket each."""
        cls = config.optimizer_class
        if needs_closure(cls):
            raise UnsupportedOptimizer(
                f"{cls.__name__} evaluates the loss several times per step: it works at world size 1 alone, without an "
                "offload or masters, and what it keeps depends on shapes; pass the model, on meta if it is large"
            )
        if not is_elementwise(cls):
            raise ConfigError(
                f"what {cls.__name__} keeps may depend on shapes, which a number has none of; call zero_opt.estimate() "
                f"with the model, on the meta device if it is large{_or_register(cls)}"
            )
        if isinstance(numel, bool) or not 1 <= numel <= sys.float_info.max or numel != int(numel):
            raise ConfigError(f"a number of parameters must be a whole number, at least 1, got {quoted(numel)}")
        check_numel(numel)
        dtype = self.dtype or torch.get_default_dtype()
        bucket_mb = bucket_mb_of(config.reduction, between_hosts=False)
        each = max(int(bucket_mb * 2**20) // (dtype.itemsize * ALIGN) * ALIGN, ALIGN)
        if numel > each * _MOST_BUCKETS:
            raise ConfigError(
                f"{numel:g} elements are more than {_MOST_BUCKETS:,} buckets of {bucket_mb:g} MB and "
                "would take minutes to plan; raise bucket_mb, or pass the model on the meta device"
            )
        counts = [min(each, int(numel) - start) for start in range(0, int(numel), each)]
        params = [torch.empty(count, dtype=dtype, device="meta").requires_grad_() for count in counts]
        return [{"params": params}]

    def device_of(self, param: Tensor) -> torch.device:
        """Where a parameter will be."""
        if self.device is not None:
            return self.device
        if not is_meta(param.device):
            return param.device
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return HOST if accelerator is None else torch.device(accelerator.type)
