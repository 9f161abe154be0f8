"""This rank's parts of the user's DTensors, and of their state, as plain parameters for the sharded engine."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from operator import is_, itemgetter, ne
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...errors import StepDesync
from ...placement import ParamState, ReadThrough
from ...reduction.autograd_hooks import ArrivalHooks, ended_in_exception
from ...reduction.consumed_grad import ConsumedGrad
from ...sharding.flat_param import grad_dtypes_of, is_dtensor, place_of
from ...system.inference_mode import outside_inference_mode, version_of, versions_of
from ...system.interrupts import uninterrupted
from .local_parts import dtensor_over, is_cut_alike, local_grad, local_of, state_of_part, value_of_param
from .part_samples import NO_VALUES, PartSamples, sampled

_first, _second = itemgetter(0), itemgetter(1)


class _Twin:
    """One parameter, and the plain one over the memory of this rank's part of it.

    A write to a DTensor raises its own version counter and not that of the part, nor the other way round; a reader
    of either must see both.

    Attributes:
        plain: shares memory and, unless the part was re-pointed since, the version counter of the part.
        apart: whether the parameter has a counter of its own.
        noted: the versions of the parameter, its part and the plain one, as of :func:`_note`.
        sampled: what is looked at of the part of a DTensor, see :func:`sampled`.
    """

    def __init__(self, param: Tensor) -> None:
        self.param, part = param, local_of(param)
        self.plain = nn.Parameter(part, requires_grad=param.requires_grad)
        self.apart = is_dtensor(param)
        self._consumed: Tensor | None = None  # a DTensor over the ConsumedGrad of the part
        self.noted = version_of(param), version_of(part), version_of(self.plain)
        self.sampled = sampled(part) if self.apart else NO_VALUES

    def follow_kind(self) -> None:
        """Let the plain parameter be what the part is by now."""
        param, plain, part = self.param, self.plain, local_of(self.param)
        plain.requires_grad_(param.requires_grad)
        if plain.grad_dtype is not param.grad_dtype:  # which the partition refuses
            plain.grad_dtype = param.grad_dtype
        if place_of(part) != place_of(plain):
            plain.data = part
            self.sampled = sampled(part) if self.apart else NO_VALUES

    def hand_over(self) -> None:
        """Hand a gradient to the plain parameter's hooks, as autograd does. Waits for no rank.

        One that is cut otherwise than the parameter, or of another dtype or device than that had, stays in ``p.grad``
        for :meth:`follow`.
        """
        param, plain = self.param, self.plain
        if param.grad is not None and is_cut_alike(param.grad, param):
            try:
                plain.grad = local_of(param.grad)
            except RuntimeError:  # it does not fit: the step refuses the parameter
                return
            for hook in (plain._post_accumulate_grad_hooks or {}).values():
                hook(plain)
            self.show_consumed()

    def follow_dropped(self) -> None:
        """Let the plain parameter have no gradient if the user's has none."""
        if self.param.grad is None:
            self.plain.grad = self._consumed = None

    def show_consumed(self) -> None:
        """Let ``p.grad`` be consumed if the part's gradient is."""
        consumed, grad = self.plain.grad, self.param.grad
        if not isinstance(consumed, ConsumedGrad) or (grad is not None and local_of(grad) is consumed):
            return
        if self._consumed is None or local_of(self._consumed) is not consumed:
            self._consumed = dtensor_over(consumed, self.param)
        self.param.grad = self._consumed

    def drop_consumed(self) -> None:
        """Drop ``p.grad`` if it is consumed, and the part's gradient was dropped."""
        if self.plain.grad is None and self._consumed is not None and self.param.grad is self._consumed:
            self.param.grad = None


def _versions(twins: Sequence[_Twin]) -> list[tuple[int, int, int]]:
    """Return the versions of each parameter, its part and the plain one; see ``_Twin.noted``."""
    params = [twin.param for twin in twins]
    plains = [twin.plain for twin in twins]
    return [*zip(versions_of(params), versions_of([*map(local_of, params)]), versions_of(plains), strict=True)]


def _note(twins: Sequence[_Twin]) -> None:
    """Note the versions of parameters, of which none has a write that the others do not tell of."""
    for twin, versions in zip(twins, _versions(twins), strict=True):
        twin.noted = versions


