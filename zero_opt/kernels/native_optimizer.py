"""What optimizers with the native kernel for a step have in common."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar, TypedDict

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parameter import is_lazy

from ..errors import (
    ConfigError,
    ConfigTypeError,
    StateDictTypeError,
    UnsupportedParam,
    ZeroOptError,
    ZeroOptWarning,
    quoted,
)
from ..field_checks import check_flag
from ..policies import AdamState
from ..system.extension import native, require_native
from ..system.inference_mode import outside_inference_mode
from ..system.unedited_hypers import UneditedHypers
from .adam_state import (
    HALVES,
    Halfway,
    check_plain,
    follow_param,
    loaded_state,
    new_state,
    param_dtypes,
    plain_state,
    stored_state,
)
from .checks import GRAD_DTYPES, check_apart, check_tensor, require_counts
from .code_watch import CodeWatch, WriteMark, write_mark
from .runs import step_runs
from .slots import Slot, own_count
from .threads import checked_threads, say_threads
from .updates import NativeUpdate

ParamsT = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]
PLAIN = AdamState()


class NativeOptions(TypedDict, total=False):
    """Keyword arguments that all of these classes take beside torch's hyperparameters.

    ``state``: in what form moments and masters are kept. ``threads``: the most that step; None is the number of cores
    that this process may use, divided by the ranks that share them, but at most what ``torch.set_num_threads`` was
    given (``OMP_NUM_THREADS=1``, which torchrun sets, is ignored). ``flush_denormals``: take subnormal numbers as zero
    inside the step, which keeps rows that have long had no gradient from slowing it down. The others are torch's
    switches between implementations.
    """

    state: AdamState
    threads: int | None
    flush_denormals: bool
    fused: bool | None
    foreach: bool | None
    capturable: bool
    differentiable: bool


def _fused_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return torch's implementation switches with ``fused`` on, as state_dict() shows them."""
    if options.get("fused") is False:
        raise ConfigError(f"{name} is a fused kernel; for fused=False use torch.optim")
    if options.get("foreach"):
        raise ConfigError(f"{name} is a fused kernel; for foreach=True use torch.optim")
    if options.get("differentiable"):
        raise ConfigError(f"{name} cannot be differentiated through; for differentiable=True use torch.optim")
    return {**options, "fused": True}


def refuse_own_options(group: Mapping[str, Any], number: int) -> None:
    """Raise ConfigError for what the optimizer takes, and a param group has no say in."""
    for key in ("state", "threads", "flush_denormals"):
        if key in group:
            raise ConfigError(
                f"param group {number} has {key!r}, which is the same for all params; pass {key}= to the optimizer "
                "itself, or make another optimizer for this group"
            )


def _in_plain_form(optimizer: torch.optim.Optimizer, packed: dict[str, Any]) -> None:
    """Bring the states of a state dict that is being made into torch's form; a hook."""
    assert isinstance(optimizer, NativeOptimizer)
    ids = chain.from_iterable(group["params"] for group in packed["param_groups"])
    states = dict(packed["state"])
    for key, (name, param) in zip(ids, optimizer._named()):
        if states.get(key) and optimizer._needs_conversion(param):
            states[key] = plain_state(name, param, states[key])
    packed["state"] = states


