"""Parameters that are late: torch tells of every use of one outside the optimizer.

A late parameter is of a class of its own for as long, a subclass of the one it had, whose ``__torch_function__`` torch
calls with what it is about to do. The parameter stays the object it was. What asks for the shape, the gradient and the
like is let through. Values reach the user without that where no function of torch is called on the parameter: by
pointers, NumPy arrays and tensors that share its memory, made before, and in C++, as where torch makes a tensor of data
(``torch.tensor(param)``). Only a mode would be told of those, of every function on its thread.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch._functorch.eager_transforms
import torch._functorch.vmap
from torch import Tensor, nn

from ..errors import StepPending
from ..system.interrupts import uninterrupted
from ..system.untraced import untraced_frames

#: A context in which late parameters are as all others, on this thread.
Unwatched = torch._C.DisableTorchFunctionSubclass

_VALUES = ("data", "real", "imag", "T", "H", "mT", "mH", "_base")  # properties that give values
_METADATA = """
    size stride dim ndimension numel nelement element_size storage_offset get_device has_names __len__ _is_view
    is_coalesced is_complex is_conj is_contiguous is_distributed is_floating_point is_inference is_neg is_pinned
    is_same_size is_shared is_signed requires_grad_ retain_grad register_hook register_post_accumulate_grad_hook
    result_type can_cast promote_types empty_like zeros_like ones_like rand_like randn_like
    new_empty new_empty_strided new_zeros new_ones
"""
_FILLING = "full_like randint_like new_full new_tensor"  # metadata of one argument, values of another
_UNTOLD = "as_subclass set_ _use_count"  # methods without __torch_function__; swap_tensors begins with the last


def _harmless() -> Iterator[Any]:
    """Yield what torch calls to ask for something else than values, as ``__torch_function__`` gets it."""
    properties = vars(torch._C.TensorBase)
    descriptor = type(properties["grad"])
    for name in [key for key, value in properties.items() if isinstance(value, descriptor) and key not in _VALUES]:
        yield properties[name].__get__
        yield properties[name].__set__
        yield properties[name].__delete__
    yield from _functions_named(_METADATA)


def _functions_named(names: str) -> list[Any]:
    return [getattr(owner, name) for name in names.split() for owner in (Tensor, torch) if hasattr(owner, name)]


_HARMLESS = frozenset(_harmless())
_FILLS = frozenset(_functions_named(_FILLING))
_PARAMETER_NEW: Any = nn.Parameter.__new__


# Where torch.func wraps the arguments of vmap, grad, vjp, jacrev and functionalize, by C functions that tell nothing.
_WRAPPERS = (
    (torch._functorch.vmap, "_add_batch_dim"),
    (torch._functorch.eager_transforms, "_wrap_for_grad"),
    (torch._functorch.eager_transforms, "_wrap_functional_tensor"),
)


@cache
def _watch_transforms() -> None:
    """Let torch tell of late parameters that it gives to those, or begins a backward from, from here on."""
    for module, name in _WRAPPERS:
        wrap = getattr(module, name, None)
        if wrap is not None:
            setattr(module, name, _Telling(wrap))
    make_grads = getattr(torch.autograd, "_make_grads", None)
    if make_grads is not None:
        telling = _Telling(make_grads)
        # As a function of torch.autograd, of which torch.compile traces no frame.
        torch.autograd._make_grads = untraced_frames(lambda *args, **options: telling(*args, **options))


class _Telling:
    """A function that first calls one of torch on its arguments that are late, or are in one that is a sequence."""

    def __init__(self, wrap: Callable[..., Any]) -> None:
        self._wrap = wrap

    def __call__(self, *args: Any, **options: Any) -> Any:
        for arg in args:
            for each in arg if isinstance(arg, (tuple, list)) else (arg,):
                if isinstance(each, _Late):
                    Tensor.view_as(each, each)  # type: ignore[arg-type]
        return self._wrap(*args, **options)


_all: weakref.WeakSet[LateParams] = weakref.WeakSet()


def await_others(own: LateParams, params: Iterable[Tensor]) -> None:
    """Return when none of these parameters is late for another reason than ``own``, as another optimizer's step.

    Within an optimizer's calls torch tells of no use, so it asks before it uses the values of parameters.

    Raises:
        StepPending: another optimizer's step for one is pending.
    """
    for late in [late for late in list(_all) if late is not own and len(late)]:
        if any(map(late.has, params)):
            try:
                late.settle()
            except StepPending as pending:
                raise StepPending(
                    "another ShardedOptimizer has a step for the same parameters pending (delay=1): call flush() of "
                    "that one on every rank first, or close() it (if nothing refers to it any more, gc.collect() ends "
                    "it)"
                ) from pending


def _reads_no_values(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a function of torch has no values of the late parameters among its arguments."""
    if func in _HARMLESS:
        return True
    if func is Tensor.type:
        return len(args) == 1 and not kwargs
    return func in _FILLS and len(late_among([*args, *kwargs.values()])) == 1


