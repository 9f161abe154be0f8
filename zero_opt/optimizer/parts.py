"""What the sharded engine drives, built once: groups of ranks, partition, reduction, placement, gather, state."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import Tensor

from ..comm.agreement import Agreement
from ..comm.backend_exchanges import between_hosts
from ..comm.exchange import Exchange, close_all
from ..placement import Placement
from ..reduction import ReductionParts, StepCount, bucket_mb_of, build_reduction
from ..sharding.background_gather import build_gather
from ..sharding.partition import Partition
from ..sharding.wrapped_class import is_elementwise
from ..state.alike_entries import StateOwner
from ..state.full_state import FullState
from ..state.guard import StateGuard, marks
from ..state.stand_ins import StandIns
from ..state.visible_state import VisibleState
from ..system.background_thread import SerialThread
from .config import Config
from .process_groups import OwnGroups
from .step_figures import StepFigures


class EngineParts:
    """The parts of one engine, as a configuration asks for them, without any parameters yet.

    Attributes:
        owner: has the user's param groups and state. describe: names a parameter, given its global index.
        count: where training is. figures: of the last step. params: every parameter by global index, planned or not.
        exchanges: by device type. thread: runs what exchanges with other ranks off the user's thread, in one order.
        visible: the user's view of this rank's state. full: the state of all ranks.
    """

    def __init__(
        self,
        config: Config,
        groups: OwnGroups,
        owner: StateOwner,
        describe: Callable[[int], str],
        unscale: Callable[[Tensor], bool],
    ) -> None:
        """Build all parts. Collective.

        Args:
            unscale: what GradScaler's unscaling of reduced gradients calls.

        Raises:
            RankMismatch: on every rank, if the ranks have different configurations.
            OutOfMemory, OutOfResources, WorkerFailed, StorageFailed: on every rank, if one cannot have its placement.
        """
        self.config, self.groups, self.owner, self.describe = config, groups, owner, describe
        self.agreement = Agreement(groups.control, describe)
        self.agreement.require_same_contents(config.entries())  # what comes below is collective, and differs with it
        whole, reduction = not is_elementwise(config.optimizer_class), config.reduction
        apart = reduction.bucket_mb is None and between_hosts(groups.control)
        bucket_mb, mixed = bucket_mb_of(reduction, between_hosts=apart), config.placement.mixes_groups
        self.partition = Partition(groups.control, describe, whole, bucket_mb, config.precision, mixed=mixed)
        self.guard = StateGuard(partial(marks, self.partition.streams))
        self.exchanges: dict[str, Exchange] = {}
        self.thread = SerialThread("zero_opt exchange", partial(close_all, self.exchanges))
        groups.leave_with(self.exchanges, self.thread)
        self.count, self.params, self.figures = StepCount(), list[Tensor](), StepFigures()
        of_reduction = ReductionParts(
            self.partition, self.agreement, self.count, self.exchanges, self.thread, self.params, unscale
        )
        self.pool = of_reduction.pool
        self.reduction = build_reduction(config.reduction, of_reduction)
        model = config.reduction.overlap_param_gather  # whose forward waits for parameters
        self.placement, lookout = self._built_placement(), groups.control.lookout
        seconds = self.figures.seconds
        self.gather = build_gather(self.partition, self.exchanges, self.thread, model, self.placement, lookout, seconds)
        shown = {key: value for key, value in config.defaults.items() if key != "state"}  # in torch's form
        stand_ins = StandIns(config.optimizer_class, shown, owner, self.params)
        self.visible = VisibleState(owner, stand_ins, self.params, self.partition, self.placement)
        self.guard.notice_edits(self.partition.edits, self.visible.written)
        self.full = FullState(self.agreement, self.partition, self.placement, self.guard)

    def _built_placement(self) -> Placement:
        """Return the placement, or raise on all ranks if one has none. Collective."""
        with ExitStack() as undo:
            with self.agreement.together("ShardedOptimizer()"):
                placement = self.config.placement.build(self.groups.neighbors)
                undo.callback(placement.close)
            undo.pop_all()
        return placement

    @property
    def param_groups(self) -> Sequence[MutableMapping[str, Any]]:
        """The user's, as they are now."""
        return self.owner.param_groups

    @property
    def patience_s(self) -> float:
        """Seconds that this rank waits for another one that reads its state."""
        return self.groups.control.timeout_s
