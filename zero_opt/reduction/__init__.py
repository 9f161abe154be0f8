"""Reductions, which turn gradients into shards. Here: the table that selects one by its policy's type."""

from __future__ import annotations

from ..errors import ConfigTypeError, quoted
from ..policies import AlreadyReduced, AtStep, DDPHook, Overlapped
from .already_reduced import AlreadyReducedGrads
from .at_step import AtStepReduction
from .ddp_buckets import DDPHookReduction
from .interface import GradReduction, GradShard, OwnRounds, ReductionParts, StepCount
from .overlapped import OverlappedReduction

ReductionPolicy = Overlapped | AtStep | AlreadyReduced | DDPHook

__all__ = [
    "DDPHookReduction",
    "GradReduction",
    "GradShard",
    "OwnRounds",
    "ReductionParts",
    "ReductionPolicy",
    "StepCount",
    "bucket_mb_of",
    "build_reduction",
    "check_reduction_policy",
]

_REDUCTION_OF: dict[type[ReductionPolicy], type[GradReduction]] = {
    Overlapped: OverlappedReduction,
    AtStep: AtStepReduction,
    AlreadyReduced: AlreadyReducedGrads,
    DDPHook: DDPHookReduction,
}


def bucket_mb_of(policy: ReductionPolicy, *, between_hosts: bool) -> float:
    """Return the bucket size in MiB, chosen if none is given.

    Between hosts several buckets are on the wire at a time: small ones begin sooner, and lose nothing. On one host
    each message costs processor time.
    """
    return (5 if between_hosts else 25) if policy.bucket_mb is None else policy.bucket_mb


def check_reduction_policy(policy: object) -> None:
    """Raise ConfigTypeError unless ``policy`` is an instance of a reduction policy."""
    if not isinstance(policy, tuple(_REDUCTION_OF)):
        called = f"; write {policy.__name__}()" if isinstance(policy, type) else ""
        raise ConfigTypeError(
            f"reduction must be Overlapped(), AtStep(), AlreadyReduced() or DDPHook(), got {quoted(policy)}{called}"
        )


def build_reduction(policy: ReductionPolicy, parts: ReductionParts) -> GradReduction:
    """Make the reduction that a policy asks for."""
    made = next(made for kind, made in _REDUCTION_OF.items() if isinstance(policy, kind))
    return made(parts)
