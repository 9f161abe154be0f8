"""A gather in the background, and module hooks that let each forward wait for its parameters."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from ..comm.exchange import Exchange, Ident
from ..comm.waits_beside import outcome
from ..errors import ConfigConflict, ConfigError, OutOfResources, ProcessGroupError, StepFailed
from ..system.background_thread import CallingThread, SerialThread
from ..system.future import Future
from ..system.inference_mode import outside_inference_mode
from ..system.phases import Phase, Seconds
from ..system.stages import CallStages, Lane
from .buckets import GradBucket
from .gather import Arrivals, ParamGather
from .late_params import LateParams, Unwatched
from .partition import Partition

# Where torch.jit.script asks for a hook's name.
_SCRIPTS = "torch.jit._recursive"
_gathers: weakref.WeakSet[BackgroundGather] = weakref.WeakSet()


def finish_gathers(params: Collection[torch.Tensor]) -> None:
    """Return when no gather of any optimizer will write to these. Collective, among the ranks that update them."""
    for gather in list(_gathers):
        if gather.holds(params):
            gather.flush()


class PendingResults(Protocol):
    """The results of a step that have yet to be copied into the parameters; of a placement."""

    def await_result(self, bucket: int) -> None:
        """Return when the result of a bucket has arrived; on any thread, which may have to copy it."""

    def await_results(self) -> None:
        """Return when all results have arrived."""


class BackgroundGather(ParamGather):
    """A gather that goes on after :meth:`end` has returned: on ``thread``, in order with all other exchanges.

    Where a bucket's results lie elsewhere, they are copied on ``thread`` too, before the bucket's gather. Reductions
    run there as well, so no reduction of the next backward overtakes a gather. On an accelerator, gathers run on the
    side stream. :meth:`start` records an event before each; the stream that runs a forward waits for the event after.

    A module waits for the parameters it holds itself, and for those of the modules below it that are not called on
    their own: a parent that reads a child's weight without calling the child is common (``nn.MultiheadAttention``).
    The first forward shows which modules are called; until then the outermost module waits for everything. While the
    whole model is in evaluation, which may call other modules, every module waits for everything.
    """

    def __init__(
        self,
        partition: Partition,
        exchanges: Mapping[str, Exchange],
        thread: SerialThread,
        model: nn.Module,
        results: PendingResults,
        lookout: Callable[[], Callable[[], None]],
        seconds: Seconds,
    ) -> None:
        super().__init__(partition, exchanges)
        self._thread, self._model, self._results, self._lookout = thread, model, results, lookout
        self._seconds = seconds
        self._pid = os.getpid()
        self._arriving: dict[int, Future[Any]] = {}
        self._arrived: dict[int, Any] = {}  # the events of gathers that are enqueued, by bucket
        self._failures: Future[Sequence[int]] | None = None  # the ranks on which the last step failed
        # By id: torch.compile, which traces the hooks, refuses a module that it comes to in two ways.
        self._called: set[int] = set()
        self._order: list[int] = []
        self._present: dict[int, nn.Module] = {}
        self._needs: dict[int, set[int]] = {}
        self._handles: list[Any] = []
        self._hooked: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._late = LateParams(self._wait_for_late)
        self._hook_modules()
        _gathers.add(self)

    def _hook_modules(self) -> None:
        """Hook the modules that the model has by now."""
        me, present = weakref.ref(self), {id(module): module for module in self._model.modules()}
        self._called.intersection_update(present)
        self._present = present  # modules of before have lived until here, so that an id has meant one module
        fresh = [m for m in present.values() if m not in self._hooked and not _is_compiled_form(m)]
        wait = _Hook(me, lambda gather, module: gather.called(module))
        read = _Hook(me, lambda gather, _: gather.require_whole())
        write = _Hook(me, lambda gather, _: gather.flush())
        for module in fresh:
            self._hooked.add(module)
            # Before all others: some make what forward reads of the parameters (torch.nn.utils.prune).
            self._handles.append(module.register_forward_pre_hook(wait, prepend=True))
            self._handles.append(module.register_state_dict_pre_hook(read))  # type: ignore[no-untyped-call]
            self._handles.append(module.register_load_state_dict_pre_hook(write))  # type: ignore[no-untyped-call]
        if fresh:
            _forget_compiled()

    def order(self) -> Sequence[int]:
        """Return first the buckets whose modules were registered first: the forward is likely to come to them first."""
        buckets = self._partition.buckets
        if len(self._order) != len(buckets):
            places: dict[torch.Tensor, int] = {param: place for place, param in enumerate(self._model.parameters())}
            turns = [min([places.get(flat.param, 0) for flat in bucket.params]) for bucket in buckets]
            self._order = sorted(range(len(buckets)), key=turns.__getitem__)
        return self._order

    def refusal(self) -> OutOfResources | None:
        return self._thread.refusal() if any(exchange.blocks for exchange in self._exchanges.values()) else None

    def begin(self, step: int) -> None:
        super().begin(step)
        self._plan_waits()
        self._arrived.clear()
        self._failures = None

    def start(self, bucket: GradBucket, updated: Collection[int], *, failed: bool) -> None:
        """Hand the bucket to the thread. Waits for nothing."""
        self._last, (_, stepped) = self._exchanges[bucket.device.type], bucket.streams.produced()
        thread, ident = self._thread_of(self._last), self._next_ident()
        lane = Lane("gather", ident.sequence % (self._last.gathers_ahead + 1))
        arrivals = self._expected(bucket, updated)
        arrivals.own.count()
        arriving = thread.submit_stages(lane, self._gather_one, bucket, ident, arrivals, stepped, failed)
        self._arriving[bucket.layout.index] = arriving

    def end(self) -> Sequence[int]:
        """Return no rank, since no rank knows of failures yet; :meth:`failed` waits until they do."""
        if self._last is not None:
            last, step = self._last, self._step
            self._failures = self._thread_of(last).submit(lambda: last.failures(step)())
        return ()

    def _thread_of(self, exchange: Exchange) -> SerialThread | CallingThread:
        return self._thread if exchange.blocks else CallingThread()

    def _gather_one(
        self, bucket: GradBucket, ident: Ident, arrivals: Arrivals, stepped: Any, failed: bool
    ) -> CallStages[Any]:
        """Copy a bucket's results, gather the other ranks' shards, and return an event after that."""
        with torch.no_grad(), Unwatched(), bucket.streams.side([stepped], bucket.memory_to_record()):
            self._results.await_result(bucket.layout.index)
            arrive = self._gather(bucket, ident, arrivals, failed=failed)
        yield None
        with torch.no_grad(), Unwatched(), bucket.streams.side([], []):
            arrivals.complete_counted(arrive)
            return bucket.streams.produced()[1]

    def failed(self) -> Sequence[int]:
        if self._failures is None:
            return ()
        self._refuse_in_fork(self._failures)
        ranks: Sequence[int] = outcome(self._failures, self._lookout)
        return ranks

    def require_whole(self) -> None:
        """Wait as :meth:`flush` does, and raise StepFailed if the last step failed on a rank."""
        self.flush()
        if self.failed():
            ranks = " and ".join(f"rank {rank}" for rank in self.failed())
            raise StepFailed(
                f"step {self._step} failed on {ranks}, where step() has raised the reason, so parameters lack "
                "a part of that step on all ranks: load a checkpoint, or step again"
            )

    def forget_failure(self) -> None:
        self._failures = None

    def watch(self) -> None:
        self._order = []
        self._plan_waits()

    def _plan_waits(self) -> None:
        """Find the buckets that each module's forward needs; see the class. Modules may have come or gone."""
        self._hook_modules()
        self._needs.clear()
        places = self._partition.places
        of_param = {flat.param: places[index][0] for index, flat in self._partition.flats.items()}

        def own(module: nn.Module) -> set[int]:
            needed = {of_param[param] for param in module.parameters(recurse=False) if param in of_param}
            for child in module.children():
                below = own(child)
                if id(child) not in self._called:
                    needed |= below
            self._needs[id(module)] = needed
            return needed

        own(self._model)

    def called(self, module: nn.Module) -> None:
        """Wait for what a module needs, whose forward begins."""
        self._called.add(id(module))
        if not self._model.training:
            self.flush()
        elif module is self._model and self._arriving:  # modules may have been added to it
            self._plan_waits()
        for index in self._needs.get(id(module), ()):
            self._arrive(index)

    def holds(self, params: Collection[torch.Tensor]) -> bool:
        """Return whether any of these parameters is gathered here."""
        return not {flat.param for flat in self._partition.flats.values()}.isdisjoint(params)

    def watch_late(self) -> None:
        for index in [*self._arriving]:  # a copy: a signal's handler, or another thread, may remove what has arrived
            self._late.mark(flat.param for flat in self._partition.buckets[index].params)

    def unwatch(self) -> None:
        self._late.clear()

    def _wait_for_late(self) -> None:
        with outside_inference_mode():
            self.flush()

    def _arrive(self, index: int) -> None:
        if not self._late:
            self._await(index)
            return
        with Unwatched():
            self._await(index)
        self._late.clear(flat.param for flat in self._partition.buckets[index].params)

    def _await(self, index: int) -> None:
        arriving = self._arriving.get(index)
        if arriving is not None:
            self._refuse_in_fork(arriving)
            try:
                with self._seconds.counted("params"), Phase("params"):
                    event = outcome(arriving, self._lookout)
                if event is not None:
                    self._arrived[index] = event
            finally:
                if arriving.done():  # no Ctrl-C
                    self._arriving.pop(index, None)
        if index in self._arrived:  # every stream waits for itself
            self._partition.buckets[index].streams.wait(self._arrived[index])
        # Nothing is left, unless a Ctrl-C in step() has kept the bucket from the thread.
        self._results.await_result(index)

    def _refuse_in_fork(self, awaited: Future[Any]) -> None:
        """Raise ProcessGroupError if this is a fork and the future was not done before it.

        The thread that would complete it runs in the parent only.
        """
        if os.getpid() != self._pid and not awaited.done():
            raise ProcessGroupError(
                f"this process was forked from process {self._pid} while parameters were on their way there, and "
                "lacks a part of the last step; call opt.flush() before the fork"
            )

    def flush(self) -> None:
        """Wait for all gathers. This rank's own results arrive, whatever becomes of the other ranks' parts.

        Raises:
            ProcessGroupError: in a fork that lacks parameters, at every call.
        """
        for arriving in [*self._arriving.values()]:  # another thread may await parameters
            self._refuse_in_fork(arriving)
        with Unwatched():
            try:
                for index in [*self._arriving, *self._arrived]:
                    self._await(index)
            except Exception:
                self._arriving.clear()
                self._results.await_results()
                raise
            self._results.await_results()
        self._late.clear()

    def forget(self) -> None:
        self.flush()
        super().forget()

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        if os.getpid() == self._pid:  # in a fork there is no thread to wait for
            self.flush()


