"""The command line: ``python -m zero_opt`` and ``estimate``, ``plan``, ``bench`` or ``doctor``."""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import re
import sys
from collections.abc import Callable, Sequence
from decimal import Decimal
from functools import partial
from typing import Any

import torch

from . import __version__, kernels
from .errors import ConfigConflict, ConfigError, ZeroOptError
from .kernels.table import NATIVE_CLASSES
from .placement import Offload
from .policies import (
    MOMENT_FORMS,
    AdamState,
    AlreadyReduced,
    AtStep,
    CPUOffload,
    DDPHook,
    MixedPrecision,
    NVMeOffload,
    Overlapped,
    WorkerOffload,
)
from .tools import bench as benching
from .tools import doctor
from .tools.compare_ranks import print_comparison
from .tools.drawing import require_drawable
from .tools.estimate import MOST_RANKS_PER_HOST, estimate
from .tools.plan import PLANNED, Machines, as_json, as_picture, as_table, plan

_REDUCTIONS = {"overlapped": Overlapped, "at-step": AtStep, "ddp-hook": DDPHook, "already-reduced": AlreadyReduced}
_OFFLOADS: dict[str, Callable[..., Offload]] = {
    "none": lambda: None,
    "cpu": CPUOffload,
    "worker": WorkerOffload,
    "nvme": partial(NVMeOffload, "."),  # the estimate makes nothing there
}
_NATIVE = tuple(cls.__name__ for cls in NATIVE_CLASSES)
# Fields of offloads, and whose they are.
_FIELDS = {"ratio": "cpu", "subgroup_mb": "cpu", "window_mb": "nvme"}
_FIELDS |= dict.fromkeys(("delay", "prediction", "speculate"), "worker")
_SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
_UNITS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, _SHORT_DTYPES.get(name, name), None)
    if not isinstance(dtype, torch.dtype):
        raise argparse.ArgumentTypeError(f"{name!r} is not a torch dtype such as float32, bfloat16 or bf16")
    return dtype


def _numel(text: str) -> float:
    """A number that may end as those of models do: 350M, 7B, 1.5T."""
    unit = _UNITS.get(text[-1:].upper())
    try:
        # In decimal: 1.07 times 1e9 is no whole number in binary.
        return float(Decimal(text) if unit is None else Decimal(text[:-1]) * unit)
    except ArithmeticError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of elements such as 7e9, 7B or 350M") from None


def _bytes(text: str) -> float:
    """A number of bytes as machines have them: 80GB, 512GiB, 2TB."""
    if re.fullmatch(r"0+\.?0*", text.strip()):
        return 0.0
    found = re.fullmatch(r"(\d+\.?\d*) *([KMGT]?)(i?)B", text.strip(), re.IGNORECASE)
    if found is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of bytes with its unit, such as 80GB, 512GiB or 2TB"
        )
    number, unit, binary = found.groups()
    power = "KMGT".index(unit.upper()) + 1 if unit else 0
    return float(number) * float((1024 if binary else 1000) ** power)


def _master(name: str) -> torch.dtype | str:
    return name if name == "split" else _dtype(name)


def _optimizer(name: str) -> type[torch.optim.Optimizer]:
    cls = getattr(kernels if name in _NATIVE else torch.optim, name, None)
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)) or cls is torch.optim.Optimizer:
        raise argparse.ArgumentTypeError(f"{name!r} is not a class of torch.optim, nor one of {', '.join(_NATIVE)}")
    return cls