def _kinds(params: Sequence[Tensor]) -> tuple[list[bool], list[torch.dtype | None]]:
    """Return what plain parameters have of the user's, but for their memory."""
    return [param.requires_grad for param in params], grad_dtypes_of(params)


class PlainGroup(UserDict[str, Any]):
    """A param group of the user's, but for its parameters, which are the plain ones. Changes are made to the user's."""

    def __init__(self, group: dict[str, Any], params: list[nn.Parameter]) -> None:
        self.data, self._params = group, params  # the user's own dict, of which UserDict would take a copy

    def __getitem__(self, key: str) -> Any:
        """Return the user's value, and the plain parameters in the place of the user's."""
        return self._params if key == "params" else self.data[key]


class _Pair(NamedTuple):
    """A live value, what users see of it, and the version of the latter whose writes the live value's version shows."""

    live: Any
    shown: Any
    version: int

    @classmethod
    def of(cls, live: Any, shown: Any) -> _Pair:
        """Return a pair of values that have been written to alike."""
        return cls(live, shown, _version(shown))

    @property
    def written(self) -> bool:
        """Whether a write to what users see does not show in the live value's version."""
        return self.live is not self.shown and _version(self.shown) != self.version


def _version(value: Any) -> int:
    return version_of(value) if isinstance(value, Tensor) else 0


class DTensorValues(ReadThrough):
    """What users see of a part's state whose values are made when they are read: DTensors over those.

    Args:
        live: the part's state. param, plain: see :func:`value_of_param`.
    """

    def __init__(self, live: ReadThrough, param: Tensor, plain: Tensor) -> None:
        self.live, self._param, self._plain = live, param, plain
        self._pairs: dict[str, _Pair] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self.live)

    def __getitem__(self, key: str) -> Any:
        value = self.live[key]
        if key not in self._pairs or self._pairs[key].live is not value:
            with outside_inference_mode():
                shown = value_of_param(value, self._param, self._plain)
            self._pairs[key] = _Pair.of(value, shown)
        return self._pairs[key].shown

    def __setitem__(self, key: str, value: Any) -> None:
        self.live[key] = state_of_part({key: value}, self._param)[key]

    def __delitem__(self, key: str) -> None:
        del self.live[key]

    @property
    def nbytes(self) -> int:
        return self.live.nbytes

    def held(self) -> list[Tensor]:
        return [pair.shown for pair in self._pairs.values() if isinstance(pair.shown, Tensor)]

    @property
    def adopted(self) -> object:
        return self.live.adopted

    def follow(self) -> None:
        """Let edits of DTensors be edits of the values."""
        written = [pair.live for key, pair in self._pairs.items() if key in self.live and pair.written]
        if written:
            torch.autograd.graph.increment_version(written)
        self._pairs.clear()


class _Shown:
    """A parameter's live state, and what users see of it.

    Attributes:
        pairs: by key, the live value and what stands for it.
        others: those before: a step may go from bank to bank.
    """

    def __init__(self, live: ParamState) -> None:
        self.live = live
        self.pairs: dict[str, _Pair] = {}
        self.others: dict[str, _Pair] = {}

    def is_seen_as(self, entry: Mapping[str, Any]) -> bool:
        """Return whether the user's entry has what stands for the live values, and nothing else."""
        return (
            len(entry) == len(self.live)
            and [*entry] == [*self.pairs]
            and all(map(is_, entry.values(), map(_second, self.pairs.values())))
        )

    def is_current(self) -> bool:
        """Return whether the live values are those that something stands for."""
        return [*self.live] == [*self.pairs] and all(map(is_, self.live.values(), map(_first, self.pairs.values())))


