"""Global gradient norm, non-finite test and clip coefficient."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..comm.groups import Group
from ..errors import ConfigError, ConfigTypeError, quoted
from ..field_checks import check_number, plain_number
from ..kernels import grad_squares
from ..kernels.strides import is_dense, resolved
from ..system.extension import native_available

_NATIVE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Elements widened to fp64 at a time: they stay in the cache.
_WIDENED_NUMEL = 1 << 15


def refusal_of_more(
    call: str, usage: str, others: Sequence[object], options: Mapping[str, object]
) -> ConfigTypeError | None:
    """Return the error if a call is given more than the norm, as torch's function takes.

    Args:
        call, usage: its name, and how to write it. others, options: what it was given beyond the norm.
    """
    if not (others or options):
        return None
    more = ", ".join([*map(quoted, others), *(f"{key}={quoted(value)}" for key, value in options.items())])
    return ConfigTypeError(
        f"{call} takes the norm alone, as in {usage}: it clips the gradients of all parameters by their L2 norm; "
        f"got {more} too"
    )


def check_max_norm(max_norm: Any, name: str) -> float:
    """``max_norm`` as a float.

    Raises:
        ConfigTypeError, ConfigError: not a number, or not positive.
    """
    if isinstance(max_norm, Tensor) and max_norm.numel() == 1:
        max_norm = max_norm.item()
    max_norm = plain_number(max_norm)
    check_number(name, max_norm)
    if not max_norm > 0:
        raise ConfigError(f"{name} must be positive, got {quoted(max_norm)}")
    if sys.float_info.max < max_norm < math.inf:
        raise ConfigError(f"{name} is an integer that no float can hold, got {quoted(max_norm)}")
    return float(max_norm)


def _values(grad: Tensor) -> Tensor:
    if grad.is_sparse:
        grad = grad.coalesce().values()
    return torch.view_as_real(resolved(grad)) if grad.is_complex() else grad


def _run_of(values: Tensor) -> Tensor:
    """Return the values as a 1-D tensor, in any order; a view where they are dense."""
    if is_dense(values.shape, values.stride()):
        return values.as_strided((values.numel(),), (1,), values.storage_offset())
    return values.reshape(-1)


def _to_host(scalars: Sequence[Tensor]) -> list[Any]:
    """Return the values of 0-dim tensors of one dtype, with one copy to the host, and one wait, per device."""
    values: list[Any] = [None] * len(scalars)
    devices = dict.fromkeys(scalar.device for scalar in scalars)
    places = [[at for at, scalar in enumerate(scalars) if scalar.device == device] for device in devices]
    stacked = [torch.stack([scalars[at] for at in here]) for here in places]
    for here, together in zip(places, stacked, strict=True):
        for at, value in zip(here, together.tolist(), strict=True):
            values[at] = value
    return values


def _norms(values: Iterable[Tensor]) -> list[Tensor]:
    """Return the norms of tensors on accelerators, in fp64, in any order."""
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in values:
        alike.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    # Of tensors alike, CUDA makes one pass that accumulates in fp64. One by one, each would be copied as fp64 first.
    return [norm for same in alike.values() for norm in torch._foreach_norm(same, 2, torch.float64)]


def _finite(grads: Iterable[Tensor]) -> list[bool]:
    """Return of each gradient whether all its elements are finite."""
    return _to_host([torch.isfinite(_values(grad.detach())).all() for grad in grads])


def all_finite(grads: Iterable[Tensor]) -> bool:
    """Return whether all elements of all gradients are finite, with one wait per device."""
    return all(_finite(grads))


def _squares(values: Tensor) -> Iterator[float]:
    """Yield sums of squares of pieces, each in fp64, without a second copy of the whole in fp64."""
    run = _run_of(values)
    for start in range(0, run.numel(), _WIDENED_NUMEL):
        widened = run[start : start + _WIDENED_NUMEL].double()
        yield float(torch.dot(widened, widened))


def square_sum(grads: Sequence[Tensor | None], known: Sequence[Tensor | None] = ()) -> float:
    """Return the sum of squares of all elements, accumulated in fp64; ``known`` as for :func:`grad_squares`."""
    native: list[tuple[Tensor, Tensor | None]] = []
    others: list[Tensor] = []
    elsewhere: list[Tensor] = []
    kernel = native_available()
    for grad, sums in zip(grads, known or [None] * len(grads), strict=True):
        if grad is not None:
            values = _values(grad.detach())
            if kernel and values.is_cpu and values.dtype in _NATIVE_DTYPES:
                native.append((values, sums))
            else:
                (others if values.is_cpu else elsewhere).append(values)
    try:
        # In one call: of many small ones, calls are the cost.
        total = grad_squares(*zip(*native, strict=True)).total if native else 0.0
        squares = (square for values in others for square in _squares(values))
        norms = _to_host(_norms(elsewhere))
        return math.fsum([total, *squares, *(norm * norm for norm in norms)])
    except OverflowError:  # finite squares whose sum is not
        return math.inf


class Measured(NamedTuple):
    """The gradients of all ranks, the same on every rank.

    Attributes:
        norm: L2, a 0-dim tensor, fp32 or, where parameters are fp64, fp64.
        nonfinite: (rank, param) of the first rank with a non-finite element, and its first parameter with one.
    """

    norm: Tensor
    nonfinite: tuple[int, int] | None


class Share(NamedTuple):
    """What one optimizer adds to a norm.

    Attributes:
        square: sum of squares, in fp64: of this rank's part of the gradients if there is a group, else of all ranks'.
            Not read if there are ``grads``.
        nonfinite: (rank, param) as in :class:`Measured`, likewise.
        dtype: see :func:`norm_dtype`.
        group: the ranks that have the other parts.
        grads: all gradients, where torch's own function measures them.
    """

    square: float
    nonfinite: tuple[int, int] | None
    dtype: torch.dtype
    group: Group | None = None
    grads: Sequence[Tensor] | None = None

    @classmethod
    def from_rows(cls, rows: Sequence[tuple[int, float, float]], dtype: torch.dtype) -> Share:
        """Combine (rank, sum of squares, first non-finite parameter or -1) of ranks, in one order everywhere."""
        nonfinite = next(((rank, int(param)) for rank, _, param in rows if param >= 0), None)
        return cls(sum(square for _, square, _ in rows), nonfinite, dtype)


# Returns what all optimizers' gradients are together, given what one adds; see :func:`joint_norm`.
Joint = Callable[[Share], Measured]


def joint_norm(shares: Sequence[Share]) -> list[Measured]:
    """Return for each share the norm over all, and what is not finite in its own. The same bits on every rank.

    One message, of two numbers per share that has a group. Collective over the groups, which have the same ranks.
    """
    whole = _gathered(shares)
    if all(share.grads is not None for share in whole):
        norm = torch.nn.utils.get_total_norm([grad for share in whole for grad in share.grads or ()])
    else:
        total = sum(share.square if share.grads is None else square_sum(share.grads) for share in whole)
        dtype = torch.float64 if any(share.dtype is torch.float64 for share in whole) else torch.float32
        norm = torch.tensor(math.sqrt(total) if total >= 0 else math.nan, dtype=dtype, device="cpu")
    return [Measured(norm, share.nonfinite) for share in whole]


def _gathered(shares: Sequence[Share]) -> list[Share]:
    """Return the shares with what all ranks have."""
    cut = [share for share in shares if share.group is not None]
    if not cut:
        return list(shares)
    mine = [(share.square, -1 if share.nonfinite is None else share.nonfinite[1]) for share in cut]
    assert cut[0].group is not None
    by_rank = [told.tolist() for told in cut[0].group.all_gather(torch.tensor(mine, dtype=torch.float64, device="cpu"))]
    rows = iter([[(rank, *told[at]) for rank, told in enumerate(by_rank)] for at in range(len(cut))])
    return [share if share.group is None else Share.from_rows(next(rows), share.dtype) for share in shares]


def alone(share: Share) -> Measured:
    """Measure the gradients of one optimizer by themselves. Collective over its group."""
    return joint_norm([share])[0]


def norm_dtype(params: Iterable[Tensor]) -> torch.dtype:
    """Return the dtype of the norm over gradients of these parameters."""
    wide = any(param.dtype in (torch.float64, torch.complex128) for param in params)
    return torch.float64 if wide else torch.float32


def share_of(
    grads: Sequence[Tensor | None],
    params: Sequence[int],
    group: Group | None,
    known: Sequence[Tensor | None] = (),
    dtype: torch.dtype = torch.float32,
) -> Share:
    """Return what gradients add to a norm, in one read.

    The norm is accumulated in fp64 in rank order and rounded once, so it differs from
    ``torch.nn.utils.get_total_norm`` by at most the latter's own fp32 rounding.

    Args:
        grads: this rank's part of the gradient; no element is on two ranks.
        params: what the gradients belong to, by global index.
        group: the ranks that have the other parts; ``None``: there are none.
        known: nothing, or per gradient what :func:`grad_squares` would find first, or ``None``.
        dtype: see :func:`norm_dtype`.
    """
    square, nonfinite = look(grads, params, known)
    return Share.from_rows([(0, square, nonfinite)], dtype)._replace(group=group)


def look(
    grads: Sequence[Tensor | None], params: Sequence[int], known: Sequence[Tensor | None] = ()
) -> tuple[float, int]:
    """Return the sum of squares, and the first parameter that is not finite, or -1; see :func:`share_of`."""
    square = square_sum(grads, known)
    return square, _first_nonfinite(grads, params, square)


def _first_nonfinite(grads: Sequence[Tensor | None], params: Sequence[int], square: float) -> int:
    """Return the parameter of the first gradient with a non-finite element, or -1; finite squares have none."""
    if math.isfinite(square):
        return -1
    present = [(param, grad) for param, grad in zip(params, grads, strict=True) if grad is not None]
    finite = _finite(grad for _, grad in present)
    return next((param for (param, _), fine in zip(present, finite, strict=True) if not fine), -1)


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """``min(1, max_norm / (norm + 1e-6))`` in the norm's dtype, as ``torch.nn.utils.clip_grad_norm_`` computes it."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


def scale_(grads: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply gradients by a 0-dim tensor, in place, also where others hold them, as views or detached."""
    for grad in grads:
        # In place, torch gives a sparse tensor new values, which one that was detached from it does not see.
        values = grad._values() if grad.layout is torch.sparse_coo else grad
        values.mul_(factor.to(grad.device))
