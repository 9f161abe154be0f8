"""A param's stored state in the form that AdamState asks for, and the same in torch's own form.

The plain form is what torch.optim.Adam's state dict has: step, exp_avg, exp_avg_sq and max_exp_avg_sq, fp32 and of the
param's shape; for a bf16 or fp16 param also ``master``. Every number that a stored state can hold is exact in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import StateDictError, StateDictTypeError, quoted
from ..policies import AdamState
from ..system.extension import native
from .checks import DTYPE_NAMES, oddity, require_count, storage_order
from .runs import BASES, BLOCK_NUMEL, MOMENT_DTYPE, blocks_of, check_arrays, errors_of_state
from .updates import NativeUpdate, given_arrays

HALVES = (torch.bfloat16, torch.float16)
MOMENTS = ("exp_avg", "exp_avg_sq")
MAXIMUM = "max_exp_avg_sq"
SQUARES = (MOMENTS[1], MAXIMUM)
# What of a stored state a step writes, beside the count of steps and the master. Other entries are the user's own.
BESIDE = ("remainder", *BASES)
ROLES = (*MOMENTS, MAXIMUM, *BESIDE)


def param_dtypes(form: AdamState) -> tuple[torch.dtype, ...]:
    """Return the dtypes of params that a state of this form can be for."""
    if form.master is None:
        return (torch.float32,)
    return (torch.float32, torch.bfloat16) if form.master == "split" else (torch.float32, *HALVES)


def prefer_huge_pages(fresh: Tensor) -> None:
    """Ask for huge pages under a tensor that has not been written yet: a step is over sooner."""
    native.prefer_huge_pages(fresh.data_ptr(), fresh.untyped_storage().nbytes())


def _like(param: Tensor, dtype: torch.dtype) -> Tensor:
    """Return zeros of the param's shape, in the order that a run has, in huge pages where there are such."""
    fresh = torch.empty_strided(param.shape, storage_order(param), dtype=dtype, device=param.device)
    prefer_huge_pages(fresh)
    return fresh.zero_()


def _new_arrays(like: Tensor, form: AdamState, roles: Iterable[str]) -> dict[str, Tensor]:
    """Return zeros for what a step writes, by role, but for a param, a master or what a split one has beside that."""
    return {
        role: torch.zeros(blocks_of(like.numel()), dtype=dtype, device="cpu") if role in BASES else _like(like, dtype)
        for role, dtype in state_dtypes(AdamState(form.moments), roles).items()
    }


def new_state(
    update: NativeUpdate, param: Tensor, form: AdamState, roles: Sequence[str], *, first: float = 0.0
) -> dict[str, Any]:
    """Return a new state, in torch's own order: step fp32 0-dim, the rest in the param's shape and order.

    Args:
        roles: which of the update's arrays it has. first: what their elements are.

    The caller takes it over in one call: a Ctrl-C in the middle must leave no part of a state.
    """
    state: dict[str, Any] = {"step": torch.zeros((), dtype=torch.float32, device="cpu")} if update.counts else {}
    state |= _new_arrays(param, form, roles)
    for role in roles if first else ():
        state[role].fill_(first)
    if param.dtype in HALVES:
        _add_master(state, param, None, form)
    return state


def _add_master(state: dict[str, Any], param: Tensor, master: Tensor | None, form: AdamState) -> None:
    """Add a master to a state, or, without one, the param as its own. The param is not written."""
    if form.master == "split":
        state["remainder"] = remainder_of(param, master)
    else:
        state["master"] = _like(param, torch.float32).copy_(param.detach() if master is None else master)


def _separable_bits(master: Tensor) -> Tensor:
    """Return the bits of an fp32 master that a bf16 param and a remainder can stand for: one NaN alone, as natively."""
    return torch.where(master.isnan(), 0x7FC00000, master.contiguous().view(torch.int32))


def _upper_bits(param: Tensor) -> Tensor:
    return param.detach().contiguous().view(torch.int16).int() << 16