class _Hook:
    """A hook of a module that calls ``act(gather, module)``. That of a copied or saved module does nothing."""

    def __init__(
        self,
        gather: weakref.ReferenceType[BackgroundGather] | None = None,
        act: Callable[[BackgroundGather, nn.Module], None] | None = None,
    ) -> None:
        self._gather, self._act = gather, act

    def __call__(self, module: nn.Module, *_: object) -> None:
        gather = None if self._gather is None else self._gather()
        if gather is not None and self._act is not None:
            with outside_inference_mode():
                self._act(gather, module)

    def __getattr__(self, name: str) -> Any:
        if name == "__name__" and sys._getframe(1).f_globals.get("__name__") == _SCRIPTS:
            raise ConfigConflict(
                "torch.jit.script cannot compile the hooks by which forwards wait for parameters "
                "(overlap_param_gather): script the model after opt.close(), or leave overlap_param_gather out; "
                "torch.compile needs neither"
            )
        return object.__getattribute__(self, name)  # which raises

    def __reduce__(self) -> Any:
        return _Hook, ()


def _forget_compiled() -> None:
    """Have ``torch.compile`` look for hooks: what it has made of a model would not wait for parameters."""
    torch.compiler.reset()
    config: Any = torch._dynamo.config
    if hasattr(config, "skip_nnmodule_hook_guards"):
        config.skip_nnmodule_hook_guards = False


