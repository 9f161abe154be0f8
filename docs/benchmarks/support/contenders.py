"""What adam.py and updates.py compare: each contender makes one whole step, in memory that all have in turns."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

import zero_opt
from zero_opt.kernels import AdamHypers, AdamUpdate, adam_update_, grad_squares

OPTIONS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
HYPERS = AdamHypers(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, decoupled=True)
LOSS_SCALE, MAX_NORM = 1024.0, 1.0
PARAM_NUMEL = 1 << 22
PAGE_BYTES = 4096
# What the largest contender has per element, and room for pages between its arrays.
ELEMENT_BYTES, PAGES_BYTES = 24, 1 << 20
# OpenMP's threads go on spinning for a while after a step, on the processors that the next contender needs.
SETTLE_S = 0.05
# Blocks of memory, all held at once, each of which a share of the rounds is in.
PLACES = 3
# Codes of 8-bit moments, and what is added to them for 1e-2, which is a remainder like any other too.
INTEGERS = {torch.uint8: 64, torch.int16: 898}
CAST, CAST_KEPT = "cast + torch fused + cast", "the same, buffers kept"
READING, MOVING = "reading the inputs once", "reading and writing as much"


class Place:
    """A block of memory that all contenders have their arrays in, in turns.

    Which memory a process is given decides its speed, on virtual machines by up to a factor of two.
    """

    def __init__(self, nbytes: int) -> None:
        self._bytes = torch.zeros(nbytes, dtype=torch.uint8)

    def room(self) -> Room:
        """All of it, for one contender."""
        return Room(self._bytes)


class Room:
    """Gives one contender its arrays, a page apart: at distances of a power of two they would compete for one bank.

    Attributes:
        tensors: what it has given.
    """

    def __init__(self, free: Tensor) -> None:
        self._free, self.tensors = free, list[Tensor]()

    def take(self, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A flat array."""
        nbytes = numel * dtype.itemsize
        # .data has a version counter of its own: what others write here is no edit of this one's state.
        self.tensors.append(self._free[:nbytes].view(dtype).data)
        self._free = self._free[-(-nbytes // PAGE_BYTES) * PAGE_BYTES + PAGE_BYTES :]
        return self.tensors[-1]

    def param(self, numel: int, dtype: torch.dtype = torch.float32) -> Parameter:
        """With a gradient."""
        param = Parameter(self.take(numel, dtype))
        param.grad = self.take(numel, dtype)
        return param

    def move_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Let an optimizer make its state, and have that here: whole entries, as compact state cannot be split."""
        optimizer.step()
        for state in optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    numel = value.numel()
                    state[key] = self.take(numel, value.dtype).view(value.shape) if numel > 1 else value.clone()


@dataclass(frozen=True)
class Contender:
    """One whole step, and the arrays that it works on."""

    step: Callable[[], object]
    room: Room

    def prepare(self) -> None:
        """Give the arrays values, which others have overwritten: what a step costs depends on none but subnormals."""
        for tensor in self.room.tensors:
            tensor.data.fill_(1e-2 if tensor.is_floating_point() else INTEGERS[tensor.dtype])


Contenders = dict[str, Contender]
Times = dict[str, list[float]]


def measure(make: Callable[[Place], Contenders], nbytes: int, rounds: int) -> Times:
    """Milliseconds of every contender in every round, in several places; in each a round comes first, uncounted.

    Args:
        nbytes: what the largest contender has, without the pages between its arrays.
    """
    times: Times = {}
    for place in [Place(nbytes + PAGES_BYTES) for _ in range(PLACES)]:
        contenders = make(place)
        for number in range(-(-rounds // PLACES) + 1):
            for name, contender in contenders.items():
                contender.prepare()
                time.sleep(SETTLE_S)
                begin = time.perf_counter()
                contender.step()
                if number:
                    times.setdefault(name, []).append(1e3 * (time.perf_counter() - begin))
    return times


def deepspeed_adam(param: Parameter) -> Any:
    """DeepSpeedCPUAdam over the param, or None where deepspeed is not installed."""
    if importlib.util.find_spec("deepspeed") is None:
        return None
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam([param], adamw_mode=True, **OPTIONS)


def fp32_contenders(numel: int, threads: int, place: Place) -> Contenders:
    """The fp32 steps, and the time that their arrays take to be read, and to be read and written."""
    made: dict[str, Callable[[Parameter], Any]] = {
        "torch for-loop": lambda param: torch.optim.AdamW([param], foreach=False, **OPTIONS),
        "torch foreach": lambda param: torch.optim.AdamW([param], foreach=True, **OPTIONS),
        "torch fused": lambda param: torch.optim.AdamW([param], fused=True, **OPTIONS),
        "DeepSpeedCPUAdam": deepspeed_adam,
        "zero_opt": lambda param: zero_opt.CPUAdamW([param], threads=threads, **OPTIONS),
    }
    steps: Contenders = {}
    for name, make in made.items():
        room = place.room()
        optimizer = make(room.param(numel))
        if optimizer is not None:
            room.move_state(optimizer)
            steps[name] = Contender(optimizer.step, room)
    return steps | {READING: reading(numel, place), MOVING: moving(numel, place)}


def reading(numel: int, place: Place) -> Contender:
    """Reads every byte once and does as little with it as can be."""
    room = place.room()
    tensors = [room.take(numel) for _ in range(4)]
    return Contender(lambda: [tensor.sum() for tensor in tensors], room)


def moving(numel: int, place: Place, dtype: torch.dtype = torch.float32, arrays: int = 2) -> Contender:
    """Moves as many bytes as a step with fp32 state and does as little with them as can be.

    Args:
        dtype: of the gradient; if it is not fp32, a parameter is written in it too.
        arrays: of state, beside the param.
    """
    room = place.room()
    grad, state = room.take(numel, dtype), [room.take(numel) for _ in range(1 + arrays)]
    out = None if dtype is torch.float32 else room.take(numel, dtype)

    def step() -> None:
        for tensor in state:
            tensor.neg_()
        grad.sum() if out is None else torch.neg(grad, out=out)

    return Contender(step, room)


def pieces(tensor: Tensor) -> list[Tensor]:
    """A flat tensor as parameters of a usual size."""
    return list(tensor.split(PARAM_NUMEL))


def narrow_params(numel: int, room: Room) -> list[Parameter]:
    """bf16 parameters of a usual size, with gradients."""
    values, grads = room.take(numel, torch.bfloat16), room.take(numel, torch.bfloat16)
    params = [Parameter(piece) for piece in pieces(values)]
    for param, grad in zip(params, pieces(grads), strict=True):
        param.grad = grad
    return params


def casting(numel: int, place: Place) -> Contender:
    """As a training loop has it: each bf16 gradient to fp32, torch's fused step, each fp32 param to bf16."""
    room = place.room()
    narrow = narrow_params(numel, room)
    grads = [param.grad for param in narrow]
    masters = [Parameter(piece) for piece in pieces(room.take(numel))]
    optimizer = torch.optim.AdamW(masters, fused=True, **OPTIONS)

    @torch.no_grad()
    def step() -> None:
        for grad, master in zip(grads, masters, strict=True):
            assert grad is not None
            master.grad = grad.float()
        optimizer.step()
        for param, master in zip(narrow, masters, strict=True):
            param.copy_(master)
        optimizer.zero_grad()

    step()
    for master in masters:
        master.grad = torch.zeros_like(master)
    room.move_state(optimizer)
    return Contender(step, room)


def casting_kept(numel: int, place: Place) -> Contender:
    """The same with a buffer for the fp32 gradients that is kept, one flat tensor of each kind."""
    room = place.room()
    grad, out = room.take(numel, torch.bfloat16), room.take(numel, torch.bfloat16)
    param = room.param(numel)
    optimizer = torch.optim.AdamW([param], fused=True, **OPTIONS)
    room.move_state(optimizer)

    def step() -> None:
        assert param.grad is not None
        param.grad.copy_(grad)
        optimizer.step()
        out.copy_(param.detach())

    return Contender(step, room)


FORMS = {
    "one pass": ("float32", "float32"),
    "split master": ("float32", "split"),
    "bf16 moments": ("bfloat16", "float32"),
    "bf16 moments, split master": ("bfloat16", "split"),
    "8-bit moments": ("block8", "float32"),
    "8-bit moments, split master": ("block8", "split"),
}
MOMENT_BYTES = {"float32": 4.0, "bfloat16": 2.0, "block8": 1 + 2 / 64}


def bytes_moved(moments: str, master: str) -> float:
    """Read and written per element: gradient in, master both ways, moments both ways, param out."""
    return 2 + (8 if master == "float32" else 4) + 4 * MOMENT_BYTES[moments] + (2 if master == "float32" else 4)


def reduced_contenders(numel: int, threads: int, place: Place) -> Contenders:
    """The steps with a bf16 gradient and param, and the time that arrays of the first form take to be moved."""
    steps = {CAST: casting(numel, place), CAST_KEPT: casting_kept(numel, place)}
    for name, form in FORMS.items():
        room = place.room()
        params = narrow_params(numel, room)
        optimizer = zero_opt.CPUAdamW(params, threads=threads, state=zero_opt.AdamState(*form), **OPTIONS)
        room.move_state(optimizer)
        steps[name] = Contender(optimizer.step, room)
    return steps | {MOVING: moving(numel, place, torch.bfloat16)}


def reduced_bytes() -> dict[str, float]:
    """Bytes that each of :func:`reduced_contenders` moves per element."""
    forms = {name: bytes_moved(*form) for name, form in FORMS.items()}
    return dict.fromkeys((CAST, CAST_KEPT), 6 + 28 + 6.0) | forms | {MOVING: forms["one pass"]}


def deepspeed_passes(numel: int, place: Place) -> tuple[str, Contender]:
    """What DeepSpeed 0.19 does in ZeRO-Offload (stage_1_and_2.py), from the reduced gradient of each parameter on.

    Per parameter: look for values that are not finite, norm of a copy in fp32, cast, copy to the flat buffer; then
    scale, step, cast to a bf16 buffer, copy to the parameters. torch's fused Adam where deepspeed is not installed.
    """
    room = place.room()
    grads, buffer, out = pieces(room.take(numel, torch.bfloat16)), *(room.take(numel, torch.bfloat16) for _ in range(2))
    param, theirs, optimizer = separate_adam(numel, room)
    wide = param.grad
    assert wide is not None

    def step() -> None:
        squares, overflow = 0.0, False
        for grad, into in zip(grads, pieces(wide), strict=True):
            overflow |= not bool(torch.isfinite(grad.amax()) & torch.isfinite(grad.amin()))
            squares += float(grad.float().norm(2)) ** 2
            into.copy_(grad.float())
        if overflow:
            return
        wide.mul_(clip_factor(squares**0.5))
        optimizer.step()
        buffer.copy_(param.detach())
        out.copy_(buffer)

    return f"DeepSpeed's passes and {theirs}", Contender(step, room)


def separate_adam(numel: int, room: Room) -> tuple[Parameter, str, Any]:
    """An fp32 parameter, and the name and the optimizer of what steps it: DeepSpeedCPUAdam, or torch fused."""
    param = room.param(numel)
    optimizer = deepspeed_adam(param)
    name = "DeepSpeedCPUAdam"
    if optimizer is None:
        name, optimizer = "torch fused", torch.optim.AdamW([param], fused=True, **OPTIONS)
    room.move_state(optimizer)
    return param, name, optimizer


def fewest_passes(numel: int, place: Place) -> tuple[str, Contender]:
    """Cast, norm, scale, DeepSpeedCPUAdam (torch fused where it is missing), cast; all buffers are kept."""
    room = place.room()
    grad, out = room.take(numel, torch.bfloat16), room.take(numel, torch.bfloat16)
    param, theirs, optimizer = separate_adam(numel, room)
    wide = param.grad
    assert wide is not None

    def step() -> None:
        wide.copy_(grad)
        wide.mul_(clip_factor(float(torch.linalg.vector_norm(wide))))
        optimizer.step()
        out.copy_(param.detach())

    return f"fewest separate passes and {theirs}", Contender(step, room)


def clip_factor(scaled_norm: float) -> float:
    """What gradients are multiplied by to unscale and to clip them."""
    return min(1.0, MAX_NORM / (scaled_norm / LOSS_SCALE + 1e-6)) / LOSS_SCALE


def two_passes(numel: int, threads: int, place: Place, moments: torch.dtype = torch.float32) -> Contender:
    """Ours: one pass over the gradient for the norm, one over everything for the rest."""
    room = place.room()
    grad = room.take(numel, torch.bfloat16)
    update = AdamUpdate(
        name="param",
        hypers=HYPERS,
        step=3.0,
        param=room.take(numel),
        grad=grad,
        exp_avg=room.take(numel, moments),
        exp_avg_sq=room.take(numel, moments),
        out=room.take(numel, torch.bfloat16),
    )

    def step() -> None:
        norm = grad_squares([grad], threads=threads).total ** 0.5
        adam_update_([update], grad_scale=clip_factor(norm), threads=threads)

    return Contender(step, room)


def pipeline_contenders(numel: int, threads: int, place: Place) -> Contenders:
    """A whole mixed-precision step; the first is what the others are compared with."""
    return {
        **dict([deepspeed_passes(numel, place), fewest_passes(numel, place)]),
        "zero_opt": two_passes(numel, threads, place),
        "zero_opt, bf16 moments": two_passes(numel, threads, place, torch.bfloat16),
    }
