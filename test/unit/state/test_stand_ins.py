"""Entries of ``state`` for parameters that lie elsewhere: the scalars of a plain optimizer, and no elements."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from zero_opt.layout import mask_of
from zero_opt.sharding.wrapped_class import register_elementwise
from zero_opt.state import stand_ins
from zero_opt.state.stand_ins import Kind, StandIns

SHAPES = ((3, 2), (4,), (4,), ())


def _point_elsewhere(entry: Any, number: float) -> None:
    entry["step"].data = torch.tensor(number)


# Ways to change the step count in an entry.
EDITS: dict[str, Callable[[Any, float], Any]] = {
    "add_": lambda entry, number: entry["step"].add_(number),
    "fill_": lambda entry, number: entry["step"].fill_(number),
    "uncounted": lambda entry, number: entry["step"].detach().numpy().fill(number),
    "data": _point_elsewhere,
    "replace": lambda entry, number: entry.update(step=torch.tensor(number)),
    "as it is": lambda entry, _: entry.update(step=entry["step"].clone()),
    "wider": lambda entry, _: entry.update(step=entry["step"].double()),
}


class Elsewhere:
    """Stand-ins for parameters beside a plain optimizer that steps them."""

    def __init__(self, cls: Any = torch.optim.AdamW, **options: Any) -> None:
        self.params = [nn.Parameter(torch.ones(shape)) for shape in SHAPES]
        self.plain = cls(self.params, **options)
        self.owner: Any = SimpleNamespace(param_groups=self.plain.param_groups, state=defaultdict(dict))
        self.stand_ins = StandIns(cls, options, self.owner, self.params)
        host = torch.device("cpu")
        self.stand_ins.add({i: Kind(0, len(shape), torch.float32, host) for i, shape in enumerate(SHAPES)})

    def step(self, *used: int) -> None:
        for index, param in enumerate(self.params):
            param.grad = torch.ones_like(param) if index in used else None
        self.plain.step()
        self.stand_ins.step(mask_of(used))

    def compare(self) -> None:
        for param in self.params:
            expected, entry = self.plain.state.get(param, {}), self.owner.state.get(param, {})
            assert entry.keys() == expected.keys()
            for key, value in expected.items():
                if key in ("step", "eta", "mu", "mu_product"):
                    assert torch.equal(entry[key], value)
                elif isinstance(value, Tensor):
                    assert entry[key].numel() == 0 and entry[key].dtype is value.dtype


@pytest.mark.parametrize("name", ["AdamW", "ASGD", "NAdam", "Adagrad", "Adafactor", "SGD"])
def test_scalars_are_those_of_the_owners(name: str) -> None:
    elsewhere = Elsewhere(getattr(torch.optim, name), lr=0.1)
    elsewhere.compare()
    for used in ((0, 1, 2, 3), (0, 2), (), (1,), (0, 1, 2, 3)):
        elsewhere.step(*used)
        elsewhere.compare()


def test_parameters_used_alike_are_stepped_once(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere, steps = Elsewhere(), list[int]()
    step = stand_ins.Trial.step
    monkeypatch.setattr(stand_ins.Trial, "step", lambda trial: (steps.append(1), step(trial))[1])
    for used, expected in (((0, 1, 2, 3), 3), ((1, 2), 1), ((1,), 1), ((1, 2), 2)):
        steps.clear()
        elsewhere.step(*used)
        assert len(steps) == expected
    elsewhere.compare()


def test_edits_count_from_the_next_step_on() -> None:
    elsewhere = Elsewhere()
    elsewhere.step(0, 1, 2, 3)
    for state in (elsewhere.owner.state, elsewhere.plain.state):
        state[elsewhere.params[1]]["step"] = torch.tensor(7.0)
        state[elsewhere.params[3]] = {
            "step": torch.tensor(3.0), "exp_avg": torch.tensor(0.5), "exp_avg_sq": torch.tensor(0.5)
        }  # fmt: skip
    assert not elsewhere.stand_ins.take_dropped()
    elsewhere.step(0, 1, 2, 3)
    elsewhere.compare()
    assert [float(elsewhere.owner.state[param]["step"]) for param in elsewhere.params] == [2, 8, 2, 4]


@given(
    name=st.sampled_from(["AdamW", "NAdam", "Adagrad"]),
    calls=st.lists(
        st.one_of(
            st.sets(st.integers(0, 3)),  # the parameters that a step uses
            st.tuples(st.sampled_from(sorted(EDITS)), st.integers(0, 3), st.integers(0, 5)),
        ),
        max_size=8,
    ),
)
def test_an_edit_is_that_of_one_entry_alone(name: str, calls: list[Any]) -> None:
    elsewhere = Elsewhere(getattr(torch.optim, name), lr=0.1)
    elsewhere.step(0, 1, 2, 3)
    for call in calls:
        if isinstance(call, set):
            elsewhere.step(*call)
        else:
            how, index, number = call
            for state in (elsewhere.owner.state, elsewhere.plain.state):
                EDITS[how](state[elsewhere.params[index]], float(number))
        elsewhere.compare()


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_leaves_the_objects_of_other_entries(edit: str) -> None:
    elsewhere = Elsewhere()
    elsewhere.step(0, 1, 2, 3)
    held = [elsewhere.owner.state[param] for param in elsewhere.params]
    counts = [entry["step"] for entry in held]
    EDITS[edit](held[1], 7.0)
    counts[1] = held[1]["step"]
    for _ in range(2):
        elsewhere.stand_ins.step(mask_of(range(4)))
    for param, entry, count in zip(elsewhere.params, held, counts, strict=True):
        assert elsewhere.owner.state[param] is entry and entry["step"] is count
    assert [float(count) for count in counts[2:]] == [3.0, 3.0]


@pytest.mark.parametrize("odd", [3.0, torch.tensor(5.0, device="meta"), "three"])
def test_an_edit_that_cannot_be_stepped_touches_no_other_entry(odd: Any) -> None:
    elsewhere = Elsewhere()
    elsewhere.step(0, 1, 2, 3)
    elsewhere.owner.state[elsewhere.params[1]]["step"] = odd
    for _ in range(2):
        elsewhere.stand_ins.step(mask_of(range(4)))
    assert [float(elsewhere.owner.state[elsewhere.params[at]]["step"]) for at in (0, 2, 3)] == [3.0] * 3


def test_a_value_that_entries_share_is_stepped_once_where_others_of_theirs_are_replaced() -> None:
    elsewhere = Elsewhere()
    elsewhere.step(0, 1, 2, 3)
    for param in elsewhere.params[:3]:
        elsewhere.owner.state[param]["exp_avg"] = torch.zeros(0)
    for used in ((0, 1, 2, 3), (1, 2)):
        elsewhere.step(*used)
        elsewhere.compare()


def test_groups_with_the_same_options_are_stepped_together_while_they_have_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    params = [nn.Parameter(torch.ones(4)) for _ in range(4)]
    plain = torch.optim.AdamW([{"params": params[:2]}, {"params": params[2:]}])
    owner: Any = SimpleNamespace(param_groups=plain.param_groups, state=defaultdict(dict))
    elsewhere = StandIns(torch.optim.AdamW, {}, owner, params)
    elsewhere.add({index: Kind(index // 2, 1, torch.float32, torch.device("cpu")) for index in range(4)})
    steps, step = list[str](), elsewhere._after_a_step
    monkeypatch.setattr(elsewhere, "_after_a_step", lambda kind, entry: (steps.append(""), step(kind, entry))[1])
    elsewhere.step(0b1111)
    assert len(steps) == 1
    owner.state.clear()
    for used, amsgrad in (((0,), False), ((0, 2), True), ((0, 1, 2, 3), True), ((0, 3), True)):
        plain.param_groups[1]["amsgrad"] = amsgrad
        for state in (owner.state, plain.state) if used == (0, 2) else ():
            state[params[0]]["step"].add_(3)  # the user's edits count where entries are parted, too
        for index, param in enumerate(params):
            param.grad = torch.ones(4) if index in used else None
        plain.step()
        elsewhere.step(mask_of(used))
    assert [float(owner.state[param]["step"]) for param in params] == [7, 1, 2, 2]
    for param in params:
        assert owner.state[param].keys() == plain.state[param].keys()


def test_dropped_entries_are_told_once_and_start_afresh() -> None:
    elsewhere = Elsewhere()
    elsewhere.step(0, 1, 2, 3)
    for state in (elsewhere.owner.state, elsewhere.plain.state):
        del state[elsewhere.params[2]]
    assert elsewhere.stand_ins.take_dropped() == {2}
    assert not elsewhere.stand_ins.take_dropped()
    elsewhere.step(0, 1, 2, 3)
    elsewhere.compare()


def test_loaded_state_is_copied_and_completed_by_the_class() -> None:
    elsewhere = Elsewhere()
    saved = {
        i: {"step": 4, "exp_avg": torch.ones(shape), "exp_avg_sq": torch.ones(shape)} for i, shape in enumerate(SHAPES)
    }
    saved[2]["step"] = mine = torch.tensor(9.0)
    elsewhere.stand_ins.load(saved)
    elsewhere.stand_ins.step(mask_of([0, 2, 3]))
    entries = [elsewhere.owner.state[param] for param in elsewhere.params]
    assert [float(entry["step"]) for entry in entries] == [5, 4, 10, 5]
    assert all(isinstance(entry["step"], Tensor) and entry["exp_avg"].numel() == 0 for entry in entries)
    assert float(mine) == 9.0


@pytest.fixture
def fussy() -> Any:
    @register_elementwise
    class Fussy(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise ArithmeticError("never")

    return Fussy


def test_a_class_that_cannot_step_zeros_shows_nothing(fussy: Any) -> None:
    elsewhere = Elsewhere(fussy, lr=0.1)
    elsewhere.stand_ins.step(mask_of(range(4)))
    assert not elsewhere.owner.state


def test_an_entry_that_is_no_dict_is_an_error_before_the_step() -> None:
    elsewhere = Elsewhere()
    elsewhere.owner.state[elsewhere.params[0]] = 5
    with pytest.raises(AttributeError):
        elsewhere.stand_ins.take_dropped()
