"""The shard lives in an arena, and a process of its own steps it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..buckets import GradBucket
from ..collectives import Group
from ..cpu_adam.update import hypers_of as adam_hypers
from ..errors import StepPending, UnsupportedOptimizer, ZeroOptError
from ..flat_param import share_counters
from ..page_lock import PageLock
from ..policies import WorkerOffload
from ..reduction.base import GradShard
from ..worker_process import Batches, WorkerProcess
from .arena_shard import ArenaShard, section_nbytes
from .base import ParamState, Stretch
from .cores import Confined, agreed_split
from .native_rules import say_without_masters

_log = logging.getLogger("zero_opt")


class Used(NamedTuple):
    """The slices of one shard that a step has."""

    shard: ArenaShard
    positions: Sequence[int]


class Pending(NamedTuple):
    """A step that was submitted and not brought in.

    Attributes:
        sequence: its number; ``None`` where nothing of it is on this rank.
        buckets: indices of those that are used on any rank. used: what is stepped here.
    """

    sequence: int | None
    buckets: Sequence[int]
    used: Sequence[Used]


class WorkerPlacement:
    """See the module and :class:`Placement`.

    The gradients of a step stay where they are in the arena until it is brought in. With ``delay=1`` those of the next
    one come meanwhile, so buckets that are reduced into the arena have two buffers there.
    """

    _shard_type: type[ArenaShard] = ArenaShard
    staging_nbytes = 0  # state is stepped where it lives

    def __init__(
        self,
        policy: WorkerOffload,
        defaults: Mapping[str, Any],
        group: Group,
        grad_buffers: int,
    ) -> None:
        self._grad_buffers = grad_buffers
        self._delay = policy.delay
        self._flush_denormals = bool(defaults.get("flush_denormals", False))
        split = agreed_split(policy, group)
        self._worker = WorkerProcess(policy, split.worker, split.threads)
        self._confined = Confined(split.trainer) if split.trainer else None
        self._locked: PageLock | None = None
        self._amsgrad: list[bool] = []
        self._shards: dict[int, ArenaShard] = {}
        self._places: dict[int, tuple[ArenaShard, int]] = {}
        self._pending: Pending | None = None

    # -- what there is ------------------------------------------------------------------------------------------------

    def add_group(self, hypers: Mapping[str, Any]) -> None:
        """See :class:`Placement`."""
        self._amsgrad.append(bool(hypers["amsgrad"]))

    def drop_groups(self, kept: int) -> None:
        """See :class:`Placement`."""
        del self._amsgrad[kept:]

    def add(self, buckets: Sequence[GradBucket]) -> None:
        """See :class:`Placement`."""
        known = [flat for shard in self._shards.values() for flat in shard.bucket.params]
        share_counters(known, [flat for bucket in buckets for flat in bucket.params])
        added = [self._shard_type(bucket) for bucket in buckets]
        self._extend([*self._shards.values(), *added])
        for shard in added:
            self._shards[shard.bucket.layout.index] = shard
            self._places.update({piece.param: (shard, at) for at, piece in enumerate(shard.pieces)})

    def _extend(self, shards: Sequence[ArenaShard]) -> None:
        """Give all arrays a place that have none yet."""
        missing = [
            (shard, shard.missing(amsgrad=self._amsgrad[shard.bucket.layout.group], grads=self._grad_buffers))
            for shard in shards
        ]
        nbytes = sum(section_nbytes(shard.bucket.shard_numel, list(arrays.values())) for shard, arrays in missing)
        if any(arrays for _, arrays in missing):
            self.wait()
            start = self._worker.extend(nbytes)
            for shard, arrays in missing:
                start = shard.place(arrays, start)
            for shard in shards:
                shard.bind(self._worker.arena)
            self._lock_pages(shards)
        self._worker.start()

    def _lock_pages(self, shards: Sequence[ArenaShard]) -> None:
        """Let GPUs, if parameters are there, read and write the arena as it is mapped now."""
        if any(shard.bucket.device.type == "cuda" for shard in shards):
            if self._locked is not None:
                self._locked.release()
            self._locked = PageLock(self._worker.arena.address, self._worker.arena.bytes.numel())

    def require_own(self) -> None:
        """See :class:`Placement`."""
        self._worker.require_own()

    def repoint(self, params: Sequence[int]) -> None:
        """See :class:`Placement`."""
        for index in params:
            if index in self._places:
                shard, position = self._places[index]
                shard.repoint(position)

    def state(self) -> Iterator[tuple[int, ParamState]]:
        """See :class:`Placement`."""
        for index, (shard, position) in self._places.items():
            if position in shard.stepped:
                yield index, shard.state(position)

    def saved(self) -> Iterator[tuple[int, ParamState]]:
        """See :class:`Placement`; it is plain."""
        return self.state()

    def resident(self) -> Iterator[Tensor]:
        """See :class:`Placement`; all is in the arena."""
        return iter(())

    def adopt(self, index: int, state: ParamState | None) -> bool:
        """See :class:`Placement`. Values are copied to where the worker has them."""
        shard, position = self._places[index]
        if state is not None and not shard.replaced(position, state):
            return False
        if self._pending is not None:
            raise StepPending(
                f"the state of {shard.flats[position].label} was replaced while a step for it was pending; with "
                "delay=1, call opt.flush() before that"
            )
        saved = {} if state is None else dict(state)
        shard.forget_views(position)
        shard.load(position, saved)
        self._tell_autograd()
        return True

    def param_of(self, index: int) -> Tensor:
        """See :class:`Placement`."""
        shard, position = self._places[index]
        return shard.flats[position].part(shard.pieces[position].in_param)

    def set_stretches(self, index: int, stretches: Sequence[Stretch]) -> None:
        """See :class:`Placement`."""
        shard, position = self._places[index]
        shard.stretches[position] = stretches

    def load(self, states: Mapping[int, Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> None:
        """See :class:`Placement`; what is under way ends, and is forgotten."""
        self.wait()
        if self._pending is not None:
            for used in self._pending.used:
                used.shard.bucket.reclaim()
            self._pending = None
        self._amsgrad = [bool(group["amsgrad"]) for group in groups]
        self._extend(list(self._shards.values()))
        without = 0
        for index, (shard, position) in self._places.items():
            saved = states.get(index, {})
            shard.load(position, saved)
            without += bool(saved) and shard.param_dtype is not torch.float32 and "master" not in saved
        say_without_masters(without)
        self._tell_autograd()

    def close(self) -> None:
        """See :class:`Placement`."""
        try:
            self.wait()
        except ZeroOptError as error:
            _log.warning("the last step is lost: %s", error)
        finally:
            if self._locked is not None:
                self._locked.release()
            if self._confined is not None:
                self._confined.restore()
            self._worker.close()

    # -- steps --------------------------------------------------------------------------------------------------------

    @property
    def pending(self) -> bool:
        """See :class:`Placement`."""
        return self._pending is not None

    @property
    def spare_nbytes(self) -> int:
        """See :class:`Placement`."""
        return sum(shard.spare_nbytes for shard in self._shards.values())

    def landing(self, grads: Sequence[GradShard]) -> Sequence[int]:
        """See :class:`Placement`."""
        if not self._delay:
            return [shard.bucket for shard in grads if shard.used]
        return [] if self._pending is None else self._pending.buckets

    def step(
        self, grads: Sequence[GradShard], groups: Sequence[MutableMapping[str, Any]], grad_scale: float
    ) -> Iterator[int]:
        """See :class:`Placement`."""
        before = list(self.land())
        self._pending = self._submit(grads, groups, grad_scale)
        yield from self._land() if not self._delay else before

    def wait(self) -> None:
        """See :class:`Placement`."""
        if self._pending is not None and self._pending.sequence is not None:
            self._await(self._pending.sequence)

    def _await(self, sequence: int) -> None:
        self._worker.wait(sequence)

    def land(self) -> Iterator[int]:
        """See :class:`Placement`."""
        self._load_mirrors()
        yield from self._land()

    def _load_mirrors(self) -> None:
        """Whole buckets are gathered, so what is edited in a parameter that no step uses must be in its mirror."""
        for shard in self._shards.values():
            for flat in shard.bucket.params:
                flat.load()

    def _land(self) -> Iterator[int]:
        self.wait()
        pending, self._pending = self._pending, None
        if pending is None:
            return
        for shard, positions in pending.used:
            shard.count_step(positions)
        self._tell_autograd()
        used = {shard.bucket.layout.index: (shard, positions) for shard, positions in pending.used}
        for bucket in pending.buckets:
            if bucket in used:
                shard, positions = used[bucket]
                shard.write_params([position for position in positions if not shard.edited(position)])
            yield bucket

    def conflict(self) -> StepPending | None:
        """See :class:`Placement`."""
        for shard, positions in () if self._pending is None else self._pending.used:
            for position in filter(shard.edited, positions):
                return StepPending(
                    f"{shard.flats[position].label} was changed while a step for it was pending; with delay=1, call "
                    "opt.flush() before changing parameters. A flush() after it keeps the change and drops the update"
                )
        return None

    def _submit(
        self, grads: Sequence[GradShard], groups: Sequence[MutableMapping[str, Any]], grad_scale: float
    ) -> Pending:
        batches: dict[int, tuple[Any, list[Any], list[int]]] = {}
        keep: list[Tensor] = []
        used: list[Used] = []
        for found in grads:
            shard = self._shards[found.bucket]
            positions = [position for position, grad in enumerate(found.grads) if grad is not None]
            if not positions:
                continue
            number = shard.bucket.layout.group
            if number not in batches:
                batches[number] = (adam_hypers(groups[number]).native(grad_scale), [], [])
            _, runs, addresses = batches[number]
            shard.read_params(positions)
            home = shard.take_grads(found.grads)
            for bound, where in shard.runs(positions, amsgrad=self._uses_maximum(shard, groups[number])):
                runs.append(bound.run)
                keep.append(home[where])
                addresses.append(keep[-1].data_ptr())
            used.append(Used(shard, positions))
        # The worker reads gradients, and writes over what parameters are copied from: both copies are over by then.
        for device in {shard.bucket.device for shard, _ in used if shard.bucket.device.type != "cpu"}:
            torch.accelerator.current_stream(device).synchronize()
        sequence = None
        if any(runs for _, runs, _ in batches.values()):
            sequence = self._send(list(batches.values()))
        for shard, _ in used:
            shard.lend_grads()
        return Pending(sequence, [shard.bucket for shard in grads if shard.used], used)

    def _send(self, batches: Batches) -> int:
        return self._worker.submit(batches, flush_denormals=self._flush_denormals)

    def _uses_maximum(self, shard: ArenaShard, group: Mapping[str, Any]) -> bool:
        if group["amsgrad"] and not shard.has_maximum():
            raise UnsupportedOptimizer("amsgrad cannot be switched on after its param group was added")
        return bool(group["amsgrad"])

    def _tell_autograd(self) -> None:
        """Every array is a view of these bytes, and shares their version counter."""
        torch.autograd.graph.increment_version([self._worker.arena.bytes])
