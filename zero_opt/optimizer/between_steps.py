"""The engine between steps: param groups added, a pending step brought in, state shown, saved and loaded, the end."""

from __future__ import annotations

import copy
import sys
import weakref
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..comm.exchange import close_all
from ..comm.groups import Group
from ..errors import (
    ConfigTypeError,
    ParamsReplaced,
    PeerLost,
    RankMismatch,
    StepFailed,
    StepPending,
    UnsupportedParam,
    ZeroOptError,
)
from ..layout import mask_of
from ..placement import Placement
from ..reduction.consumed_grad import ConsumedGrad
from ..sharding.flat_param import is_dtensor
from ..sharding.gather import broadcast_shards
from ..sharding.late_params import await_others
from ..sharding.param_groups import PlannedGroups, hypers_of, normalized_group, params_of, set_hypers
from ..sharding.pending_params import PendingParams
from ..state.alike_entries import StateOwner
from ..state.guard import marks
from ..state.state_dict import StateDict, StatesByIndex, pack_groups
from ..system.background_thread import run_apart
from ..system.log import log
from ..system.streams import wait_done
from .arguments import adopt_errors, completed_group, template_of
from .config import Config
from .contents import HyperDigest, loaded_contents, loaded_digest
from .dtensors.mesh_params import MeshParams, admit
from .hyperparameters import HyperForms
from .interface import Engine
from .join import UnevenInputs
from .loading import Loaded, fitted_state
from .parts import EngineParts
from .planning import Planner
from .process_groups import OwnGroups
from .user_edits import UserEdits, keep_uneven_edits, restore

# Seconds that a background thread has to end what it has begun; after that its memory stays where it is.
_IDLE_S = 1.0


def _end_dropped(groups: OwnGroups, placement: Placement) -> None:
    """Close the groups of an optimizer that nobody holds any more, and say what is lost with it."""
    if placement.pending:
        log.warning(
            "an optimizer was dropped while a step was pending: parameters lack its update%s; call opt.flush(), then "
            "opt.close(), before the last reference goes",
            ", and show predictions" if placement.predicts else "",
        )
    run_apart(groups.close, _IDLE_S)


