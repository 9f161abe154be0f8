"""``python -m zero_opt plan``: which offload and which form of state fit a machine, and which to prefer.

[Note: what a step costs]
A step reads and writes its state once, so it takes about twice the bytes of the state by the bandwidth of where
they lie, which the ranks of a host share but for their devices. Gradients and updated parameters cross the link of the
device. Of what runs behind backward a tenth counts, as backward is not always long enough. The bandwidths are those of
a usual server; only the order of the choices is meant to be right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..errors import ConfigConflict, ConfigError, UnsupportedOptimizer
from ..field_checks import check_integer
from ..kernels import CPUAdam, CPUAdamW, CPULion
from ..kernels.table import NATIVE_CLASSES
from ..placement import Offload
from ..policies import AdamState, CPUOffload, MixedPrecision, NVMeOffload, WorkerOffload
from ..system.devices import is_host
from .drawing import file_pyplot
from .estimate import PLACES, check_numel, checked_device, estimate

_GB_PER_S = {"device": 1500.0, "host": 100.0, "nvme": 3.0}
_LINK_GB_PER_S = 25.0
_WHERE = {"device": "on the device", "host": "in host memory", "nvme": "on the disk"}
# Memory grows evenly with the elements of a rank from here on; larger numbers are read off two smaller ones.
_FEW, _MORE = 400_000_000, 800_000_000
# Of more ranks each has what it would have of fewer, of a smaller model, but for the parameters.
_RANKS = 8


@dataclass(frozen=True)
class Machines:
    """What the ranks have.

    Attributes:
        device: type of device that parameters are on. world_size: number of ranks, each with a device of its own.
        ranks_per_host: how many share the memory and the disk of a host.
        device_nbytes: memory of a device; none of its own on the CPU. host_nbytes, disk_nbytes: of a host.
    """

    device: str
    world_size: int
    ranks_per_host: int
    device_nbytes: float
    host_nbytes: float
    disk_nbytes: float

    def __post_init__(self) -> None:
        checked_device(self.device)
        check_integer("world_size", self.world_size)
        check_integer("ranks_per_host", self.ranks_per_host)
        if self.ranks_per_host > self.world_size:
            raise ConfigError(f"{self.ranks_per_host} ranks per host are more than all {self.world_size}")

    @property
    def on_host(self) -> bool:
        """Whether parameters are in host memory."""
        return is_host(torch.device(self.device))

    def room(self, place: str) -> float:
        """Bytes in a place for each rank."""
        if place == "device":
            return 0.0 if self.on_host else self.device_nbytes
        return (self.host_nbytes if place == "host" else self.disk_nbytes) / self.ranks_per_host


class _Placed(NamedTuple):
    name: str
    offload: Offload = None
    code: str = ""  # in place of the name
    exposed: float = 1.0  # how much of the step is not hidden behind backward, or what follows
    late: bool = False


class _Form(NamedTuple):
    """What is kept of a parameter: by which class, with which of its arguments, and how moments are stored."""

    optimizer: type[torch.optim.Optimizer]
    defaults: Mapping[str, Any]
    moments: str = "float32"

    @property
    def native(self) -> bool:
        """Whether the class steps on the CPU alone."""
        return self.optimizer in NATIVE_CLASSES

    @property
    def says(self) -> str:
        """The form in words, and whether the result is torch's."""
        return _FORMS_SAY[self.moments] + ("" if self.native else ", torch's bits")


_PLACED = (
    _Placed("none"),
    _Placed("WorkerOffload(speculate=True)", WorkerOffload(speculate=True), exposed=0.1),
    _Placed("WorkerOffload()", WorkerOffload()),
    _Placed("CPUOffload()", CPUOffload()),
    _Placed("NVMeOffload(...)", NVMeOffload("."), 'NVMeOffload("/a/directory")'),
    _Placed(
        "WorkerOffload(delay=1)",
        WorkerOffload(delay=1, prediction=1.0),
        "WorkerOffload(delay=1, warmup_steps=warmup, prediction=1.0)",
        exposed=0.0,
        late=True,
    ),
)
_TIMES = (
    "Times are those of step() alone: FSDP2's gathers come besides, and speculate and delay hide the step only if\n"
    "forward and backward take at least as long."
)
_FORMS_SAY = {"float32": "fp32 state", "bfloat16": "bf16 moments", "block8": "8-bit moments"}
# Classes with the same update that keep compact moments.
_COMPACT: Mapping[type[torch.optim.Optimizer], type[torch.optim.Optimizer]] = {
    torch.optim.AdamW: CPUAdamW,
    torch.optim.Adam: CPUAdam,
}
# What can be planned: every offload steps them.
PLANNED = (*_COMPACT, torch.optim.SGD, torch.optim.Adagrad, CPULion)