class PlainState(MutableMapping[Tensor, ParamState]):
    """The user's ``state``, by plain parameter: tensors in a part's shape are DTensors there, over the same memory."""

    def __init__(self, user: torch.optim.Optimizer, twins: dict[Tensor, _Twin]) -> None:
        self._user, self._twins = user, twins
        self._shown: dict[Tensor, _Shown] = {}

    def __getitem__(self, plain: Tensor) -> ParamState:
        """The live state, or what the user has put in its place."""
        param = self._twins[plain].param
        entry = self._user.state.get(param)
        if not entry:
            raise KeyError(plain)
        shown = self._shown.get(plain)
        if shown is None:
            shown = self._shown[plain] = _Shown({})
        if isinstance(entry, DTensorValues) and entry.live is shown.live:
            entry.follow()
            return shown.live
        if not shown.is_seen_as(entry):
            pairs = shown.pairs
            kept = {key: pairs[key][0] for key, value in entry.items() if key in pairs and pairs[key][1] is value}
            taken = {**kept, **state_of_part({key: entry[key] for key in entry if key not in kept}, param)}
            shown.live = {key: taken[key] for key in entry}
            shown.pairs = {key: _Pair.of(shown.live[key], entry[key]) for key in entry}
        return shown.live

    def __setitem__(self, plain: Tensor, live: ParamState) -> None:
        """Put other live state in the place of what there is."""
        self._shown[plain] = _Shown(live)
        param = self._twins[plain].param
        self._user.state[param] = DTensorValues(live, param, plain) if isinstance(live, ReadThrough) else {}
        self._refresh(plain)

    def __delitem__(self, plain: Tensor) -> None:
        """Let the user see no state of a parameter."""
        self._shown.pop(plain, None)
        del self._user.state[self._twins[plain].param]

    def __iter__(self) -> Iterator[Tensor]:
        """Iterate over the parameters that have state."""
        return iter([plain for plain, twin in self._twins.items() if self._user.state.get(twin.param)])

    def __len__(self) -> int:
        """Return how many parameters have state."""
        return sum(1 for _ in self)

    def follow(self) -> None:
        """Let writes to what users see count as writes to the live values, whose version counters they do not raise."""
        for shown in self._shown.values():
            written = {key: pair for key, pair in shown.pairs.items() if pair.written}
            if written:
                with uninterrupted():
                    torch.autograd.graph.increment_version([pair.live for pair in written.values()])
                    shown.pairs |= {key: _Pair.of(pair.live, pair.shown) for key, pair in written.items()}

    def refresh(self) -> None:
        """Let the user see values that a step has added to live state, or put in the place of others."""
        for plain in self._shown:
            self._refresh(plain)

    def _refresh(self, plain: Tensor) -> None:
        shown = self._shown[plain]
        live, before, others = shown.live, shown.pairs, shown.others
        if isinstance(live, ReadThrough) or shown.is_current():
            return
        param = self._twins[plain].param
        kept = {key: before[key] for key, value in live.items() if key in before and before[key][0] is value}
        kept |= {key: others[key] for key, value in live.items() if key in others and others[key][0] is value}
        pairs = {
            key: kept.get(key) or _Pair.of(value, value_of_param(value, param, plain)) for key, value in live.items()
        }
        shown.others, shown.pairs, entry = before, pairs, self._user.state[param]
        entry.clear()
        entry.update((key, pair[1]) for key, pair in pairs.items())


