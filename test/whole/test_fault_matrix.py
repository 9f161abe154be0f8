"""Every mistake of ``support/constructor_faults.py`` and ``support/faults.py``, made by one of two real ranks.

The same typed error on both, soon, nothing touched. One pair of processes goes through all of them, so none may
leave the next with ranks that are apart.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import zero_opt
from test.support.constructor_faults import CONSTRUCTOR, ConstructorFault
from test.support.faults import STATE, STEP, Fault, RankUnderTest, make_params
from test.support.harness import bitwise_difference, run_processes

FAULTS: dict[str, Fault | ConstructorFault] = {**CONSTRUCTOR, **STEP, **STATE}
ROOT = Path(__file__).resolve().parents[2]


class Outcome(NamedTuple):
    """What a rank has met.

    Attributes:
        error: its class, with that of torch's it stands for. changed: what is not as before. after: bits of parameters
            after a step that followed, if one could be taken.
    """

    error: str
    message: str
    changed: list[str]
    after: str


def _construct(rank: int, fault: ConstructorFault) -> Outcome:
    arguments: dict[str, Any] = {"params": make_params(), "optimizer_class": torch.optim.Adam}
    if rank:
        fault.change(arguments)
    try:
        zero_opt.ShardedOptimizer(**arguments).close()
    except zero_opt.ZeroOptError as error:
        return Outcome(type(error).__name__, str(error), [], "")
    return Outcome("none", "", [], "")


def _act(tested: RankUnderTest, fault: Fault) -> Outcome:
    before, name, message = tested.snapshot(), "none", ""
    try:
        fault.act(tested)
    except zero_opt.ZeroOptError as error:
        name, message = type(error).__name__, str(error)
    if fault.mend is None:
        return Outcome(name, message, [], "")
    changed = list(bitwise_difference(tested.snapshot(), before))
    fault.mend(tested)
    tested.step(2)
    return Outcome(name, message, changed, str([param.tolist() for param in tested.params]))


def _meet_all(rank: int, world_size: int) -> dict[str, Outcome]:
    dist.new_group([0, 1])  # that a rank can mistake for the default one
    outcomes, tested = dict[str, Outcome](), RankUnderTest(rank)
    for name, fault in FAULTS.items():
        if isinstance(fault, ConstructorFault):
            outcomes[name] = _construct(rank, fault)
            dist.barrier()  # a rank refuses its argument before it knows that another one waits
        elif fault.mend is None or fault.options is not dict:
            own = RankUnderTest(rank, **fault.options())
            outcomes[name] = _act(own, fault)
            own.opt.close()
        else:
            outcomes[name] = _act(tested, fault)
    tested.opt.close()
    return outcomes


@pytest.fixture(scope="module")
def met() -> list[dict[str, Outcome]]:
    """Per rank, what it met with every fault."""
    return run_processes(2, _meet_all)


@pytest.mark.parametrize("name", FAULTS)
def test_the_same_typed_error_on_both_ranks(met: list[dict[str, Outcome]], name: str) -> None:
    first, second = met[0][name], met[1][name]
    assert first.error == second.error == FAULTS[name].error.__name__
    # The rank at fault says what it has done; the other, whose mistake it is.
    assert re.sub("^rank [01]: ", "", first.message) == re.sub("^rank [01]: ", "", second.message)
    assert first.changed == second.changed == []
    assert first.after == second.after


# ---------------------------------------------------------------------------------------------------------------------
# the table


def _rows() -> list[tuple[str, str]]:
    """(case, test) of every row in docs/reliability.md."""
    found = []
    for line in (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and (test := re.search(r"`(test/[^`]+)`", cells[-1])):
            found.append((cells[0], test[1]))
    return found


def test_every_row_names_a_test_that_exists() -> None:
    rows = _rows()
    assert len(rows) >= 60 and len({case for case, _ in rows}) == len(rows)
    for case, test in rows:
        path, function, parameter = re.fullmatch(r"([^:]+)::(\w+)(?:\[(.+)\])?", test).groups()  # type: ignore[union-attr]
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert function.startswith("test_") and function in names, (case, test)
        if parameter is not None:
            assert parameter in FAULTS, (case, test)


def test_every_fault_has_a_row() -> None:
    parameters = {match[1] for _, test in _rows() if (match := re.search(r"\[(.+)\]$", test))}
    assert parameters == set(FAULTS)
