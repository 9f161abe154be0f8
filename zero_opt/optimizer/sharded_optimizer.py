"""ShardedOptimizer: a ``torch.optim.Optimizer`` whose state and gradients are sharded over the ranks of a group."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.distributed.algorithms.join import Joinable

from ..comm.agreement import Agreement
from ..comm.groups import agreed_group, check_rank
from ..errors import ConfigConflict, ConfigTypeError, OptimizerClosed, ZeroOptError
from ..placement import Policy as Offload
from ..policies import Checks, MixedPrecision, Overlapped
from ..reduction import GradReduction, Policy
from ..reduction.grad_norm import check_max_norm
from ..sharding.flat_param import is_dtensor
from ..sharding.param_groups import following, hypers_of, normalized, normalized_group, run_once, tensors_of
from ..state.state_dict import StateDict, copied, pack_groups
from .config import Recipe
from .contents import adopt_errors, template_of
from .dtensors.engine import build_wiring, own_groups
from .dtensors.local_parts import local_of
from .dtensors.mesh_params import MeshParams, admit, mesh_of, steps_apart
from .engine import Wiring
from .join import UnevenInputs, join_notice
from .loading import Loading, add_places, asked_by_load, joined
from .loss_scale import LossScaled, overflowed, unscaling
from .offload_state import Parked
from .process_groups import OwnGroups
from .single_rank import Wrapping

_Closure = Callable[[], Any]


class ShardedOptimizer(LossScaled, Wrapping, UnevenInputs):
    """Any ``torch.optim`` optimizer, its state and gradients sharded over a process group (ZeRO-1 and ZeRO-2).

    The sharding is that of Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models"
    (2020), sections 5.1 and 5.2. Parameters stay whole on every rank and are never re-pointed. At world size 1 it
    behaves as the wrapped class does.

    Args:
        params: parameters or param groups, in every form ``torch.optim`` takes.
        optimizer_class: the class to wrap. Elementwise classes are cut anywhere; the others step whole parameters,
            each on one rank (see :func:`register_elementwise`).
        process_group: a ProcessGroup or a 1-D DeviceMesh; default is the default group, or world size 1 without one.
            Left out where parameters are DTensors (FSDP2): their mesh says.
        reduction: :class:`Overlapped`, :class:`AtStep`, or, under DDP, :class:`AlreadyReduced` or :class:`DDPHook`.
        offload: ``None``: state lives with the parameters. :class:`CPUOffload`: in host memory, stepped by this
            process. :class:`WorkerOffload`: by one beside this. :class:`NVMeOffload`: in a file, a window at a time.
        precision: dtypes of the gradient path and of masters.
        max_grad_norm: clip the global gradient norm to this at every step.
        checks: what to do about non-finite gradients, and bounds on waiting.
        **defaults: the wrapped class's own arguments.

    All ranks of the group must construct it, with the same arguments in the same order, and call :meth:`step`,
    :meth:`add_param_group`, :meth:`clip_grad_norm_`, :meth:`consolidate_state_dict` and :meth:`load_state_dict`
    together.

    Raises:
        ConfigError, ConfigTypeError, ConfigConflict: bad arguments.
        UnsupportedOptimizer, UnsupportedParam: cannot be sharded.
        ParamsUnsharded: a parameter is a copy that FSDP2 has gathered.
        RankMismatch: on every rank, when ranks differ in what they pass or hold.
        ProcessGroupError: a launcher started several ranks but torch.distributed is not initialized.
    """

    @torch.inference_mode(False)
    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[torch.optim.Optimizer],
        process_group: Any = None,
        *,
        reduction: Policy = Overlapped(),  # noqa: B008  (frozen)
        offload: Offload = None,
        precision: MixedPrecision = MixedPrecision(),  # noqa: B008  (frozen)
        max_grad_norm: float | None = None,
        checks: Checks = Checks(),  # noqa: B008  (frozen)
        **defaults: Any,
    ) -> None:
        wrong: ZeroOptError | None = None
        params = run_once(params)
        over_dtensors = any(map(is_dtensor, tensors_of(params)))
        self._mesh: MeshParams | None = None
        self._recipe = Recipe(optimizer_class, defaults, reduction, offload, precision, max_grad_norm, checks)
        try:
            self._recipe = self._recipe.checked()
            self._mesh = mesh_of(params, self._recipe, process_group)
        except ZeroOptError as error:  # of one rank alone, the others must hear of it
            wrong = error
        self._process_group = process_group
        self._sharded: Wiring | None = None
        self._parked = Parked()
        self._wired = self._closed = False
        Joinable.__init__(self)
        parent = None if over_dtensors else agreed_group(process_group)
        alone = parent is None or parent.size() == 1
        if alone and wrong is not None:
            raise wrong
        if alone and not (self._recipe.has_masters if self._mesh is None else steps_apart(self._recipe)):
            self._build_alone(params)
        else:
            self._build_sharded(params, own_groups(parent, checks if wrong is None else Checks(), self._mesh), wrong)
        self._wired = True

    # -- construction -------------------------------------------------------------------------------------------------

    def _build_sharded(self, params: Iterable[Any], groups: OwnGroups, wrong: ZeroOptError | None) -> None:
        try:
            with Agreement(groups.control, self._describe).together("ShardedOptimizer()"):
                if wrong is not None:
                    raise wrong
                self._validate(params)
        except BaseException:
            groups.close()
            raise
        self._connect(groups)

    def _connect(self, groups: OwnGroups) -> Wiring:
        """Plan the parameters and connect everything over ``groups``, which are closed if that fails. Collective."""
        try:
            parts = self._sharded = build_wiring(self._recipe, groups, self._describe, self, self._mesh, self._parked)
            parts.progress.begins = join_notice(self)
            parts.add_groups()
        except BaseException:
            if self._sharded is None:
                groups.close()
            else:
                self._sharded.close()  # a traceback may keep it, and with it the worker and the trainer's cores
            raise
        self._finalizer = weakref.finalize(self, groups.close)
        self._finalizer.atexit = False
        return parts

    def _replan(self) -> None:
        """Build everything again for parameters that the user has replaced the planned ones with. Collective."""
        old, recipe = self._sharded, self._recipe
        assert old is not None
        with old.agreement.together():
            old.require_replaceable()
            mesh = mesh_of(self.param_groups, recipe, self._process_group)
            wraps = mesh is not None and not steps_apart(recipe)
            if not wraps:
                recipe.check_params(self.param_groups, self._describe)
        with old.agreement.together():
            old.planned.require_replaced()
        old.agreement.on_contents([("parameters are DTensors", mesh is not None)])
        self._finalizer.detach()
        old.close()
        self._sharded, self._mesh, self._closed = None, mesh, True  # it stays closed if anything below fails
        self.state.clear()
        if wraps:
            self.state.update(self._wrapped(self.param_groups).state)
        else:
            parent = old.agreement.group.parent if mesh is None else None
            self._connect(own_groups(parent, recipe.checks, mesh)).progress.begun = old.progress.begun
        self._closed = False

    def _validate(self, params: Iterable[Any]) -> None:
        """Fill in param groups and defaults as the wrapped class does, and refuse what cannot be sharded."""
        recipe = self._recipe
        with adopt_errors():
            entries = normalized(params)
            template = template_of(recipe.optimizer_class, entries, recipe.defaults)
            super().__init__(entries, template.defaults)
        for group, complete in zip(self.param_groups, template.param_groups, strict=False):
            group.update(hypers_of(complete))
        recipe.check_params(self.param_groups, self._describe)

    @torch.inference_mode(False)
    @following
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, as in ``torch.optim``. Collective; what is planned already does not move.

        Raises:
            RankMismatch: on every rank, when the groups differ.
        """
        if not self._wired:
            if self._inner is None:
                super().add_param_group(param_group)
            else:
                self.param_groups.append(param_group)  # the wrapped class has checked it
            return
        self._require_open()
        known = len(self.param_groups)
        if self._sharded is None:
            self._parked.require_here()
            with adopt_errors():
                group = normalized_group(param_group, known)
                admit(self._mesh, tensors_of([group]), self._recipe)
                self._alone().add_param_group(group)
            return
        try:
            with self._sharded.agreement.together("add_param_group()"):
                self._sharded.planned.require()
                self._parked.require_here()
                with adopt_errors():
                    group = normalized_group(param_group, known)
                    admit(self._mesh, tensors_of([group]), self._recipe)
                    super().add_param_group(group)
                    template_of(self._recipe.optimizer_class, self.param_groups[known:], self._recipe.defaults)
                self._recipe.check_params(self.param_groups, self._describe)
            self._sharded.add_groups()
        except BaseException:
            del self.param_groups[known:]
            raise

    # -- the step -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: _Closure | None = None, **options: Any) -> Any:
        """Reduce gradients, step this rank's shard, gather the updated parameters. Collective.

        Args:
            closure: called once, with gradients enabled, to recompute the loss; its value is returned.
            **options: what else the wrapped class's ``step`` takes; at world size 1 only, else ConfigTypeError.

        Raises:
            StepDesync, RankMismatch, GradientConflict, GradientsLocal: on every rank; parameters, state are untouched.
            NonFiniteGradient: a gradient is not finite, under ``Checks(nonfinite="raise")``; likewise.
            ParamsReplaced: ``param_groups`` was edited after the first step, or holds other shapes; likewise.
            StepPending: a parameter was changed while a delayed step was pending; likewise.
            ParamsUnsharded: FSDP2 has parameters gathered; likewise. StepFailed: a step has failed on another rank.
            WorkerDied, WorkerFailed, StorageFailed: worker or disk fails; the step stays pending, see :meth:`flush`.
        """
        self._require_open()
        if self._sharded is None:
            self._parked.require_here()
            return self._alone_step.step(self._alone(), closure, options)
        if options:
            raise ConfigTypeError(f"step() over several ranks takes a closure alone, got {sorted(options)}")
        return self._step_sharded(closure)

    @_disable_dynamo  # what torch.compile cannot trace, it calls
    def _step_sharded(self, closure: _Closure | None) -> Any:
        """World size > 1, or an offload."""
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        if not overflowed(self):
            self._take()
        return loss

    @torch.inference_mode(False)
    @torch.no_grad()
    @following
    def _take(self) -> None:
        """Step with the current gradients."""
        if self._sharded is not None:
            self._sharded.take(self._sharded.finish(), unscaling(self))
        elif unscaling(self) == 1.0:
            self._alone_step.step(self._alone(), None, {})
        else:  # parameters were replaced by DTensors
            raise ConfigConflict(
                "GradScaler has left fp16 gradients scaled; construct the optimizer after fully_shard()"
            )

    def _params(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, reduced or not. Not collective, but every rank must call it between the same steps."""
        super().zero_grad(set_to_none)
        if self._sharded is not None:
            self._sharded.reduction.reset()

    def no_sync(self) -> AbstractContextManager[None]:
        """Within it, gradients stay local and full-size; the next backward outside reduces them; a step needs one."""
        self._require_open()
        return nullcontext() if self._sharded is None else self._sharded.reduction.no_sync()

    @torch.no_grad()
    @following
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the global L2 norm of the reduced gradients; call it between backward and :meth:`step`. Collective.

        Returns:
            The norm before clipping, a 0-dim fp32 tensor, the same on every rank.
        """
        self._require_open()
        limit, error = 0.0, None
        try:  # what one rank alone gets wrong, the others must hear of
            limit = check_max_norm(max_norm, "max_norm")
        except ZeroOptError as found:
            error = found
        if self._sharded is not None:
            return self._sharded.clip(self._sharded.finish(error, clip_to=limit), limit)
        if error is not None:
            raise error
        self._parked.require_here()
        self._alone()
        return self._alone_step.clip(self._params(), limit)

    @property
    def skipped_steps(self) -> int:
        """How often :meth:`step` has left parameters and state alone, under ``Checks(nonfinite="skip")``."""
        return self._alone_step.skips if self._sharded is None else self._sharded.progress.skips

    def flush(self) -> None:
        """Return when every parameter on this rank is up to date. Collective.

        Needed only with a policy that lets :meth:`step` return earlier: before reading parameters outside the model, or
        changing any (``overlap_param_gather``), before reading or changing any (``WorkerOffload(delay=1)``). It also
        tries again a step that a worker could not take, or in which a disk failed.

        Raises:
            StepPending: a parameter was changed while a step was pending; it keeps the change, and lacks the update.
            WorkerDied, WorkerFailed, StorageFailed: worker or disk cannot take the pending step. StepFailed.
        """
        self._require_open()
        if self._sharded is not None:
            with torch.no_grad():
                self._sharded.flush()

    def offload_state(self) -> None:
        """Give the parameters' device the memory of state, masters and reduced gradients until :meth:`reload_state`.

        Values and objects stay the same, in host memory, and can be saved. A step, clipping, a load and adding a param
        group raise StateOffloaded meanwhile. Not collective, but every rank must call it between the same steps.
        The memory goes back to torch's allocator; ``torch.accelerator.empty_cache()`` returns it to the device."""
        self._require_open()
        if self._sharded is not None:
            self._sharded.leave_device()
        self._parked.leave(v for state in self.state.values() for v in state.values() if isinstance(v, Tensor))

    def reload_state(self) -> None:
        """Undo :meth:`offload_state`."""
        if self._sharded is not None:
            self._sharded.come_back()
        self._parked.come_back()

    # -- state --------------------------------------------------------------------------------------------------------

    @following
    def consolidate_state_dict(self, to: int = 0) -> None:
        """Bring the full optimizer state to rank ``to`` of the group, in host memory. Collective.

        :meth:`state_dict` returns it there until the next step or load. It needs no call of this; see there.

        Raises:
            ConfigError, ConfigTypeError: ``to`` is not a rank of the group. RankMismatch: it differs between ranks.
            StateDictError: the wrapped class keeps state other than tensors, numbers and strings.
            StorageFailed: the state of a rank cannot be read.
            All of them on every rank. OptimizerClosed.
        """
        self._require_open()
        if self._sharded is not None:
            self._sharded.consolidate(to)
        elif self._mesh is not None:
            self._mesh.consolidate(to, self._alone().state_dict()["state"], self.state)
        else:
            check_rank(to, 1, "to")

    def state_dict(self) -> StateDict:
        """The full state in ``torch.optim`` format; a plain optimizer of the wrapped class loads it.

        Not collective: any rank may call it alone between two steps, and so may several at once. Unless
        :meth:`consolidate_state_dict` has brought the current state here, the other ranks' parts are pulled while those
        go on. They may be anywhere up to the next step, or closed, or about to exit.

        Raises:
            StateNotConsolidated: closed; or the process group has no messages between two ranks.
            StepDesync: another rank is in a later step, or another thread of this one in a step. PeerLost: a rank has
                ended, or does not get to this step in time.
            StepFailed: the last step failed on one. StateDictError, StorageFailed: state of one cannot be sent.
            StepPending: a delayed step is pending; :meth:`flush` brings it in.
            OptimizerClosed: closed with a step pending that was lost.
        """
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        if self._sharded is None:
            state_dict = self._alone().state_dict()
            if self._mesh is not None:
                state_dict["state"] = self._mesh.full_state(state_dict["state"], self.state)
        else:
            state_dict = {"state": self._sharded.full_state(), "param_groups": pack_groups(self.param_groups)}
        if asked_by_load():
            add_places(state_dict, self.param_groups, self._recipe)
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            replaced = post_hook(self, state_dict)
            if replaced is not None:
                state_dict = replaced
        return state_dict

    def load_state_dict(self, state_dict: StateDict, *, strict: bool = True) -> None:
        """Load a full ``torch.optim`` state dict, saved at any world size. Collective; every rank gives the whole dict.

        The dict is neither changed nor kept. Everything is checked before anything is written. A pending step is let
        end, and forgotten. The log says which parameters start afresh because the dict has no state for them.

        Args:
            strict: whether state that does not fit its parameter is an error. Else that parameter starts afresh,
                hyperparameters that are missing stay as they are, and the log says so.

        Raises:
            StateDictError: names what does not fit. RankMismatch: names what differs between ranks. StorageFailed: a
                rank's file cannot be written to; if the disk has failed since that was checked, state is loaded in
                part, so load it again. All of them on every rank.
        """
        self._require_open()
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = hook(self, state_dict)
            if replaced is not None:
                state_dict = replaced
        self._load(joined(state_dict), strict=strict)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    @torch.inference_mode(False)
    @following
    def _load(self, state_dict: StateDict, *, strict: bool) -> None:
        loading = Loading(self, self._recipe, state_dict, strict=strict)
        loading.check(self._sharded, self._parked)
        refused, states = loading.refused, loading.states
        if self._sharded is None:
            loaded = refused.for_class(state_dict, states, self.param_groups)
            if self._mesh is not None:
                loaded = self._mesh.spread(loaded, self.param_groups)
            self._alone().load_state_dict(loaded)
            self._share_inner()
        else:
            self._sharded.load(states, loading.groups)
        if self._group.rank == 0:
            loading.say(self._params(), self._describe)

    # -- for checkpoint.py and ddp_hook.py ----------------------------------------------------------------------------

    @property
    def _reduction(self) -> GradReduction | None:
        return None if self._sharded is None else self._sharded.reduction

    def _together(self, call: str) -> AbstractContextManager[None]:
        """See :meth:`Agreement.together`."""
        self._require_open()
        return nullcontext() if self._sharded is None else self._sharded.agreement.together(call)

    @following
    def _rows(self) -> dict[int, dict[str, Any]]:
        """All state by global parameter index in host memory, cut by rows over the ranks. Collective."""
        self._require_open()
        if self._sharded is not None:
            return self._sharded.rows()
        assert self._inner is not None
        return copied(self._inner.state_dict()["state"], torch.device("cpu"))

    def memory_report(self) -> dict[str, int]:
        """Bytes this rank holds for the optimizer, by kind: ``grad_shards``, ``staging`` and ``state``.

        ``staging``, allocated once, is what buckets pass through to and from the other ranks, shared memory and windows
        of a file included (``state`` is in the file then). None, and no shards, at world size 1. Not collective.
        """
        held = dict.fromkeys(("grad_shards", "staging", "state"), 0)
        held |= {} if self._sharded is None else self._sharded.memory_report()
        tensors = [local_of(v) for state in self.state.values() for v in state.values() if isinstance(v, Tensor)]
        return {**held, "state": held["state"] + sum(tensor.numel() * tensor.element_size() for tensor in tensors)}

    # -- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Let parameters arrive, stop listening to gradients and destroy this optimizer's own process groups.

        Every rank should call it; until all have, this rank's part of the state is served to those that ask for it. A
        pending step (``WorkerOffload(delay=1)``) is brought in at world size 1; over several ranks, which do not wait
        for each other here, it is lost, and the log says so: call :meth:`flush` first.
        """
        closed, self._closed = self._closed, True
        if not closed and self._sharded is not None:
            self._finalizer.detach()
            self._sharded.close()

    def _require_open(self) -> None:
        if self._closed:
            raise OptimizerClosed("this ShardedOptimizer was closed; construct a new one")
