"""Whatever a training script does, in whatever order, ranks hold the bits of one plain optimizer.

``ZERO_OPT_SOAK`` is the number of examples. An example is one script, drawn by Hypothesis and played from construction
to ``close()``: by every rank, each with gradients of its own, and by one plain optimizer that sees their mean. All
parameters and all state are compared at the end, to the bit. Most scripts are short, up to 8 operations: a third of
them by two ranks as threads, the others by one alone with an offload, which does all that ranks do but for messages.
One in thirty is long besides, up to 24 operations in segments at 1 to 4 ranks, with a save and a load in between.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

import zero_opt
from test.support.script_player import ALONE, CLASSES, REDUCTIONS, How, Operation, check_script

SCRIPTS = int(os.environ.get("ZERO_OPT_SOAK", "450"))
LONG_IN = 30


class Training(RuleBasedStateMachine):
    """Collects a script rule by rule, and plays it at the end: ranks are threads that one call starts and ends."""

    segments = 3

    def __init__(self) -> None:
        super().__init__()
        self.number = 0
        self.how = How(torch.optim.Adam, REDUCTIONS[0])
        self.script: list[tuple[int, list[Operation]]] = []
        self.scaled = False

    @initialize(cls=st.sampled_from(CLASSES), reduction=st.sampled_from(REDUCTIONS), world_size=st.integers(2, 3))
    def begin(self, cls: Any, reduction: Any, world_size: int) -> None:
        """What is trained with, and by how many."""
        self.how = How(cls, reduction)
        self.script = [(world_size, [])]

    def _do(self, *operation: Any) -> None:
        self.script[-1][1].append(operation)

    @rule(mask=st.integers(0, 50), bad=st.integers(0, 9))
    def backward(self, mask: int, bad: int) -> None:
        """A backward; one in ten has a NaN on rank 0."""
        if self.scaled:  # AtStep refuses gradients that change after a clip
            self.step()
        self.number += 1
        self._do("backward", self.number, mask, bad == 9)

    @rule()
    def step(self) -> None:
        """A step and a zero_grad."""
        self.scaled = False
        self._do("step")

    @rule()
    def clip(self) -> None:
        """A clip that reduces what there is."""
        self.scaled = True
        self._do("scale")

    @rule()
    def zero_grad(self) -> None:
        """Drop all gradients; under AtStep alone, since the threaded group cannot drop messages that are under way."""
        if isinstance(self.how.reduction, zero_opt.AtStep):
            self.scaled = False
            self._do("zero_grad")

    @rule(group=st.integers(0, 5), lr=st.sampled_from([0.1, 0.003]))
    def hyper(self, group: int, lr: float) -> None:
        """Another lr."""
        self._do("hyper", group, lr)

    @rule(index=st.integers(0, 8), frozen=st.booleans())
    def freeze(self, index: int, frozen: bool) -> None:
        """Freeze or unfreeze a parameter, between steps."""
        self.step()
        self._do("freeze", index, frozen)

    @rule()
    def add_group(self) -> None:
        """Add a param group, between steps."""
        self.step()
        self._do("add")

    @rule()
    def reload(self) -> None:
        """Save and load, between steps."""
        self.step()
        self._do("reload")

    @rule(world_size=st.integers(1, 4))
    def resume(self, world_size: int) -> None:
        """Save, and go on at another world size."""
        self.step()
        if len(self.script) < self.segments:
            self.script.append((world_size, []))

    def teardown(self) -> None:
        """Play it."""
        if self.script:
            check_script(self.how, self.script)


class ShortTraining(Training):
    """A script of one segment."""

    segments = 1

    @initialize(
        cls=st.sampled_from(CLASSES),
        reduction=st.sampled_from(REDUCTIONS),
        offload=st.sampled_from((None, *ALONE)),
    )
    def begin(self, cls: Any, reduction: Any, offload: Any) -> None:  # type: ignore[override]
        """What is trained with, and by one or two."""
        self.how = How(cls, reduction, offload)
        self.script = [(2 if offload is None else 1, [])]


def _settings(examples: int, operations: int) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=operations,
        deadline=None,
        derandomize="ZERO_OPT_SOAK" not in os.environ,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


TestTraining, TestShortTraining = Training.TestCase, ShortTraining.TestCase
TestTraining.settings, TestShortTraining.settings = _settings(SCRIPTS // LONG_IN, 24), _settings(SCRIPTS, 8)


def test_a_script_of_everything() -> None:
    """Every operation at least once, with what is hard about each, at 2, 1 and 3 ranks."""
    first: list[Operation] = [
        ("backward", 1, 3, False),
        ("backward", 2, 7, False),
        ("scale",),
        ("step",),
        ("freeze", 3, True),
        ("backward", 3, 0, True),
        ("step",),
        ("add",),
        ("backward", 4, 5, False),
        ("step",),
    ]
    second: list[Operation] = [("backward", 5, 2, False), ("hyper", 1, 0.1), ("step",), ("freeze", 3, False)]
    third: list[Operation] = [
        ("zero_grad",),
        ("backward", 6, 11, False),
        ("backward", 7, 11, False),
        ("step",),
        ("reload",),
        ("add",),
        ("backward", 8, 12, False),
        ("step",),
    ]
    for reduction in REDUCTIONS:
        check_script(How(torch.optim.Adam, reduction), [(2, first), (1, second), (3, third)])
