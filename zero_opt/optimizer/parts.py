"""What the sharded engine drives, built once: groups of ranks, partition, reduction, placement, gather, state."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from ..comm.agreement import Agreement
from ..comm.exchange import Exchange, StagingPool, close_all
from ..placement import Placement
from ..reduction import GradReduction, Parts, StepCount, build_reduction
from ..sharding.background_gather import build_gather
from ..sharding.gather import ParamGather
from ..sharding.partition import Geometry, Partition
from ..sharding.wrapped_class import is_elementwise
from ..state.full_state import WholeState
from ..state.guard import StateGuard, marks
from ..state.stand_ins import StandIns
from ..state.visible_state import Owner, ShownState
from ..system.background_thread import SerialThread
from .config import Config
from .process_groups import OwnGroups


@dataclass(frozen=True)
class EngineParts:
    """The parts of one engine.

    Attributes:
        owner: has the user's param groups and state. describe: names a parameter, given its global index.
        count: where training is. params: every parameter by global index, planned or not.
        exchanges: by device type. thread: runs what exchanges with other ranks off the user's thread, in one order.
        shown: the user's view of this rank's state. whole: the state of all ranks.
    """

    config: Config
    groups: OwnGroups
    owner: Owner
    describe: Callable[[int], str]
    count: StepCount
    params: list[Tensor]
    agreement: Agreement
    partition: Partition
    guard: StateGuard
    exchanges: dict[str, Exchange]
    thread: SerialThread
    pool: StagingPool
    reduction: GradReduction
    placement: Placement
    gather: ParamGather
    shown: ShownState
    whole: WholeState

    @property
    def param_groups(self) -> Sequence[MutableMapping[str, Any]]:
        """The user's, as they are now."""
        return self.owner.param_groups

    @property
    def patience_s(self) -> float:
        """Seconds that this rank waits for another one that reads its state."""
        return self.groups.control.timeout_s


def build_parts(
    config: Config,
    groups: OwnGroups,
    owner: Owner,
    describe: Callable[[int], str],
    unscale: Callable[[Tensor], bool],
) -> EngineParts:
    """The parts that a configuration asks for, without any parameters yet. Collective.

    Args:
        unscale: what GradScaler's unscaling of reduced gradients calls.

    Raises:
        RankMismatch: on every rank, if the ranks have different configurations.
        OutOfMemory, WorkerFailed, StorageFailed: on every rank, if one cannot have its placement.
    """
    agreement = Agreement(groups.control, describe)
    agreement.on_contents(config.entries())  # what comes below is collective, and differs with it
    dtypes = (config.precision.reduce_dtype, config.precision.accumulate_dtype)
    geometry = Geometry(not is_elementwise(config.optimizer_class), config.reduction.bucket_mb, *dtypes)
    partition = Partition(groups.control, geometry, describe)
    guard = StateGuard(partial(marks, partition.streams), partition.edits)
    exchanges: dict[str, Exchange] = {}
    thread = SerialThread("zero_opt exchange", partial(close_all, exchanges))
    groups.leave_with(exchanges, thread)
    count, params = StepCount(), list[Tensor]()
    of_reduction = Parts(partition, agreement, count, exchanges, thread, params, unscale)
    reduction = build_reduction(config.reduction, of_reduction)
    placement = _built_placement(config, groups, agreement)
    return EngineParts(
        config,
        groups,
        owner,
        describe,
        count,
        params,
        agreement,
        partition,
        guard,
        exchanges,
        thread,
        of_reduction.pool,
        reduction,
        placement,
        gather=build_gather(partition, exchanges, thread, config.reduction.overlap_param_gather, placement),
        shown=ShownState(owner, StandIns(config.optimizer_class, config.defaults), partition, placement),
        whole=WholeState(agreement, partition, placement, guard),
    )


def _built_placement(config: Config, groups: OwnGroups, agreement: Agreement) -> Placement:
    """The placement, or an error on all ranks if one has none. Collective."""
    placement = None
    try:
        with agreement.together("ShardedOptimizer()"):
            placement = config.placement.build(groups.neighbors)
    except BaseException:
        if placement is not None:
            placement.close()
        raise
    assert placement is not None
    return placement
