"""The seam between ``ShardedOptimizer`` and what does its work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket as DDPBucket

from ..comm.groups import Group
from ..errors import ZeroOptError
from ..reduction.grad_norm import Joint, alone
from ..state.state_dict import StateDict, StatesByIndex

# What the log says of a step, once.
MET_NONE = (
    "a step() met no gradient on any rank, and changed nothing; if fully_shard(), load_state_dict(assign=True) or a "
    "wrapper has replaced the model's parameters, the optimizer has the old ones: construct it after that"
)


class Engine(Protocol):
    """Steps the user's parameters, and keeps their optimizer state.

    An optimizer has one engine: the wrapped class itself (:mod:`.single_rank`), or the sharded one (:mod:`.sharded`),
    each also in a form for DTensors (:mod:`.dtensors.engine`). Engines inherit from this class. The methods that have a
    body do nothing, as is right for a rank alone.

    Methods are called on the user's thread, but for :meth:`take_bucket` (in backward, on autograd's thread) and
    :meth:`state_dict` (on any thread). They are collective, but for :meth:`zero_grad`, :meth:`no_sync`,
    :meth:`take_bucket`, :meth:`state_dict`, those about memory, and :meth:`close`. Those that are collective raise
    ParamsReplaced on every rank, before anything is changed, if the user has replaced parameters.

    Attributes:
        skips: steps that were not taken because of non-finite gradients.
        wrapped: the wrapped optimizer, if there is one.
    """

    skips: int
    wrapped: torch.optim.Optimizer | None = None

    @property
    def group(self) -> Group:
        """The ranks."""

    @property
    def unscales(self) -> bool:
        """Whether :meth:`step` multiplies gradients by what GradScaler has set on the optimizer."""

    @property
    def grads_are_local(self) -> bool:
        """Whether ``p.grad`` has this rank's own gradients until the step."""
        return False

    # -- the wrapped optimizer ----------------------------------------------------------------------------------------

    def attach(self, user: torch.optim.Optimizer) -> None:  # noqa: ARG002  (of the protocol)
        """Serve this optimizer; called once it is constructed, copied or unpickled."""
        return

    def require_copyable(self) -> None:
        """Raise ConfigTypeError unless this process has all state."""
        return

    def set_state(self, state: dict[str, Any]) -> None:
        """Do what ``torch.optim.Optimizer.__setstate__`` does."""

    def require_groups(self) -> None:
        """Raise ParamsReplaced if the user has put something in the place of ``param_groups`` that is none."""
        return

    def add_param_group(self, group: dict[str, Any]) -> None:
        """Add a group, as users give it, to the optimizer's."""

    # -- the step -----------------------------------------------------------------------------------------------------

    def step(
        self, closure: Callable[[], Any] | None, options: Mapping[str, Any], error: ZeroOptError | None = None
    ) -> Any:
        """Take one optimizer step; return what the closure returns.

        Args:
            error: what is wrong with the call on this rank, raised on every one that takes part in the step.
        """

    def clip(self, max_norm: object, joint: Joint = alone, error: ZeroOptError | None = None) -> Tensor:
        """Clip the global L2 norm of the gradients, unless they will be skipped; return the norm before.

        Args:
            joint: measures the gradients, with those of other optimizers; called once, before any are scaled.
            error: what is wrong with the call on this rank, raised on every one.
        """

    def will_skip(self, nonfinite: tuple[int, int] | None) -> bool:
        """Return whether a step will leave the gradients out; raise NonFiniteGradient where checks say so.

        Args:
            nonfinite: as in :class:`Measured`.
        """

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that share gradients or parameters, in the default process group; none of a rank alone."""
        return ()

    def unscaling(self, factor: Tensor) -> AbstractContextManager[None]:  # noqa: ARG002  (of the protocol)
        """Return a context in which GradScaler multiplies every ``p.grad`` by ``factor``, a 0-dim tensor.

        On exit, gradients that were reduced from ``p.grad`` are multiplied too.
        """
        return nullcontext()

    def zero_grad(self) -> None:
        """Drop all gradients that are not in ``p.grad``."""
        return

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context within which backward exchanges nothing."""
        return nullcontext()

    def take_bucket(self, bucket: DDPBucket) -> None:
        """Take gradients from DistributedDataParallel's communication hook."""

    def flush(self) -> None:
        """Return when every parameter on this rank is up to date."""
        return

    def shadow_step(self) -> None:
        """Take part in the others' step on a rank that has run out of inputs, with gradients of zero."""
        return

    def forget_epoch(self) -> None:
        """Count no ``zero_grad`` after the last step: ranks without inputs have called none. Collective."""
        return

    def of_all_ranks(self) -> AbstractContextManager[None]:
        """Return a context of what every rank does. An exception that ends it on this rank alone, once messages were
        sent, is the end of training here."""
        return nullcontext()

    def together(self, call: str) -> AbstractContextManager[None]:  # noqa: ARG002  (of the protocol)
        """Return a context that raises on all ranks, at its end, what fails within it on one."""
        return nullcontext()

    def together_on_meshes(self, call: str) -> AbstractContextManager[None]:
        """Return a context that raises on all ranks what fails on one, also where parameters are DTensors."""
        return self.together(call)

    def check_rows(self, state_dict: StateDict) -> None:  # noqa: ARG002  (of the protocol)
        """Raise what :meth:`load` would raise on this rank alone, which over several ranks is nothing."""
        return

    def summary(self) -> str:
        """Return in one line what the optimizer is and has, for its ``repr()``; nothing if it is the wrapped one."""
        return ""

    def stats(self) -> dict[str, float]:
        """Return the figures of the last step."""
        return {"skipped_steps": float(self.skips)}

    # -- state --------------------------------------------------------------------------------------------------------

    def consolidate(self, to: int) -> None:
        """Bring the full state to one rank, where :meth:`state_dict` returns it while it is current."""

    def rows(self, *, compact: bool) -> StatesByIndex:
        """Return copies of all state by global parameter index, cut by rows over the ranks, in host memory.

        Args:
            compact: whether compact state is returned as it is.
        """

    def as_planned(self, index: int, param: Tensor) -> Tensor:  # noqa: ARG002  (of the protocol)
        """Return a tensor like that which a parameter was when it was planned, whatever it was re-pointed to."""
        return param

    def sums(self, params: Mapping[int, Tensor], call: str) -> Mapping[int, int]:  # noqa: ARG002  (of the protocol)
        """Return a sum over the bits of each bf16 DTensor of these, the same for every cut."""
        return {}

    def state_dict(self) -> StateDict:
        """Return the full state, sharing memory with live state at most where the wrapped class's does."""

    def load(self, state_dict: StateDict, *, strict: bool) -> None:
        """Replace all state, after checking on every rank that what is loaded fits."""

    # -- memory, and the end ------------------------------------------------------------------------------------------

    def moving(self) -> AbstractContextManager[None]:
        """Return a context in which state moves to other memory: no other thread reads it meanwhile."""
        return nullcontext()

    def leave_device(self) -> None:
        """Bring to host memory what is kept on the parameters' device beside the parameters and ``state``."""
        return

    def come_back(self) -> None:
        """Undo :meth:`leave_device`, but for what is parked."""
        return

    def memory_report(self) -> dict[str, int]:
        """Return the bytes on this rank of gradient shards, of staging, and of state that ``state`` lacks."""

    def close(self) -> None:
        """Let parameters arrive, stop listening to gradients and destroy the groups."""
        return
