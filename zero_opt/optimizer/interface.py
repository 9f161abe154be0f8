"""The seam between ``ShardedOptimizer`` and what does its work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from ..comm.groups import Group
from ..state.state_dict import StateDict


class Engine(Protocol):
    """Steps the user's parameters, and keeps their optimizer state.

    An optimizer has one: the wrapped class itself (:mod:`.single_rank`), the sharded one (:mod:`.sharded`), and of
    both a form for DTensors (:mod:`.dtensors.engine`). Methods are called on the user's thread and are collective, but
    for :meth:`zero_grad`, :meth:`no_sync`, :meth:`take_bucket`, :meth:`state_dict` (on any thread), those about memory,
    and :meth:`close`.

    Attributes:
        skips: steps that were not taken because of non-finite gradients.
    """

    skips: int

    @property
    def group(self) -> Group:
        """The ranks."""

    def attribute(self, name: str) -> Any:
        """An attribute of the wrapped optimizer, or AttributeError."""

    def attach(self, user: torch.optim.Optimizer) -> None:
        """Serve this optimizer; called once it is constructed, copied or unpickled."""

    def require_copyable(self) -> None:
        """Raise ConfigTypeError if this process alone does not have all state."""

    def set_state(self, state: dict[str, Any]) -> None:
        """What ``torch.optim.Optimizer.__setstate__`` does."""

    def add_param_group(self, group: dict[str, Any]) -> None:
        """Add a group, as users give it, to the optimizer's."""

    def step(self, closure: Callable[[], Any] | None, options: Mapping[str, Any]) -> Any:
        """One optimizer step; what the closure returns.

        Raises:
            ParamsReplaced: on every rank, before anything is changed, if the user has replaced parameters. So do all
                that are collective.
        """

    @property
    def unscales(self) -> bool:
        """Whether :meth:`step` multiplies gradients by what GradScaler has set on the optimizer."""

    def clip(self, max_norm: object) -> Tensor:
        """Clip the global L2 norm of the gradients, unless no step is to be taken with them; the norm before."""

    def zero_grad(self) -> None:
        """The user drops all gradients."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Within it, backward exchanges nothing."""

    def take_bucket(self, bucket: GradBucket) -> None:
        """Take gradients from DistributedDataParallel's communication hook, in backward."""

    def flush(self) -> None:
        """Return when every parameter on this rank is up to date."""

    def shadow_step(self) -> None:
        """A step on a rank that has run out of inputs: it contributes zeros, and steps its shard."""

    def forget_epoch(self) -> None:
        """Ranks without inputs have not called ``zero_grad`` after the last step."""

    def together(self, call: str) -> AbstractContextManager[None]:
        """What fails within it on one rank is raised on all, at its end; see :meth:`Agreement.together`."""

    def consolidate(self, to: int) -> None:
        """Bring the full state to one rank, where :meth:`state_dict` gives it while it is current."""

    def rows(self) -> dict[int, dict[str, Any]]:
        """All state by global parameter index, cut by rows over the ranks: copies in host memory."""

    def state_dict(self) -> StateDict:
        """The full state, sharing memory with live state at most where the wrapped class's does."""

    def load(self, state_dict: StateDict, *, strict: bool) -> None:
        """Replace all state, after checking on every rank that what is loaded fits."""

    def leave_device(self) -> None:
        """Bring what is kept on the parameters' device beside them and ``state`` to host memory."""

    def come_back(self) -> None:
        """Undo :meth:`leave_device`, but for what is parked."""

    def memory_report(self) -> dict[str, int]:
        """Bytes on this rank of gradient shards, of staging, and of state that the optimizer's ``state`` lacks."""

    def close(self) -> None:
        """Let parameters arrive, stop listening to gradients and destroy the groups."""