@dataclass(frozen=True)
class Choice:
    """One way to train, with what a rank holds.

    Attributes:
        code: the line to write. says: how the result differs from that of the class with fp32 state.
        offload: its name. params: whether every rank has all parameters, or FSDP2 shards them.
        nbytes: bytes on one rank, by place (``device``, ``host``, ``nvme``) and kind. On the CPU all is ``host``.
        exposed_s: about how long ``step()`` takes, for comparison; see the module.
        lacks: bytes that are missing, by place; empty if it fits.
        left: bytes left where the parameters are, for what is not counted: activations, say.
    """

    code: str
    says: str
    offload: str
    params: str
    nbytes: Mapping[str, Mapping[str, int]]
    exposed_s: float
    lacks: Mapping[str, int]
    left: int

    def total(self, place: str) -> int:
        """Bytes on one rank in one place."""
        return sum(self.nbytes[place].values())


def plan(
    numel: float,
    machines: Machines,
    optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
    **defaults: Any,
) -> list[Choice]:
    """Return every choice for a model of ``numel`` elements that runs in bf16, those that fit and are best first.

    Choices with torch's bits come first, then compact state, then late updates; each by how long ``step()`` takes.
    Activations, what frameworks take for themselves and, under FSDP2, gathered layers are not counted: they need what
    is left.

    Args:
        optimizer_class: one of ``PLANNED``. defaults: its own arguments, such as ``momentum=0.9``.

    Raises:
        ConfigError: ``numel`` is not positive, or more than any machine addresses.
        ConfigConflict: ``fused`` or ``foreach`` is given, of which each offload has its own.
        UnsupportedOptimizer: the class is none of ``PLANNED``.
    """
    check_numel(numel)
    if chosen := sorted(defaults.keys() & {"fused", "foreach"}):
        raise ConfigConflict(f"plan compares offloads, which step as fused=True does; leave out {', '.join(chosen)}")
    found = list(_choices(numel, machines, _forms(optimizer_class, defaults)))
    order = {id(choice): turn for turn, (_, choice) in enumerate(sorted(found, key=_preference))}
    return sorted((choice for _, choice in found), key=lambda choice: order[id(choice)])


def _preference(entry: tuple[tuple[int, ...], Choice]) -> tuple[Any, ...]:
    worth, choice = entry
    return bool(choice.lacks), worth, sum(choice.lacks.values()), choice.exposed_s


def _forms(optimizer_class: type[torch.optim.Optimizer], defaults: Mapping[str, Any]) -> list[_Form]:
    """Return the forms that the state of a class may have, the most exact first."""
    if optimizer_class not in PLANNED:
        names = ", ".join(cls.__name__ for cls in PLANNED)
        raise UnsupportedOptimizer(
            f"plan takes {names}, which every offload steps, not {optimizer_class.__name__}; "
            "zero_opt.estimate() with the model takes other classes"
        )
    compact = _COMPACT.get(optimizer_class)
    found = [_Form(optimizer_class, defaults)]
    return found + [_Form(compact, defaults, moments) for moments in ("bfloat16", "block8") if compact is not None]


def _choices(numel: float, machines: Machines, forms: Sequence[_Form]) -> Iterator[tuple[tuple[int, ...], Choice]]:
    for placed in _PLACED:
        for turn, form in enumerate(forms):
            if placed.offload is None and form.native and not machines.on_host:
                continue  # stepped on the CPU
            if isinstance(placed.offload, CPUOffload) and machines.on_host:
                continue  # the same as none
            for fsdp in (False, True) if machines.world_size > 1 and not machines.on_host else (False,):
                yield (int(placed.late), turn), _choice(numel, machines, placed, form, fsdp=fsdp)