def check_held(model: nn.Module, params: Iterable[torch.Tensor], describe: Callable[[int], str]) -> None:
    """Raise an error unless the forwards of the model can wait for all parameters.

    Raises:
        ConfigError: a parameter, which is named, is not in the model. ConfigConflict: a module takes no hooks.
    """
    for name, module in model.named_modules():
        if type(module).register_forward_pre_hook is not nn.Module.register_forward_pre_hook:
            raise ConfigConflict(
                f"overlap_param_gather: module {name!r} is of torch.jit.script, which takes none of the hooks by which "
                "forwards wait for parameters; give a model that is not scripted, or leave overlap_param_gather out"
            )
    held = set(model.parameters())
    for index, param in enumerate(params):
        if param not in held:
            raise ConfigError(
                f"overlap_param_gather: {describe(index)} is not in the given model; pass the whole model"
            )


def build_gather(
    partition: Partition,
    exchanges: Mapping[str, Exchange],
    thread: SerialThread,
    model: nn.Module | None,
    results: PendingResults,
    lookout: Callable[[], Callable[[], None]],
    seconds: Seconds,
) -> ParamGather:
    """Gather in the background if a model is given whose modules can wait, else within ``step()``.

    Args:
        results: where ``step()`` leaves what is to be copied first; the placement.
        lookout: see :meth:`Group.lookout`. seconds: count waits for parameters.
    """
    if model is None:
        return ParamGather(partition, exchanges)
    while _is_compiled_form(model):
        model = model.get_submodule("_orig_mod")
    return BackgroundGather(partition, exchanges, thread, model, results, lookout, seconds)


def _is_compiled_form(module: nn.Module) -> bool:
    """Return whether ``torch.compile`` has made this of a module, whose own forward is called, and waits."""
    return "_orig_mod" in module._modules