def joined_master(param: Tensor, remainder: Tensor) -> Tensor:
    """Return the fp32 master that a bf16 param and a remainder of its shape are."""
    # Of a param of 0 that the user has written, a remainder below 0 is another value's: it would make a NaN.
    remainder = torch.where(param.detach() == 0, remainder.clamp(min=0), remainder)
    return (_upper_bits(param) + remainder.int()).view(torch.float32)


def remainder_of(param: Tensor, master: Tensor | None) -> Tensor:
    """Return what a bf16 param lacks of an fp32 master of its shape, or, without one, zeros. The param is not written.

    Where the param is not the master, rounded, it may be loaded after this: what is returned is what that will lack,
    but see :class:`Halfway`.
    """
    remainder = _like(param, torch.int16)
    if master is not None:
        remainder.copy_(_lacking(_upper_bits(param), _separable_bits(master.to(device="cpu", dtype=torch.float32))))
    return remainder


def _halfway_above_even(bits: Tensor) -> Tensor:
    """Return which masters, given their bits, lie halfway between two bf16 numbers, the smaller of them even."""
    return bits & 0x1FFFF == 0x8000


def _lacking(upper: Tensor, bits: Tensor) -> Tensor:
    """Return remainders, given the bits of params and masters. Beside the even number there is no 0x8000: 1 less."""
    even = _halfway_above_even(bits) & (bits - upper == 0x8000)
    return torch.where(even, 0x7FFF, bits.to(torch.int16))


class Halfway:
    """Elements of a split master halfway between two bf16 numbers, of which the smaller one is even.

    fp32 masters round them to that, split ones to the other. Which of the two the param is, and so what it lacks of the
    master, is known once the model is loaded, which may be after the master.
    """

    def __init__(self, where: tuple[Tensor, ...], bits: Tensor) -> None:
        self._where, self._bits = where, bits

    @classmethod
    def of(cls, master: Tensor | None) -> Halfway | None:
        """Return the elements of an fp32 master that has some."""
        if master is None:
            return None
        bits = _separable_bits(master.to(device="cpu", dtype=torch.float32))[None]  # 0-dim ones have places, too
        where = _halfway_above_even(bits).nonzero(as_tuple=True)
        return cls(where, bits[where]) if where[0].numel() else None

    def settle(self, param: Tensor, remainder: Tensor) -> Tensor:
        """Write what the param, as it is now, lacks of these elements; uncounted, as the step does. Return it all."""
        upper = _upper_bits(param.detach()[None][self._where])
        remainder.data[None][self._where] = _lacking(upper, self._bits)
        return remainder


def arrays_of(state: Mapping[str, Any], param: Tensor, roles: Sequence[str]) -> dict[str, Tensor]:
    """Return the tensors that a step writes, by the kernel's names for their roles; ``roles``: those of the update."""
    arrays = given_arrays(state, (*roles, *BESIDE))
    if "master" not in state or param.dtype not in HALVES:
        return {"param": param, **arrays}
    return {"param": state["master"], "out": param, **arrays}


def check_plain(
    name: str, plain: Mapping[str, Any], param: Tensor, update: NativeUpdate, needed: Sequence[str]
) -> None:
    """Raise StateDictError, naming the entry, for what a state in torch's form lacks or has in another shape.

    Args:
        name: what error messages call the param. needed: what there must be.
    """
    if not isinstance(plain, Mapping):
        raise StateDictTypeError(f"the state saved for {name} must be a dict, got a {type(plain).__name__}")
    for key in needed:
        if key not in plain:
            raise StateDictError(f"the state saved for {name} has no {key}")
    if update.counts:
        require_count(f"step saved for {name}", plain["step"])
    for key in (*update.arrays, "master"):
        if key in plain and (plain[key] is not None or key in needed):
            _check_array(f"{key} saved for {name}", plain[key], param)
            if key in update.squares:
                require_squares(f"{key} saved for {name}", plain[key])


def require_squares(what: str, value: Tensor) -> None:
    """Raise StateDictError, naming ``what``, if means of squares have a value below 0. NaN is none.

    8-bit moments have no sign for them, and would drop it; a step of other forms makes NaN of them.
    """
    if value.is_meta or not value.numel():
        return
    values = value.detach() if value.itemsize > 1 else value.detach().float()  # torch compares no fp8
    least = values.min()  # NaN if there is one
    if bool(least < 0) or (bool(least.isnan()) and bool((values < 0).any())):
        raise StateDictError(
            f"{what} has values below 0, which no mean of squares has; clamp it at 0, or load another state"
        )


