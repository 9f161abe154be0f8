"""Functions of torch that read a late parameter: all wait, but for those that the reference lists."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import get_overridable_functions

from zero_opt.policies import Reduction, WorkerOffload
from zero_opt.sharding.late_params import LateParams

REFERENCE = Path(__file__).parents[3] / "docs" / "reference.md"
SHAPES = ((2, 2), (4,), (4, 1, 1))
ROWS, COLUMNS = torch.tensor([0, 2, 4]), torch.tensor([0, 1, 0, 1])
PLACES = torch.tensor([[0, 1, 0, 1], [0, 0, 1, 1]])
Arguments = Callable[[Tensor, Tensor], tuple[Any, ...]]
OF_METHODS: tuple[Arguments, ...] = (
    lambda p, _: (p,),
    lambda p, y: (y, p),
    lambda p, y: (p, y),
    lambda p, _: (p, p),
    lambda p, _: (p, Tensor),
)
OF_FUNCTIONS: tuple[Arguments, ...] = (
    *OF_METHODS,
    lambda p, _: ([p],),
    lambda p, _: (PLACES, p),
    lambda p, _: (PLACES[:, :2], p),
    lambda p, _: (ROWS, COLUMNS, p),
    lambda p, _: (Tensor, p),
)
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"dtype": "torch.DoubleTensor"},
    {"dtype": torch.float64},
    {"copy": True},
    {"layout": torch.sparse_csr},
    {"layout": torch.sparse_bsc},
)
SPARSE = {f"sparse_{kind}_tensor" for kind in ("coo", "csr", "csc", "bsr", "bsc", "compressed")}
TYPES = {f"{kind}Tensor" for kind in ("Float", "Double", "Half", "BFloat16", "")}
# What torch tells nothing of, by what the reference calls it.
UNNOTICED = {
    "`torch.tensor(p)`": {"tensor"},
    "`as_tensor`": {"as_tensor"},
    "`asarray`": {"asarray"},
    "`sparse_*_tensor`": SPARSE,
    "`nested_tensor`": {"nested_tensor"},
    "`torch.Tensor(p)`": {"FloatTensor", "Tensor"},
    "`y.new(p)`": {"Tensor.new"},
    "`y.new_tensor(p)`": {"Tensor.new_tensor"},
    "`y.set_(p)`": {"Tensor.set_"},
    "`y.data = p`": {"Tensor.data"},
    "`y.real = p`": {"Tensor.real"},
    "`torch.Tensor.as_subclass(p, ...)`": {"Tensor.as_subclass"},
}


class Waits:
    """Whether something has waited for the late parameter."""

    def __init__(self) -> None:
        self.waited = False
        self.params = LateParams(self.wait)

    def wait(self) -> None:
        self.waited = True
        self.params.clear()


WAITS = Waits()


def _values(result: Any, late: Tensor) -> list[float]:
    if result is late:
        return []
    if isinstance(result, (list, tuple)):
        return [value for item in result for value in _values(item, late)]
    if not isinstance(result, Tensor):
        return []
    if result.is_nested:
        return _values(result.unbind(), late)
    dense: list[Any] = result.to_dense().double().flatten().tolist()
    return dense


def _read(function: Callable[..., Any], arguments: Arguments, options: dict[str, Any], values: Tensor) -> Any:
    """Return what a function makes of a late parameter, if it does not wait."""
    param, other = nn.Parameter(values), torch.full((2, 2), 0.5)
    WAITS.waited = False
    WAITS.params.mark([param])
    torch.manual_seed(0)
    try:
        with torch.no_grad():
            result = function(*arguments(param, other), **options)
        WAITS.params.clear()
        return None if WAITS.waited else [_values(result, param), _values(other, param)]
    except Exception:  # not its arguments
        return None
    finally:
        WAITS.params.clear()


def _functions() -> Iterator[tuple[str, Callable[..., Any], tuple[Arguments, ...]]]:
    """Yield the functions that torch does not list as those it tells of; of tensors, all methods."""
    # As most methods are. A few are so listed and are not.
    told = {id(function) for functions in get_overridable_functions().values() for function in functions}
    for owner in (torch._C._VariableFunctions, torch._C._nested):
        for name in dir(owner):
            function = getattr(owner, name)
            of_a_library = name.startswith(("_", "cudnn", "miopen", "mkldnn"))
            if callable(function) and id(function) not in told and not of_a_library and name[-1] != "_":
                yield name, function, OF_FUNCTIONS
    for name in TYPES:
        yield name, getattr(torch, name), OF_FUNCTIONS
    for name in dir(Tensor):
        method = getattr(Tensor, name)
        if callable(method) and not name.startswith("_"):
            yield f"Tensor.{name}", method, OF_METHODS
        elif hasattr(method, "__set__"):
            yield f"Tensor.{name}", method.__set__, OF_METHODS


def _reads_late_values(function: Callable[..., Any], arguments: tuple[Arguments, ...]) -> bool:
    ways = [*product(SHAPES[:1], arguments, OPTIONS if arguments is OF_FUNCTIONS else OPTIONS[:2])]
    if arguments is OF_FUNCTIONS:
        ways += product(SHAPES[1:], arguments, [{}, *OPTIONS[-2:]])
    for shape, given, options in ways:
        values = torch.linspace(0.25, 1, 4).reshape(shape)
        found = _read(function, given, options, values)
        if found is not None and found != _read(function, given, options, values + 1):
            return True
    return False


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="another version of torch has other functions")
def test_functions_that_read_a_late_parameter_wait_or_are_listed() -> None:
    torch.use_deterministic_algorithms(True)  # which fill memory that nothing was written to
    try:
        found = {name for name, function, arguments in _functions() if _reads_late_values(function, arguments)}
    finally:
        torch.use_deterministic_algorithms(False)
    assert found == set[str]().union(*UNNOTICED.values())


def test_the_reference_lists_what_nothing_tells_of() -> None:
    section = REFERENCE.read_text().split("### Reads that nothing tells of")[1].split("\n### ")[0]
    assert set(re.findall(r"`[^`]*`", section)) >= {*UNNOTICED, "`torch.full(shape, p)`"}
    for policy in (Reduction, WorkerOffload):
        listed = set(re.findall(r"``([^`]*)``", policy.__doc__ or ""))
        assert {name.strip("`") for name in UNNOTICED} <= listed, policy


def _scalar() -> nn.Parameter:
    param = nn.Parameter(torch.tensor(0.5), requires_grad=False)
    WAITS.waited = False
    WAITS.params.mark([param])
    return param


NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "full": lambda p: torch.full((2,), p),  # type: ignore[arg-type]
    "full_like": lambda p: torch.full_like(ROWS, p),  # type: ignore[arg-type]
    "alpha": lambda p: torch.add(torch.ones(2), torch.ones(2), alpha=p),  # type: ignore[arg-type]
}
FILLED: dict[str, Callable[[Tensor], Tensor]] = {
    "full_like": lambda p: torch.full_like(p, p),  # type: ignore[arg-type]
    "full_like by name": lambda p: torch.full_like(p, fill_value=p),  # type: ignore[arg-type]
    "new_full": lambda p: p.new_full((2,), p),  # type: ignore[arg-type]
    "new_tensor": lambda p: p.new_tensor([p, p]),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_frozen_scalar_is_read_as_a_number(name: str) -> None:
    NUMBERS[name](_scalar())
    told = WAITS.waited
    WAITS.params.clear()
    assert not told, "torch tells of it, so that the reference need not list it"


@pytest.mark.parametrize("name", FILLED)
def test_what_fills_with_a_late_value_waits(name: str) -> None:
    FILLED[name](_scalar())
    assert WAITS.waited
    WAITS.waited = False
    WAITS.params.mark([param := nn.Parameter(torch.ones(2))])
    param.new_full((2,), 3.0), param.new_tensor([1.0]), torch.full_like(param, 2.0)
    told = WAITS.waited
    WAITS.params.clear()
    assert not told


def test_an_object_that_has_got_a_late_class_gets_back_its_own() -> None:
    param, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(2))
    WAITS.params.mark([param])
    other.__class__ = type(param)
    assert (other + 1).tolist() == [1, 1]
    assert type(other) is type(param) is nn.Parameter


def test_swapped_tensors_wait_first() -> None:
    param, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(2))
    WAITS.params.mark([param])
    torch.utils.swap_tensors(other, param)
    assert type(other) is type(param) is nn.Parameter
    assert [*other.tolist(), *param.tolist()] == [1, 1, 0, 0]