class LateParams:
    """The parameters that are late for one reason.

    Args:
        wait: a method that is called on the user's thread before a function of torch has values of a late parameter, or
            changes them. It returns when none is late any more, or raises.
    """

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait: Any = weakref.WeakMethod(wait)
        self._classes: dict[type, type] = {}
        self._marked: dict[int, tuple[Tensor, type]] = {}  # by id: a parameter and the class that it had
        weakref.finalize(self, _restore_all, self._marked).atexit = False
        _all.add(self)

    def __len__(self) -> int:
        return len(self._marked)

    def mark(self, params: Iterable[Tensor]) -> None:
        """Make these late, from here on."""
        with uninterrupted():
            for param in params:
                if id(param) not in self._marked:
                    kind = type(param)
                    param.__class__ = self._late_class_of(kind)
                    self._marked[id(param)] = (param, kind)

    def _late_class_of(self, kind: type) -> type:
        late = self._classes.get(kind)
        if late is None:
            _watch_transforms()
            late = self._classes[kind] = _late_class(kind, weakref.ref(self))
        return late

    def has(self, param: Tensor) -> bool:
        """Return whether a parameter is late for this reason."""
        return id(param) in self._marked

    def clear(self, params: Iterable[Tensor] | None = None) -> None:
        """Make these as they were before, or all."""
        marked = self._marked
        if params is None:
            _restore_all(marked)
        elif marked:
            for param in params:
                _restore_one(marked, id(param))

    def settle(self) -> None:
        """Return when none is late any more; none is whose owner has gone."""
        wait = self._wait()
        if wait is None:
            self.clear()
        else:
            wait()

    def settle_these(self, args: Iterable[Any]) -> None:
        """Return when none is late any more, and none of these is of a late class, which the user may have assigned."""
        self.settle()
        kinds = {late: kind for kind, late in self._classes.items()}
        for param in late_among(args):
            if not self.has(param):  # another thread may have marked it since
                param.__class__ = kinds.get(type(param), type(param))

    def compiles(self) -> bool:
        """Return whether torch.compile traces a use that need not wait."""
        return False

    def use(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a function of torch that has values of a late parameter, or changes them, and return its result."""
        self.settle_these([*args, *kwargs.values()])
        return func(*args, **kwargs)


class _Late:
    """The base of classes of late parameters."""

    __slots__ = ()


def is_late(param: Tensor) -> bool:
    """Return whether a parameter is late."""
    return isinstance(param, _Late)


def _late_class(kind: type, late: weakref.ReferenceType[LateParams]) -> type:
    """Return the class of late parameters that were of class ``kind``."""

    def __new__(cls: type, *args: Any, **kwargs: Any) -> Any:  # noqa: N807, ARG001
        return kind(*args, **kwargs)  # type(param)(...) is of the class that param is

    def __torch_function__(  # noqa: N807
        _: type, func: Any, __: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        of = late()
        kwargs = kwargs or {}
        if _reads_no_values(func, args, kwargs) or (of is not None and of.compiles()):
            with Unwatched():
                return func(*args, **kwargs)
        if of is None:
            _restore_these([*args, *kwargs.values()])
            return func(*args, **kwargs)
        result = of.use(func, args, kwargs)
        if func is Tensor.detach and sys._getframe(1).f_code is _PARAMETER_NEW.__code__:
            result.__class__ = type(args[0])  # which nn.Parameter(param) insists on
        return result

    def __deepcopy__(self: Any, memo: Any) -> Any:  # noqa: N807
        _await(late, self)  # torch would take the late class for the parameter's own
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self: Any, protocol: Any) -> Any:  # noqa: N807
        _await(late, self)
        return self.__reduce_ex__(protocol)

    def untold(name: str) -> Any:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            _await(late, self)
            return getattr(self, name)(*args, **kwargs)

        return method

    methods = {
        **{name: untold(name) for name in _UNTOLD.split()},
        "__slots__": (),
        "__module__": kind.__module__,
        "__qualname__": f"late {kind.__qualname__}",
        "__new__": __new__,
        "__torch_function__": classmethod(__torch_function__),
        "__deepcopy__": __deepcopy__,
        "__reduce_ex__": __reduce_ex__,
    }
    bases = (kind,) if issubclass(kind, _Late) else (_Late, kind)  # it may be late for two reasons
    return type(kind)(kind.__name__, bases, methods)


def _await(late: weakref.ReferenceType[LateParams], param: Any) -> None:
    """Wait for late parameters, one of which is this."""
    of = late()
    if of is None:
        _restore_these([param])
    else:
        of.settle_these([param])


def _make_plain(param: Tensor, kind: type) -> None:
    if is_late(param):  # the user may have assigned another class
        param.__class__ = kind


def _restore_all(marked: dict[int, tuple[Tensor, type]]) -> None:
    for key in list(marked):
        _restore_one(marked, key)


def _restore_one(marked: dict[int, tuple[Tensor, type]], key: int) -> None:
    """Make one as it was before. It stays marked until it is: a signal handler may raise between any two lines."""
    found = marked.get(key)
    if found is not None:
        _make_plain(*found)
        marked.pop(key, None)


def _restore_these(args: Iterable[Any]) -> None:
    for param in late_among(args):
        plain: Any = next(kind for kind in type(param).__mro__ if not issubclass(kind, _Late))
        param.__class__ = plain


def late_among(args: Iterable[Any]) -> list[Tensor]:
    """Return the late parameters among arguments of a function of torch."""
    found: list[Tensor] = []
    for arg in args:
        if isinstance(arg, _Late):
            found.append(arg)  # type: ignore[arg-type]
        elif isinstance(arg, (tuple, list)):
            found += late_among(arg)
        elif isinstance(arg, dict):
            found += late_among(arg.values())
    return found
