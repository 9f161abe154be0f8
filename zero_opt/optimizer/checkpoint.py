"""State for ``torch.distributed.checkpoint``: every rank saves its rows, and any number of ranks load them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from ..errors import ConfigTypeError, StateDictError
from ..field_checks import check_flag
from ..kernels.adam_state import STORED_KEYS
from ..kernels.functions import ADAM
from ..placement.native_rules import COLUMN_KEYS
from ..state.state_dict import StateDict, pack_groups
from .compact_rows import check_entry, half_digest, is_half, is_stored, order_of, plain_entry, require_once
from .loading import entry_of, joined, places
from .sharded_optimizer import ShardedOptimizer

# The key, in a sharded state dict, of a JSON text that says which parameters have which state.
_WITH_STATE = "with_state"
# Of one that says in which order in memory the elements of each parameter are, of whose blocks there is compact state.
_ORDERS = "orders"
# Of one with a digest of each parameter that is half of a split master, of which there is the other half.
_HALVES = "halves"


def sharded_state_dict(optimizer: ShardedOptimizer, *, compact: bool = False) -> StateDict:
    """The optimizer's state for ``torch.distributed.checkpoint.save``, or to ``load`` into. Collective.

    Every rank gets the format of :meth:`ShardedOptimizer.state_dict`, with tensors of a parameter's shape as
    ``DTensor`` of that shape, cut by rows (``Shard(0)``) over the ranks, in host memory: 1/world_size of the state per
    rank. At world size 1 they are plain tensors. State of parameters that are DTensors is cut as they are. Nothing
    aliases live state. State dict hooks are called as for ``state_dict``.

    Trainable parameters that have no state yet are given a place each, so that there is something to load into, and
    with ``Selective`` matrices one for gradients that wait, though none do; the
    entry ``"with_state"`` says which state is real. Nothing is stepped for that: a class from elsewhere than
    ``torch.optim`` is asked on a stand-in of two elements if it is registered as elementwise, else its places are left
    out, and :func:`load_sharded_state_dict` says so if a checkpoint needs them.

    Args:
        optimizer: on every rank, the one to save or to load into.
        compact: save what :class:`AdamState` keeps as it is: codes, bases and remainders, 2.06 to 4 bytes per element
            where values in torch's form take 8 or 12. :func:`load_sharded_state_dict` alone reads that, at any world
            size, into an optimizer of any form; but ``torch.distributed.checkpoint.load`` fills only a dict that was
            made with the saved form. A run in the same form goes on to the bit. Load the model first: its bf16
            parameters are half of split masters, and others than were saved are a StateDictError. Parameters that are
            DTensors need the same on both sides, and 8-bit moments of those that are not cut between whole blocks of 64
            elements are saved in torch's form.

    Returns:
        A dict with ``"state"``, by the number of the parameter, ``"param_groups"`` and ``"with_state"``; if compact,
        also ``"orders"`` and ``"halves"``, texts for :func:`load_sharded_state_dict`.

    Raises:
        ConfigTypeError: on every rank, ``compact`` is no bool; on this rank alone, ``optimizer`` no ShardedOptimizer.
        StateDictError: on every rank, if state of one is not tensors, numbers or strings.
        StorageFailed, OutOfResources, OutOfMemory: on every rank, if one cannot read its state, open files,
            or hold its rows.
        StepPending, StepFailed, OptimizerClosed, PeerLost, PeerSilent: as for
            :meth:`ShardedOptimizer.consolidate_state_dict`.
    """
    _check(optimizer)
    by_rows = partial(_state_by_rows, optimizer, compact=compact)
    return optimizer._with_hooks(lambda: optimizer._to_save(by_rows))


def _state_by_rows(optimizer: ShardedOptimizer, *, compact: bool) -> StateDict:
    """Return what :func:`sharded_state_dict` does, without hooks. Collective."""
    with optimizer._engine.together_on_meshes("sharded_state_dict()"):
        check_flag("compact", compact)
    state = optimizer._engine.rows(compact=compact)
    known = json.dumps([[index, sorted(map(str, entry))] for index, entry in sorted(state.items())])
    groups, orders = pack_groups(optimizer.param_groups), dict[int, list[int]]()
    params = _params_as_planned(optimizer)
    halved = {index: params[index] for index, entry in state.items() if is_half(entry)}
    sums = optimizer._engine.sums(halved, "sharded_state_dict(compact=True)") if compact else {}
    halves = {index: half_digest(entry, params[index], sums.get(index)) for index, entry in sorted(state.items())}
    for packed, group in zip(groups, optimizer.param_groups, strict=True):
        for index, param in zip(packed["params"], group["params"], strict=True):
            like = optimizer._engine.as_planned(index, param)
            if param.requires_grad and (index not in state or optimizer._config.placement.steps_by_columns(like)):
                made = places(optimizer._config, optimizer._group, packed, like, compact=compact)
                state[index] = {**made, **state.get(index, {})}
            if compact:
                orders[index] = order_of(like)
    return {
        "state": state,
        "param_groups": groups,
        _WITH_STATE: known,
        **({_ORDERS: json.dumps(orders), _HALVES: json.dumps(halves)} if compact else {}),
    }


def load_sharded_state_dict(optimizer: ShardedOptimizer, state_dict: Mapping[str, Any]) -> None:
    """Load what ``torch.distributed.checkpoint.load`` has put into a :func:`sharded_state_dict`. Collective.

    It may have been saved at any world size. Full tensors, and DTensors cut otherwise, are taken as well. Everything is
    checked before anything is written, as by :meth:`ShardedOptimizer.load_state_dict`, whose hooks are called.

    Args:
        optimizer: on every rank, the one to load into.
        state_dict: what :func:`sharded_state_dict` has returned, with values loaded into it; or a full state dict. It
            is not changed.

    Raises:
        StateDictError: on every rank, naming what does not fit on one. RankMismatch: the ranks give different things.
        ConfigTypeError: ``optimizer`` is no ShardedOptimizer. OptimizerClosed, and others as
            :meth:`ShardedOptimizer.load_state_dict`.
    """
    _check(optimizer)
    optimizer.load_state_dict(optimizer._to_load(partial(_loadable, optimizer, state_dict)))


def _loadable(optimizer: ShardedOptimizer, state_dict: Mapping[str, Any]) -> StateDict:
    """Return the state dict that :func:`load_sharded_state_dict` loads. Collective."""
    group, params, call = optimizer._group, _params_as_planned(optimizer), "load_sharded_state_dict()"
    compared = dict(enumerate(params)) if _has_halves(state_dict) else {}
    sums = optimizer._engine.sums(compared, call)
    with optimizer._engine.together_on_meshes(call):
        saved = _saved(optimizer, state_dict, sums)
    state, failed = dict(saved["state"]), list[StateDictError]()
    for index, entry in saved["state"].items():
        if is_stored(entry):
            try:
                state[index] = plain_entry(entry, params[index], group)
            except StateDictError as error:  # other ranks may go on with the next one, which is collective
                failed.append(error)
    loaded = {**saved, "state": state}
    with optimizer._engine.together_on_meshes(call):
        return _fitting(optimizer, failed, loaded)


def _fitting(optimizer: ShardedOptimizer, errors: Sequence[Exception], state_dict: StateDict) -> StateDict:
    """Return a state dict that is about to be loaded, or raise the first error; no other of what hooks may change."""
    for error in errors:
        raise error
    if not optimizer._optimizer_load_state_dict_pre_hooks:
        optimizer._engine.check_rows(joined(state_dict))
    return state_dict


def _params_as_planned(optimizer: ShardedOptimizer) -> list[Tensor]:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return [optimizer._engine.as_planned(index, param) for index, param in enumerate(params)]


def _check(optimizer: object) -> None:
    if not isinstance(optimizer, ShardedOptimizer):
        raise ConfigTypeError(f"optimizer must be a ShardedOptimizer, got {type(optimizer).__name__}")


def _saved(optimizer: ShardedOptimizer, state_dict: Mapping[str, Any], sums: Mapping[int, int]) -> StateDict:
    """Return the state dict as it was before :func:`sharded_state_dict` added places, its compact entries checked.

    Args:
        sums: of parameters that are DTensors, as they are now.
    """
    real = _real_state(state_dict)
    params = _params_as_planned(optimizer)
    # What no parameter has a place for is no place, and is refused as in any state dict.
    unknown = {*map(_index_of, state_dict["state"])}.difference(range(len(params)))
    real |= {index: entry_of(state_dict["state"], index) for index in unknown}
    orders, halves = (_by_index(state_dict, key) for key in (_ORDERS, _HALVES))
    for index, entry in real.items():
        if is_stored(entry):
            _require_keys(index, state_dict)
            if index in unknown:
                raise StateDictError(f"the state dict has state for parameter {index}, which is in no param group")
            given = entry_of(state_dict["state"], index)
            require_once(index, given)
            _require_saved(index, given, entry)
            before = orders.get(str(index)), halves.get(str(index))
            check_entry(index, entry, params[index], *before, sums.get(index))
    apart = (_WITH_STATE, _ORDERS, _HALVES)
    return {key: real if key == "state" else value for key, value in state_dict.items() if key not in apart}


def _require_keys(index: int, state_dict: Mapping[str, Any]) -> None:
    """Raise StateDictError if a state dict with a compact entry lacks what says of which parameters it was saved."""
    for key in (_ORDERS, _HALVES):
        if key not in state_dict:
            raise StateDictError(
                f"the state dict has compact state of parameter {index}, and no {key!r}, which "
                "sharded_state_dict(compact=True) puts in beside 'state'; save and load all that it returns"
            )


def _require_saved(index: int, given: Mapping[str, Any], real: Mapping[str, Any]) -> None:
    """Raise StateDictError if a compact entry has keys that neither were saved nor are places for Adam's state."""
    unknown = sorted(map(str, given.keys() - real.keys() - {*STORED_KEYS, *ADAM.keys, *COLUMN_KEYS}))
    if unknown:
        raise StateDictError(
            f"the compact state of parameter {index} has {unknown[0]!r}, which was not saved with it, and would be lost"
        )