def _option(text: str) -> tuple[str, Any]:
    key, _, value = text.partition("=")
    if key == "params" or key in inspect.signature(estimate).parameters:
        raise argparse.ArgumentTypeError(f"{key!r} is not an option of an optimizer class; see --help")
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        raise argparse.ArgumentTypeError(f"{text!r} is not an option with a Python value, as amsgrad=True is") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m zero_opt", description="What an optimizer will hold; what works here.")
    parser.add_argument("--version", action="version", version=f"zero_opt {__version__}, torch {torch.__version__}")
    commands = parser.add_subparsers(dest="command")
    sizes = commands.add_parser("estimate", help="bytes per rank on device, host and NVMe, by kind")
    sizes.add_argument("numel", type=_numel, help="elements of all parameters, such as 7e9 or 7B")
    sizes.add_argument("--world", type=int, default=1, help="number of ranks (default 1)")
    sizes.add_argument("--ranks-per-host", type=int, help="ranks that share a host (default: all, up to 8)")
    sizes.add_argument("--mesh", action="store_true", help="hosts and ranks of each are a mesh, as the process group")
    _add_optimizer(sizes, f"a class of torch.optim, or {', '.join(_NATIVE)}")
    sizes.add_argument("--param-dtype", type=_dtype, help="of the parameters (default: torch's, float32)")
    sizes.add_argument("--master", type=_master, help="of bf16 and fp16 parameters: float32, or split")
    sizes.add_argument("--moments", choices=MOMENT_FORMS, help="of CPUAdam(W): see AdamState (default float32)")
    sizes.add_argument("--reduce-dtype", type=_dtype, help="of gradients on their way (default: the parameters')")
    sizes.add_argument("--accumulate-dtype", type=_dtype, help="of the sum over several backwards (default: as sent)")
    sizes.add_argument("--between-hosts-dtype", type=_dtype, help="of fp32 gradients between hosts (default: as sent)")
    sizes.add_argument("--device", help="where parameters are, as cuda or cpu (default: this machine's accelerator)")
    sizes.add_argument("--reduction", choices=sorted(_REDUCTIONS), default="overlapped", help="(default overlapped)")
    sizes.add_argument("--bucket-mb", type=float, help="size of a bucket (default 25, or 5 between hosts)")
    sizes.add_argument("--offload", choices=_OFFLOADS, default="none", help="where the shard lives")
    sizes.add_argument("--ratio", type=float, help="with --offload cpu: how much of the shard")
    sizes.add_argument("--subgroup-mb", type=float, help="with --offload cpu: see CPUOffload")
    sizes.add_argument("--window-mb", type=float, help="with --offload nvme: see NVMeOffload")
    sizes.add_argument("--delay", type=int, help="with --offload worker: steps until an update arrives")
    sizes.add_argument("--prediction", type=float, help="with --offload worker, --delay 1: see WorkerOffload")
    sizes.add_argument("--speculate", action="store_true", help="with --offload worker: see WorkerOffload")
    sizes.add_argument("--rank", type=int, help="of which rank (default: the one that needs most)")
    _add_plan(commands.add_parser("plan", help="which offload and which form of state fit a machine, best first"))
    _add_bench(commands.add_parser("bench", help="reductions and offloads side by side on this machine, beside DDP"))
    looks = commands.add_parser("doctor", help="what of zero_opt works on this machine, and what to do about the rest")
    looks.add_argument("--path", help="a directory for NVMeOffload, to look at too")
    looks.add_argument("--json", action="store_true", help="print a JSON list, for a report")
    looks.add_argument("--ranks", action="store_true", help="under torchrun: compare all ranks")
    return parser


def _add_optimizer(parser: argparse.ArgumentParser, classes: str) -> None:
    parser.add_argument("--optimizer", type=_optimizer, default="AdamW", help=f"{classes} (default AdamW)")
    parser.add_argument(
        "--option", type=_option, action="append", default=[], help="of the class, as amsgrad=True; repeatable"
    )


def _add_plan(plans: argparse.ArgumentParser) -> None:
    plans.add_argument("numel", type=_numel, help="elements of all parameters, such as 7e9 or 7B; they run in bf16")
    plans.add_argument("--world", type=int, default=1, help="number of ranks (default 1)")
    plans.add_argument("--ranks-per-host", type=int, help="ranks that share a host (default: all, up to 8)")
    _add_optimizer(plans, f"one of {', '.join(cls.__name__ for cls in PLANNED)}")
    plans.add_argument("--device", default="cuda", help="where parameters are: cuda (default), cpu or another")
    plans.add_argument("--device-memory", type=_bytes, help="of each device, such as 80GB")
    plans.add_argument("--host-memory", type=_bytes, required=True, help="of each host, such as 512GB")
    plans.add_argument("--disk", type=_bytes, default=0.0, help="of each host, for state, such as 2TB (default none)")
    plans.add_argument("--json", action="store_true", help="print the choices as JSON")
    plans.add_argument("--plot", help="a PNG file, for a picture of what each choice holds")


def _print_plan(given: argparse.Namespace) -> None:
    require_drawable(given.plot)
    per_host = min(MOST_RANKS_PER_HOST, given.world) if given.ranks_per_host is None else given.ranks_per_host
    sizes = given.device_memory or 0.0, given.host_memory, given.disk
    machines = Machines(given.device, given.world, per_host, *sizes)
    if not machines.on_host and given.device_memory is None:
        raise ConfigError(f"--device {given.device} needs --device-memory, such as 80GB; or take --device cpu")
    if machines.on_host and given.device_memory:
        raise ConfigConflict(
            "--device-memory is not for --device cpu, whose parameters are in host memory; leave it out"
        )
    choices = plan(given.numel, machines, given.optimizer, **dict(given.option))
    print(json.dumps(as_json(choices), indent=2) if given.json else as_table(choices, machines))
    if given.plot:
        as_picture(choices, machines, given.plot)