class NativeOptimizer(torch.optim.Optimizer):
    """The base of optimizers with the native step: torch's construction and state, our checks and our step.

    A class of torch's comes behind this one among the bases. A constructor passes on what :meth:`_take` returns, and
    calls :meth:`_made` last.

    Attributes:
        update: of the native table.
        nonfinite_grads: how many gradient elements of the last step were infinite or NaN.
    """

    # GradScaler unscales before step(), as the kernel does not.
    _step_supports_amp_scaling = False

    update: ClassVar[NativeUpdate]
    nonfinite_grads: int = 0

    def _take(self, options: NativeOptions) -> dict[str, Any]:
        """Keep what is ours of the options, and return what is torch's."""
        require_native()
        rest: dict[str, Any] = dict(options)
        self._form: AdamState = rest.pop("state", PLAIN)
        if not isinstance(self._form, AdamState):
            raise ConfigTypeError(f"state must be a zero_opt.AdamState, got {self._form!r}")
        if not self.update.compact and (self._form.moments != "float32" or self._form.master == "split"):
            raise ConfigError(
                f"compact forms are of Adam's state, and {type(self).__name__} keeps another, in fp32: take "
                "AdamState(master='float32'), or leave state out"
            )
        self._threads: int | None = rest.pop("threads", None)
        checked_threads(self._threads)
        self._flush = rest.pop("flush_denormals", False)
        check_flag("flush_denormals", self._flush)
        self._slots: dict[int, Slot] = {}
        self._unedited = UneditedHypers()
        self._last_hypers: list[native.Hypers] = []
        # By param: its mark as of our last write; None while the master is loaded, and not stepped yet.
        self._written: dict[int, WriteMark | None] = {}
        # Of split masters that are loaded, and not stepped yet: the param, the remainder made for it, what that lacks.
        self._halfway: list[tuple[Parameter, Tensor, Halfway]] = []
        self._codes = CodeWatch(self._form)
        return _fused_options(type(self).__name__, rest)

    def _made(self) -> None:
        """Bring state that a class of torch's has made in its constructor into our form."""
        self._step_supports_amp_scaling = False
        for _, param in self._named():
            if param in self.state and param.dtype not in (torch.float32, *HALVES):  # frozen, and not stepped here
                del self.state[param]
            elif param.dtype in HALVES and param in self.state and not param.is_meta:
                self.state[param] = self._new_state(param, self.update.arrays)

    def _new_state(self, param: Tensor, roles: Sequence[str]) -> dict[str, Any]:
        return new_state(self.update, param, self._form, roles, first=self.update.first_value(self.defaults))

    def __getstate__(self) -> dict[str, Any]:
        own = {key: self.__dict__[key] for key in ("_form", "_threads", "_flush", "_halfway")}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._halfway = state.get("_halfway", [])
        self._slots, self._written, self._codes = {}, {}, CodeWatch(self._form)
        self._unedited = UneditedHypers()
        # A state dict of an unfused optimizer loads too, and leaves the switches as they are here.
        for group in self.param_groups:
            group["fused"], group["foreach"] = True, None
        self._note_codes()

    # -- params -------------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch does; raise a ZeroOptError for a param, not frozen, that the kernel cannot update."""
        super().add_param_group(param_group)
        try:
            refuse_own_options(self.param_groups[-1], len(self.param_groups) - 1)
            self.param_groups[-1].update(_fused_options(type(self).__name__, self.param_groups[-1]))
            for position, param in enumerate(self.param_groups[-1]["params"]):
                frozen = isinstance(param, Parameter) and not param.requires_grad
                # A stand-in can be asked about, not stepped. The step checks it, and what is frozen now.
                if not (frozen or param.is_meta or is_lazy(param)):
                    self._check_param(self._name(len(self.param_groups) - 1, position), param)
        except ZeroOptError:
            self.param_groups.pop()
            raise

    @classmethod
    def require_dtype(cls, name: str, dtype: torch.dtype, form: AdamState) -> None:
        """Raise UnsupportedParam if the class does not step a dtype in this form.

        The message names the parameter, and what does step it.
        """
        taken = param_dtypes(form)
        if dtype in taken:
            return
        if dtype in HALVES:
            split = " or 'split'" if cls.update.compact and dtype is torch.bfloat16 else ""
            otherwise = f"state=zero_opt.AdamState(master='float32'){split} keeps an fp32 master for it"
        else:
            otherwise = f"use {torch_class_of(cls)}"
        raise UnsupportedParam(f"{name} must be {' or '.join(map(str, taken))}, got {dtype}; {otherwise}")

    def _check_param(self, name: str, param: Tensor) -> None:
        self.require_dtype(name, param.dtype, self._form)
        check_tensor(name, param, None, param_dtypes(self._form))

    def _name(self, index: int, position: int) -> str:
        """Return what error messages call a param."""
        names = self.param_groups[index].get("param_names")
        called = f" ({names[position]!r})" if names else ""
        return f"{type(self).__name__} param {position} of group {index}{called}"

    # -- state dicts --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return torch's form, whatever the state's: fp32 moments, and ``master`` (fp32) for bf16 and fp16 params.

        The result loads into any other form and into torch.optim; in the same form, training goes on to the bit.

        Raises:
            StateDictError: codes in ``state`` were written to or replaced, or an entry of it is no dict.
        """
        self._require_dicts()
        self._require_own_codes()
        self._follow_params(loaded=False)
        with self.register_state_dict_post_hook(_in_plain_form, prepend=True):  # the user's hooks see torch's form
            packed: dict[str, Any] = super().state_dict()
        return packed

    def _named(self) -> Iterator[tuple[str, Parameter]]:
        for index, group in enumerate(self.param_groups):
            for position, param in enumerate(group["params"]):
                yield self._name(index, position), param

    def _needs_conversion(self, param: Tensor) -> bool:
        """Return whether the state of a param is another than torch's classes have of it."""
        return self.update.compact and (self._form.moments != "float32" or param.dtype in HALVES)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what any torch Adam or any form of this one has saved, as torch's Adam does.

        The params are not written: load the model too, before or after. A ``master`` counts from the next step on,
        where the param is what it rounds to then. Without one, the param is the master, and a warning says so.
        """
        fitting: list[tuple[Parameter, Mapping[str, Any]]] = []
        with (
            self.register_load_state_dict_pre_hook(lambda _, loaded: fitting.extend(self._checked(loaded))),  # the last
            self.register_load_state_dict_post_hook(lambda _: self._revive(fitting), prepend=True),
        ):
            super().load_state_dict(dict(state_dict))
        without_master = sum(param.dtype in HALVES and "master" not in saved for param, saved in fitting)
        if without_master:
            message = f"no master saved for {without_master} params: their own values are taken"
            warnings.warn(message, ZeroOptWarning, stacklevel=2)

    def _checked(self, loaded: Mapping[str, Any]) -> Iterator[tuple[Parameter, Mapping[str, Any]]]:
        """Yield the state that is saved for each param, once it is known to fit; nothing has been written yet."""
        saved_ids = chain.from_iterable(group["params"] for group in loaded["param_groups"])
        saved_roles = (
            self.update.roles({**self.defaults, **group}) for group in loaded["param_groups"] for _ in group["params"]
        )
        for key, roles, (name, param) in zip(saved_ids, saved_roles, self._named()):
            saved = loaded["state"].get(key, {})
            if not isinstance(saved, Mapping) or saved:
                check_plain(name, saved, param, self.update, self.update.needed(roles))
                if self._form != PLAIN:
                    check_tensor(name, param, None, param_dtypes(self._form))
                yield param, saved

    @torch.no_grad()
    def _revive(self, fitting: Sequence[tuple[Parameter, Mapping[str, Any]]]) -> None:
        for param, saved in fitting:
            if self._needs_conversion(param) or param.dtype in HALVES:
                self.state[param] = (
                    stored_state(saved, param, self._form)
                    if self.update.compact
                    else loaded_state(saved, param, self.update, self._form)
                )
                self._written[id(param)] = None
                remainder = self.state[param].get("remainder")
                halfway = None if remainder is None else Halfway.of(saved.get("master"))
                if halfway is not None:
                    self._halfway.append((param, remainder, halfway))
        self._note_codes()

    def _require_dicts(self) -> None:
        """Raise StateDictTypeError, naming the param, if the user has put something else in the place of a state."""
        odd = {id(param): state for param, state in self.state.items() if not isinstance(state, Mapping)}
        for name, param in self._named() if odd else ():
            if id(param) in odd:
                given = quoted(odd[id(param)])
                raise StateDictTypeError(f"opt.state of {name} must be a dict, got {given}; del it to start afresh")

    # -- codes --------------------------------------------------------------------------------------------------------

    def _states(self) -> list[Mapping[str, Any]]:
        """Return the state of every param, an empty one where there is none."""
        return [self.state.get(param) or {} for group in self.param_groups for param in group["params"]]

    def _note_codes(self) -> None:
        """Remember what the step alone may write."""
        if self._codes.watches:
            self._codes.note(self._states())

    def _require_own_codes(self) -> None:
        """Raise StateDictError, naming the param, if the user has written to codes, or replaced some of them."""
        if self._codes.watches:
            self._codes.require_own(self._states(), lambda at: list(self._named())[at][0])

    # -- the step -----------------------------------------------------------------------------------------------------

    def _bind(self, stale: list[tuple[int, int, Parameter, Tensor]]) -> None:
        """Make the slots of these params, and state that is missing, after checking all of them."""
        moved = False
        if stale and not self._slots:
            say_threads(type(self).__name__, checked_threads(self._threads))
        for index, position, param, grad in stale:
            name, slot = self._name(index, position), self._slots.get(id(param))
            moved |= slot is None or slot.pointer != param.data_ptr()
            self._check_param(name, param)
            check_tensor(f"grad of {name}", grad, param.shape, GRAD_DTYPES)
        if moved:
            lying = [(name, param) for name, param in self._named() if param.is_cpu and not is_lazy(param)]
            check_apart([(name, param) for name, param in lying if param.layout is torch.strided])
        fresh: list[tuple[Parameter, str]] = []
        try:
            for index, position, param, grad in stale:
                self._bind_one(self._name(index, position), self.param_groups[index], param, grad, fresh)
            self._require_counts()
        except BaseException:
            for param, key in fresh:
                self.state[param].pop(key, None)
            for param in {param for param, _ in fresh if not self.state[param]}:
                del self.state[param]
            raise

    def _require_counts(self) -> None:
        """Raise StateDictError, naming the param, if the user has written to a count of steps what is none."""
        if self.update.counts:
            stepped = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
            require_counts(
                [self.state[param]["step"] for param in stepped],
                lambda at: next(name for name, param in self._named() if param is stepped[at]),
            )

    def _bind_one(
        self, name: str, group: Mapping[str, Any], param: Parameter, grad: Tensor, fresh: list[tuple[Parameter, str]]
    ) -> None:
        """Make a slot; note in ``fresh`` what is made of its state."""
        roles, state, before = self.update.roles(group), self.state.get(param, {}), self._slots.get(id(param))
        begins = self.update.begins(state, roles)
        if begins:
            made = {key: value for key, value in self._new_state(param, roles).items() if state.get(key) is None}
            fresh += ((param, key) for key in made)
            if made:
                self.state[param].update(made)
                state = self.state[param]
        count = own_count(self.update, state, roles, before, begins=begins)
        slot = Slot(name, state, param, grad, update=self.update, roles=roles, count=count)
        self._slots[id(param)] = slot
        slot.set_grad(grad)

    def _stale(self) -> Iterator[tuple[int, int, Parameter, Tensor]]:
        """Yield the params with a gradient whose slot holds no more."""
        slots, states = self._slots, self.state
        for index, group in enumerate(self.param_groups):
            roles = self.update.roles(group)
            for position, param in enumerate(group["params"]):
                grad = param.grad
                if grad is None:
                    continue
                slot = slots.get(id(param))
                if (
                    slot is not None
                    and type(grad) is Tensor
                    and grad.is_cpu
                    and grad.layout is torch.strided
                    and grad.is_contiguous()
                    and param.is_contiguous()
                    and not grad.is_neg()
                    and slot.holds(states.get(param, {}), param, grad, roles)
                ):
                    slot.grad = grad
                else:
                    yield index, position, param, grad

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, grad_scale: float = 1.0) -> Any:
        """Step every param that has a gradient, in place.

        Args:
            closure: re-evaluates the model and returns the loss, which is handed back.
            grad_scale: what gradients are multiplied by first, in the same pass over memory.

        Raises:
            UnsupportedParam, ConfigError, ConfigTypeError, StateDictError: a param, gradient or state that the kernel
                cannot work on, by name; no param and no state has been changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._require_dicts()
        self._require_own_codes()
        hypers = self._kernel_hypers(grad_scale)
        with outside_inference_mode():
            self._bind(list(self._stale()))
        self._follow_params(loaded=True)
        batches = [
            (values, [self._slots[id(param)] for param in group["params"] if param.grad is not None])
            for group, values in zip(self.param_groups, hypers, strict=True)
        ]
        self._codes.forget()  # a Ctrl-C may come as soon as the codes are written
        self.nonfinite_grads = step_runs(batches, threads=checked_threads(self._threads), flush_denormals=self._flush)
        self._written = {id(param): write_mark(param) for param, _ in self._mastered()}
        self._note_codes()
        return loss

    def _kernel_hypers(self, grad_scale: float) -> list[native.Hypers]:
        """Return the groups' hyperparameters as the kernel takes them: the last step's while none was edited."""
        if grad_scale == 1.0 and self._unedited.are(self.param_groups):
            return self._last_hypers
        hypers = [self.update.hypers(group).for_kernel(grad_scale) for group in self.param_groups]
        if grad_scale == 1.0:
            self._last_hypers = hypers
            self._unedited.note(self.param_groups)
        return hypers

    def _mastered(self) -> Iterator[tuple[Parameter, Tensor]]:
        """Yield the params that have an fp32 master beside them, and that."""
        for _, param in self._named() if self._form.master == "float32" else ():
            master = self.state[param].get("master") if param in self.state else None
            if isinstance(master, Tensor) and master.shape == param.shape and master.dtype is torch.float32:
                yield param, master

    def _follow_params(self, *, loaded: bool) -> None:
        """Let masters follow params written to since the last step, and all those of which a master was ``loaded``."""
        for param, master in self._mastered():
            known = self._written.get(id(param), ())
            if known != write_mark(param) and (loaded or known is not None):
                follow_param(master, param)
                self._written[id(param)] = write_mark(param)
        for param, remainder, halfway in self._halfway:
            there: Any = self.state[param].get("remainder") if param in self.state else None
            if there is remainder or _is_copy(there, remainder):
                halfway.settle(param, there)
        if loaded:
            self._halfway.clear()


def _is_copy(value: Any, of: Tensor) -> bool:
    """Return whether a value is a tensor like another one."""
    return (
        isinstance(value, Tensor) and value.dtype is of.dtype and value.device == of.device and torch.equal(value, of)
    )


def torch_class_of(cls: type[torch.optim.Optimizer]) -> str:
    """Return how messages name the class of torch's that steps what a class of this package does not."""
    bases = [base.__name__ for base in cls.__mro__ if base.__module__.startswith("torch.optim.")]
    return f"torch.optim.{bases[0]}" if bases[0] != torch.optim.Optimizer.__name__ else "a class of torch.optim"
