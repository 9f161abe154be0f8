"""ShardedOptimizer: a ``torch.optim.Optimizer`` whose state and gradients are sharded over the ranks of a group."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.join import Joinable

from ..comm.agreement import Agreement
from ..comm.beginning import Beginning
from ..comm.groups import Group
from ..comm.rendezvous import hosts_of, require_still_alone, resolve_group
from ..errors import ConfigConflict, OptimizerClosed, ParamsReplaced, ZeroOptError, mib
from ..placement import Offload, live_tensors
from ..policies import Checks, MixedPrecision, Overlapped
from ..reduction import ReductionPolicy
from ..reduction.grad_norm import refusal_of_more
from ..sharding.flat_param import is_dtensor
from ..sharding.param_groups import hypers_of, normalized, params_of, run_once
from ..state.state_dict import StateDict
from ..system.failures import on_failure
from ..system.saved_tensors import keep_saved
from ..system.untraced import untraced
from .arguments import adopt_errors, refusal_of_others, template_of
from .attributes import WrappedAttributes
from .config import Config
from .dtensors.engine import DTensorEngine, DTensorSingleRank
from .dtensors.local_parts import state_nbytes
from .dtensors.mesh_params import MeshParams, mesh_of, steps_apart
from .interface import Engine
from .join import UnevenInputs
from .loading import asked_by_load, joined, with_places
from .loss_scale import forgets_scale, leaves_scaled, note_scaler
from .offload_state import Parked
from .one_call import OneCall, one_call
from .process_groups import OwnGroups
from .sharded import ShardedEngine
from .single_rank import SingleRank


class ShardedOptimizer(WrappedAttributes, UnevenInputs):
    """Any ``torch.optim`` optimizer, its state and gradients sharded over a process group (ZeRO-1 and ZeRO-2).

    The sharding is that of Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models"
    (2020), sections 5.1 and 5.2. Parameters stay whole and are never re-pointed. Alone, it acts as the wrapped class.

    Args:
        params: floating-point or complex parameters, or param groups, in every form ``torch.optim`` takes.
        optimizer_class: to wrap. Elementwise classes are cut anywhere (see :func:`register_elementwise`); the others
            step whole parameters, each on one rank.
        process_group: a ProcessGroup or a DeviceMesh of one dimension, or two: between hosts, and inside each. Default:
            the default group, or world size 1 without one. Left out for DTensors (FSDP2): their mesh says.
        reduction: :class:`Overlapped`, :class:`AtStep`, or, under DDP, :class:`AlreadyReduced` or :class:`DDPHook`.
        offload: ``None``: state lives with the parameters. :class:`CPUOffload`: in host memory, stepped by this
            process. :class:`WorkerOffload`: by one beside this. :class:`NVMeOffload`: in a file, a window at a time.
        precision: dtypes of the gradient path and of masters.
        max_grad_norm: above 0: clip the global L2 norm of gradients to this at every step.
        checks: what to do about non-finite gradients, and bounds on waiting.
        **defaults: the wrapped class's own arguments.

    All ranks of the group must construct it, with the same arguments in the same order, and make the calls that are
    called collective together, :func:`sharded_state_dict` and :func:`load_sharded_state_dict` too. While a call of a
    method is under way, a signal handler and other threads may call :meth:`state_dict` alone: of any other method that
    changes the optimizer, or is collective, they get StepDesync. Closures may call all.

    Raises:
        ConfigError, ConfigTypeError, ConfigConflict: bad arguments. NativeUnavailable: they need the extension.
        UnsupportedOptimizer, UnsupportedParam: cannot be sharded. ParamsUnsharded: FSDP2 has gathered a parameter.
        OutOfMemory, OutOfResources, StorageFull, StorageFailed, WorkerFailed: on every rank, when one has no room, file
            descriptors or threads, or gets no file or worker. PeerLost, PeerSilent: a rank ends, or does not come.
        RankMismatch: on every rank, when they differ. ProcessGroupError: torch.distributed is not initialized.
    """

    @torch.inference_mode(False)
    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[torch.optim.Optimizer],
        process_group: Any = None,
        *,
        reduction: ReductionPolicy = Overlapped(),  # noqa: B008  (frozen)
        offload: Offload = None,
        precision: MixedPrecision = MixedPrecision(),  # noqa: B008  (frozen)
        max_grad_norm: float | None = None,
        checks: Checks = Checks(),  # noqa: B008  (frozen)
        **defaults: Any,
    ) -> None:
        with Beginning(process_group, "ShardedOptimizer()") as begun:
            params = run_once(params)
            self._hosts, self._ranks_given = hosts_of(process_group), process_group is not None  # no reference to it
            self._parked, self._closed, self._one_call = Parked(), False, OneCall()
            Joinable.__init__(self)
            over_mesh = begun.elsewhere = any(map(is_dtensor, params_of(params)))
            parent = None if over_mesh else resolve_group(process_group)
            self._has_no_group = parent is None and not over_mesh
            alone, apart, mesh, error = parent is None or parent.size() == 1, True, None, None
            try:
                self._config = Config(optimizer_class, defaults, reduction, offload, precision, max_grad_norm, checks)
                mesh = mesh_of(params, self._config, ranks_given=self._ranks_given)
                apart = self._config.has_masters if mesh is None else steps_apart(self._config)
            except ZeroOptError as own_error:
                if alone:
                    raise
                error, checks = own_error, Checks()
            if alone and not apart:
                engine = (SingleRank if mesh is None else DTensorSingleRank)(self._config, params, self._parked, mesh)
                super().__init__([{"params": []}], {})  # the wrapped class has checked the arguments
                self._engine: Engine = engine
                engine.attach(self)
                return
            groups = self._own_groups(parent, checks, mesh)
            agreement = Agreement(groups.control, self._describe)
            with on_failure(groups.close), groups.announcing(), agreement.together("ShardedOptimizer()"):
                if error is not None:
                    raise error
                self._validate(params)
            self._engine = self._connected(groups, mesh)

    # -- construction -------------------------------------------------------------------------------------------------

    def _validate(self, params: Iterable[Any]) -> None:
        """Fill in param groups and defaults as the wrapped class does, and refuse what cannot be sharded."""
        config = self._config
        entries = normalized(params)
        with adopt_errors():
            template = template_of(config.optimizer_class, entries, config.defaults)
            super().__init__(entries, template.defaults)
        self._of_class = {*dir(template)} - {*dir(torch.optim.Optimizer)}
        for group, complete in zip(self.param_groups, template.param_groups, strict=True):
            group.update(hypers_of(complete))
        config.check_params(self.param_groups, self._describe)

    def _own_groups(self, parent: ProcessGroup | None, checks: Checks, mesh: MeshParams | None) -> OwnGroups:
        """Return process groups of this optimizer's own, for ranks of a parent. Collective."""
        return OwnGroups(parent, checks, None if mesh is None else mesh.largest, hosts=self._hosts)

    def _connected(self, groups: OwnGroups, mesh: MeshParams | None) -> ShardedEngine:
        """Return an engine over ``groups``, with the param groups planned; if that fails, close all. Collective."""
        with on_failure(groups.close), groups.announcing():
            given = (self._config, groups, self)
            engine = ShardedEngine(*given) if mesh is None else DTensorEngine(*given, mesh)
        with on_failure(engine.close), groups.announcing():  # a traceback may keep it alive, and its worker
            engine.add_groups()
        return engine

    def _replan(self) -> None:
        """Build the engine again for parameters that the user has replaced the planned ones with. Collective."""
        old, config = self._engine, self._config
        assert isinstance(old, ShardedEngine)  # no other raises ParamsReplaced
        with old.together(""):
            old.require_replaceable()
            mesh = self._examined()
        parent = old.group.parent if mesh is None else None
        old.make_way(dtensors=mesh is not None)
        self._closed = True  # it stays so if anything below fails
        self.state.clear()
        if mesh is not None and not steps_apart(config):
            held = self.param_groups, self.state  # by the user
            self._engine = DTensorSingleRank(config, self.param_groups, self._parked, mesh)
            self._engine.attach(self)
            held[1].update(self.state)
            self.param_groups, self.state = held
        else:
            engine = self._connected(self._own_groups(parent, config.checks, mesh), mesh)
            self._engine, engine.join_notified = engine, old.join_notified
        self._closed = False

    def _examined(self) -> MeshParams | None:
        """Check the parameters that there are now; return what is known of their meshes if they are DTensors."""
        mesh = mesh_of(self.param_groups, self._config, ranks_given=self._ranks_given)
        if mesh is None or steps_apart(self._config):
            self._config.check_params(self.param_groups, self._describe)
        elif leaves_scaled(self):
            raise ConfigConflict(
                "GradScaler has left fp16 gradients scaled; construct the optimizer after fully_shard()"
            )
        return mesh

    @one_call("opt.add_param_group()", replans=True)
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, as in ``torch.optim``. Collective; what is planned already does not move.

        Args:
            param_group: a dict with ``"params"``, in no group so far, and options that differ from the defaults.

        Raises:
            RankMismatch: on every rank, when the groups differ. Others as the constructor: nothing was added then.
        """
        if "_engine" in vars(self):
            self._require_open()
            self._engine.add_param_group(param_group)
        else:  # the constructor of torch.optim.Optimizer
            super().add_param_group(param_group)

    # -- the step -----------------------------------------------------------------------------------------------------

    @one_call("opt.step()", traced=True)
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *others: Any, **options: Any) -> Any:
        """Reduce gradients, step this rank's shard, gather the updated parameters. Collective.

        Args:
            closure: called once, with gradients enabled, to recompute the loss, which is returned. Others are refused.
            **options: what else the wrapped class's ``step`` takes; at world size 1 only, else ConfigTypeError.

        Raises:
            StepDesync, RankMismatch, GradientConflict, GradientsLocal: on every rank; parameters, state are untouched.
            NonFiniteGradient: a gradient is not finite, under ``Checks(nonfinite="raise")``; likewise.
            ParamsReplaced: ``param_groups`` was edited after the first step, or holds other shapes; likewise.
            StepPending: a parameter or state was changed while a delayed step was pending; likewise.
            ProcessGroupError: this rank has others since. ParamsUnsharded: FSDP2 has parameters gathered; likewise.
            StepFailed: a step has failed on another rank. PeerLost, PeerSilent: a rank has left. WorkerDied,
                WorkerFailed, OutOfResources, StorageFailed: the step stays pending, see :meth:`flush`.
        """
        self._require_open()
        if self._has_no_group:
            require_still_alone()
        losses: list[Any] = []

        def noted() -> Any:
            assert closure is not None
            losses.append(self._one_call.outside(closure))
            self._require_open()
            return losses[-1]

        given, error = noted if callable(closure) else closure, refusal_of_others(others)  # a class may take others
        with forgets_scale(self):
            try:
                return self._engine.step(given, options, error)
            except ParamsReplaced:
                self._replan()
            return self._engine.step(losses.pop if losses else given, options, error)

    @one_call("opt.zero_grad()", traced=True)
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, reduced or not. With ``set_to_none=False`` a ``p.grad`` that can be read is zeroed.
        Not collective, but every rank must call it between the same steps."""
        self._engine.require_groups()
        super().zero_grad(set_to_none)
        self._engine.zero_grad()

    def no_sync(self) -> AbstractContextManager[None]:
        """On every rank: within it gradients stay local, full-size, until a backward outside. Without one :meth:`step`
        raises GradientsLocal, but under ``AtStep``. DDP and FSDP2 have their own. Raises OptimizerClosed if closed."""
        self._require_open()
        return self._engine.no_sync()

    @one_call("opt.clip_grad_norm_()", replans=True)
    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, *others: Any, **options: Any) -> Tensor:
        """Clip the global L2 norm of the reduced gradients; call it between backward and :meth:`step`. Collective.

        Args:
            max_norm: the largest norm that is left as it is. Other arguments of torch's are a ConfigTypeError.

        Returns:
            The norm before clipping, a 0-dim tensor, fp32 or, if a parameter is fp64, fp64; the same on every rank.

        Raises:
            ConfigError, ConfigTypeError, RankMismatch: ``max_norm`` is no norm, or differs. Others as :meth:`step`.
        """
        self._require_open()
        error = refusal_of_more("opt.clip_grad_norm_()", "opt.clip_grad_norm_(1.0)", others, options)
        return self._engine.clip(max_norm, error=error)

    @property
    def skipped_steps(self) -> int:
        """How often :meth:`step` has left parameters and state alone, under ``Checks(nonfinite="skip")``."""
        return self._engine.skips

    @one_call("opt.flush()")
    def flush(self) -> None:
        """Return when every parameter on this rank is up to date. Collective.

        Needed only with a policy that lets :meth:`step` return earlier: before reading parameters outside the model, or
        changing any (``overlap_param_gather``), before reading or changing any (``WorkerOffload(delay=1)``). It also
        tries again a step that a worker could not take, or in which a disk failed.

        Raises:
            StepPending: a parameter was changed while a step was pending; it keeps the change (of each part, its
                owner's), and lacks the update; or state was, the other way round. Not if it was raised already.
            RankMismatch: a parameter was changed on some ranks only; each has its own values then. OptimizerClosed.
            StepDesync: an error has left the last step, or a load, half-way on this rank; raised on this rank alone.
            WorkerDied, WorkerFailed, OutOfResources, StorageFailed, StepFailed, PeerLost, PeerSilent: as :meth:`step`.
        """
        self._require_open()
        with torch.no_grad():
            keep_saved(params_of(self.param_groups))
            self._engine.flush()

    @one_call("opt.offload_state()")
    def offload_state(self) -> None:
        """Give the parameters' device the memory of state, masters and reduced gradients until :meth:`reload_state`.

        Values and objects stay the same, in host memory, and can be saved. A step, clipping, a load and adding a param
        group raise StateOffloaded meanwhile. Not collective, but every rank must call it between the same steps.
        The memory goes back to torch's allocator; ``torch.accelerator.empty_cache()`` returns it to the device.

        Raises:
            OptimizerClosed: it was closed. PeerLost: a reader of the state does not end in time.
        """
        self._require_open()
        with self._engine.moving():
            self._engine.leave_device()
            self._parked.leave(chain.from_iterable(map(live_tensors, self.state.values())))

    @one_call("opt.reload_state()")
    def reload_state(self) -> None:
        """Undo :meth:`offload_state`: on every rank, between the same steps, with the same errors. Not collective."""
        self._require_open()
        with self._engine.moving():
            self._engine.come_back()
            self._parked.come_back()

    # -- state --------------------------------------------------------------------------------------------------------

    @one_call("opt.consolidate_state_dict()", replans=True)
    def consolidate_state_dict(self, to: int = 0) -> None:
        """Bring the full optimizer state to one rank, in host memory. Collective.

        :meth:`state_dict` returns it there until the next step or load; for plain parameters it works without this too.

        Args:
            to: the number of the rank in the group.

        Raises:
            ConfigError, ConfigTypeError: ``to`` is not a rank of the group. RankMismatch: it differs between ranks.
            StateDictError: the wrapped class keeps state other than dense tensors, numbers and strings.
            StorageFailed: the state of a rank cannot be read. All of them on every rank.
            OptimizerClosed, StepPending, StepFailed, PeerLost, PeerSilent: as :meth:`flush`.
        """
        self._require_open()
        self._engine.consolidate(to)

    @untraced
    def state_dict(self) -> StateDict:
        """Return the full state in ``torch.optim`` format; a plain optimizer of the wrapped class loads it.

        Not collective: any rank may call it alone between two steps, and so may several at once. Unless
        :meth:`consolidate_state_dict` has brought the current state here, the other ranks' parts are pulled while those
        ranks go on: anywhere up to the next step, closed, or about to exit. Over DTensors (FSDP2), unless that call
        came before, it returns DTensors with this rank's part, which no other rank can load.

        Raises:
            StateNotConsolidated: closed; or the process group has no messages between two ranks.
            StepDesync: another rank is in a later step, or another thread of this one in a step. PeerLost: a rank has
                ended, or does not get to this step in time.
            StepFailed: the last step failed on one. StateDictError, StorageFailed: state of one cannot be sent.
            StepPending: a delayed step is pending; :meth:`flush` brings it in. OptimizerClosed: it was lost by closing.
        """
        if not asked_by_load():
            return self._with_hooks(self._read)
        return self._with_hooks(lambda: with_places(self._read(), self.param_groups, self._config))

    def _read(self) -> StateDict:
        return self._one_call.read(self._engine.state_dict)

    def _with_hooks(self, make: Callable[[], StateDict]) -> StateDict:
        """Return the state dict that ``make`` returns, after the user's state dict hooks."""
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        state_dict = make()
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            replaced = post_hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        return state_dict

    def load_state_dict(self, state_dict: StateDict, *, strict: bool = True) -> None:
        """Load a full ``torch.optim`` state dict, saved at any world size. Collective; every rank gives the whole dict.

        The dict is neither changed nor kept. Everything is checked before anything is written. A pending step is let
        end, and forgotten. The log says which parameters start afresh because the dict has no state for them.

        Args:
            state_dict: of this class, the wrapped one or :func:`sharded_state_dict`; DTensors may have any cut.
            strict: whether state that does not fit its parameter is an error. Else that parameter starts afresh,
                hyperparameters that are missing stay as they are, and the log says so.

        Raises:
            StateDictError: names what does not fit. RankMismatch: names what differs between ranks. StorageFailed: a
                rank's file cannot be written to; if the disk has failed since that was checked, state is loaded in
                part, so load it again. StateOffloaded: see :meth:`offload_state`. All of them on every rank.
            OptimizerClosed, PeerLost, PeerSilent: as :meth:`flush`.
        """
        self._require_open()
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        self._load(joined(state_dict), strict=strict)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    @one_call("opt.load_state_dict()", replans=True)
    def _load(self, state_dict: StateDict, *, strict: bool) -> None:
        self._engine.load(state_dict, strict=strict)

    # -- for checkpoint.py, ddp_hook.py and torch ---------------------------------------------------------------------

    @one_call("load_sharded_state_dict()")
    def _to_load(self, make: Callable[[], StateDict]) -> StateDict:
        """Return what ``make`` returns, which is collective."""
        self._require_open()
        with self._engine.of_all_ranks():
            return make()

    @one_call("sharded_state_dict()", replans=True)
    def _to_save(self, make: Callable[[], StateDict]) -> StateDict:
        """Return what ``make`` returns, which is collective."""
        self._require_open()
        with self._engine.of_all_ranks():
            return make()

    def memory_report(self) -> dict[str, int]:
        """Return the bytes this rank holds for the optimizer, by kind: ``grad_shards``, ``staging`` and ``state``.

        ``staging``, allocated once, is what buckets pass through to and from the other ranks, shared memory and windows
        of a file included (``state`` is in the file then). A class that steps by itself has only state. Not collective.
        """
        held = self._engine.memory_report()
        return {**held, "state": held["state"] + sum(state_nbytes(*entry) for entry in self.state.items())}

    def stats(self) -> dict[str, float]:
        """Return what the last step took and moved on this rank, as a flat dict for a logger. Not collective.

        Keys begin with what they are about: ``exposed/`` (seconds that the user's thread has spent in ``step()``, and
        in ``clip_grad_norm_()`` and GradScaler's ``unscale_`` before it, by cause), ``hidden/`` (seconds that the
        exchange thread and the worker have worked meanwhile), ``worker/``, ``disk/`` (bytes, GB/s); besides
        ``sent_bytes``, ``grad_norm``, ``clip_factor``, ``steps`` and ``skipped_steps``. docs/observing.md lists them.
        Before the first step, and where the wrapped class itself steps the parameters, there are counts alone.
        """
        return self._engine.stats()

    @property
    def _group(self) -> Group:
        return self._engine.group

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether GradScaler calls ``step()`` after an overflow too, and leaves fp16 gradients to be unscaled there."""
        unscales, local = self._engine.unscales, self._engine.grads_are_local
        asks = note_scaler(self, self._engine.unscaling if local and not unscales else None)
        return unscales or (asks and local)

    def __repr__(self) -> str:
        as_in_torch, summary = super().__repr__(), self._engine.summary()
        if not summary:
            return as_in_torch
        kind, opened, groups = as_in_torch.partition("(")
        held = "; ".join(f"{name} {mib(nbytes)}" for name, nbytes in self.memory_report().items())
        return f"{kind}{opened}\n{summary}\n{held}\n{groups.lstrip()}"

    def __getstate__(self) -> dict[str, Any]:
        """Return what ``copy`` and ``pickle`` keep, at world size 1 only."""
        self._engine.require_copyable()
        kept = ("defaults", "_config", "_engine", "_parked", "_closed", "_hosts", "_ranks_given", "_has_no_group")
        return {name: getattr(self, name) for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_engine" in state:
            self._one_call = OneCall()
            super().__setstate__(state)
        else:  # the wrapped class's own form; the class completes one that an older version of it wrote
            self._engine.set_state(state)
        self._engine.attach(self)

    # -- the end ------------------------------------------------------------------------------------------------------

    @one_call("opt.close()", traced=True)  # else torch imports a module, which a finalizer at the end cannot
    def close(self) -> None:
        """Let parameters arrive, stop listening to gradients and destroy this optimizer's own process groups.

        Every rank should call it; until all have, this rank's part of the state is served to those that ask for it. A
        pending step (``WorkerOffload(delay=1)``) is brought in at world size 1. Over several ranks, which do not wait
        for each other here, or as the interpreter ends, it is lost, and the log says so: call :meth:`flush` first.
        Inside a call: StepDesync."""
        closed, self._closed = self._closed, True
        if not closed:
            self._engine.close()

    def _require_open(self) -> None:
        if self._closed:
            raise OptimizerClosed("this ShardedOptimizer was closed; construct a new one")
