"""A search for a DistributedDataParallel that reduces the gradients which the optimizer is about to reduce."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterable, Iterator, Sequence

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _DDPJoinHook

from ..errors import ConfigConflict, GradientConflict
from ..system.frames import calling_frames


def ddp_conflict(params: Iterable[Tensor]) -> GradientConflict | None:
    """Return the error if ``DistributedDataParallel`` all-reduces any of the gradients. Looks at all its instances."""
    held = {id(param) for param in params}
    if not held or not _has_ddp_of(held):
        return None
    gc.collect()
    if not _has_ddp_of(held):  # it was garbage
        return None
    return GradientConflict(
        "DistributedDataParallel all-reduces the gradients that this optimizer would reduce again; use "
        "reduction=zero_opt.AlreadyReduced(), or DDPHook() with ddp.register_comm_hook(opt, zero_opt.ddp_hook)"
    )


def not_reduced(label: str, step: int, param: Tensor) -> GradientConflict:
    """Return the error about the gradients of a parameter in a step, which the ranks have not reduced."""
    advice = (
        "put the model into DistributedDataParallel, and run the last backward of each step outside ddp.no_sync(); or "
        "use reduction=zero_opt.Overlapped() or AtStep() without it"
    )
    if _has_ddp_of({id(param)}):
        advice = (
            "run the last backward of each step outside ddp.no_sync(); if parameters get no gradient, or were frozen "
            "after DistributedDataParallel was made, pass find_unused_parameters=True to it; and if they were frozen "
            "when it was made, and unfrozen since, make it anew: it reduces only what was trainable when it was made"
        )
    if _is_ignored(param):
        advice = (
            "DistributedDataParallel was told to ignore this parameter (_ddp_params_and_buffers_to_ignore): let it "
            "reduce the parameter, or use reduction=zero_opt.DDPHook(), which reduces what it ignores"
        )
    return GradientConflict(
        f"the gradients of {label} differ between ranks in step {step}, so p.grad is not yet reduced; {advice}"
    )


def over_other_ranks(param: Tensor, ranks: Sequence[int]) -> ConfigConflict | None:
    """Return the error if the DDP that hands a parameter's gradient to a hook is over other ranks than the optimizer.

    Args:
        ranks: the optimizer's, in the default process group.
    """
    own = sorted(ranks)
    hooked = [ddp for ddp in _instances(DistributedDataParallel) if vars(ddp).get("_comm_hooks")]
    theirs = [
        sorted(dist.get_process_group_ranks(ddp.process_group))
        for ddp in hooked
        if any(held is param for held in ddp.parameters())
    ]
    if not theirs or own in theirs:
        return None
    return ConfigConflict(
        f"DistributedDataParallel is over ranks {theirs[0]}, and the ShardedOptimizer whose ddp_hook it calls over "
        f"ranks {own}, which alone would be averaged over; give both the same process_group, or leave the hook out and "
        "pass reduction=zero_opt.AlreadyReduced()"
    )


def waits_to_fill(params: Iterable[Tensor]) -> bool:
    """Return whether a ``DistributedDataParallel`` of these parameters waits for a gradient before it calls its hook.

    It does after a synced forward, if some of its parameters have got a gradient, and others none. A forward in
    ``no_sync()``, or without gradients, leaves False in the attribute that is read here.
    """
    held = {id(param) for param in params}
    for ddp in _instances(DistributedDataParallel):
        waits = ddp.require_forward_param_sync and not (ddp.find_unused_parameters or ddp.static_graph)
        grads = [param.grad for param in ddp.parameters() if id(param) in held]
        if waits and vars(ddp).get("_comm_hooks") and len({grad is None for grad in grads}) == 2:
            return True
    return False


def _is_ignored(param: Tensor) -> bool:
    return any(
        held is param and name in getattr(ddp, "parameters_to_ignore", ())
        for ddp in _instances(DistributedDataParallel)
        for name, held in ddp.module.named_parameters()
    )


def _has_ddp_of(held: Collection[int]) -> bool:
    return any(
        vars(ddp).get("_comm_hooks") == [] and any(id(param) in held for param in ddp.parameters())
        for ddp in _instances(DistributedDataParallel)
    )


def _instances(kind: type[DistributedDataParallel]) -> Iterator[DistributedDataParallel]:
    """Yield all instances, of subclasses too: an object refers to its class.

    Not by ``gc.get_objects``, which refers to tuples that other threads are still making: those threads fail then.
    """
    for referrer in gc.get_referrers(kind):
        if type(referrer) is kind:
            yield referrer
    for subclass in kind.__subclasses__():
        yield from _instances(subclass)


def forward_of_ddp() -> nn.Module | None:
    """Return the module whose forward ``DistributedDataParallel`` is about to call, if its code is on the stack."""
    module: nn.Module
    for frame in calling_frames():
        if frame.f_code is DistributedDataParallel._pre_forward.__code__:
            module = frame.f_locals["self"].module
            return module
        if frame.f_code is _DDPJoinHook.main_hook.__code__:
            module = frame.f_locals["self"].ddp.module
            return module
    return None