class BetweenSteps(Engine):
    """The base of :class:`ShardedEngine`: all of :class:`Engine` but the step.

    Attributes:
        parts: what the engine drives. count, agreement, partition, reduction, placement, gather: those of the parts
            that it uses most.
        skips: steps that were not taken because of non-finite gradients.
        join_notified: whether ``Join`` knows that this rank is about to take the next step.
    """

    def __init__(
        self,
        config: Config,
        groups: OwnGroups,
        user: UnevenInputs,
        mesh: MeshParams | None = None,
        owner: StateOwner | None = None,
    ) -> None:
        """Connect everything, without any parameters yet. Collective.

        Args:
            user: the optimizer that users see. mesh: what is known of its parameters if they are DTensors.
            owner: a view of its param groups and state, if they are not its own.
        """
        self._config, self._groups, self._user, self._mesh = config, groups, user, mesh
        self._describe, self._parked, self._one_call = user._describe, user._parked, user._one_call
        self.skips, self.join_notified = 0, False
        self._loaded = self._half_loaded = self._closed = False
        self._sends = False  # whether the reduction may have sent messages in this call
        self._params_may_differ = False  # ranks may not have all of each other's updates
        self._parted = False  # ranks have lost each other, or given each other up: they share no call any more
        self._undone: ZeroOptError | None = None  # what was changed then, and was undone by a flush() that has failed
        self._told_pending = False  # all ranks have raised what was changed while a step was pending
        self._digest, self._forms = HyperDigest(), HyperForms(config.optimizer_class)
        self._user_edits = UserEdits()
        parts = EngineParts(config, groups, owner or user, self._describe, self.unscale)
        self.parts, self._planner, self._guard = parts, Planner(parts, PlannedGroups(user)), parts.guard
        self.count, self.agreement, self.partition = parts.count, parts.agreement, parts.partition
        self.reduction, self.placement, self.gather = parts.reduction, parts.placement, parts.gather
        self._lagging = PendingParams(self._refuse_reads)
        self._one_call.watch, self._one_call.within_hook = self._watch_late, self.reduction.within_hook
        self._finalizer = weakref.finalize(user, _end_dropped, groups, parts.placement)
        self._finalizer.atexit = False

    @property
    def group(self) -> Group:
        return self._groups.control

    def together(self, call: str) -> AbstractContextManager[None]:
        return self.agreement.together(call)

    @abstractmethod
    def unscale(self, inv_scale: Tensor) -> bool:
        """Multiply the reduced gradients for GradScaler; return whether any rank found a non-finite one. Collective."""

    @contextmanager
    def of_all_ranks(self) -> Iterator[None]:
        """See :class:`Engine`. Training goes on after an exception before the first message, so that this rank can
        repeat the call, and where the other ranks raise it too, or learn of it as of a step's failure."""
        watch = self.group.watch
        calls, self._sends, self.group.told = self.group.calls, False, 0
        step = self.count.step  # of this call, also once the call has counted it
        try:
            with nullcontext() if watch is None else watch.naming_call():
                yield
            self._told_pending = False
        except BaseException as error:
            self._told_pending |= isinstance(error, StepPending)
            self._parted |= isinstance(error, PeerLost)
            alone = (self._sends or self.group.calls > calls) and not isinstance(error, ZeroOptError)
            if alone and id(error) != self.group.told and error is not self._guard.failure:
                self._parted = True
                self.group.leave_interrupted(error, f"{self._one_call.under_way} in step {step}")
            raise

    # -- the wrapped optimizer, which there is none of ----------------------------------------------------------------

    def require_copyable(self) -> None:
        raise ConfigTypeError(
            f"a ShardedOptimizer {self._config.why_apart(self.group.world_size)} cannot be copied or pickled: it "
            "has state of its own; save opt.state_dict() after opt.consolidate_state_dict(to=rank) on every rank"
        )

    def set_state(self, state: dict[str, Any]) -> None:  # noqa: ARG002  (of the protocol)
        raise ConfigTypeError(f"__setstate__() {self._config.why_apart(self.group.world_size)}: use load_state_dict()")

    # -- parameters ---------------------------------------------------------------------------------------------------

    def _follow_moved(self) -> None:
        """Let placement and gather use the new data of parameters that the user has re-pointed."""
        if moved := self.partition.refresh():
            self.placement.repoint(moved)
            self.gather.forget()

    def _adopt_edits(self) -> ZeroOptError | None:
        """Take over the user's edits of ``state``; return what is wrong with them, or with ``param_groups``."""
        try:
            self._planner.planned.require()
            self._planner.make_room_for_edits(partial(self._forms.fit, self._user.param_groups, self._user.state))
            with self.parts.visible.lock:
                self.parts.visible.adopt_edits()
        except ZeroOptError as error:
            return error
        return None

    def add_groups(self) -> None:
        """Take in the owner's param groups that are new, after comparing them with the other ranks'. Collective."""
        self._planner.add_groups()
        self._forms.learn(self._user.param_groups, self._user.defaults)

    def add_param_group(self, group: dict[str, Any]) -> None:
        user, config = self._user, self._config
        known: int | None = None
        try:
            with self.of_all_ranks():
                with self.agreement.together("add_param_group()"):
                    self._planner.planned.require()
                    if (conflict := self._changed_while_pending()) is not None:
                        raise conflict
                    known = len(user.param_groups)
                    self._parked.require_here()
                    taken = normalized_group(group, known)
                    with adopt_errors():
                        admit(self._mesh, params_of([taken]))
                        await_others(self._lagging, params_of([taken]))
                        taken = completed_group(config.optimizer_class, user, config.defaults, taken)
                        torch.optim.Optimizer.add_param_group(user, taken)
                        template_of(config.optimizer_class, user.param_groups[known:], config.defaults, known)
                    config.check_params(user.param_groups, self._describe, known)
                self.add_groups()
        except BaseException:
            if known is not None:
                del user.param_groups[known:]
                with self.parts.visible.lock:  # state may have moved to make room
                    self.parts.visible.note_entries()
            raise

    def require_groups(self) -> None:
        self._planner.planned.require_groups()

    def require_replaceable(self) -> None:
        """Raise ParamsReplaced if the user has replaced parameters, and it is too late to plan the new ones."""
        planned = self._planner.planned
        reduced = any(isinstance(param.grad, ConsumedGrad) and param.grad.owner() is not None for param in planned)
        planned.require_replaceable(begun=reduced or self._loaded or self.count.step + self.skips > 0)

    def make_way(self, *, dtensors: bool) -> None:
        """Close this engine for one over parameters that the user has replaced the planned ones with. Collective.

        Args:
            dtensors: whether the new parameters are.

        Raises:
            ParamsReplaced: on every rank, if one rank has the planned parameters still.
            RankMismatch: on every rank, if the new parameters are DTensors on some ranks only.
        """
        with self.agreement.together():
            self._planner.planned.require_replaced()
        self.agreement.require_same_contents([("parameters are DTensors", dtensors)])
        self.close()

    # -- late parameters ----------------------------------------------------------------------------------------------

    def _watch_late(self) -> None:
        """Watch the parameters that are late. A use of one waits for its gather, or gets :meth:`_refuse_reads`."""
        # DTensors are not watched: the partition has plain parameters over their memory, which users do not see.
        lags = self._mesh is None and self.placement.lags and not self._closed
        flats = self.partition.flats
        if len(self._lagging) != (len(flats) if lags else 0):
            self.gather.unwatch()  # what waits for a gather is to do so first
            if lags:
                self._lagging.mark(flat.param for flat in flats.values())
            else:
                self._lagging.clear()
        self.gather.watch_late()

    def _refuse_reads(self) -> None:
        if self._parted:
            raise StepPending("a parameter was read that lacks an update, and ranks have parted: close() gives that up")
        raise StepPending(
            "a parameter was read while a step for it is pending (delay=1), so it lacks an update"
            f"{', and is a prediction' if self.placement.predicts else ''}; call opt.flush() on every rank before "
            "state_dict(), copies, averages and evaluation. Until then parameters are for training alone: for forwards "
            "with gradients enabled, in which p.detach() may be read, but nothing within torch.no_grad()"
        )

    # -- a pending step -----------------------------------------------------------------------------------------------

    def flush(self) -> None:
        self._bring_in("flush()")
        self._guard.require_whole()

    def _bring_in(self, call: str) -> None:
        """Bring in a pending step, for a call or, if that is empty, within one."""
        self.placement.require_not_forked()
        with self.of_all_ranks():
            self.gather.flush()
            if self._config.offload is not None:
                with self._guard.telling_why():
                    self._finish_pending(call)
            if self.gather.failed() or self._params_may_differ:
                self._raise_failed(self._guard.missing_part(), call)

    def _raise_failed(self, error: ZeroOptError | None, call: str) -> None:
        """Raise, on every rank, the error of the first rank that has one; return if none has. Collective."""
        try:
            self.agreement.raise_first_error(error, call)
        except StepFailed:
            self._told_failure()
            raise

    def _told_failure(self) -> None:
        """Note that every rank knows of a failed step. The next step gathers all parameters again."""
        self._guard.note_told()
        self._params_may_differ = True

    def _finish_pending(self, call: str) -> None:
        """Bring a pending step into the parameters of all ranks. Collective.

        Parameters that were changed meanwhile keep the change, and lack the update; state has the update, and lacks
        what was changed. The error that says so is raised at the end, unless a step has raised it already.

        Raises:
            RankMismatch: on every rank, if values differ of a parameter that was changed on some ranks; each rank has
                its own then. StepPending: on every rank, if parameters or state were changed on one. StepFailed: on
                every rank, if the last step failed on one, and is not pending there.
        """
        conflict: ZeroOptError | None = None
        mismatch: RankMismatch | None = None
        undone, self._undone = self._undone, None
        begun, kept = False, dict[int, Tensor]()
        try:
            with self.agreement.together(call):
                with suppress(UnsupportedParam):  # its update goes to the data of the plan, and the next step raises it
                    self._follow_moved()
                conflict = undone or self._changed_while_pending()
                begun = self.placement.pending
            due = self._params_may_differ = self.agreement.any(self._params_may_differ or begun)
            if due:
                mismatch, kept = keep_uneven_edits(self.partition, self.agreement, self.parts.params)
                conflict = conflict or self.placement.conflict()  # of a parameter that was written to on another rank
            making_up = self._guard.making_up(self.parts.patience_s) if begun else nullcontext()
            with self.agreement.together(), making_up, self.parts.visible.bringing_in():
                list(self.placement.bring_in())
        except Exception as error:
            self._undone = conflict or undone
            if begun and not isinstance(error, PeerLost):
                self._guard.take_back()
            raise
        if due:
            broadcast_shards(self.partition.buckets, self._groups.control)
            restore(self.partition, kept)
            self._params_may_differ = False
            self.gather.forget_failure()
            with self.parts.visible.lock:
                self._show_state()
                self._guard.commit(self.count.step)
        if mismatch is not None:
            raise mismatch from conflict
        missing = self._guard.missing_part() if call else None  # else a step follows, which goes on without it
        self._raise_failed((None if self._told_pending else conflict) or missing, "")

    def _changed_while_pending(self) -> ZeroOptError | None:
        """Return the error if the user has changed state or parameters on this rank while a step was pending."""
        try:
            with self.parts.visible.lock:
                self.parts.visible.require_as_shown()
        except ZeroOptError as error:
            return error
        return self.placement.conflict()

    # -- state --------------------------------------------------------------------------------------------------------

    def _show_state(self) -> None:
        """Let the user's ``state`` follow the steps that are in the state."""
        self.parts.visible.follow()
        self.parts.full.forget()

    def _complete_state(self, call: str) -> None:
        """Bring in a pending step and the user's edits of ``state``, on every rank. Collective."""
        self._bring_in(call)
        self._raise_failed(self._guard.half_way() or self._guard.missing_part() or self._adopt_edits(), call)

    def consolidate(self, to: int) -> None:
        """Bring the full state, pending step included, to one rank."""
        with self.of_all_ranks():
            self._complete_state("consolidate_state_dict()")
            self.parts.full.consolidate(to)

    def rows(self, *, compact: bool) -> StatesByIndex:
        """Return all state, pending step included, cut by rows over the ranks."""
        with self.of_all_ranks():
            self._complete_state(f"sharded_state_dict({'compact=True' if compact else ''})")
            return self.parts.full.rows(compact=compact)

    def as_planned(self, index: int, param: Tensor) -> Tensor:
        flat = None if is_dtensor(param) else self.partition.flats.get(index)
        return param if flat is None else flat.as_planned()

    def state_dict(self) -> StateDict:
        """Return the full state. The other ranks' edits of ``state`` are in it from their next step on."""
        return {"state": self._full_state(), "param_groups": pack_groups(self._user.param_groups)}

    def _full_state(self) -> StatesByIndex:
        """Return what :meth:`consolidate` brought here, if still current, else pull it from the other ranks."""
        self.parts.full.require_landed()
        between_steps = not (self._closed or self._guard.is_changing)  # a signal handler may be in the middle of a step
        if between_steps:
            self.gather.flush()  # where state was replaced, masters may be taken from parameters
        conflict = self._adopt_edits() if between_steps else None
        if isinstance(conflict, ParamsReplaced):
            self.require_replaceable()  # the new parameters have no state yet; what is here is the planned ones'
        elif conflict is not None:
            raise conflict
        return self.parts.full.here(self._groups.service)

    def load(self, state_dict: StateDict, *, strict: bool) -> None:
        config, groups = self._config, self._user.param_groups
        with self.of_all_ranks():
            with self.agreement.together("load_state_dict()"):
                self._planner.planned.require()
                self._parked.require_here()
                self.partition.require_fitting()  # what does not fit any more cannot be stepped, whatever is loaded
                loaded = fitted_state(state_dict, groups, config, strict=strict, whole=False)
                await_others(self._lagging, self.parts.params)  # of which masters may be taken
                self.placement.wait()
                self.placement.require_writable()
            if self.placement.predicts:  # parameters whose master is not in the state are to be the true ones
                with suppress(StepPending):  # what was written to stays: the state is replaced anyway
                    self._bring_in("")
            if self.placement.pending:
                log.warning("load_state_dict() has dropped a pending step; call opt.flush() first to keep its update")
            self._write(loaded)
        if self._groups.control.rank == 0:
            loaded.say(config, self.parts.params, self._describe)

    def _write(self, loaded: Loaded) -> None:
        """Load this rank's slices of state that has its full shape here, or is cut over all ranks. Collective."""
        parts, states = self.parts, loaded.states
        if not self.agreement.same(partial(loaded_digest, states, loaded.groups)):
            self.agreement.require_same_contents(loaded_contents(states, loaded.groups, self._describe))
        self.gather.flush()
        self._planner.plan(mask_of(states))
        mine = parts.full.own_part(states)
        self._guard.begin(parts.patience_s)
        self._half_loaded = True
        parts.full.forget()
        with self._guard.telling_why("load_state_dict()"), self.agreement.together():  # a disk may fail at any moment
            self.placement.load(mine, loaded.groups)
            self.placement.resume(states)
        for group, hypers in zip(parts.param_groups, loaded.groups, strict=True):
            set_hypers(group, copy.deepcopy(hypers_of(hypers)))  # an lr may be a tensor, to be written in place
        self._forms.learn(self._user.param_groups, self._user.defaults)
        with parts.visible.lock:
            parts.visible.load(states)
            self._show_state()
        self._loaded = self._loaded or bool(states)
        self._guard.note_failure(None)
        self.gather.forget_failure()
        self._guard.commit(self.count.step)
        self._half_loaded = False

    # -- memory, and the end ------------------------------------------------------------------------------------------

    def moving(self) -> AbstractContextManager[None]:
        return self._guard.moving(self.parts.patience_s)

    def leave_device(self) -> None:
        """Bring state to host memory, and let go of staging."""
        self.gather.flush()
        # Gradients that a step will use stay: they may be still on their way, as long as other ranks like.
        leaves = not self.reduction.holds_gradients and self.parts.thread.idle_within(_IDLE_S)
        for bucket in self.partition.buckets if leaves else ():
            bucket.leave()
        self.gather.forget()
        self.parts.pool.release()
        self._parked.leave(self.placement.resident())

    def come_back(self) -> None:
        for bucket in self.partition.buckets:
            bucket.come_back()

    def memory_report(self) -> dict[str, int]:
        staging = self.parts.pool.nbytes + sum(exchange.nbytes for exchange in self.parts.exchanges.values())
        staging += self.placement.staging_nbytes
        shards = sum(bucket.shard_nbytes for bucket in self.partition.buckets)
        return {"grad_shards": shards, "staging": staging, "state": self.placement.spare_nbytes}

    def close(self) -> None:
        """Close every part, whatever fails meanwhile, and destroy the groups."""
        self._finalizer.detach()
        if sys.is_finalizing():
            self._end_pending()
            return  # workers and services have ended
        self.parts.full.close()
        self._closed = True
        self._lagging.clear()
        with ExitStack() as last_first:
            last_first.callback(self._groups.close)
            last_first.callback(close_all, self.parts.exchanges)
            last_first.callback(self._end_collectives)
            last_first.callback(self.placement.close)
            last_first.callback(self.parts.thread.close)
            last_first.callback(self.reduction.close)
            last_first.callback(self.gather.close)
            if self._groups.service is not None:
                last_first.callback(self._groups.service.close)
            last_first.callback(self._end_pending)

    def _end_collectives(self) -> None:
        """Wait seconds at most for what this rank has enqueued on communicators, which are aborted next."""
        if not all(exchange.blocks for exchange in self.parts.exchanges.values()):
            self.partition.join()
            wait_done([event for _, _, event in marks(self.partition.streams)])

    @torch.no_grad()
    def _end_pending(self) -> None:
        """Bring a pending step in at world size 1; over several ranks, of which some may stay, log that it is lost."""
        if not self.placement.pending:
            return
        reason = "the interpreter ends" if sys.is_finalizing() else "the other ranks need not be there"
        if self.partition.world_size == 1 and not sys.is_finalizing():
            try:
                self._bring_in("flush()")
                return
            except Exception as error:  # whatever it is, the rest is to be closed
                reason = str(error)
        reason += "; parameters stay predictions" * self.placement.predicts
        log.warning("close() has lost the update of a pending step (%s): call opt.flush() on every rank first", reason)
