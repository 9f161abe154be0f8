"""A slice of a parameter by columns: some have their state beside the parameter, all others in an inner placement."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...errors import StateDictError
from ...kernels import AdamHypers, AdamUpdate
from ...kernels.adam_state import follow_param, new_state
from ...kernels.checks import GRAD_DTYPES
from ...kernels.functions import ADAM, adam_hypers
from ...layout import ParamSlice
from ...policies import AdamState
from ...sharding.flat_param import FlatParam, own_writes
from ...system.devices import HOST
from ...system.readable_pages import require_readable, require_writable
from ..interface import ParamState
from ..masters import FollowedParams
from ..native_rules import COLUMN_SELECTED, COLUMN_STEPS, WAITING, WINDOW
from ..read_through import MadeState, ReadThrough
from .column_state import check_columns, column_shape
from .columns import columns_of, is_matrix, places_of
from .schedule import Schedule


class ColumnSlice(FollowedParams):
    """One slice of a parameter: which columns are selected, their state, and the gradients that wait for the others.

    What is no matrix has one column, which is selected. As one of :class:`FollowedParams` a slice has position 0.

    Attributes:
        index, group: of the parameter, and of its param group. total: how many columns the parameter has.
        is_matrix: whether columns are selected by gradients.
        home: the live state that the inner placement has of the slice; of selected columns it is meaningless.
        chosen: numbers of the selected columns, ascending. places: where their elements lie in the slice.
        selected: their state here: the master as "param", and moments; fp32, 1-D, on the parameter's device.
        steps: how many gradients all columns have been stepped by.
        waiting: the sum of the gradients since, (numel,) fp32, in host memory; of selected columns, which have been
            stepped by these too, meaningless. gathered: how many gradients are in it.
        stepped: whether there is state. saved: what state dicts have of it. shown: what users see.
    """

    def __init__(self, piece: ParamSlice, flat: FlatParam, schedule: Schedule) -> None:
        super().__init__([piece], [flat])
        self.index, self.group, self.flat = piece.param, piece.group, flat
        self.total, self.is_matrix = columns_of(flat.shape), is_matrix(flat.shape)
        self.home: ParamState = {}
        self.chosen, self.places = schedule.first_columns(flat.shape), torch.empty(0, dtype=torch.int64, device="cpu")
        self.selected: dict[str, Tensor] = {}
        self.steps, self.gathered, self.stepped = 0.0, 0, False
        self.waiting = torch.empty(0, dtype=torch.float32, device="cpu")
        self.saved = SavedColumns(self, schedule)
        self.shown = ReadThrough(self.saved)

    @property
    def mask(self) -> Tensor:
        """Whether each column of the parameter is selected."""
        mask = torch.zeros(self.total, dtype=torch.bool, device="cpu")
        mask[self.chosen] = True
        return mask

    @property
    def waits(self) -> bool:
        """Whether gradients wait for columns that are not selected."""
        return self.chosen.numel() < self.total

    @property
    def counts(self) -> Tensor:
        """How many gradients each column of the parameter has been stepped by, fp32.

        Columns are counted that are elsewhere, too: any rank can say of all how often they were stepped.
        """
        return self.steps + self.gathered * self.mask.float()

    # -- steps --------------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Let masters follow what the user has written to the parameter, and the state be shown anew."""
        self.shown.forget()
        self.flat.load()
        if not self.to_read(0):
            return
        run = self.param_run(0)
        if "master" in self.home:
            require_writable(self.home["master"])
            follow_param(self.flat_grad(0, self.home["master"]), run)
        if self.selected:
            follow_param(self.selected["param"], self._take(run))
        self.follow(0)

    def update(self, grad: Tensor, hypers: AdamHypers, roles: Sequence[str]) -> AdamUpdate:
        """The step of the selected columns by a gradient of the slice, 1-D."""
        taken, number = self._take(grad), self.steps + self.gathered + 1
        arrays = {role: self.selected[role] for role in ("param", *roles)}
        taken = taken if taken.dtype in GRAD_DTYPES else taken.float()
        return AdamUpdate(name="selected columns", hypers=hypers, step=number, grad=taken, **arrays)

    def gather(self, grad: Tensor, grad_scale: float) -> None:
        """Let a gradient of the slice, 1-D, wait for the columns that are not selected, and count it."""
        self.stepped = True
        if not self.waits:
            self.steps += 1
            return
        term = grad.to(HOST)
        if grad_scale != 1 or grad.dtype is torch.float64:  # else what is narrower is widened as it is added
            term = term.float() * grad_scale
        if not self.waiting.numel():
            self.waiting = torch.empty_like(term, dtype=torch.float32)
        if self.gathered:
            self.waiting.add_(term)
        else:
            self.waiting.copy_(term)
        self.gathered += 1

    def take_mean(self, divisor: int) -> Tensor | None:
        """Clear the waiting gradients; return their mean, or their sum if the step at home divides by ``divisor``."""
        if not self.gathered:
            return None
        # The number of the step is rounded to fp32, from which 1 can be taken exactly.
        number = torch.tensor((self.steps + self.gathered) / self.gathered, dtype=torch.float32, device="cpu")
        self.home["step"].copy_(number - 1)
        if divisor != self.gathered:
            self.waiting.div_(self.gathered)
        self.steps, self.gathered = self.steps + self.gathered, 0
        return self.shaped(self.waiting, 0)

    # -- state --------------------------------------------------------------------------------------------------------

    def _take(self, run: Tensor) -> Tensor:
        """The elements of the selected columns out of a slice, 1-D."""
        return run.index_select(0, self.places.to(run.device))

    def _put(self, run: Tensor, values: Tensor) -> None:
        """Write values of the selected columns, 1-D, into a slice, rounded to its dtype."""
        run.index_copy_(0, self.places.to(run.device), values.to(run.device, run.dtype))

    def _arrays_at_home(self) -> dict[str, Tensor]:
        """What the inner placement has of all columns, as in :attr:`selected`; masters only if it shows them."""
        roles = {"param" if key == "master" else key: value for key, value in self.home.items() if key != "step"}
        return {role: self.flat_grad(0, value) for role, value in roles.items()}

    def select(self, chosen: Tensor) -> None:
        """Select other columns, and move state there and back; :meth:`begin_step` comes before.

        Raises:
            StorageFailed: the inner placement has it in a file that cannot be read or written; nothing was.
        """
        arrays = self._arrays_at_home()
        for array in arrays.values():
            require_readable(array)
            require_writable(array)
        for role, array in arrays.items() if self.selected else ():
            self._put(array, self.selected[role])
        self._take_selected(chosen)

    def _take_selected(self, chosen: Tensor) -> None:
        self.chosen, self.places = chosen, places_of(chosen, self.pieces[0], self.flat)
        run = self.param_run(0)
        arrays = {"param": run, **self._arrays_at_home()} if self.places.numel() else {}
        self.selected = {role: self._take(array).to(run.device, torch.float32) for role, array in arrays.items()}

    def value(self, key: str) -> Tensor:
        """One of "exp_avg", "exp_avg_sq", "max_exp_avg_sq" and "master" as users see it, a copy.

        Raises:
            StorageFailed: the inner placement has it in a file that cannot be read.
        """
        require_readable(self.home[key])
        run = self.flat_grad(0, self.home[key]).clone()
        if self.selected:
            self._put(run, self.selected["param" if key == "master" else key])
        return self.shaped(self.saved_master(0, run) if key == "master" else run, 0)

    def state_at_home(self, saved: Mapping[str, Any], roles: Sequence[str]) -> dict[str, Any]:
        """A loaded state for the inner placement; what is missing is zeros or, of the master, the parameter."""
        self.flat.load()
        state = new_state(ADAM, self.param_run(0).to(HOST), AdamState(), roles)
        for key in state.keys() - {"step"}:
            if key in saved:
                state[key].copy_(self.flat_grad(0, saved[key].detach()))
            state[key] = self.shaped(state[key], 0)
        return state

    def require_columns(self, state: Mapping[str, Any]) -> None:
        """Raise StateDictError for a state that the user has put in this one's place, if its column keys do not fit."""
        if not self.is_matrix or not isinstance(state.get(COLUMN_STEPS), Tensor):
            return
        wrong = check_columns(state, self.flat.shape, self.part(0).shape)
        if wrong is None and WAITING in state and not is_trusted(state):
            wrong = "while gradients wait, state 'step' must be the largest of 'column_steps'"
        if wrong:
            raise StateDictError(f"{self.flat.label}: {wrong}")

    def follow_step(self, state: ParamState) -> None:
        """If the user has changed the step alone, shift every column's count as much, so that what waits is kept."""
        counts = state.get(COLUMN_STEPS)
        if not isinstance(counts, Tensor) or counts.device != HOST or counts.dtype is not torch.float32:
            return
        if torch.equal(counts.reshape(-1), self.counts):
            state[COLUMN_STEPS] = counts - counts.max() + float(state["step"])

    def load(self, saved: Mapping[str, Any], home: ParamState, chosen: Tensor) -> None:
        """Replace the state; an empty one makes it new. The inner placement has :meth:`state_at_home` already.

        Args:
            chosen: the selected columns, if the state does not say so itself.
        """
        self.home, self.stepped = home, bool(saved)
        self.steps, self.gathered = float(saved.get("step", 0.0)), 0
        if self.is_matrix and is_trusted(saved):
            chosen = saved[COLUMN_SELECTED].detach().cpu().reshape(-1).nonzero().view(-1)
            if WAITING in saved:
                self.waiting = self.flat_grad(0, saved[WAITING].detach()).to(HOST, torch.float32, copy=True)
                self.gathered = int(saved[WINDOW].reshape(-1)[4])
            self.steps -= self.gathered if chosen.numel() else 0
        self._take_selected(chosen)
        self.shown.forget()
        self.follow(0)


