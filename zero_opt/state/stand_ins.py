"""State of parameters that lie wholly on other ranks: no elements, and the scalars that their owners have.

Step counts, and whatever else a class keeps as numbers, follow from hyperparameters and from how often a parameter was
used, not from its values. So a step of a few zeros makes the owners' scalars, to the bit, and nothing needs to be sent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..field_checks import is_on
from ..kernels.strides import joined_scalars
from ..layout import indices_of
from ..placement import PlacementPolicy
from ..placement.native_rules import ADAM_CLASSES
from ..sharding.flat_param import is_dtensor
from ..sharding.param_groups import hypers_of
from .alike_entries import AlikeEntries, StateOwner
from .state_dict import apart
from .trial import Trial, is_known
from .usual_states import UsualStates, values_by_name

_NOTHING: Mapping[str, Any] = {}
# Hyperparameters by which a step has another form, and by which Adam's state has other keys or lies elsewhere.
FORMS = ("amsgrad", "capturable", "fused", "foreach", "differentiable")


class Kind(NamedTuple):
    """What parameters have in common whose scalars one step of zeros makes.

    Attributes:
        group: number of the param group, or of one whose scalars are the same. dims: of a parameter, whose state may
            depend on it.
    """

    group: int
    dims: int
    dtype: torch.dtype
    device: torch.device


def kinds_of(policy: PlacementPolicy, params: Iterable[tuple[int, int, Tensor]]) -> dict[int, Kind]:
    """Return the kinds of ``params``, which are (global index, number of the group, parameter).

    By global index, without parameters that are stepped by columns.
    """
    return {
        index: Kind(group, param.dim(), *policy.stepped_as(param))
        for index, group, param in params
        if not policy.steps_by_columns(param)
    }


class StandIns:
    """Entries in the owner's ``state`` for parameters without a slice on this rank. No method is collective.

    The entries are all the state there is: what the user puts into one counts from that parameter's next step on.
    Parameters that were used alike are stepped together, by one step of zeros, with the current hyperparameters.
    Parameters of a class of which nothing is known have no entries, nor have those that the class cannot step: an
    owner says why.

    Args:
        params: all parameters, by global index.
    """

    def __init__(
        self,
        cls: type[torch.optim.Optimizer],
        defaults: Mapping[str, Any],
        owner: StateOwner,
        params: Sequence[Tensor],
    ) -> None:
        self._class, self._defaults, self._known = cls, dict(defaults), is_known(cls)
        self._owner, self._params = owner, params
        self._kinds: dict[int, Kind] = {}  # each with the parameter's own group
        self._stands_for: list[int] = []  # by number of a group: the first one whose scalars are the same
        self._alike: dict[Kind, list[AlikeEntries]] = {}  # each with a group that stands for others
        self._trials: dict[Kind, Trial] = {}
        self._entered: set[int] = set()  # what had an entry when that was last looked at

    def add(self, kinds: Mapping[int, Kind]) -> None:
        """Stand in for more parameters, given by global index."""
        self._kinds.update(kinds)
        self._follow_forms()
        for kind, members in self._by_kind(kinds if self._known else (), self._stands_for).items():
            self._trial(kind)
            self._alike.setdefault(kind, []).append(self._enter(members, self._first_entry(kind, {})))

    def _standing(self) -> list[int]:
        """Return, by number of a param group, the first one whose scalars are the same now."""
        groups = self._owner.param_groups
        if self._class not in ADAM_CLASSES:
            return [*range(len(groups))]
        first: dict[tuple[Any, ...], int] = {}  # its scalars are counts of steps, whatever the numbers are
        forms = (tuple(map(_setting, map(group.get, FORMS))) for group in groups)
        return [first.setdefault(form, number) for number, form in enumerate(forms)]

    def _by_kind(self, indices: Iterable[int], standing: Sequence[int]) -> Mapping[Kind, list[int]]:
        """Return the parameters that can be stepped together, by kind; ``standing``: of :meth:`_standing`."""
        found = defaultdict[Kind, list[int]](list)
        for index in indices:
            kind = self._kinds[index]
            found[kind._replace(group=standing[kind.group])].append(index)
        return found

    def _follow_forms(self) -> None:
        """Part entries that can no longer be stepped together, since the user has edited options of some groups."""
        standing = self._standing()
        if standing == self._stands_for:
            return
        found = defaultdict[Kind, list[AlikeEntries]](list)
        for alike in (part for known in self._alike.values() for each in known for part in self._as_seen(each)):
            parted = self._by_kind(alike.members, standing)
            for kind, members in parted.items():
                found[kind].append(alike if len(parted) == 1 else self._enter(members, _apart(alike.entry)))
        self._stands_for, self._alike = standing, {**found}

    def _trial(self, kind: Kind) -> Trial:
        if kind not in self._trials:
            self._trials[kind] = self._new_trial(kind)
            with suppress(Exception):
                self._trials[kind].step()  # shows which of the state are no scalars
        return self._trials[kind]

    def _new_trial(self, kind: Kind) -> Trial:
        like = torch.zeros((1,) * max(kind.dims, 1), dtype=kind.dtype, device=kind.device)
        return Trial(self._class, like, self._hypers(kind), **self._defaults)

    def _hypers(self, kind: Kind) -> dict[str, Any]:
        """Return the group's hyperparameters, tensors on the device of the trial: a class may copy without waiting."""
        hypers = hypers_of(self._owner.param_groups[kind.group])
        return {key: value.to(kind.device) if isinstance(value, Tensor) else value for key, value in hypers.items()}

    def _enter(self, members: Sequence[int], entry: Mapping[str, Any]) -> AlikeEntries:
        """Let the user see this state of ``members``."""
        self._entered.update(members if entry else ())
        return AlikeEntries(self._owner, self._params, members, entry)

    def step(self, used: int, *, edited: bool = True) -> None:
        """Do for the entries what a step of the owners does.

        Args:
            used: bit per global index, whether any rank had a gradient.
            edited: the user may have put other objects into entries, or groups, since the last step.
        """
        stepped = indices_of(used)
        if edited:
            self._follow_forms()
        for kind, known in self._alike.items():
            as_seen = [part for alike in known for part in self._as_seen(alike, objects=edited)]
            self._alike[kind] = [part for alike in as_seen for part in self._stepped(kind, alike, stepped)]

    def _as_seen(self, alike: AlikeEntries, *, objects: bool = True) -> Iterator[AlikeEntries]:
        """Yield these entries as the user has left them: those that were edited, and the rest together."""
        edited = alike.edited_members() if alike.are_edited(objects=objects) else []
        if len(edited) < len(alike.members):
            if edited:
                alike.keep_only([index for index in alike.members if index not in set(edited)])
            yield alike
        state, params = self._owner.state, self._params
        for index in edited:
            entry = state.get(params[index]) or _NOTHING
            plain = {key: _plain(value) for key, value in entry.items()}
            if type(entry) is dict and entry and all(map(_can_be_written, entry.values())):
                yield AlikeEntries.around(self._owner, params, index, plain)
            else:
                yield self._enter([index], plain)

    def _stepped(self, kind: Kind, alike: AlikeEntries, used: frozenset[int]) -> Iterator[AlikeEntries]:
        """Step these entries, as far as they are of ``used`` parameters. Yields all of them."""
        members, entry = alike.members, alike.entry
        stepped = members if used.issuperset(members) else [index for index in members if index in used]
        if stepped and stepped is not members:
            alike.keep_only([index for index in members if index not in used])
            entry = _apart(entry)
        after = self._after_a_step(kind, entry) if stepped else None
        if stepped is not members:
            yield alike
            if stepped:
                yield self._enter(stepped, entry if after is None else after)
        elif after is None or alike.follow(after):
            yield alike
        else:
            yield self._enter(stepped, after)

    def _after_a_step(self, kind: Kind, entry: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return what a step makes of an entry, in place where the class steps so; ``None`` if it cannot step it."""
        with suppress(Exception):  # whatever a class raises
            trial = self._trial(kind)
            trial.set_hypers(self._hypers(kind))
            trial.optimizer.state[trial.param] = _with_elements(entry, trial)
            trial.step()
            return _without_elements(trial.state, entry)
        return None

    def take_dropped(self) -> set[int]:
        """Return the parameters whose entries the user has dropped since the last call."""
        before, state, params = self._entered, self._owner.state, self._params
        indices = chain(*(alike.members for known in self._alike.values() for alike in known))
        self._entered = {index for index in indices if (state.get(params[index]) or _NOTHING).keys()}
        return before - self._entered

    def load(self, states: Mapping[int, Mapping[str, Any]]) -> None:
        """Enter the scalars of full-shape state, by global index, where there are no entries yet."""
        self._entered.clear()
        members = [*chain(*(alike.members for known in self._alike.values() for alike in known))]
        standing, entered = self._standing(), dict[Kind, list[AlikeEntries]]()
        for kind, alike in self._by_kind(members, standing).items():
            loaded = {index: states.get(index, _NOTHING) for index in alike}
            usual = isinstance(states, UsualStates) and states.keys() >= loaded.keys()
            entered[kind] = [
                self._enter(equal, self._first_entry(kind, loaded[equal[0]]))
                for equal in _with_equal_scalars(loaded, usual=usual)
            ]
        self._stands_for, self._alike = standing, entered

    def _first_entry(self, kind: Kind, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the class makes of a parameter's saved state; of none, what it makes when it is constructed."""
        made = self._new_trial(kind)
        if saved:
            saved = {key: _plain(value) for key, value in _with_elements(saved, self._trial(kind)).items()}
            packed = made.optimizer.state_dict()["param_groups"]
            made.optimizer.load_state_dict({"state": {0: saved}, "param_groups": packed})
        return _without_elements(made.state, {})


def _setting(option: Any) -> bool | None:
    """Return whether an option is on; ``None`` leaves it to torch."""
    return None if option is None else is_on(option)


def _with_equal_scalars(entries: Mapping[int, Mapping[str, Any]], *, usual: bool) -> Iterable[list[int]]:
    """Return the keys of ``entries``, those together of entries with equal scalars; see :func:`_texts_of`."""
    equal = defaultdict[str, list[int]](list)
    for index, text in zip(entries, _texts_of([*entries.values()], usual=usual), strict=True):
        equal[text].append(index)
    return equal.values()


def _texts_of(entries: Sequence[Mapping[str, Any]], *, usual: bool) -> Iterable[str]:
    """Return a text per entry, equal for entries with equal scalars; ``usual``: of :class:`UsualStates`."""
    if not usual:
        return (repr([(key, _number(value)) for key, value in entry.items()]) for entry in entries)
    scalars = [joined_scalars(column) for column in values_by_name(entries).values() if not column[0].dim()]
    return map(repr, zip(*(column.tolist() for column in scalars))) if scalars else repeat("", len(entries))


def _can_be_written(value: Any) -> bool:
    """Return whether a step can go on in a value that the user has put in; one that is no tensor is replaced."""
    plain = type(value) in (Tensor, torch.nn.Parameter) and not (value.is_meta or value.is_inference())
    return not isinstance(value, Tensor) or (plain and value.layout is torch.strided and not value.requires_grad)


def _apart(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry with copies of the values."""
    return {key: apart(value) for key, value in entry.items()}


def _plain(value: Any) -> Any:
    """Return a copy of a value, of which a DTensor, as users may load or put in, is plain."""
    return apart(value.to_local() if is_dtensor(value) else value)


def _number(value: Any) -> Any:
    """Return what two values have in common if they are the same scalar."""
    if not isinstance(value, Tensor):
        return type(value), value
    readable = value.dim() == 0 and not value.is_meta
    return value.dtype, value.device, value.item() if readable else ()


def _without_elements(state: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Return what users see of a trial's state: of tensors that are no scalars those of ``before``, if they fit."""
    shown = dict(state)
    for key, value in state.items():
        if isinstance(value, Tensor) and value.dim():
            empty = before.get(key)
            fits = isinstance(empty, Tensor) and empty.dtype is value.dtype and not empty.numel()
            shown[key] = empty if fits else value.new_empty(0)
    return shown


def _with_elements(entry: Mapping[str, Any], trial: Trial) -> dict[str, Any]:
    """Return an entry as state for ``trial``: of tensors that are no scalars, those that the trial has already."""
    state = dict(entry)
    for key, value in entry.items():
        before = trial.state.get(key)
        if isinstance(before, Tensor) and before.dim():
            state[key] = before
        elif before is None and isinstance(value, Tensor) and (value.dim() or key == "master"):
            state[key] = torch.zeros_like(trial.param, dtype=value.dtype)
    return state
