"""Reductions, which turn gradients into shards. Here: the table that selects one by its policy's type."""

from __future__ import annotations

from ..errors import ConfigTypeError, quoted
from ..policies import AlreadyReduced, AtStep, DDPHook, Overlapped
from .already_reduced import AlreadyReducedGrads
from .at_step import AtStepReduction
from .ddp_buckets import DDPHookReduction
from .interface import GradReduction, GradShard, ReductionParts, ReductionReport, StepCount
from .overlapped import OverlappedReduction

ReductionPolicy = Overlapped | AtStep | AlreadyReduced | DDPHook

__all__ = [
    "DDPHookReduction",
    "GradReduction",
    "GradShard",
    "ReductionParts",
    "ReductionPolicy",
    "ReductionReport",
    "StepCount",
    "build_reduction",
    "check_reduction_policy",
]

_REDUCTION_OF: dict[type[ReductionPolicy], type[GradReduction]] = {
    Overlapped: OverlappedReduction,
    AtStep: AtStepReduction,
    AlreadyReduced: AlreadyReducedGrads,
    DDPHook: DDPHookReduction,
}


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
