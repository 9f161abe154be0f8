"""What ``doctor --ranks`` says of ranks that differ."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from zero_opt.__main__ import main
from zero_opt.tools import compare_ranks
from zero_opt.tools.compare_ranks import compared, facts
from zero_opt.tools.doctor import BAD, OK, Finding


@pytest.fixture(scope="module")
def own() -> dict[str, str]:
    return facts("0.1.0", None)


def found(ranks: dict[int, dict[str, str]]) -> dict[str, Finding]:
    return {finding.name: finding for finding in compared(ranks)}


def test_ranks_that_are_alike(own: dict[str, str]) -> None:
    findings = found(dict.fromkeys(range(4), own))
    assert all(finding.status == OK and not finding.advice for finding in findings.values())
    assert findings["torch"].found == torch.__version__ and findings["hosts"].found.startswith("1: ")
    assert json.loads(json.dumps(own)) == own


@pytest.mark.parametrize(
    "name", ["zero_opt", "torch", "native", "worker", "gloo", "accelerator", "bf16", "path", "WORLD_SIZE", "NCCL_ALGO"]
)
def test_what_must_be_alike(name: str, own: dict[str, str]) -> None:
    findings = found({0: own, 1: own, 2: own | {name: "else"}, 3: own})
    assert [finding.name for finding in findings.values() if finding.status == BAD] == [name]
    assert findings[name].found.startswith("ranks 0-1, 3: ") and "rank 2: else" in findings[name].found
    assert findings[name].advice


@pytest.mark.parametrize(
    "name", ["python", "kernels", "cores", "numa", "torch threads", "devices", "NCCL_IB_HCA", "ZERO_OPT_ISA"]
)
def test_what_may_differ_is_marked(name: str, own: dict[str, str]) -> None:
    findings = found({0: own, 1: own | {name: "else"}})
    assert all(finding.status == OK for finding in findings.values())
    assert [finding.name for finding in findings.values() if finding.advice] == [name]


def test_what_no_rank_can_be_used_without_need_not_differ(own: dict[str, str]) -> None:
    findings = found(dict.fromkeys(range(2), own | {"usable": "torch: 2.10.1"}))
    assert findings["usable"].status == BAD and findings["usable"].found == "torch: 2.10.1"


def test_a_path_of_which_no_rank_can_make_use_is_bad_once(own: dict[str, str], tmp_path: Path) -> None:
    has = facts("0.1.0", f"{tmp_path}/nothing")
    bad = {name: finding for name, finding in found({0: has, 1: has}).items() if finding.status == BAD}
    assert [*bad] == ["path"] and "NVMeOffload is refused there" in bad["path"].advice


def test_hosts_are_listed(own: dict[str, str]) -> None:
    ranks = {rank: own | {"host": "a" if rank < 2 else "b"} for rank in range(4)}
    assert found(ranks)["hosts"].found == "2: ranks 0-1: a; ranks 2-3: b"


def test_variables_and_paths_are_facts(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.setenv("SECRET", "x")
    has = facts("0.1.0", str(tmp_path))
    assert has["NCCL_ALGO"] == "Ring" and "SECRET" not in has and has["path"] == "yes"
    assert facts("0.1.0", f"{tmp_path}/nothing")["path"] != "yes"


def test_without_a_launcher_it_says_how_to_run_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert main(["doctor", "--ranks"]) == 2
    assert "torchrun --nproc-per-node=2 -m zero_opt doctor --ranks" in capsys.readouterr().err


def test_a_store_that_is_not_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    launched = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    assert compare_ranks.print_comparison("0.1.0", patience_s=0.5) == 1
    told = capsys.readouterr()
    assert "rank 1 does not reach the store at 127.0.0.1:9" in told.err and not told.out