def _check_array(what: str, value: Any, param: Tensor) -> None:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        raise StateDictTypeError(f"{what} must be a floating-point tensor, got {quoted(value)}")
    odd = None if param.is_meta else oddity(value)
    if odd is not None:
        raise StateDictTypeError(f"{what} must be a dense tensor with values, and is {odd}")
    if value.shape != param.shape:
        raise StateDictError(f"{what} must have shape {tuple(param.shape)}, got {tuple(value.shape)}")


def plain_state(name: str, param: Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored state in torch's form. What is in that form already is not copied.

    Raises:
        StateDictError: the state does not fit the param, which is called ``name``.
    """
    with errors_of_state():
        check_arrays(name, arrays_of(state, param, (*MOMENTS, MAXIMUM)), MOMENTS)
    moments = dict(zip(MOMENTS, _plain_moments(state), strict=True))
    return {key: moments[key] if key in moments else plain_value(state, param, key) for key in plain_keys(state)}


def plain_keys(state: Mapping[str, Any]) -> list[str]:
    """Return the keys that a stored state has in torch's form."""
    return ["master" if key == "remainder" else key for key in state if key not in BASES]


def plain_value(state: Mapping[str, Any], param: Tensor, key: str) -> Any:
    """Return one value of a stored state in torch's form. What is in that form already is not copied."""
    if key == "master" and "remainder" in state:
        return joined_master(param, state["remainder"])
    if key in MOMENTS and "exp_avg_base" in state:
        return _plain_moments(state)[MOMENTS.index(key)]
    return state[key].float() if key in MOMENTS else state[key]


def _plain_moments(state: Mapping[str, Any]) -> list[Tensor]:
    """Return both moments in fp32. What is in fp32 already is not copied."""
    if "exp_avg_base" not in state:
        return [state[moment].float() for moment in MOMENTS]
    moments = [_like(state[moment], torch.float32) for moment in MOMENTS]
    native.unpack_moments(_moment_run(state, moments, 1.0))
    return moments


def unpacked(codes: Sequence[Tensor], bases: Sequence[Tensor], lead: int) -> list[Tensor]:
    """Return both 8-bit moments of consecutive elements in fp32, 1-D.

    Args:
        codes: of exp_avg and exp_avg_sq, 1-D. bases: of their blocks. lead: elements of the first block before these.
    """
    whole = [torch.cat([run.new_zeros(lead), run]) for run in codes]
    state = dict(zip((*MOMENTS, *BASES), (*whole, *(base.contiguous() for base in bases)), strict=True))
    return [moment[lead:] for moment in _plain_moments(state)]


def code_key(key: str, value: Any) -> str:
    """Return the key under which a value of a stored state is saved as such: 8-bit codes are no values of torch's."""
    return f"{key}_codes" if key in MOMENTS and isinstance(value, Tensor) and value.dtype is torch.uint8 else key


CODES = tuple(f"{moment}_codes" for moment in MOMENTS)
# What is saved of compact state as it is stored, under keys that torch's form has not.
STORED_KEYS = (*CODES, *BASES, "remainder")
# The highest bases, those of blocks that are NaN: base_for() of native/kernels/compact.inl. Others make codes overflow.
HIGHEST_BASES = dict(zip(BASES, (0x7FC - 127, 0x7FC - 255), strict=True))


def require_bases(what: str, bases: Tensor, highest: int) -> None:
    """Raise StateDictError, naming ``what``, unless bases are from 0 to the ``highest``."""
    if bases.numel() and not 0 <= int(bases.min()) <= int(bases.max()) <= highest:
        raise StateDictError(f"{what} must be from 0 to {highest}, and has {int(bases.min())} to {int(bases.max())}")


@torch.no_grad()
def follow_param(master: Tensor, param: Tensor) -> None:
    """Take a master from a parameter of its shape that may have been written to; on any devices."""
    if master.dtype is param.dtype:
        master.copy_(param)
        return
    param = param.to(master.device)
    # Where the parameter is what the master rounds to, the user has not written to it, and the master is more exact.
    same = master.to(param.dtype).view(torch.int16) == param.view(torch.int16)
    if param.dtype is torch.bfloat16 and not bool(same.all()):  # a split master rounds ties away from zero
        same |= _separable_bits(master).add_(0x8000) >> 16 == param.view(torch.int16)
    torch.where(same, master, param.float(), out=master)


def state_dtypes(form: AdamState, roles: Iterable[str]) -> dict[str, torch.dtype]:
    """Return the dtypes of what a step writes of a param, by role, but for the param and a master in its place.

    Args:
        roles: those of the update's arrays that it has. Adam's moments alone may have another form than fp32.
    """
    dtypes = {role: MOMENT_DTYPE[form.moments] if role in MOMENTS else torch.float32 for role in roles}
    if form.moments == "block8":
        dtypes |= dict.fromkeys(BASES, torch.int16)
    if form.master == "split":
        dtypes["remainder"] = torch.int16
    return dtypes


def role_numel(role: str, numel: int) -> int:
    """Return how many elements an array has for so many of the param."""
    return blocks_of(numel) if role in BASES else numel


def span_of(role: str, where: slice) -> slice:
    """Return where an array has what belongs to these elements, the first of which begins a block."""
    if role not in BASES:
        return where
    assert where.start % BLOCK_NUMEL == 0, "cuts are between blocks"
    return slice(where.start // BLOCK_NUMEL, blocks_of(where.stop))


def _moment_run(state: Mapping[str, Any], plain: list[Tensor], step: float) -> Any:
    roles = {"plain_exp_avg": plain[0], "plain_exp_avg_sq": plain[1]}
    roles |= {key: state[key] for moment in MOMENTS for key in (moment, f"{moment}_base") if key in state}
    addresses = {role: tensor.data_ptr() for role, tensor in roles.items()}
    dtype = DTYPE_NAMES[state["exp_avg"].dtype]
    return native.MomentRun(state["exp_avg"].numel(), dtype, addresses, step=step)


def packed_moments(plain: Mapping[str, Any], like: Tensor, form: AdamState) -> dict[str, Any]:
    """Return a state in torch's form in the form that is asked for, without a master.

    A moment that the form can hold is kept as it is; others are rounded.

    Args:
        like: has the shape and strides of what is stepped.
    """
    others = {key: value for key, value in plain.items() if key != "master"}
    given = given_arrays(plain, (*MOMENTS, MAXIMUM))
    step = torch.tensor(float(plain["step"]), dtype=torch.float32, device="cpu")
    arrays = _new_arrays(like, form, given)
    for role, array in arrays.items():
        if array.dtype is torch.float32:
            array.copy_(given[role])
    if form.moments != "float32":
        fp32 = [_like(like, torch.float32).copy_(given[moment]) for moment in MOMENTS]
        native.pack_moments(_moment_run(arrays, fp32, max(float(plain["step"]), 1.0)))
    return {**others, "step": step, **arrays}


def stored_state(plain: Mapping[str, Any], param: Tensor, form: AdamState) -> dict[str, Any]:
    """Return a state in torch's form in the form that is asked for. The param is not written."""
    state = packed_moments(plain, param, form)
    if param.dtype in HALVES:
        _add_master(state, param, plain.get("master"), form)
    return state


def loaded_state(plain: Mapping[str, Any], param: Tensor, update: NativeUpdate, form: AdamState) -> dict[str, Any]:
    """Return the state of an update that has no compact forms, out of one in torch's form. The param is not written."""
    state = {key: value for key, value in plain.items() if key != "master"}
    if update.counts:
        state["step"] = torch.tensor(float(plain["step"]), dtype=torch.float32, device="cpu")
    given = given_arrays(plain, update.arrays)
    state |= {role: _like(param, torch.float32).copy_(value) for role, value in given.items()}
    if param.dtype in HALVES:
        _add_master(state, param, plain.get("master"), form)
    return state
