"""Clipping of one norm over the gradients of several optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from ..errors import ConfigConflict, ConfigError, ConfigTypeError, NonFiniteGradient, ZeroOptError
from ..reduction.grad_norm import Joint, Measured, Share, alone, joint_norm, refusal_of_more
from ..sharding.wrapped_class import in_short
from .one_call import one_call
from .sharded_optimizer import ShardedOptimizer


@_disable_dynamo
@torch.no_grad()
def clip_grad_norm_(optimizers: Sequence[ShardedOptimizer], max_norm: float, *others: Any, **options: Any) -> Tensor:
    """Clip the gradients of several optimizers by the L2 norm over all of them, as if they were one optimizer's.

    Call it between backward and the optimizers' steps. Collective: every rank of their group calls it with the same
    optimizers, in the same order. Beside what each optimizer agrees on, as in ``opt.clip_grad_norm_()``, one message
    carries the squares of all.

    Under ``Checks(nonfinite="raise")`` a non-finite gradient of one optimizer raises before any is scaled. Under
    ``"skip"`` all of them skip their next step: the finite gradients are made NaN.

    Args:
        optimizers: of the same ranks, with the same ``Checks(nonfinite=...)``.
        max_norm: the largest norm that is left as it is. Other arguments of torch's function are a ConfigTypeError.

    Returns:
        The norm before clipping, a 0-dim tensor, fp32 or, if a parameter is fp64, fp64; the same bits on every rank.
        On a rank alone, where every class steps by itself, that of ``torch.nn.utils.clip_grad_norm_``.

    Raises:
        ConfigTypeError, ConfigError: no sequence of ShardedOptimizers, none, or one twice; ``max_norm`` is not a norm,
            or other arguments were given. On every rank, if all sequences begin with the same optimizer.
        ConfigConflict: they have different ranks or checks of non-finite gradients, or one is in torch's ``Join``.
        OptimizerClosed: one was closed.
        RankMismatch, StepDesync, NonFiniteGradient and others: as ``opt.clip_grad_norm_()``, on every rank.
    """
    more = refusal_of_more("zero_opt.clip_grad_norm_()", "clip_grad_norm_([muon, adam], 1.0)", others, options)
    listed = _checked_on_all(optimizers, max_norm, more)
    shares: list[Share] = []
    measured: list[Measured] = []

    def joint_of(number: int) -> Joint:
        def joint(share: Share) -> Measured:
            shares.append(share)
            if number + 1 < len(listed):  # all are measured before the first is scaled
                _clip_one(listed[number + 1], max_norm, joint_of(number + 1))
            else:
                measured.extend(joint_norm(shares))
                norms.append(measured[0].norm)
                if any(_will_skip(at, *pair) for at, pair in enumerate(zip(listed, measured, strict=True))):
                    measured[:] = [one._replace(norm=one.norm * torch.nan) for one in measured]
            return measured[number]

        return joint

    norms: list[Tensor] = []
    _clip_one(listed[0], max_norm, joint_of(0))
    return norms[0]


def _will_skip(at: int, optimizer: ShardedOptimizer, measured: Measured) -> bool:
    """Return whether the optimizer will skip its step.

    Raises:
        NonFiniteGradient: names the optimizer and its parameter.
    """
    try:
        return optimizer._engine.will_skip(measured.nonfinite)
    except NonFiniteGradient as error:
        where = f"optimizer {at} ({optimizer._config.optimizer_class.__name__})"
        raise NonFiniteGradient(f"{where}: {error}", rank=error.rank, param=error.param) from None


def _checked_on_all(optimizers: object, max_norm: float, more: ZeroOptError | None) -> list[ShardedOptimizer]:
    """As :func:`_checked`; its errors, and ``more``, are told by way of the first optimizer, where the others are."""
    try:
        if more is not None:
            raise more
        return _checked(optimizers)
    except ZeroOptError as error:
        first = next(iter(optimizers), None) if isinstance(optimizers, Sequence) else optimizers
        if isinstance(first, ShardedOptimizer) and not first._join_config.enable:
            _clip_one(first, max_norm, alone, error)
        raise


def _checked(optimizers: object) -> list[ShardedOptimizer]:
    """Return the optimizers, if one norm can be taken over them."""
    if not isinstance(optimizers, Sequence):
        raise ConfigTypeError(
            "zero_opt.clip_grad_norm_() takes a sequence of ShardedOptimizers, as in clip_grad_norm_([muon, adam], "
            f"1.0), got {in_short(optimizers)}"
        )
    listed: list[Any] = list(optimizers)
    for optimizer in listed:
        if not isinstance(optimizer, ShardedOptimizer):
            raise ConfigTypeError(
                f"zero_opt.clip_grad_norm_() takes ShardedOptimizers, got {in_short(optimizer)}; shard it too, or clip "
                "its gradients by themselves"
            )
    if len(set(map(id, listed))) < len(listed) or not listed:
        what = "the same optimizer twice" if listed else "no optimizer"
        raise ConfigError(f"zero_opt.clip_grad_norm_() was given {what}")
    for optimizer in listed:
        optimizer._require_open()
        if optimizer._join_config.enable:
            raise ConfigConflict(
                "zero_opt.clip_grad_norm_() cannot be called within Join: a rank that has run out of inputs does not "
                "know which optimizers are clipped together; clip each by itself"
            )
    ranks = [optimizer._engine.ranks for optimizer in listed]
    checks = [optimizer._config.checks.nonfinite for optimizer in listed]
    for at in range(1, len(listed)):
        if ranks[at] != ranks[0]:
            raise ConfigConflict(
                "zero_opt.clip_grad_norm_() takes one norm over optimizers of the same ranks: those of optimizer 0 are "
                f"{_told(ranks[0])}, those of optimizer {at} {_told(ranks[at])}"
            )
        if checks[at] != checks[0]:
            raise ConfigConflict(
                f"zero_opt.clip_grad_norm_() was given optimizers with Checks(nonfinite={checks[0]!r}) and "
                f"Checks(nonfinite={checks[at]!r}); let them skip, or raise for, the same steps"
            )
    return listed


def _told(ranks: Sequence[int]) -> str:
    return str(list(ranks)) if ranks else "this one alone"


@one_call("zero_opt.clip_grad_norm_()", replans=True)
def _clip_one(optimizer: ShardedOptimizer, max_norm: float, joint: Joint, error: ZeroOptError | None = None) -> None:
    """Have one optimizer collect its gradients, then ``joint`` measure those of all, then scale its own."""
    optimizer._require_open()
    optimizer._engine.clip(max_norm, joint, error)