def _choice(numel: float, machines: Machines, placed: _Placed, form: _Form, *, fsdp: bool) -> Choice:
    nbytes = _held(numel, machines, placed, form, fsdp=fsdp)
    left = {place: machines.room(place) - sum(nbytes[place].values()) for place in PLACES}
    lacks = {place: round(-room) for place, room in left.items() if room < 0}
    says = form.says if not placed.late else f"{form.says}, each update one step late"
    code, params = _code(machines, placed, form, fsdp=fsdp), "FSDP2" if fsdp else "on every rank"
    exposed_s = _exposed_s(nbytes, machines, placed)
    unused = max(round(left["host" if machines.on_host else "device"]), 0)
    return Choice(code, says, placed.name, params, nbytes, exposed_s, lacks, unused)


def _code(machines: Machines, placed: _Placed, form: _Form, *, fsdp: bool) -> str:
    own = _arguments(machines, placed, form, fsdp=fsdp)
    arguments = [
        "model.parameters()",
        f"{'zero_opt' if form.native else 'torch.optim'}.{form.optimizer.__name__}",
        *([] if "lr" in own else ["lr=lr"]),
        *(f"{name}={_written(value)}" for name, value in own.items()),
        *([f"offload=zero_opt.{placed.code or placed.name}"] if placed.offload else []),
    ]
    line = f"opt = zero_opt.ShardedOptimizer({', '.join(arguments)})"
    wrap = "fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)); "
    return wrap + line if fsdp else line


def _arguments(machines: Machines, placed: _Placed, form: _Form, *, fsdp: bool) -> dict[str, Any]:
    """Return what the optimizer is given besides parameters, class, ``lr`` and offload.

    bf16 parameters have fp32 masters (an offload makes them by itself). With compact moments the master is split.
    """
    if not form.native:
        masters = {} if fsdp or placed.offload else {"precision": MixedPrecision(torch.float32)}
        steps_on_device = placed.offload is None and not machines.on_host
        # torch's fused Adagrad runs on the CPU alone.
        fused = {} if steps_on_device and form.optimizer is torch.optim.Adagrad else {"fused": True}
        return {**fused, **form.defaults, **masters}
    if fsdp:  # where parameters are fp32
        master = None
    elif form.moments != "float32":
        master = "split"
    else:
        master = None if placed.offload else "float32"
    state = AdamState(form.moments, master)
    return {**form.defaults, **({} if state == AdamState() else {"state": state})}


def _written(value: object) -> str:
    """Return an argument as code."""
    if isinstance(value, MixedPrecision):
        return f"zero_opt.MixedPrecision({value.master_dtype})"
    return f"zero_opt.{value!r}" if isinstance(value, AdamState) else repr(value)


def _held(numel: float, machines: Machines, placed: _Placed, form: _Form, *, fsdp: bool) -> dict[str, Counter[str]]:
    """Bytes on one rank by place and kind."""
    ranks = 1 if fsdp else min(machines.world_size, _RANKS)
    each, few, more = max(round(numel * ranks / machines.world_size), 1), _FEW * ranks, _MORE * ranks
    if each <= more:
        found = _estimated(each, ranks, machines, placed, form, fsdp=fsdp)
    else:
        start, end = (_estimated(count, ranks, machines, placed, form, fsdp=fsdp) for count in (few, more))
        share = (each - few) / (more - few)
        found = {place: Counter(start[place]) for place in PLACES}
        for place, kinds in end.items():
            for kind, nbytes in kinds.items():
                found[place][kind] += round(share * (nbytes - start[place][kind]))
    if not fsdp:
        place = "host" if machines.on_host else "device"
        found[place]["params"] = round(numel * torch.bfloat16.itemsize)
    return found


def _estimated(
    numel: float, ranks: int, machines: Machines, placed: _Placed, form: _Form, *, fsdp: bool
) -> dict[str, Counter[str]]:
    found = estimate(
        numel,
        ranks,
        form.optimizer,
        offload=placed.offload,
        param_dtype=torch.float32 if fsdp else torch.bfloat16,
        device=machines.device,
        **_arguments(machines, placed, form, fsdp=fsdp),
    )
    if found.ranks_per_host != min(machines.ranks_per_host, ranks):
        found = found.on_hosts_of(machines.ranks_per_host)
    nbytes: dict[str, Counter[str]] = {place: Counter() for place in PLACES}
    for row in found.rows:
        place = "host" if machines.on_host and row.where == "device" else row.where
        nbytes[place][row.kind] += row.nbytes
    return nbytes


