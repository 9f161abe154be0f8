"""Where the cases of test/accelerator run on GPUs, and what their results are compared with.

Every operation of a case's forward and backward is elementwise and rounds once, so its gradients have the same bits on
a GPU as on the CPU. What follows depends on the case:

- State in host memory is stepped there by the same code as on the CPU: such a case must have the bits of the CPU.
- A GPU's kernels fuse a multiplication and an addition into one rounding, and sum a norm in another order. So what they
  step, clip or multiply as complex numbers differs from the CPU in the last bits: root mean squares are compared.
- The same kernels on the same values have the same bits at any time. So every case must have the bits that it has where
  the host waits for each kernel (CUDA_LAUNCH_BLOCKING=1), and nothing can overtake anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import zero_opt
from test.gpu.processes import NCCL
from test.support.device_cases import programs
from test.support.device_cases.cases import CASES
from test.support.device_cases.places import Place
from test.support.device_cases.training import Case, run

DEVICE = "cuda"
# A case has at most six steps, each of which rounds a value a few times.
LAST_BITS = 16
# Of squares' means: CUDA's fused Adam makes 1 - beta2 of a beta2 that is rounded to fp32 (fused_adam_utils.cuh), which
# half an ulp of a number in [0.5, 1) puts off by up to 2**-25; that of the CPU makes it in fp64.
SQUARES, SQUARES_OFF = ("exp_avg_sq", "max_exp_avg_sq"), 2.0**-25 / (1 - 0.999)
# Below it, root mean squares are not relative: of values that cancel, the learning rate is the measure.
LEAST_SCALE = 0.02
CPU = "the CPU"
_NATIVE = (zero_opt.CPUOffload, zero_opt.WorkerOffload, zero_opt.NVMeOffload)


@dataclass(frozen=True)
class Kind:
    """How the ranks of a run are joined.

    Attributes:
        backend: of the default process group. direct: whether it carries tensors of the GPUs.
        gpus: how many there must be.
    """

    name: str
    world_size: int
    backend: str | None
    direct: bool = True
    gpus: int = 1


KINDS = (
    Kind("no process group", 1, None),
    Kind("NCCL at world size 1", 1, NCCL),
    Kind("relay: two ranks share a GPU over gloo", 2, "gloo", direct=False),
    Kind("NCCL", 2, NCCL, gpus=2),
)


def places(kind: Kind, rank: int) -> list[Place]:
    """Make the places of a rank, the CPU first."""
    group = None if kind.backend is None else dist.group.WORLD
    mine = (torch.device(DEVICE, rank if kind.world_size > 1 and kind.direct else 0),)
    found = [Place(CPU, (torch.device("cpu"),), group, exchange="backend")]
    for own_stream in (False, True):
        name = "on a stream of its own" if own_stream else "on the default stream"
        found.append(Place(name, mine, group, kind.direct, own_stream))
    # NCCL refuses two ranks that use the same two devices.
    if torch.accelerator.device_count() > 1 and (kind.world_size == 1 or not kind.direct):
        both = (torch.device(DEVICE, 0), torch.device(DEVICE, 1))
        found.append(Place("on two devices", both, group, kind.direct))
    return found


def run_cases(rank: int, world_size: int, kind: Kind, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Run cases at all their places on this rank; return, by case and place, what must have the same bits."""
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        case, at = CASES[name], None
        found[name] = {}
        try:
            for at in places_of(case, places(kind, rank)):
                torch.accelerator.set_device_index(at.devices[0].index or 0)
                found[name][at.name] = run(case, at)
                torch.accelerator.synchronize()
        except BaseException as error:
            error.add_note(f"in the case {name!r}, {at.name if at else 'before it began'}, {kind.name}")
            raise
    return found


def places_of(case: Case, among: Sequence[Place]) -> list[Place]:
    """Return the places at which a case can run."""
    return [place for place in among if not place.accelerated or case.runs_at(place)]


def bits_of_the_cpu(case: Case) -> bool:
    """Return whether all that rounds more than once happens in host memory."""
    clips = case.clip is not None or "max_grad_norm" in case.options or case.program is programs.clipped
    offload = case.offload
    in_host = isinstance(offload, _NATIVE) and offload.selective is None and getattr(offload, "ratio", 1.0) == 1.0
    return in_host and not clips and not case.dtype.is_complex


def tolerance(case: Case) -> float:
    """Return the root mean square of differences from the CPU, relative to the values, that is rounding."""
    # Muon multiplies matrices in bf16, whatever its parameters are.
    coarsest = torch.bfloat16 if case.cls is torch.optim.Muon else case.dtype
    return LAST_BITS * max(torch.finfo(coarsest).eps, torch.finfo(torch.float32).eps)


def far(found: Any, expected: Any, tolerance: float, where: str = "value") -> Iterator[str]:
    """Yield one line per place where values differ by more than rounding, or by their kind."""
    if isinstance(found, Tensor) and isinstance(expected, Tensor):
        yield from _far_tensor(found, expected, tolerance, where)
    elif isinstance(found, Mapping) and isinstance(expected, Mapping) and found.keys() == expected.keys():
        for key, value in expected.items():
            allowed = tolerance + SQUARES_OFF * (key in SQUARES)
            yield from far(found[key], value, allowed, f"{where}[{key!r}]")
    elif isinstance(found, (list, tuple)) and isinstance(expected, (list, tuple)) and len(found) == len(expected):
        for index, value in enumerate(expected):
            yield from far(found[index], value, tolerance, f"{where}[{index}]")
    elif isinstance(found, float) and isinstance(expected, float):
        yield from _far_tensor(torch.tensor(found), torch.tensor(expected), tolerance, where)
    elif type(found) is not type(expected) or found != expected:
        yield f"{where}: {found!r} and {expected!r}"


def _far_tensor(found: Tensor, expected: Tensor, tolerance: float, where: str) -> Iterator[str]:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        yield f"{where}: {found.dtype} {tuple(found.shape)} and {expected.dtype} {tuple(expected.shape)}"
        return
    if not expected.numel():
        return
    a, b = _real(found), _real(expected)
    off, scale = _root_mean_square(a - b), max(_root_mean_square(b), LEAST_SCALE)
    if not off <= tolerance * scale and not torch.equal(found, expected):
        yield f"{where}: root mean square of differences {off:.3g}, of values {scale:.3g}, tolerance {tolerance:.3g}"


def _real(tensor: Tensor) -> Tensor:
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()


def _root_mean_square(tensor: Tensor) -> float:
    return float(tensor.square().mean().sqrt())
