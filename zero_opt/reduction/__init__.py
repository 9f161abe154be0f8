"""Strategies that turn gradients into shards; the type of the policy picks one."""

from __future__ import annotations

from ..errors import ConfigTypeError, quoted
from ..policies import AlreadyReduced, AtStep, DDPHook, Overlapped
from .already_reduced import AlreadyReducedGrads
from .at_step import AtStepReduction
from .ddp_buckets import DDPHookReduction
from .interface import GradReduction, GradShard, Parts, ReductionReport, StepCount
from .overlapped import OverlappedReduction

Policy = Overlapped | AtStep | AlreadyReduced | DDPHook

__all__ = [
    "DDPHookReduction",
    "GradReduction",
    "GradShard",
    "Parts",
    "Policy",
    "ReductionReport",
    "StepCount",
    "build_reduction",
    "check_policy",
]


def check_policy(policy: object) -> None:
    """Raise ConfigTypeError unless ``policy`` is an instance of a reduction policy."""
    if not isinstance(policy, (Overlapped, AtStep, AlreadyReduced, DDPHook)):
        called = f"; write {policy.__name__}()" if isinstance(policy, type) else ""
        raise ConfigTypeError(
            f"reduction must be Overlapped(), AtStep(), AlreadyReduced() or DDPHook(), got {quoted(policy)}{called}"
        )


def build_reduction(policy: Policy, parts: Parts) -> GradReduction:
    """The strategy a policy names."""
    if isinstance(policy, Overlapped):
        return OverlappedReduction(parts)
    if isinstance(policy, AtStep):
        return AtStepReduction(parts)
    if isinstance(policy, DDPHook):
        return DDPHookReduction(parts)
    return AlreadyReducedGrads(parts)