def _exposed_s(nbytes: Mapping[str, Mapping[str, int]], machines: Machines, placed: _Placed) -> float:
    """See [Note: what a step costs]."""
    seconds = 0.0
    for place in PLACES:
        state = sum(nbytes[place].get(kind, 0) for kind in ("state", "masters"))
        shared = 1 if place == "device" else machines.ranks_per_host
        seconds += placed.exposed * 2 * state * shared / _GB_PER_S[place] / 1e9
    if placed.offload is not None and not machines.on_host and not placed.late:
        ways = 2 if placed.exposed == 1.0 else 1  # gradients leave behind backward
        seconds += ways * nbytes["device"].get("grad_shards", 0) / _LINK_GB_PER_S / 1e9
    return seconds


def as_table(choices: Sequence[Choice], machines: Machines) -> str:
    """The choices as text: a table, with what those that do not fit lack, and the line of code of those that do."""
    places = [place for place in PLACES if place != "device" or not machines.on_host]
    rooms = [f"{place}/{machines.room(place) / 1e9:,.1f}" for place in places]
    rows = [("", "result", "offload", "parameters", "step, ms", *rooms, "left")]
    for number, choice in enumerate(choices, 1):
        sizes = [_gb(choice.total(place)) + "!" * (place in choice.lacks) for place in places]
        name = f"{number}." if not choice.lacks else "-"
        step_ms = f"{1e3 * choice.exposed_s:,.0f}"
        rows.append((name, choice.says, choice.offload, choice.params, step_ms, *sizes, _gb(choice.left)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["GB on one rank, of what it has; activations need what is left. Best first; ! is too much.", ""]
    for name, says, offload, params, *numbers in rows:
        words = zip((name, says, offload, params), widths, strict=False)
        aligned = [word.ljust(width) for word, width in words]
        aligned += [number.rjust(width) for number, width in zip(numbers, widths[4:], strict=True)]
        lines.append("  ".join(aligned).rstrip())
    fitting = [choice for choice in choices if not choice.lacks]
    lines += ["", _TIMES, ""]
    if any(choice.params == "FSDP2" for choice in fitting):
        lines.append("from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard")
    lines += [f"{number}. {choice.code}" for number, choice in enumerate(fitting, 1)]
    return "\n".join(lines if fitting else [*lines, _nearest(choices)])


def _nearest(choices: Sequence[Choice]) -> str:
    """Name the choice that lacks the least memory, and where."""
    choice = min(choices, key=lambda choice: sum(choice.lacks.values()))
    missing = " and ".join(f"{nbytes / 1e9:,.2f} GB {_WHERE[place]}" for place, nbytes in choice.lacks.items())
    return (
        f"Nothing fits. The closest is offload {choice.offload} ({choice.says}, parameters {choice.params}), which "
        f"lacks {missing}. Add ranks or memory, or use a smaller model."
    )


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:,.1f}" if nbytes >= 5e7 else "-"


def as_json(choices: Sequence[Choice]) -> list[dict[str, Any]]:
    """The choices as JSON values, in the same order."""
    return [
        {
            **vars(choice),
            "nbytes": {place: dict(held) for place, held in choice.nbytes.items()},
            "fits": not choice.lacks,
        }
        for choice in choices
    ]


def as_picture(choices: Sequence[Choice], machines: Machines, path: str) -> None:
    """Draw what a rank holds, by kind, as stacked bars next to the room that there is.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    pyplot = file_pyplot()
    places = [place for place in PLACES if machines.room(place) or any(choice.total(place) for choice in choices)]
    figure, axes = pyplot.subplots(
        1, len(places), figsize=(4.5 * len(places) + 2, 0.4 * len(choices) + 1.5), sharey=True
    )
    kinds = sorted({kind for choice in choices for place in places for kind in choice.nbytes[place]})
    colors = {kind: f"C{number}" for number, kind in enumerate(kinds)}
    names = [f"{n}. {choice.offload}, {choice.params}: {choice.says}" for n, choice in enumerate(choices, 1)]
    for axis, place in zip([axes] if len(places) == 1 else axes, places, strict=True):
        left = [0.0] * len(choices)
        for kind in kinds:
            widths = [choice.nbytes[place].get(kind, 0) / 1e9 for choice in choices]
            axis.barh(names, widths, left=left, color=colors[kind], label=kind)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        axis.axvline(machines.room(place) / 1e9, color="black", linestyle="--")
        axis.set_xlabel(f"{place}, GB per rank")
        axis.invert_yaxis()
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncol=len(labels))
    figure.tight_layout(rect=(0, 0, 1, 0.94))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
