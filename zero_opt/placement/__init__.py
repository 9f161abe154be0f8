"""Strategies for where the shard lives; the type of the offload policy picks one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..comm.groups import Group
from ..errors import ConfigConflict, ConfigTypeError, UnsupportedOptimizer, UnsupportedParam, quoted
from ..kernels.adam_state import HALVES
from ..policies import AlreadyReduced, CPUOffload, MixedPrecision, NVMeOffload, WorkerOffload
from ..reduction import ReductionPolicy as Reduction
from ..sharding.wrapped_class import steps_params_apart
from ..system.devices import HOST, is_host
from ..system.extension import require_native
from .adam_rules import ADAM_CLASSES, NATIVE_CLASSES
from .adam_rules import check_groups as _check_native_groups
from .adam_rules import check_params as _check_native_params
from .adam_rules import check_state as _check_native_state
from .in_process.host_offload import CPUPlacement, HostUnits
from .in_process.native_steps import NativeSteps, may_be_fused, says_fused, serves
from .in_process.placement import BucketwisePlacement, DevicePlacement
from .in_process.units import DeviceUnits
from .interface import Home, ParamState, Placement, ReadThrough, tensors_of
from .nvme.placement import NVMePlacement
from .selective.column_shard import is_matrix
from .selective.column_state import extra_places, without_extra
from .selective.placement import SelectivePlacement
from .worker.cores import agree_on_threads
from .worker.placement import WorkerPlacement
from .worker.results import Results, build_results
from .worker.speculation import SpeculativePlacement, check_reduces_early

Policy = CPUOffload | WorkerOffload | NVMeOffload | None

__all__ = [
    "DevicePlacement",
    "ParamState",
    "Placement",
    "Policy",
    "ReadThrough",
    "Results",
    "build_placement",
    "build_results",
    "check_params",
    "check_policy",
    "check_reduction",
    "check_state",
    "extra_places",
    "grad_buffers_of",
    "home_of",
    "is_by_columns",
    "taken_states",
    "tensors_of",
]


def check_policy(policy: object) -> None:
    """Raise ConfigTypeError unless ``policy`` is one this version can place."""
    if policy is not None and not isinstance(policy, (CPUOffload, WorkerOffload, NVMeOffload)):
        called = f"; write {policy.__name__}(...)" if isinstance(policy, type) else ""
        raise ConfigTypeError(
            f"offload must be None, CPUOffload(), WorkerOffload() or NVMeOffload(path), got {quoted(policy)}{called}"
        )


def check_reduction(policy: Policy, reduction: Reduction) -> None:
    """Raise ConfigConflict unless a placement can work with that reduction."""
    if isinstance(policy, WorkerOffload) and policy.speculate:
        check_reduces_early(reduction)


def check_params(
    policy: Policy,
    precision: MixedPrecision,
    optimizer_class: type[torch.optim.Optimizer],
    groups: Sequence[Mapping[str, Any]],
    describe: Callable[[int], str],
) -> None:
    """Raise an error, naming it, for what cannot be stepped where the policy says.

    Raises:
        UnsupportedOptimizer, UnsupportedParam, ConfigConflict, NativeUnavailable.
    """
    params = [param for group in groups for param in group["params"]]
    if policy is not None and policy.selective is not None:
        _check_selective(policy, precision, optimizer_class, params, describe)
        _check_native_groups("Selective", optimizer_class, groups)
        _check_native_params("Selective", params, describe)
    if isinstance(policy, (WorkerOffload, NVMeOffload)):
        name = type(policy).__name__
        if precision.master_dtype == "split":
            raise ConfigConflict(f"{name} keeps fp32 masters: leave MixedPrecision.master_dtype None with it")
        _check_native_groups(name, optimizer_class, groups)
        _check_native_params(name, params, describe)
        return
    if precision.master_dtype == "split":
        _check_split_groups(policy, optimizer_class, groups)
        for index, param in enumerate(params):
            if param.dtype is torch.float16 or (policy is None and not is_host(param.device)):
                raise UnsupportedParam(
                    f"{describe(index)} is {param.dtype} on {param.device}; split masters are for torch.bfloat16 on "
                    "the CPU, or with offload=CPUOffload(); use master_dtype=torch.float32"
                )
    if isinstance(policy, CPUOffload) and policy.ratio < 1 and optimizer_class in NATIVE_CLASSES:
        for index, param in enumerate(params):
            if not is_host(param.device):
                raise UnsupportedParam(
                    f"{describe(index)} is on {param.device}, where ratio={policy.ratio} may leave it, and "
                    f"{optimizer_class.__name__} steps on the CPU alone; use torch.optim.AdamW, or ratio=1"
                )


def _check_selective(
    policy: CPUOffload | WorkerOffload | NVMeOffload,
    precision: MixedPrecision,
    optimizer_class: type[torch.optim.Optimizer],
    params: Sequence[Tensor],
    describe: Callable[[int], str],
) -> None:
    if precision.master_dtype == "split":
        raise ConfigConflict("Selective keeps fp32 masters: leave MixedPrecision.master_dtype None with it")
    if isinstance(policy, CPUOffload) and policy.ratio < 1:
        raise ConfigConflict("CPUOffload.ratio and Selective both leave a part on the device: leave ratio 1 with it")
    for index, param in enumerate(params):
        if not is_host(param.device) and optimizer_class in NATIVE_CLASSES:
            raise UnsupportedParam(
                f"{describe(index)} is on {param.device}, where Selective leaves a part of it, and "
                f"{optimizer_class.__name__} steps on the CPU alone; use torch.optim.AdamW"
            )


def _check_split_groups(
    policy: Policy, optimizer_class: type[torch.optim.Optimizer], groups: Iterable[Mapping[str, Any]]
) -> None:
    require_native()
    rule = says_fused if policy is None else may_be_fused
    for number, group in enumerate(groups):
        if optimizer_class not in ADAM_CLASSES or not rule(group):
            raise UnsupportedOptimizer(
                f"split masters are stepped by the native kernel alone, which does not step group {number} of "
                f"{optimizer_class.__name__} (fused={group.get('fused')!r}): take Adam or AdamW with fused=True, or "
                "master_dtype=torch.float32"
            )


def check_state(
    policy: Policy,
    precision: MixedPrecision,
    optimizer_class: type[torch.optim.Optimizer],
    groups: Iterable[Mapping[str, Any]],
    states: Mapping[int, Mapping[str, Tensor]],
) -> None:
    """Raise UnsupportedOptimizer or StateDictError for loaded groups and states that a placement cannot take."""
    selective = policy is not None and policy.selective is not None
    if selective or isinstance(policy, (WorkerOffload, NVMeOffload)):
        _check_native_groups(type(policy).__name__, optimizer_class, groups)
        _check_native_state(states)
    elif precision.master_dtype == "split":
        _check_split_groups(policy, optimizer_class, groups)


def is_by_columns(policy: Policy, param: Tensor) -> bool:
    """Whether a parameter is stepped by columns, so that its step counts do not follow from how often it was used."""
    return policy is not None and policy.selective is not None and is_matrix(param)


def taken_states(policy: Policy, states: dict[int, Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
    """Loaded states without what a placement would keep and not follow."""
    return without_extra(states) if policy is None or policy.selective is None else states


def home_of(policy: Policy, precision: MixedPrecision, param: Tensor) -> tuple[torch.dtype, torch.device]:
    """The dtype of what is stepped for a parameter, and the device its state is on, where it is not left there."""
    masters = policy is not None or precision.master_dtype is not None
    dtype = torch.float32 if masters and param.dtype in HALVES else param.dtype
    return dtype, param.device if policy is None else HOST


def grad_buffers_of(policy: WorkerOffload, reduction: Reduction) -> int:
    """How many buffers a worker's gradients have: buckets are reduced into one while it reads the other."""
    return 1 if isinstance(reduction, AlreadyReduced) else 1 + policy.delay


