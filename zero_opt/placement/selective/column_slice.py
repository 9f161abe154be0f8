"""A slice of a parameter by columns: some have their state beside the parameter, all others in an inner placement."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from ...kernels import AdamUpdate
from ...kernels.adam_state import follow_param, new_state
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
from .columns import Schedule, column_shape, is_matrix, places_of, trusted_window


class ColumnSlice(FollowedParams, MadeState):
    """One slice of a parameter: which columns are selected, their state, and the gradients that wait for the others.

    What is no matrix has one column, which is selected. As one of :class:`FollowedParams` a slice has position 0. As a
    mapping it is its state in the form of ``torch.optim``, with the column keys; ``step`` is the largest of any column.

    Attributes:
        index, group: of the parameter, and of its param group.
        is_matrix: whether columns are selected by gradients.
        home: the live state that the inner placement has of the slice; of selected columns it is meaningless.
        mask: whether each column of the parameter is selected. places: where the elements of those lie in the slice.
        selected: their state here: the master as "param", and moments; fp32, 1-D, on the parameter's device.
        steps: how many gradients all columns have been stepped by.
        waiting: the sum of the gradients since, (numel,) fp32, in host memory; of selected columns, which have been
            stepped by these too, meaningless. gathered: how many gradients are in it.
        stepped: whether there is state. shown: what users see of it.
    """

    def __init__(self, piece: ParamSlice, flat: FlatParam, schedule: Schedule) -> None:
        super().__init__([piece], [flat])
        self.index, self.group, self.flat, self._schedule = piece.param, piece.group, flat, schedule
        self.is_matrix, self.mask = is_matrix(flat.shape), schedule.first_columns(flat.shape)
        self.home: ParamState = {}
        self.places = torch.empty(0, dtype=torch.int64, device="cpu")
        self.selected: dict[str, Tensor] = {}
        self.steps, self.gathered, self.stepped = 0.0, 0, False
        self.waiting = torch.empty(0, dtype=torch.float32, device="cpu")
        self.shown = ReadThrough(self)

    # -- steps --------------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Let masters follow what the user has written to the parameter, and the state be shown anew."""
        self.shown.forget()
        self.flat.load()
        if self.to_read(0):
            run, master = self.param_run(0), self._at_home()["param"]
            require_writable(master)
            follow_param(master, run)  # without a master, itself
            follow_param(self.selected["param"], self.take(run))
            self.follow(0)

    def gather(self, grad: Tensor, grad_scale: float) -> None:
        """Let a gradient of the slice, 1-D, wait for the columns that are not selected, and count it."""
        self.stepped = True
        if self.mask.all():
            self.steps += 1
            return
        term = grad.to(HOST).float()
        term = term if grad_scale == 1 else term * grad_scale
        self.waiting = self.waiting.add_(term) if self.gathered else term.clone()
        self.gathered += 1

    def take_mean(self) -> Tensor | None:
        """Clear the waiting gradients, and return their mean."""
        if not self.gathered:
            return None
        # The number of the step is rounded to fp32, from which 1 can be taken exactly.
        number = torch.tensor((self.steps + self.gathered) / self.gathered, dtype=torch.float32, device="cpu")
        self.home["step"].copy_(number - 1)
        self.waiting.div_(self.gathered)
        self.steps, self.gathered = self.steps + self.gathered, 0
        return self.shaped(self.waiting, 0)

    # -- state --------------------------------------------------------------------------------------------------------

    def take(self, run: Tensor) -> Tensor:
        """The elements of the selected columns out of a slice, 1-D."""
        return run.index_select(0, self.places.to(run.device))

    def put(self, run: Tensor, role: str) -> None:
        """Write what is selected of a role into a slice, rounded to its dtype."""
        run.index_copy_(0, self.places.to(run.device), self.selected[role].to(run.device, run.dtype))

    def _at_home(self) -> dict[str, Tensor]:
        """What there is of all columns, as in :attr:`selected`; without a master, the parameter is it."""
        roles = {"param" if key == "master" else key: value for key, value in self.home.items() if key != "step"}
        return {"param": self.param_run(0)} | {role: self.flat_grad(0, value) for role, value in roles.items()}

    def _take_selected(self) -> None:
        self.places, device = places_of(self.mask, self.pieces[0], self.flat), self.flat.param.device
        self.selected = {role: self.take(run).to(device, torch.float32) for role, run in self._at_home().items()}

    def select(self, mask: Tensor) -> None:
        """Select other columns, and move state there and back; :meth:`begin_step` comes before.

        Raises:
            StorageFailed: the inner placement has it in a file that cannot be read or written; nothing was.
        """
        for run in self._at_home().values():
            require_readable(run)
            require_writable(run)
        for role, run in self._at_home().items():
            self.put(run, role)
        self.mask = mask
        self._take_selected()

    def _parts(self) -> dict[str, Tensor]:
        """What the values are made from."""
        counts = self.steps + self.gathered * self.mask.float()  # also of columns that are elsewhere
        parts = {**self.home, "step": counts.max()}
        if self.is_matrix:
            per_column = column_shape(self.flat.shape)
            parts |= {COLUMN_STEPS: counts.view(per_column), COLUMN_SELECTED: self.mask.view(per_column)}
            if self.gathered:
                parts[WAITING] = self.shaped(self.waiting, 0)
            parts[WINDOW] = torch.tensor([*self._schedule.position(), self.gathered], dtype=torch.float64, device="cpu")
        return parts

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts())

    def __len__(self) -> int:
        return len(self._parts())

    def __getitem__(self, key: str) -> Tensor:
        part, role = self._parts()[key], "param" if key == "master" else key
        if role not in self.selected:
            return part.clone()
        require_readable(part)
        run = self.flat_grad(0, part).clone()
        self.put(run, role)
        return self.shaped(self.saved_master(0, run) if key == "master" else run, 0)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._parts().values())

    def state_at_home(self, saved: Mapping[str, Any], roles: Sequence[str]) -> dict[str, Any]:
        """A loaded state for the inner placement; what is missing is zeros or, of the master, the parameter."""
        self.flat.load()
        state = new_state(ADAM, self.part(0).to(HOST), AdamState(), roles)
        for key in (state.keys() & saved.keys()) - {"step"}:
            state[key].copy_(saved[key].detach())
        return state

    def load(self, saved: Mapping[str, Any], home: ParamState) -> None:
        """Replace the state; an empty one makes it new. The inner placement has :meth:`state_at_home` already.

        Columns stay selected if the state does not say which are.
        """
        self.home, self.stepped = home, bool(saved)
        self.steps, self.gathered = float(saved.get("step", 0.0)), 0
        if self.is_matrix and (window := trusted_window(saved)) is not None:
            self.mask = saved[COLUMN_SELECTED].detach().to(HOST, torch.bool, copy=True).reshape(-1)
            if WAITING in saved:
                self.waiting = self.flat_grad(0, saved[WAITING].detach()).to(HOST, torch.float32, copy=True)
                self.gathered = int(window[-1])
            self.steps -= self.gathered if self.mask.any() else 0
        self._take_selected()
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
    hypers, roles = adam_hypers(group), ("param", *ADAM.roles(group))
    updates: list[dict[str, Any]] = [
        {"step": found.steps + found.gathered + 1, "grad": found.take(grad).float()}
        | {role: found.selected[role] for role in roles}
        for found, grad in used
    ]
    if updates[0]["param"].is_cpu:
        update([AdamUpdate(name="selected columns", hypers=hypers, **each) for each in updates], grad_scale=grad_scale)
        return
    options = asdict(hypers)
    kernel = torch._fused_adamw_ if options.pop("decoupled") else torch._fused_adam_
    params, exp_avgs, exp_avg_sqs, *others = ([each[role] for each in updates] for role in roles)
    grads = [each["grad"] * grad_scale for each in updates]
    steps = [torch.full((), each["step"], dtype=torch.float32, device=params[0].device) for each in updates]
    largest = others[0] if others else []
    kernel(params, grads, exp_avgs, exp_avg_sqs, largest, steps, amsgrad=bool(largest), **options)


def write_selected(slices: Iterable[ColumnSlice]) -> None:
    """Bring selected columns into their parameters, unless the user has written to these."""
    written = [found for found in slices if found.places.numel() and not found.edited(0)]
    with own_writes([found.flat for found in written]):
        for found in written:
            found.put(found.param_run(0), "param")
            found.flat.store()
            found.follow(0)
