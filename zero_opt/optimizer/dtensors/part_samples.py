"""A sample of the values of each DTensor's part, to notice writes that no version counter shows.

torch counts a write where an operation on the DTensor, or on what ``to_local()`` returns, goes through its dispatcher.
It does not count ``torch._foreach_*_`` on DTensors in host memory, an optimizer's ``foreach`` or ``fused`` step,
``dcp.load``, or a write to ``p.detach().to_local()``. Nearly all of these change nearly all elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_

import torch
from torch import Tensor

from ...kernels.checks import oddity
from ...kernels.strides import is_dense, run_of
from ...system.devices import is_host
from ...system.inference_mode import outside_inference_mode

# At most so many stretches of a part are looked at, of so many neighboring elements each.
_STRETCHES, _STRETCH = 32, 16
_ALIGN = 16
NO_VALUES = torch.empty(0, dtype=torch.float32, device="cpu")


def sampled(part: Tensor) -> Tensor:
    """Return a view of the elements of a part that are compared: stretches at equal distances, up to the end.

    A part of up to 512 elements, or with gaps between them, is compared as a whole. The view is empty for a part on an
    accelerator, where reading waits for the device, or without values in memory of its own.
    """
    part = part.detach()
    if not is_host(part.device) or oddity(part) is not None:
        return NO_VALUES
    if part.numel() <= _STRETCHES * _STRETCH or not is_dense(part.shape, part.stride()):
        return part
    run = run_of(part)
    # An odd number of stretches: rows of a matrix are as long as a power of two, and all columns have their turn.
    apart = _STRETCH * (-(-run.numel() // (_STRETCHES * _STRETCH)) | 1)
    count = (run.numel() - _STRETCH) // apart + 1
    return run.as_strided((count, _STRETCH), (apart, 1))


class _Copies:
    """Copies of tensors, one after the other.

    Attributes:
        bits: all copies, as int64. bits_of: by tensor, the bits of its copy. each: by tensor, its copy, in its dtype
            and shape.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        sizes = [-(-tensor.nbytes // _ALIGN) * _ALIGN for tensor in tensors]
        self.bits = torch.zeros(sum(sizes) // 8, dtype=torch.int64, device="cpu")
        self.bits_of = torch.split(self.bits, [size // 8 for size in sizes])
        self.each = [
            bits.view(torch.uint8)[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for bits, tensor in zip(self.bits_of, tensors, strict=True)
        ]


class PartSamples:
    """Values of parts as they were last, and as they are."""

    def __init__(self) -> None:
        self._views: list[Tensor] = []
        self._last = self._now = _Copies([])

    def changed(self, views: list[Tensor]) -> list[bool]:
        """Return, by view, whether its values differ from those at the last :meth:`note`; False for a new view.

        Args:
            views: of parts, see :func:`sampled`; the same objects as before, where they are of the same memory.
        """
        self.look_at(views)
        last, now = self._last, self._now
        _copy_all(now, views)
        if torch.equal(now.bits, last.bits):
            return [False] * len(views)
        return [not torch.equal(*bits) for bits in zip(now.bits_of, last.bits_of, strict=True)]

    def note(self) -> None:
        """Remember the values as they are."""
        _copy_all(self._last, self._views)

    def look_at(self, views: list[Tensor]) -> None:
        """Remember the values of new views as they are, and of others as they were at the last :meth:`note`."""
        if len(views) == len(self._views) and all(map(is_, views, self._views)):
            return
        known = {id(view): values for view, values in zip(self._views, self._last.each, strict=True)}
        with outside_inference_mode():
            last, now = _Copies(views), _Copies(views)
        _copy_all(last, [known.get(id(view), view) for view in views])
        self._views, self._last, self._now = views, last, now


def _copy_all(copies: _Copies, tensors: list[Tensor]) -> None:
    if tensors:
        torch._foreach_copy_(copies.each, tensors)
