"""The configuration of a sharded optimizer."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..errors import ConfigConflict
from ..kernels.table import NATIVE_CLASSES
from ..placement import Offload, PlacementInputs, PlacementPolicy, placement_policy
from ..policies import AdamState, AlreadyReduced, Checks, MixedPrecision
from ..reduction import ReductionPolicy, check_reduction_policy
from ..reduction.grad_norm import check_max_norm
from ..sharding.background_gather import check_held
from ..sharding.buckets import GradBucket
from ..sharding.step_cost import step_cost_of
from ..sharding.wrapped_class import check_type, check_wrapped_class, is_elementwise
from .arguments import checked_groups


@dataclass(frozen=True)
class Config:
    """The arguments of a sharded optimizer, as the user gave them.

    Attributes:
        defaults: the wrapped class's own arguments.
        placement: what ``offload`` decides.
    """

    optimizer_class: type[torch.optim.Optimizer]
    defaults: Mapping[str, Any]
    reduction: ReductionPolicy
    offload: Offload
    precision: MixedPrecision
    max_grad_norm: float | None
    checks: Checks
    placement: PlacementPolicy = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check each argument by itself.

        Raises:
            ConfigError, ConfigTypeError, UnsupportedOptimizer: an argument is wrong.
        """
        check_reduction_policy(self.reduction)
        check_type("precision", self.precision, MixedPrecision)
        if self.optimizer_class in NATIVE_CLASSES and self.precision.master_dtype is not None:
            self._say_masters_in_state(self.precision.master_dtype)
        inputs = PlacementInputs(self.optimizer_class, self.defaults, self.precision, self.reduction)
        object.__setattr__(self, "placement", placement_policy(self.offload, inputs))
        check_type("checks", self.checks, Checks)
        if self.precision.between_hosts_dtype is not None and isinstance(self.reduction, AlreadyReduced):
            raise ConfigConflict(
                "MixedPrecision.between_hosts_dtype rounds gradients on their way, and under AlreadyReduced() this "
                "optimizer sends none; use another reduction, or DDP's own bf16_compress_hook"
            )
        check_wrapped_class(self.optimizer_class)
        if self.max_grad_norm is not None:
            object.__setattr__(self, "max_grad_norm", check_max_norm(self.max_grad_norm, "max_grad_norm"))

    def _say_masters_in_state(self, dtype: torch.dtype | str) -> None:
        """Let ``master_dtype`` of a class that has ``state`` be what that says of masters."""
        master, given = "split" if dtype == "split" else "float32", self.defaults.get("state", AdamState())
        check_type("state", given, AdamState)
        state = replace(given, master=master)
        if given.master not in (None, master):
            raise ConfigConflict(
                f"MixedPrecision.master_dtype={dtype!r} and {given!r} are two answers to one question; leave "
                "master_dtype None"
            )
        warnings.warn(
            f"MixedPrecision(master_dtype={dtype!r}) of {self.optimizer_class.__name__} is deprecated; say "
            f"state={state!r}",
            DeprecationWarning,
            stacklevel=5,  # of who makes the optimizer
        )
        object.__setattr__(self, "precision", replace(self.precision, master_dtype=None))
        object.__setattr__(self, "defaults", {**self.defaults, "state": state})

    @property
    def has_masters(self) -> bool:
        """Whether masters, or copies of parameters elsewhere, may be stepped in the parameters' place."""
        return self.offload is not None or self.placement.inputs.form.master is not None

    def why_apart(self, world_size: int) -> str:
        """Return in words why the wrapped class alone does not have all state of an engine that is no SingleRank."""
        if world_size > 1:
            return "over several ranks"
        if self.offload is not None:
            return "with an offload"
        return "of DTensors" if self.placement.inputs.form.master is None else "with masters"

    def widens(self, bucket: GradBucket) -> bool:
        """Return whether the step widens a bucket's gradients, so that scaling them before it would round them."""
        stepped, _ = self.placement.stepped_as(bucket.params[0].param)
        return stepped.itemsize > bucket.shard_dtype.itemsize

    def check_params(
        self, param_groups: Sequence[Mapping[str, Any]], describe: Callable[[int], str], first: int = 0
    ) -> None:
        """Raise UnsupportedParam or ConfigError, naming it, for a parameter that cannot be sharded like this.

        Args:
            first: the first group that is new. The model may have no parameters of earlier ones any more.
        """
        checked_groups(param_groups, describe, self.precision.reduce_dtype or self.precision.accumulate_dtype)
        self.placement.check(param_groups, describe)
        model = self.reduction.overlap_param_gather
        if model is not None:
            known = sum(len(group["params"]) for group in param_groups[:first])
            added = [param for group in param_groups[first:] for param in group["params"]]
            check_held(model, added, lambda at: describe(known + at))

    def entries(self) -> Iterator[tuple[str, Any]]:
        """Return what ranks compare of the configuration, as (name, JSON value)."""
        cls, model = self.optimizer_class, self.reduction.overlap_param_gather
        yield "optimizer class", f"{cls.__module__}.{cls.__qualname__}"
        yield "register_elementwise() of that class", is_elementwise(cls)
        yield "register_cost() of that class", step_cost_of(cls) is not None
        for name in ("reduction", "offload", "precision", "max_grad_norm"):
            yield name, repr(getattr(self, name))
        yield "state", repr(self.placement.inputs.form)
        yield "checks.nonfinite", repr(self.checks.nonfinite)
        yield "overlap_param_gather given", model is not None
        # Parameters arrive in the order of these names.
        for number, (name, _) in enumerate(() if model is None else model.named_parameters()):
            yield f"parameter {number} of overlap_param_gather", name