def _has_halves(state_dict: Any) -> bool:
    return isinstance(state_dict, Mapping) and _HALVES in state_dict


def _by_index(state_dict: Mapping[str, Any], key: str) -> Mapping[str, object]:
    """Return what a JSON text in a sharded state dict says, by the number of the parameter."""
    text = state_dict.get(key, "{}")
    try:
        return dict(json.loads(str(text)))
    except (TypeError, ValueError) as error:
        raise StateDictError(f"{key!r} of the state dict is not what zero_opt has written: {text!r}") from error


def _real_state(state_dict: Any) -> dict[int, Mapping[str, Any]]:
    """Return the state that was saved, without the places that nothing was loaded into."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        raise StateDictError("expected what zero_opt.sharded_state_dict(opt) returns, with 'state' and 'param_groups'")
    state: Any = state_dict["state"]
    if not isinstance(state, Mapping) or not all(isinstance(entry, Mapping) for entry in state.values()):
        raise StateDictError("'state' of a sharded state dict is a dict of dicts, one per parameter")
    if _WITH_STATE not in state_dict:
        return {index: entry_of(state, index) for index in map(_index_of, state)}
    real: dict[int, Mapping[str, Any]] = {}
    for index, keys in _known(state_dict[_WITH_STATE]):
        entry = entry_of(state, index)
        if not any(key in entry for key in COLUMN_KEYS):  # another offload than Selective has no use for those
            keys = [key for key in keys if key not in COLUMN_KEYS]
        missing = [key for key in keys if key not in entry]
        if missing:
            raise StateDictError(
                f"the checkpoint has state {missing[0]!r} of parameter {index}, but the state dict it was loaded into "
                "has no place for it; make one with zero_opt.sharded_state_dict(opt) of an optimizer with the same "
                "class and options, in which that parameter is trainable (freeze it after the load). Of a class that "
                "is not torch.optim's, load a full state dict with opt.load_state_dict()"
            )
        real[index] = {key: entry[key] for key in keys}
    return real


def _index_of(index: object) -> int:
    try:
        return int(str(index))
    except ValueError as error:
        raise StateDictError(f"the state dict has state for parameter {index!r}, which is no number") from error


def _known(text: object) -> Sequence[tuple[int, list[str]]]:
    try:
        return [(int(index), list(keys)) for index, keys in json.loads(str(text))]
    except (TypeError, ValueError) as error:
        raise StateDictError(f"{_WITH_STATE!r} of the state dict is not what zero_opt has written: {text!r}") from error