def build_placement(
    policy: Policy,
    precision: MixedPrecision,
    optimizer_class: type[torch.optim.Optimizer],
    defaults: Mapping[str, Any],
    group: Group,
    reduction: Reduction,
    results: Results,
) -> Placement:
    """The strategy a policy names; ``None`` is the parameters' own device. Collective.

    Args:
        reduction: where gradients come from.
        results: how what is stepped elsewhere gets into the parameters.
    """
    if policy is not None and policy.selective is not None:
        # Like gradients that are reduced already, means come after a pending step has been brought in.
        home = _build_whole(policy, precision, optimizer_class, defaults, group, AlreadyReduced(), Results())
        delay = policy.delay if isinstance(policy, WorkerOffload) else 0
        threads = _own_threads(policy, optimizer_class, defaults)
        return SelectivePlacement(policy.selective, home, group, optimizer_class, defaults, delay, threads)
    return _build_whole(policy, precision, optimizer_class, defaults, group, reduction, results)


def _own_threads(
    policy: Policy, optimizer_class: type[torch.optim.Optimizer], defaults: Mapping[str, Any]
) -> int | None:
    """Return how many threads of this process step, as set by the user; ``None`` if not set."""
    given = None if policy is None or isinstance(policy, WorkerOffload) else policy.threads
    return given or (defaults.get("threads") if optimizer_class in NATIVE_CLASSES else None)


def _build_whole(
    policy: Policy,
    precision: MixedPrecision,
    optimizer_class: type[torch.optim.Optimizer],
    defaults: Mapping[str, Any],
    group: Group,
    reduction: Reduction,
    results: Results,
) -> Home:
    """What steps all of a shard in one place."""
    if isinstance(policy, WorkerOffload):
        if policy.speculate:
            return SpeculativePlacement(policy, defaults, group, reduction, results)
        return WorkerPlacement(policy, defaults, group, grad_buffers_of(policy, reduction), results)
    threads = _own_threads(policy, optimizer_class, defaults)
    if policy is not None:
        agree_on_threads(policy, threads, group)
    if isinstance(policy, NVMeOffload):
        return NVMePlacement(policy, defaults, threads)
    bucketwise = steps_params_apart(optimizer_class)
    native = None
    if serves(optimizer_class):
        native = NativeSteps(defaults, says_fused if policy is None else may_be_fused, threads)
    if policy is None:
        strategy = BucketwisePlacement if bucketwise else DevicePlacement
        return strategy(optimizer_class, defaults, DeviceUnits(precision.master_dtype), native)
    strategy = CPUPlacement if bucketwise else DevicePlacement
    return strategy(optimizer_class, defaults, HostUnits(policy, precision.master_dtype), native)
