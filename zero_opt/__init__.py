"""Shard any ``torch.optim`` optimizer over the ranks of a ``torch.distributed`` process group."""

from __future__ import annotations

from .collectives import broadcast_params
from .construction import register_elementwise
from .cpu_adam import CPUAdam, CPUAdamW
from .dcp import load_sharded_state_dict, sharded_state_dict
from .ddp_hook import ddp_hook
from .errors import (
    ConfigConflict,
    ConfigError,
    ConfigTypeError,
    GradientConflict,
    GradientConsumed,
    NativeUnavailable,
    NonFiniteGradient,
    OptimizerClosed,
    OutOfMemory,
    ParamsUnsharded,
    PeerLost,
    PeerSilent,
    ProcessGroupError,
    RankMismatch,
    StateDictError,
    StateNotConsolidated,
    StateOffloaded,
    StepDesync,
    StepFailed,
    StepPending,
    StorageFailed,
    StorageFull,
    UnsupportedOptimizer,
    UnsupportedParam,
    WorkerDied,
    WorkerFailed,
    ZeroOptError,
)
from .estimate import Estimate, estimate
from .optimizer import ShardedOptimizer
from .policies import (
    AdamState,
    AlreadyReduced,
    AtStep,
    Checks,
    CPUOffload,
    DDPHook,
    MixedPrecision,
    NVMeOffload,
    Overlapped,
    WorkerOffload,
)

__version__ = "0.1.0"

__all__ = [
    "AdamState",
    "AlreadyReduced",
    "AtStep",
    "CPUAdam",
    "CPUAdamW",
    "CPUOffload",
    "Checks",
    "ConfigConflict",
    "ConfigError",
    "ConfigTypeError",
    "DDPHook",
    "Estimate",
    "GradientConflict",
    "GradientConsumed",
    "MixedPrecision",
    "NVMeOffload",
    "NativeUnavailable",
    "NonFiniteGradient",
    "OptimizerClosed",
    "OutOfMemory",
    "Overlapped",
    "ParamsUnsharded",
    "PeerLost",
    "PeerSilent",
    "ProcessGroupError",
    "RankMismatch",
    "ShardedOptimizer",
    "StateDictError",
    "StateNotConsolidated",
    "StateOffloaded",
    "StepDesync",
    "StepFailed",
    "StepPending",
    "StorageFailed",
    "StorageFull",
    "UnsupportedOptimizer",
    "UnsupportedParam",
    "WorkerDied",
    "WorkerFailed",
    "WorkerOffload",
    "ZeroOptError",
    "broadcast_params",
    "ddp_hook",
    "estimate",
    "load_sharded_state_dict",
    "register_elementwise",
    "sharded_state_dict",
]
