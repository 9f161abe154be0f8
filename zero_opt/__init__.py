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
    PeerLost,
    PeerSilent,
    ProcessGroupError,
    RankMismatch,
    StateDictError,
    StateNotConsolidated,
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
    Selective,
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
    "GradientConflict",
    "GradientConsumed",
    "MixedPrecision",
    "NVMeOffload",
    "NativeUnavailable",
    "NonFiniteGradient",
    "OptimizerClosed",
    "OutOfMemory",
    "Overlapped",
    "PeerLost",
    "PeerSilent",
    "ProcessGroupError",
    "RankMismatch",
    "Selective",
    "ShardedOptimizer",
    "StateDictError",
    "StateNotConsolidated",
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
    "load_sharded_state_dict",
    "register_elementwise",
    "sharded_state_dict",
]
