"""Typed errors, and the category of warnings. Every one says what happened, to what, and what to do about it.

Where torch raises ``ValueError``, ``TypeError`` or ``RuntimeError`` for the same mistake, the error here is that type
too, so code written for ``torch.optim`` keeps catching it.
"""

from __future__ import annotations


def quoted(value: object) -> str:
    """Return how messages quote what a user has given: its ``repr``, cut where it is long."""
    try:
        return f"{value!r:.80}"
    except ValueError:  # Python does not write integers of many thousand digits
        size = f" of {value.bit_length()} bits" if isinstance(value, int) else ""
        return f"an object of type {type(value).__name__}{size}"


class ZeroOptError(Exception):
    """Base class of every error raised on purpose by zero_opt."""


class ZeroOptWarning(UserWarning):
    """Category of every warning that zero_opt raises by ``warnings.warn``, but for deprecations."""


class ConfigError(ZeroOptError, ValueError):
    """An argument has a value that cannot work; the message quotes it."""


class ConfigTypeError(ZeroOptError, TypeError):
    """An argument has a type that cannot work; the message quotes it."""


class ConfigConflict(ZeroOptError, RuntimeError):
    """Arguments or calls, each valid by itself, exclude each other; the message may be the wrapped class's."""


class ParamsReplaced(ConfigConflict):
    """``opt.param_groups`` holds other parameters than the planned ones, and the optimizer cannot plan them instead."""


class UnsupportedOptimizer(ZeroOptError, ValueError):
    """The wrapped optimizer class, or one of its options, cannot be sharded."""


class UnsupportedParam(ZeroOptError, TypeError):
    """A parameter, its gradient or state cannot be sharded or stepped (sparse, overlapping memory, another dtype)."""


class ProcessGroupError(ZeroOptError, RuntimeError):
    """There is no usable process group; the message says what to call first."""


class ParamsUnsharded(ZeroOptError, RuntimeError):
    """FSDP holds gathered copies of parameters, which a step would not reach; the message says what to call first."""


class GradientConsumed(ZeroOptError, RuntimeError):
    """``p.grad`` was read or edited after its values had moved into a sharded bucket."""


class GradientConflict(ZeroOptError, RuntimeError):
    """A gradient appeared that a second reducer or a hand edit produced; using it would count it twice or lose it."""


class GradientsLocal(ZeroOptError, RuntimeError):
    """Every backward since the last step was inside ``no_sync()``; nothing was reduced, gradients stay as they are."""


class RankMismatch(ZeroOptError, RuntimeError):
    """The ranks do not hold the same thing; names the first difference and both values."""


class StepDesync(ZeroOptError, RuntimeError):
    """The ranks are not in the same step, or left a backward at different points.

    Attributes:
        epoch: the number of ``zero_grad`` calls to continue from, if that is what differed.
    """

    def __init__(self, message: str, *, epoch: int | None = None) -> None:
        super().__init__(message)
        self.epoch = epoch


class StepFailed(ZeroOptError, RuntimeError):
    """A step failed on another rank, so parameters and state lack a part of that step: do not save them."""


class StepPending(ZeroOptError, RuntimeError):
    """Something needs the result of a step that is still in the worker; the message says to call ``flush()``.

    With ``delay=1`` a read of a parameter outside of training is such a thing; see :class:`WorkerOffload`.
    """


class WorkerFailed(ZeroOptError, RuntimeError):
    """The worker process cannot be started, or cannot be woken or take a step; the message quotes what it said."""


class WorkerDied(WorkerFailed):
    """Worker after worker has died in the same step without getting on. State is intact: a retry goes on with it."""


class OutOfMemory(ZeroOptError, MemoryError):
    """What is needed is more than may still be had; the message has both numbers, and nothing was touched."""


class OutOfResources(ZeroOptError, RuntimeError):
    """A rank's process can get no more file descriptors, threads or room in a file; the message names the limit."""


class StorageFailed(ZeroOptError, OSError):
    """The file that holds the state cannot be made, read or written; the message says where, and what became of it."""


class StorageFull(StorageFailed):
    """The file system has less room than the state needs; the message has both numbers, and nothing was touched."""


class PeerLost(ZeroOptError, RuntimeError):
    """Another rank has died, or has not answered within the group's timeout."""


class PeerSilent(PeerLost, StepDesync):
    """A rank that lives is stopped, or has not come to a call of all ranks in time; names it and its last step."""


class NonFiniteGradient(ZeroOptError, RuntimeError):
    """A reduced gradient has an inf or NaN (``Checks(nonfinite="raise")``); parameters and state are untouched.

    Attributes:
        rank: the rank that owns the element, ``None`` if the error has traveled. param: global parameter index.
    """

    def __init__(self, message: str, *, rank: int | None = None, param: int | None = None) -> None:
        super().__init__(message)
        self.rank, self.param = rank, param


class StateDictError(ZeroOptError, ValueError):
    """A state dict does not fit the optimizer; nothing was changed."""


class StateDictTypeError(StateDictError, TypeError):
    """A value in a state dict, or in the state that is stepped, has a type that cannot work; nothing was changed."""


class StateOffloaded(ZeroOptError, RuntimeError):
    """A step, a load or a reduction was asked for after ``offload_state()``; call ``reload_state()``."""


class StateNotConsolidated(ZeroOptError, RuntimeError):
    """``state_dict()`` was called where the full state cannot be had, as after ``close()`` over several ranks."""


class OptimizerClosed(ZeroOptError, RuntimeError):
    """The optimizer was used after ``close()``."""


class NativeUnavailable(ZeroOptError, RuntimeError):
    """``zero_opt._native`` is not built for this platform, or was built for another version of zero_opt."""


def name_and_text(error: BaseException) -> list[str]:
    """Return what another rank is sent of an error, for :func:`error_of_rank`."""
    return [type(error).__name__, str(error)]


def error_of_rank(rank: int, name: str, message: str) -> ZeroOptError:
    """What stands here for an error of another rank, given the name of its class; one of ours if it is known."""
    kind = globals().get(name)
    if not (isinstance(kind, type) and issubclass(kind, ZeroOptError)):
        kind, message = ZeroOptError, f"{message} ({name})"
    return kind(f"rank {rank}: {message}")


def mib(nbytes: float) -> str:
    """So many bytes in the words of messages, as ``12.3 MiB``; what that would show as nothing, in bytes."""
    return f"{nbytes / 2**20:,.1f} MiB" if not 0 < nbytes < 2**20 / 10 else f"{nbytes:,.0f} bytes"
