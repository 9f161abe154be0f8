"""Does anybody else reduce the gradients that we are about to reduce?"""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterable

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ..errors import GradientConflict


def ddp_conflict(params: Iterable[Tensor]) -> GradientConflict | None:
    """The error if ``DistributedDataParallel`` all-reduces any of the gradients. Looks at every object there is."""
    held = {id(param) for param in params}
    if not held or not _ddp_over(held):
        return None
    gc.collect()
    if not _ddp_over(held):  # it was garbage
        return None
    return GradientConflict(
        "DistributedDataParallel all-reduces the gradients that this optimizer would reduce again; use "
        "reduction=zero_opt.AlreadyReduced(), or DDPHook() with ddp.register_comm_hook(opt, zero_opt.ddp_hook)"
    )


def _ddp_over(held: Collection[int]) -> bool:
    # type() and not isinstance(): there are objects that answer to __class__ with a side effect, or an error.
    return any(
        issubclass(type(found), DistributedDataParallel)
        and not found._comm_hooks
        and any(id(param) in held for param in found.parameters())
        for found in gc.get_objects()
    )