def step_selected(
    used: Sequence[tuple[ColumnSlice, Tensor]],
    group: Mapping[str, Any],
    grad_scale: float,
    update: Callable[..., Any],
) -> None:
    """Step selected columns, in host memory by the native kernel, elsewhere by torch's fused one.

    Args:
        used: slices of one bucket with their gradients, 1-D. update: :func:`adam_update_` with the user's options.
    """
    hypers, roles = adam_hypers(group), ADAM.roles(group)
    updates = [found.update(grad, hypers, roles) for found, grad in used]
    if updates[0].param.is_cpu:
        update(updates, grad_scale=grad_scale)
        return
    options = asdict(hypers)
    kernel = torch._fused_adamw_ if options.pop("decoupled") else torch._fused_adam_
    largest = [each.max_exp_avg_sq for each in updates if each.max_exp_avg_sq is not None]
    kernel(
        [each.param for each in updates],
        [each.grad.float() * grad_scale for each in updates],
        [each.exp_avg for each in updates],
        [each.exp_avg_sq for each in updates],
        largest,
        [torch.full((), each.step, dtype=torch.float32, device=each.param.device) for each in updates],
        amsgrad=bool(largest),
        **options,
    )


def write_selected(slices: Iterable[ColumnSlice]) -> None:
    """Bring selected columns into their parameters, unless the user has written to these."""
    written = [found for found in slices if found.selected and not found.edited(0)]
    with own_writes([found.flat for found in written]):
        for found in written:
            found._put(found.param_run(0), found.selected["param"])
            found.flat.store()
    for found in written:
        found.follow(0)