def _add_bench(benches: argparse.ArgumentParser) -> None:
    usual = benching.Bench(20e6)
    benches.add_argument("--numel", type=_numel, default=usual.numel, help="elements of the model (default 20M)")
    benches.add_argument("--param-dtype", type=_dtype, default=usual.param_dtype, help="of the parameters, as bf16")
    benches.add_argument("--ranks", type=int, default=usual.ranks, help="processes to start here (default 2)")
    benches.add_argument("--rows", type=int, default=usual.rows, help="of each rank's batch (default 128)")
    benches.add_argument("--seconds", type=float, default=usual.seconds, help="for each way (default 4)")
    benches.add_argument("--device", default=usual.device, help="where parameters are (default cpu)")
    benches.add_argument("--path", help="a directory, to measure NVMeOffload there too")
    benches.add_argument("--json", action="store_true", help="print the measurements as JSON")
    benches.add_argument("--plot", help="a PNG file, for a picture of time and memory")


def _print_bench(given: argparse.Namespace) -> None:
    require_drawable(given.plot)
    names = ("numel", "ranks", "rows", "seconds", "param_dtype", "device", "path")
    measured = benching.run(benching.Bench(**{name: getattr(given, name) for name in names}), benching.progress)
    print(json.dumps([vars(one) for one in measured], indent=2) if given.json else benching.report(measured))
    if given.plot:
        benching.picture(measured, given.plot)


def _offload(given: argparse.Namespace) -> Offload:
    unset = (None, False)  # 0, which equals False, is a value
    own = {name: offload for name, offload in _FIELDS.items() if not any(getattr(given, name) is no for no in unset)}
    for name, offload in own.items():
        if offload != given.offload:
            raise ConfigConflict(f"--{name.replace('_', '-')} is of --offload {offload}, not of {given.offload}")
    return _OFFLOADS[given.offload](**{name: getattr(given, name) for name in own})


def _state_options(given: argparse.Namespace) -> dict[str, Any]:
    """Return ``state`` of a class that has it, and ``precision`` without what that says."""
    dtypes = given.reduce_dtype, given.accumulate_dtype, given.between_hosts_dtype
    if given.optimizer.__name__ not in _NATIVE:
        if given.moments is not None:
            compact = " and ".join(cls.__name__ for cls in NATIVE_CLASSES if cls.update.compact)
            raise ConfigConflict(f"--moments is of --optimizer {compact}")
        return {"precision": MixedPrecision(given.master, *dtypes)}
    master = None if given.master is None else str(given.master).removeprefix("torch.")
    return {"state": AdamState(given.moments or "float32", master), "precision": MixedPrecision(None, *dtypes)}


def _print_estimate(given: argparse.Namespace) -> None:
    if given.bucket_mb is not None and given.reduction == "already-reduced":
        raise ConfigConflict("--bucket-mb is of reductions that have buckets, not of --reduction already-reduced")
    sized = {} if given.bucket_mb is None else {"bucket_mb": given.bucket_mb}
    estimated = estimate(
        given.numel,
        given.world,
        given.optimizer,
        reduction=_REDUCTIONS[given.reduction](**sized),
        offload=_offload(given),
        param_dtype=given.param_dtype,
        device=given.device,
        **_state_options(given),
        **dict(given.option),
    )
    if given.mesh:
        estimated = estimated.on_mesh_of(given.ranks_per_host or estimated.ranks_per_host)
    elif given.ranks_per_host is not None:
        estimated = estimated.on_hosts_of(given.ranks_per_host)
    print(estimated if given.rank is None else estimated.on_rank(given.rank))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit status: 0, 1 if the doctor finds something BAD, 2 for bad arguments."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.command is None:
        parser.print_help()
        return 0
    try:
        if given.command == "doctor" and given.ranks:
            return print_comparison(__version__, given.path, as_json=given.json)
        if given.command == "doctor":
            return doctor.print_findings(__version__, given.path, as_json=given.json)
        {"plan": _print_plan, "bench": _print_bench, "estimate": _print_estimate}[given.command](given)
    except ZeroOptError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
