"""A slice of a matrix by columns: some have their state beside the parameter, all others in an inner placement."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...kernels.adam_state import follow_param, new_state
from ...kernels.functions import ADAM
from ...layout import ParamSlice
from ...policies import AdamState
from ...sharding.flat_param import FlatParam, own_writes
from ...system.devices import HOST
from ...system.readable_pages import require_readable, require_writable
from ..interface import ParamState
from ..masters import FollowedParams
from ..native_rules import COLUMN_SELECTED, COLUMN_STEPS, WAITING, WINDOW
from .column_step import step_selected
from .columns import Columns


class ColumnSlice(FollowedParams):
    """One slice of a matrix: which columns are selected, their state, and the gradients that wait for the others.

    As one of :class:`FollowedParams` it has position 0.

    Attributes:
        index, group: of the parameter, and of its param group.
        home: the live state that the inner placement has of the slice; of selected columns it is meaningless.
        columns: the selected ones. selected: their state here: the master as "param", and moments; fp32, 1-D, on the
            parameter's device.
        steps: how many gradients all columns have been stepped by.
        waiting: the sum of the gradients since, (numel,) fp32, in host memory; of selected columns, which have been
            stepped by these too, meaningless. gathered: how many gradients are in it.
        stepped: whether there is state.
    """

    def __init__(self, piece: ParamSlice, flat: FlatParam) -> None:
        super().__init__([piece], [flat])
        self.index, self.group, self.flat = piece.param, piece.group, flat
        self.home: ParamState = {}
        self.columns = Columns(piece, flat, torch.empty(0, dtype=torch.int64, device="cpu"))
        self.selected: dict[str, Tensor] = {}
        self.steps, self.gathered, self.stepped = 0.0, 0, False
        self.waiting = torch.empty(0, dtype=torch.float32, device="cpu")

    @property
    def total(self) -> int:
        """How many columns the parameter has."""
        return self.flat.shape[-1]

    @property
    def counts(self) -> Tensor:
        """How many gradients each column of the parameter has been stepped by, fp32."""
        counts = torch.full((self.total,), self.steps, dtype=torch.float32, device="cpu")
        counts[self.columns.chosen] += self.gathered
        return counts

    # -- steps --------------------------------------------------------------------------------------------------------

    def read_param(self) -> None:
        """Let masters follow what the user has written to the parameter."""
        if not self.to_read(0):
            return
        self.flat.load()
        run = self.param_run(0)
        if "master" in self.home:
            require_writable(self.home["master"])
            follow_param(self.flat_grad(0, self.home["master"]), run)
        if self.selected:
            follow_param(self.selected["param"], self.columns.take(run))
        self.follow(0)

    def step(self, grad: Tensor, group: Mapping[str, Any], grad_scale: float, update: Callable[..., int]) -> None:
        """Step the selected columns by a gradient of the slice, and let it wait for the others.

        Columns are counted that are elsewhere, too: any rank can say of all how often they were stepped.
        """
        run = self.flat_grad(0, grad)
        if self.selected:
            number = self.steps + self.gathered + 1
            step_selected(self.selected, self.columns.take(run), number, group, grad_scale, update)
            self.write_selected()
        if self.columns.chosen.numel() < self.total:
            self._gather(run, grad_scale)
        else:
            self.steps += 1
        self.stepped = True

    def _gather(self, run: Tensor, grad_scale: float) -> None:
        term = run.to(HOST)
        if grad_scale != 1 or run.dtype is torch.float64:  # else what is narrower is widened as it is added
            term = term.float() * grad_scale
        if not self.waiting.numel():
            self.waiting = torch.empty_like(term, dtype=torch.float32)
        if self.gathered:
            self.waiting.add_(term)
        else:
            self.waiting.copy_(term)
        self.gathered += 1

    def take_mean(self) -> Tensor:
        """The mean of the gradients that wait, for a step at home; they wait no more."""
        # The number of the step is rounded to fp32, from which 1 can be taken exactly.
        number = torch.tensor((self.steps + self.gathered) / self.gathered, dtype=torch.float32, device="cpu")
        self.home["step"].copy_(number - 1)
        mean = self.waiting.div_(self.gathered)
        self.steps, self.gathered = self.steps + self.gathered, 0
        return self.shaped(mean, 0)

    def write_selected(self) -> None:
        """Bring the selected columns into the parameter, to which the user has not written."""
        if self.selected:
            with own_writes([self.flat]):
                self.columns.put(self.param_run(0), self.selected["param"])
                self.flat.store()
            self.follow(0)

    # -- state --------------------------------------------------------------------------------------------------------

    def _arrays_at_home(self) -> dict[str, Tensor]:
        """What the inner placement has of all columns, as in :attr:`selected`; masters only if it shows them."""
        arrays = {key: self.flat_grad(0, value) for key, value in self.home.items() if key != "step"}
        if "master" in arrays:
            arrays["param"] = arrays.pop("master")
        return arrays

    def select(self, chosen: Tensor) -> None:
        """Select other columns, and move state there and back; :meth:`read_param` comes before.

        Raises:
            StorageFailed: the inner placement has it in a file that cannot be read or written; nothing was.
        """
        arrays = self._arrays_at_home()
        for array in arrays.values():
            require_readable(array)
            require_writable(array)
        for role, array in arrays.items() if self.selected else ():
            self.columns.put(array, self.selected[role])
        self._take_selected(chosen)

    def _take_selected(self, chosen: Tensor) -> None:
        self.columns, run = Columns(self.pieces[0], self.flat, chosen), self.param_run(0)
        arrays = {"param": run, **self._arrays_at_home()} if self.columns.numel else {}
        self.selected = {role: self.columns.take(array).to(run.device, torch.float32) for role, array in arrays.items()}

    def value(self, key: str) -> Tensor:
        """One of "exp_avg", "exp_avg_sq", "max_exp_avg_sq" and "master" as users see it, a copy.

        Raises:
            StorageFailed: the inner placement has it in a file that cannot be read.
        """
        require_readable(self.home[key])
        run = self.flat_grad(0, self.home[key]).clone()
        if self.selected:
            self.columns.put(run, self.selected["param" if key == "master" else key])
        return self.shaped(self.saved_master(0, run) if key == "master" else run, 0)

    def state_at_home(self, saved: Mapping[str, Any], roles: Sequence[str]) -> dict[str, Any]:
        """A loaded state for the inner placement; what is missing is zeros or, of the master, the parameter."""
        self.flat.load()
        state = new_state(ADAM, self.param_run(0).to(HOST), AdamState(), roles)
        for key, value in state.items():
            if key in saved and key != "step":
                value.copy_(self._run_of(saved[key]))
            state[key] = value if key == "step" else self.shaped(value, 0)
        return state

    def load(self, saved: Mapping[str, Any], home: ParamState, chosen: Tensor) -> None:
        """Replace the state; an empty one makes it new. The inner placement has :meth:`state_at_home` already.

        Args:
            chosen: the selected columns, if the state does not say so itself.
        """
        self.home, self.stepped = home, bool(saved)
        self.steps, self.gathered = float(saved.get("step", 0.0)), 0
        if is_trusted(saved):
            chosen = saved[COLUMN_SELECTED].detach().cpu().reshape(-1).nonzero().view(-1)
            if WAITING in saved:
                self.waiting = self._run_of(saved[WAITING]).float().clone()
                self.gathered = int(saved[WINDOW].reshape(-1)[4])
            self.steps -= self.gathered if chosen.numel() else 0
        self._take_selected(chosen)
        self.follow(0)

    def _run_of(self, value: Tensor) -> Tensor:
        """A saved tensor as 1-D: of the slice, or of the whole parameter, whose part is taken."""
        value = value.detach().cpu()
        if value.shape == self.flat.shape:
            return self.flat.flatten(value)[slice(*self.pieces[0].in_param)]
        return value.reshape(-1)


def is_trusted(saved: Mapping[str, Any]) -> bool:
    """Whether the extra keys belong to the state: an optimizer that ignores them may have stepped it since."""
    counts = saved.get(COLUMN_STEPS)
    return isinstance(counts, Tensor) and counts.numel() > 0 and float(counts.max()) == float(saved.get("step", -1.0))
