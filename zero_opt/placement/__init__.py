"""Where this rank's shard lives and who steps it. Here: the table that selects a placement by its policy's type."""

from __future__ import annotations

from types import NoneType
from typing import Any

from ..errors import ConfigTypeError, quoted
from ..policies import AlreadyReduced, CPUOffload, NVMeOffload, WorkerOffload
from .in_process.policy import CPUPolicy, OnDevicePolicy
from .interface import ParamState, Placement, live_tensors
from .nvme.policy import NVMePolicy
from .policy import PlacementInputs, PlacementPolicy, SinglePlacePolicy
from .read_through import ReadThrough
from .selective.policy import SelectivePolicy
from .worker.policy import WorkerPolicy

Offload = CPUOffload | WorkerOffload | NVMeOffload | None

__all__ = [
    "Offload",
    "ParamState",
    "Placement",
    "PlacementInputs",
    "PlacementPolicy",
    "ReadThrough",
    "live_tensors",
    "placement_policy",
]

_POLICIES: dict[type, type[SinglePlacePolicy[Any]]] = {
    NoneType: OnDevicePolicy,
    CPUOffload: CPUPolicy,
    WorkerOffload: WorkerPolicy,
    NVMeOffload: NVMePolicy,
}


def placement_policy(offload: object, inputs: PlacementInputs) -> PlacementPolicy:
    """Return what an offload policy decides.

    Raises:
        ConfigTypeError: it is none.
    """
    policy = next((kind for known, kind in _POLICIES.items() if isinstance(offload, known)), None)
    if policy is None:
        called = f"; write {offload.__name__}(...)" if isinstance(offload, type) else ""
        raise ConfigTypeError(
            f"offload must be None, CPUOffload(), WorkerOffload() or NVMeOffload(path), got {quoted(offload)}{called}"
        )
    selective = getattr(offload, "selective", None)
    if selective is None:
        return policy(offload, inputs)
    # Like gradients that are reduced already, means come after a pending step has been brought in.
    return SelectivePolicy(selective, policy(offload, inputs._replace(reduction=AlreadyReduced())))
