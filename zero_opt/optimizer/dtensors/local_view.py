"""This rank's parts of the user's DTensors, and of their state, as plain parameters for the sharded engine."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator, MutableMapping
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from ...placement import ParamState, ReadThrough
from ...reduction.autograd_hooks import ArrivalHooks
from ...reduction.consumed_grad import ConsumedGrad
from ...sharding.flat_param import is_dtensor, place_of
from ...system.inference_mode import outside_inference_mode, version_of
from .local_parts import dtensor_over, is_cut_alike, local_grad, local_of, state_of_part, value_of_param


class _Twin:
    """One parameter, and the plain one over the memory of this rank's part of it.

    A write to a DTensor raises its own version counter and not that of the part, nor the other way round; a reader
    of either must see both.

    Attributes:
        plain: shares memory and, unless the part was re-pointed since, the version counter of the part.
    """

    def __init__(self, param: Tensor) -> None:
        self.param, part = param, local_of(param)
        self.plain = nn.Parameter(part, requires_grad=param.requires_grad)
        self._apart = is_dtensor(param)
        self._consumed: Tensor | None = None  # a DTensor over the ConsumedGrad of the part
        self._note(part)

    def follow(self) -> None:
        """Take over what the user and autograd have done to the parameter since."""
        param, plain, part = self.param, self.plain, local_of(self.param)
        if plain.requires_grad is not param.requires_grad:
            plain.requires_grad_(param.requires_grad)
        if plain.grad_dtype is not param.grad_dtype:  # which the partition refuses
            plain.grad_dtype = param.grad_dtype
        if place_of(part) != place_of(plain):
            plain.data = part
        if self._apart and (version_of(param), version_of(part)) != self._edits:
            torch.autograd.graph.increment_version([plain])
        self._note(part)
        plain.grad = local_grad(param)

    def _note(self, part: Tensor) -> None:
        """Note how often the parameter and its part have been written to."""
        self._edits, self._writes = (version_of(self.param), version_of(part)), version_of(self.plain)

    def hand_over(self) -> None:
        """Hand a gradient to the plain parameter's hooks, as autograd does. Waits for no rank.

        One that is cut otherwise than the parameter stays in ``p.grad`` for :meth:`follow`.
        """
        param, plain = self.param, self.plain
        if param.grad is not None and is_cut_alike(param.grad, param):
            plain.grad = local_of(param.grad)
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

    def note_writes(self) -> None:
        """Let autograd know of writes to the part, and drop its gradient, unless that is consumed."""
        if not isinstance(self.plain.grad, ConsumedGrad):
            self.plain.grad = None
        if self._apart and version_of(self.plain) != self._writes:
            torch.autograd.graph.increment_version([self.param])
            self._note(local_of(self.param))


class PlainGroup(UserDict[str, Any]):
    """A param group of the user's, but for its parameters, which are the plain ones. Changes are made to the user's."""

    def __init__(self, group: dict[str, Any], params: list[nn.Parameter]) -> None:
        self.data, self._params = group, params  # the user's own dict, of which UserDict would take a copy

    def __getitem__(self, key: str) -> Any:
        """Return the user's value, and the plain parameters in the place of the user's."""
        return self._params if key == "params" else self.data[key]


class DTensorValues(ReadThrough):
    """What users see of a part's state whose values are made when they are read: DTensors over those.

    Args:
        live: the part's state. param, plain: see :func:`value_of_param`.
    """

    def __init__(self, live: ReadThrough, param: Tensor, plain: Tensor) -> None:
        self.live, self._param, self._plain = live, param, plain
        self._pairs: dict[str, tuple[Any, Any, int]] = {}  # the value, what stands for it, and its version

    def __iter__(self) -> Iterator[str]:
        return iter(self.live)

    def __getitem__(self, key: str) -> Any:
        value = self.live[key]
        if key not in self._pairs or self._pairs[key][0] is not value:
            with outside_inference_mode():
                shown = value_of_param(value, self._param, self._plain)
            self._pairs[key] = value, shown, version_of(shown) if isinstance(shown, Tensor) else 0
        return self._pairs[key][1]

    def __setitem__(self, key: str, value: Any) -> None:
        self.live[key] = state_of_part({key: value}, self._param)[key]

    def __delitem__(self, key: str) -> None:
        del self.live[key]

    @property
    def nbytes(self) -> int:
        return self.live.nbytes

    def held(self) -> list[Tensor]:
        return [shown for _, shown, _ in self._pairs.values() if isinstance(shown, Tensor)]

    def follow(self) -> None:
        """Let edits of DTensors be edits of the values."""
        pairs = [pair for key, pair in self._pairs.items() if key in self.live]
        written = [value for value, shown, version in pairs if value is not shown and version_of(shown) != version]
        if written:
            torch.autograd.graph.increment_version(written)
        self._pairs.clear()


class PlainState(MutableMapping[Tensor, ParamState]):
    """The user's ``state``, by plain parameter: tensors in a part's shape are DTensors there, over the same memory."""

    def __init__(self, user: torch.optim.Optimizer, twins: dict[Tensor, _Twin]) -> None:
        self._user, self._twins = user, twins
        self._live: dict[Tensor, ParamState] = {}
        # As users see it: the live value and what stands for it.
        self._pairs: dict[Tensor, dict[str, tuple[Any, Any]]] = {}
        self._others: dict[Tensor, dict[str, tuple[Any, Any]]] = {}  # those before: a step may go from bank to bank

    def __getitem__(self, plain: Tensor) -> ParamState:
        """The live state, or what the user has put in its place."""
        shown = self._user.state.get(self._twins[plain].param)
        if not shown:
            raise KeyError(plain)
        if isinstance(shown, DTensorValues) and shown.live is self._live.get(plain):
            shown.follow()
            return shown.live
        pairs = self._pairs.get(plain, {})
        kept = {key: pairs[key][0] for key, value in shown.items() if key in pairs and pairs[key][1] is value}
        live = self._live.get(plain)
        if live is not None and len(kept) == len(shown) == len(live):
            return live
        edited = {key: value for key, value in shown.items() if key not in kept}
        taken = {**kept, **state_of_part(edited, self._twins[plain].param)}
        live = self._live[plain] = {key: taken[key] for key in shown}
        self._pairs[plain] = {key: (live[key], shown[key]) for key in shown}
        return live

    def __setitem__(self, plain: Tensor, live: ParamState) -> None:
        """Put other live state in the place of what there is."""
        self._live[plain], self._pairs[plain], self._others[plain] = live, {}, {}
        param = self._twins[plain].param
        self._user.state[param] = DTensorValues(live, param, plain) if isinstance(live, ReadThrough) else {}
        self._refresh(plain)

    def __delitem__(self, plain: Tensor) -> None:
        """Let the user see no state of a parameter."""
        self._live.pop(plain, None)
        self._pairs.pop(plain, None)
        self._others.pop(plain, None)
        del self._user.state[self._twins[plain].param]

    def __iter__(self) -> Iterator[Tensor]:
        """Iterate over the parameters that have state."""
        return iter([plain for plain, twin in self._twins.items() if self._user.state.get(twin.param)])

    def __len__(self) -> int:
        """Return how many parameters have state."""
        return sum(1 for _ in self)

    def refresh(self) -> None:
        """Let the user see values that a step has added to live state, or put in the place of others."""
        for plain in self._live:
            self._refresh(plain)

    def _refresh(self, plain: Tensor) -> None:
        live, before, param = self._live[plain], self._pairs[plain], self._twins[plain].param
        if isinstance(live, ReadThrough):
            return
        kept = {key: before[key] for key, value in live.items() if key in before and before[key][0] is value}
        if len(kept) == len(before) == len(live):
            return
        others = self._others.get(plain, {})
        kept |= {key: others[key] for key, value in live.items() if key in others and others[key][0] is value}
        pairs = {key: kept.get(key) or (value, value_of_param(value, param, plain)) for key, value in live.items()}
        self._others[plain] = before
        self._pairs[plain], seen = pairs, self._user.state[param]
        seen.clear()
        seen.update((key, pair[1]) for key, pair in pairs.items())


class LocalView:
    """What stands for the user's optimizer where plain parameters are stepped.

    Attributes:
        state: by plain parameter.
    """

    def __init__(self, user: torch.optim.Optimizer) -> None:
        self._user = user
        self._twins: dict[Tensor, _Twin] = {}  # by the user's parameter
        self._by_plain: dict[Tensor, _Twin] = {}
        self._seen: list[MutableMapping[str, Any]] = []
        self._groups: list[MutableMapping[str, Any]] = []
        self.state = PlainState(user, self._by_plain)

    @property
    def param_groups(self) -> list[MutableMapping[str, Any]]:
        """The user's groups with the plain parameters. The list is a new one only when the user's has other groups."""
        groups = self._user.param_groups
        if len(groups) != len(self._seen) or not all(map(is_, groups, self._seen)):
            self._seen = list(groups)
            self._groups = [PlainGroup(group, [self._plain(param) for param in group["params"]]) for group in groups]
        return self._groups

    def _plain(self, param: Tensor) -> nn.Parameter:
        if param not in self._twins:
            twin = self._twins[param] = _Twin(param)
            self._by_plain[twin.plain] = twin
        return self._twins[param].plain

    def param_of(self, plain: Tensor) -> Tensor:
        """Return the user's parameter."""
        return self._by_plain[plain].param

    def follow(self) -> None:
        """Take over what the user and autograd have done to the parameters; see :func:`local_grad`."""
        for twin in self._twins.values():
            twin.follow()

    def follow_dropped(self) -> None:
        """Take over that the user has dropped gradients, if any are kept between steps. Waits for no rank."""

    def show_consumed(self) -> None:
        """Let the user's gradients be consumed where the plain ones are, if any can be."""

    def note_writes(self) -> None:
        """Let autograd know of writes to the plain parameters, and drop their gradients, but for consumed ones."""
        for twin in self._twins.values():
            twin.note_writes()

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

    def follow_dropped(self) -> None:
        for twin in self._hooked:
            twin.follow_dropped()

    def show_consumed(self) -> None:
        for twin in self._hooked:
            twin.show_consumed()

    def close(self) -> None:
        self._hooks.close()
        for twin in self._hooked:
            twin.drop_consumed()