class LocalView:
    """What stands for the user's optimizer where plain parameters are stepped.

    Attributes:
        state: by plain parameter.
    """

    def __init__(self, user: torch.optim.Optimizer) -> None:
        self._user = user
        self._twins: dict[Tensor, _Twin] = {}  # by the user's parameter
        self._by_plain: dict[Tensor, _Twin] = {}
        self._samples = PartSamples()
        self._seen: list[MutableMapping[str, Any]] = []
        self._groups: list[MutableMapping[str, Any]] = []
        self.state = PlainState(user, self._by_plain)

    @property
    def param_groups(self) -> list[MutableMapping[str, Any]]:
        """The user's groups with the plain parameters. The list is a new one only when the user's has other groups."""
        groups = self._user.param_groups
        if len(groups) != len(self._seen) or not all(map(is_, groups, self._seen)):
            with uninterrupted():
                params = [[self._plain(param) for param in group["params"]] for group in groups]
                self._seen, self._groups = list(groups), [*map(PlainGroup, groups, params)]
                self._samples.look_at([twin.sampled for twin in self._twins.values()])  # before masters are made
        return self._groups

    def _plain(self, param: Tensor) -> nn.Parameter:
        if param not in self._twins:
            twin = self._twins[param] = _Twin(param)
            self._by_plain[twin.plain] = twin
        return self._twins[param].plain

    def param_of(self, plain: Tensor) -> Tensor:
        """Return the user's parameter."""
        return self._by_plain[plain].param

    def follow(self, *, pending: bool) -> None:
        """Take over what the user and autograd have done to the parameters; see :func:`local_grad`.

        Args:
            pending: whether a step is pending, which an edit of a parameter conflicts with.
        """
        twins = [*self._twins.values()]
        params, plains = [twin.param for twin in twins], [twin.plain for twin in twins]
        if _kinds(params) != _kinds(plains) or any(
            map(ne, map(place_of, map(local_of, params)), map(place_of, plains))
        ):
            for twin in twins:
                twin.follow_kind()
        self._follow_writes(twins, pending=pending)
        self.state.follow()
        for param, plain in zip(params, plains, strict=True):
            plain.grad = local_grad(param)

    def _follow_writes(self, twins: Sequence[_Twin], *, pending: bool) -> None:
        """Let what the user has written to parameters be writes to the plain ones."""
        versions = _versions(twins)
        told = [twin.apart and now[:2] != twin.noted[:2] for twin, now in zip(twins, versions, strict=True)]
        changed = self._samples.changed([twin.sampled for twin in twins])
        edited = [twin for twin, known, seen in zip(twins, told, changed, strict=True) if known or seen]
        if not pending and any(seen and not known for known, seen in zip(told, changed, strict=True)):
            # Others may have been written to where nobody looks; to take over what has not changed changes nothing.
            edited = [twin for twin in twins if twin.apart]
        if edited:
            with uninterrupted():
                torch.autograd.graph.increment_version([twin.plain for twin in edited if not twin.plain.is_inference()])
                _note(twins)
                self._samples.note()
            return
        for twin, now in zip(twins, versions, strict=True):
            twin.noted = now

    def follow_dropped(self) -> None:
        """Take over that the user has dropped gradients, if any are kept between steps. Waits for no rank."""

    def missed(self) -> StepDesync | None:
        """Return the error of a step if a gradient has come in backward that was not handed over."""
        return None

    def show_consumed(self) -> None:
        """Let the user's gradients be consumed where the plain ones are, if any can be."""

    def note_writes(self) -> None:
        """Let autograd know of writes to the plain parameters, and drop their gradients, but for consumed ones."""
        twins = [*self._twins.values()]
        plains = [twin.plain for twin in twins]
        for plain in plains:
            if not isinstance(plain.grad, ConsumedGrad):
                plain.grad = None
        versions = zip(twins, versions_of(plains), strict=True)
        written = [twin for twin, version in versions if twin.apart and version != twin.noted[2]]
        if written:
            with uninterrupted():
                torch.autograd.graph.increment_version([twin.param for twin in written])
                _note(written)
                self._samples.note()

    def close(self) -> None:
        """Leave the user's parameters."""


class StreamedView(LocalView):
    """A view whose plain parameters have each gradient as soon as it is reduced, in backward.

    FSDP calls the hooks of a DTensor as autograd calls those of a plain parameter: once its gradient has been reduced
    and accumulated, on the stream that has done so. A reduction that takes gradients in backward hooks the plain
    parameters, and what it leaves in their ``grad``, :class:`ConsumedGrad`, is in the DTensors' too.
    """

    def __init__(self, user: torch.optim.Optimizer) -> None:
        super().__init__(user)
        self._hooked: list[_Twin] = []
        self._hooks = ArrivalHooks(self._arrived)

    def _plain(self, param: Tensor) -> nn.Parameter:
        known = param in self._twins
        plain = super()._plain(param)
        if not known:
            self._hooks.watch(len(self._hooked), param)
            self._hooked.append(self._twins[param])
        return plain

    def _arrived(self, number: int) -> None:
        self._hooked[number].hand_over()

    def missed(self) -> StepDesync | None:
        return ended_in_exception("call opt.zero_grad() on every rank and repeat it") if self._hooks.missed else None

    def follow_dropped(self) -> None:
        self._hooks.forget_missed()
        for twin in self._hooked:
            twin.follow_dropped()

    def show_consumed(self) -> None:
        for twin in self._hooked:
            twin.show_consumed()

    def close(self) -> None:
        self._hooks.close()
        for twin in self._hooked:
            twin.drop_consumed()