def is_trusted(saved: Mapping[str, Any]) -> bool:
    """Whether the column keys belong to the state: an optimizer that ignores them may have stepped it since."""
    counts = saved.get(COLUMN_STEPS)
    step = float(torch.as_tensor(saved.get("step", -1.0), dtype=torch.float32, device="cpu"))  # as counts are kept
    return isinstance(counts, Tensor) and counts.numel() > 0 and float(counts.max()) == step


class SavedColumns(MadeState):
    """A slice's state in the form of ``torch.optim``, with the column keys; ``step`` is the largest of any column."""

    def __init__(self, column_slice: ColumnSlice, schedule: Schedule) -> None:
        self._slice, self._schedule = column_slice, schedule

    def _makers(self) -> dict[str, Callable[[], Any]]:
        """What makes each value when it is asked for."""
        own, per_column = self._slice, column_shape(self._slice.flat.shape)
        makers: dict[str, Callable[[], Any]] = {key: partial(own.value, key) for key in own.home}
        makers["step"] = lambda: own.counts.max()
        if own.is_matrix:
            makers[COLUMN_STEPS] = lambda: own.counts.view(per_column)
            makers[COLUMN_SELECTED] = lambda: own.mask.view(per_column)
            if own.gathered:
                makers[WAITING] = lambda: own.shaped(own.waiting.clone(), 0)
            position = *self._schedule.position(), own.gathered
            makers[WINDOW] = lambda: torch.tensor(position, dtype=torch.float64, device="cpu")
        return makers

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers())

    def __len__(self) -> int:
        return len(self._makers())

    def __getitem__(self, key: str) -> Any:
        return self._makers()[key]()

    @property
    def nbytes(self) -> int:
        return sum(value.nbytes for value in self.values() if isinstance(value, Tensor))
