"""The snippets of the guides run as they stand, in order, in one program per guide."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

import zero_opt
from test.support.guides import DOCS, anchors, snippets
from test.support.harness import assert_bitwise, run_processes
from zero_opt.__main__ import main

PAGES = [*sorted(DOCS.parent.glob("*.md")), *sorted(DOCS.glob("*.md"))]


def table(guide: str, heading: str) -> list[list[str]]:
    """The cells of the first table under a heading, without its own."""
    section = (DOCS / guide).read_text().split(f"## {heading}\n")[1]
    rows = re.search(r"(?:^\|.*\n)+", section, re.M)
    assert rows is not None
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows[0].splitlines()[2:]]


def run(guide: str, folder: str) -> dict[str, Any]:
    """What the snippets of a guide define."""
    os.chdir(folder)
    names: dict[str, Any] = {}
    for snippet in snippets(guide):
        exec(compile(snippet, guide, "exec"), names)
    return names


def _saving_again(rank: int, world_size: int, folder: str) -> Any:
    """The guide's ways to save, used once more, while a plain optimizer has loaded what they wrote before."""
    names = run("checkpointing.md", folder)
    names["plain"].load_state_dict(names["checkpoint"]["opt"])
    loaded = copy.deepcopy(names["plain"].state_dict()["state"])
    inode = os.stat("checkpoint.pt").st_ino
    saving = [snippet for snippet in snippets("checkpointing.md") if re.search(r'save\(.*"checkpoint.pt"', snippet)]
    for snippet in saving:
        exec(compile(snippet, "checkpointing.md", "exec"), names)
    for param in names["model"].parameters():
        param.grad = torch.zeros_like(param)
    held = names["plain"].state_dict()["state"]
    same = all(torch.equal(loaded[index]["exp_avg"], held[index]["exp_avg"]) for index in loaded)
    names["plain"].step()
    names["opt"].close()
    return len(saving), same, inode != os.stat("checkpoint.pt").st_ino, os.path.exists("checkpoint.pt.new")


def test_saving_again_leaves_what_is_mapped(tmp_path: Path) -> None:
    """A file that is written over in place ends the process that has it mapped."""
    assert run_processes(2, _saving_again, str(tmp_path)) == [(2, True, True, False)] * 2


def _checkpointing(rank: int, world_size: int, folder: str) -> Any:
    names = run("checkpointing.md", folder)
    opt, saved = names["opt"], torch.load("checkpoint.pt", weights_only=True)
    assert_bitwise(opt.state_dict(), saved["opt"])  # as the last snippet loads it
    trained = not torch.equal(names["model"][0].weight, saved["model"]["0.weight"])
    names["model"](torch.ones(1, 300)).sum().backward()
    opt.step()
    during = {"opt": zero_opt.sharded_state_dict(opt)}
    dcp.load(during, checkpoint_id="checkpoint_async")
    zero_opt.load_sharded_state_dict(opt, during["opt"])
    opt.consolidate_state_dict(to=0)
    loaded = opt.state_dict() if rank == 0 else None
    opt.close()
    return saved["opt"], names["plain"].state_dict(), loaded, trained


def test_checkpointing(tmp_path: Path) -> None:
    found = run_processes(2, _checkpointing, str(tmp_path))
    for saved, plain, _, trained in found:
        assert len(saved["state"]) == 4 and int(saved["state"][0]["step"]) == 3
        assert_bitwise(plain, saved)
        assert trained
    assert_bitwise(found[0][2], found[0][0])


def _from_rank_0(rank: int, world_size: int, folder: str) -> Any:
    """The guide's way to set what rank 0 alone has, in a model and an optimizer that have gone on."""
    names = run("checkpointing.md", folder)
    model, opt = names["model"], names["opt"]
    getting, setting = (snippet for snippet in snippets("checkpointing.md") if "_rank_0)" in snippet)
    exec(compile(getting, "checkpointing.md", "exec"), names)
    given = copy.deepcopy((names["model_state"], names["opt_state"]))  # torch gives the parameters themselves
    names["model_state"], names["opt_state"] = copy.deepcopy(given)
    assert rank == 0 or given == ({}, {})
    model(torch.ones(1, 300)).sum().backward()
    opt.step()
    opt.zero_grad()
    exec(compile(setting, "checkpointing.md", "exec"), names)
    opt.consolidate_state_dict(to=0)
    held = opt.state_dict()["state"] if rank == 0 else None
    opt.close()
    return given, model.state_dict(), held


def test_what_rank_0_alone_has_is_set_on_all_ranks(tmp_path: Path) -> None:
    found = run_processes(2, _from_rank_0, str(tmp_path))
    (model_state, opt_state), _, held = found[0]
    for _, set_state, _ in found:
        assert_bitwise(dict(set_state), dict(model_state))
    assert_bitwise([*held.values()], [*opt_state["state"].values()])


def _fsdp(rank: int, world_size: int, folder: str) -> Any:
    opt = run("fsdp.md", folder)["opt"]
    state = [{key: value for key, value in entry.items() if key == "step"} for entry in opt.state.values()]
    opt.close()
    return state, torch.load("fsdp.pt", weights_only=True)


def test_fsdp(tmp_path: Path) -> None:
    for state, saved in run_processes(2, _fsdp, str(tmp_path)):
        assert [int(entry["step"]) for entry in state] == [4] * 4
        assert [tuple(entry["exp_avg"].shape) for entry in saved["state"].values()] == [(41, 300), (41,), (1, 41), (1,)]


def _tuning(rank: int, world_size: int, folder: str) -> list[str]:
    return list(run("tuning.md", folder)["exposed"])


def test_tuning(tmp_path: Path) -> None:
    """And its table says something of every cause of exposed seconds that the figures tell apart."""
    listed = {
        key for row in table("tuning.md", "Where the time goes") for key in re.findall(r"`(exposed/\w+)`", row[0])
    }
    known = {
        key for row in table("observing.md", "Figures of a step") for key in re.findall(r"`(exposed/\w+)`", row[0])
    }
    assert listed == known - {"exposed/total_s", "exposed/other_s"}
    for found in run_processes(2, _tuning, str(tmp_path)):
        assert set(found) <= known


@pytest.mark.parametrize("ranks", [1, 2])
def test_contributing(ranks: int, tmp_path: Path) -> None:
    """The placement of the page steps, and its figure is its own."""

    def counted(rank: int, world_size: int) -> float:
        count: float = run("../CONTRIBUTING.md", str(tmp_path))["counted"]
        return count

    assert run_processes(ranks, counted) == [3.0] * ranks


# ---------------------------------------------------------------------------------------------------------------------
# migrating

_SHAPES = {"0.weight": (40, 300), "0.bias": (40,), "2.weight": (3, 40), "2.bias": (3,)}


def _write_universal(folder: Path) -> list[dict[str, Tensor]]:
    """What DeepSpeed's two converters write, of the guide's model; per parameter what is in it."""
    generator = torch.Generator().manual_seed(3)
    written = []
    for name, shape in _SHAPES.items():
        state = {key: torch.rand(shape, generator=generator) for key in ("fp32", "exp_avg", "exp_avg_sq")}
        place = folder / "universal" / "zero" / name
        place.mkdir(parents=True)
        for key, value in state.items():
            torch.save({"cat_dim": 0, "param": value}, place / f"{key}.pt")
        torch.save(torch.tensor(7.0), place / "step.pt")
        written.append({**state, "step": torch.tensor(7.0)})
    (folder / "weights").mkdir()
    weights = {name: state["fp32"] for name, state in zip(_SHAPES, written, strict=True)}
    torch.save(weights, folder / "weights" / "pytorch_model.bin")
    return written


def _migrating(rank: int, world_size: int, folder: str) -> Any:
    names = run("migrating.md", folder)
    opt, model = names["opt"], names["model"]
    loaded, params = opt.state_dict(), [param.detach().clone() for param in model.parameters()]
    names["train"](model, opt)
    opt.close()
    return loaded, params, [param.detach() for param in model.parameters()]


def test_migrating(tmp_path: Path) -> None:
    written = _write_universal(tmp_path)
    runs = run_processes(2, _migrating, str(tmp_path))
    for loaded, params, trained in runs:
        masters = {index: {**entry, "master": entry["fp32"]} for index, entry in enumerate(written)}
        for entry in masters.values():
            del entry["fp32"]
        assert_bitwise(loaded["state"], masters)
        assert_bitwise(params, [entry["fp32"].bfloat16() for entry in written])
        assert_bitwise(trained, runs[0][2])
        assert not torch.equal(trained[0], params[0])


@pytest.mark.parametrize("option", ["parameters_as_bucket_view", "overlap_with_ddp"])
def test_options_of_zero_redundancy_optimizer_are_refused(option: str) -> None:
    assert option in (DOCS / "migrating.md").read_text()
    params = [torch.nn.Parameter(torch.ones(2))]
    with pytest.raises(zero_opt.ConfigTypeError, match=option):
        zero_opt.ShardedOptimizer(params, torch.optim.AdamW, **{option: True})


# ---------------------------------------------------------------------------------------------------------------------
# reference


def _listed(heading: str, number: int = 0) -> dict[str, str]:
    """Of a table under a heading of the reference, the second column by name; options have none."""
    section = re.split(rf"^#+ {heading}\n", (DOCS / "reference.md").read_text(), flags=re.M)[1]
    section = re.split(r"^#+ ", section, maxsplit=1, flags=re.M)[0]
    rows = re.findall(r"(?:^\|.*\n)+", section, re.M)[number].splitlines()[2:]
    cells = [[cell.strip().strip("`") for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows]
    return {name: second for name, second, *_ in cells}


def _told(value: object) -> str:
    """How the reference shows a default."""
    if value in (inspect.Parameter.empty, dataclasses.MISSING):
        return ""
    if isinstance(value, (zero_opt.Overlapped, zero_opt.MixedPrecision, zero_opt.Checks)):
        return f"{type(value).__name__}()"
    return value.__name__ if isinstance(value, type) else repr(value)


POLICIES = {
    zero_opt.Overlapped: ("Reductions", 0),
    zero_opt.AtStep: ("Reductions", 0),
    zero_opt.DDPHook: ("Reductions", 0),
    zero_opt.AlreadyReduced: ("Reductions", 1),
    zero_opt.CPUOffload: ("Offloads", 0),
    zero_opt.WorkerOffload: ("Offloads", 1),
    zero_opt.NVMeOffload: ("Offloads", 2),
    zero_opt.Selective: ("Selective", 0),
    zero_opt.MixedPrecision: ("MixedPrecision", 0),
    zero_opt.Checks: ("Checks", 0),
    zero_opt.AdamState: ("AdamState", 0),
}


def test_every_policy_is_in_the_reference() -> None:
    public = [getattr(zero_opt, name) for name in zero_opt.__all__]
    frozen = {kind for kind in public if dataclasses.is_dataclass(kind) and kind.__module__ == "zero_opt.policies"}
    assert frozen == set(POLICIES)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.__name__)
def test_the_reference_has_every_field_and_its_default(policy: Any) -> None:
    assert _listed(*POLICIES[policy]) == {field.name: _told(field.default) for field in dataclasses.fields(policy)}


@pytest.mark.parametrize("called", [zero_opt.ShardedOptimizer, zero_opt.estimate], ids=lambda called: called.__name__)
def test_the_reference_has_every_argument_and_its_default(called: Any) -> None:
    known = inspect.signature(called).parameters.values()
    assert _listed(called.__name__) == {argument.name: _told(argument.default) for argument in known}


def test_the_reference_has_every_option_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["estimate", "--help"])
    shown = re.findall(r"^  (--[\w-]+|numel)\b", capsys.readouterr().out, re.M)
    assert list(_listed("Command line")) == [*dict.fromkeys(shown)]


def _shards_within_a_host(rank: int, world_size: int, folder: str) -> Any:
    names = run("reference.md", folder)
    model, opt = names["model"], names["opt"]
    before = copy.deepcopy(model)
    ddp = torch.nn.parallel.DistributedDataParallel(before)
    trained = [(names["ddp"], opt), (ddp, torch.optim.AdamW(ddp.parameters(), lr=3e-4))]
    data = torch.randn(3, 8, 300, generator=torch.Generator().manual_seed(rank))
    for batch in data:
        for module, stepped in trained:
            module(batch).square().mean().backward()
            stepped.step()
            stepped.zero_grad()
    held = opt.memory_report()["state"]
    opt.close()
    names["staged"].close()
    return [[param.detach() for param in held.parameters()] for held in (model, before)], held


def test_shards_within_a_host(tmp_path: Path) -> None:
    """Every rank trains as under DDP, and has half of the state where two of four ranks share it."""
    runs = run_processes(4, _shards_within_a_host, str(tmp_path))
    for (ours, plain), held in runs:
        assert_bitwise(ours, plain)
        assert held < 0.6 * 8 * sum(param.numel() for param in plain)


# ---------------------------------------------------------------------------------------------------------------------
# all pages


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_arguments_that_are_named_exist(page: Path) -> None:
    for name, arguments in re.findall(r"\b([A-Z]\w+)\(([^()]*)\)", page.read_text()):
        if name in zero_opt.__all__ and not name.endswith("Error"):
            known = inspect.signature(getattr(zero_opt, name)).parameters
            unknown = [a for a in re.findall(r"\b(\w+)=", arguments) if a not in known]
            wrapped = any(kind.kind is kind.VAR_KEYWORD for kind in known.values())
            assert wrapped or not unknown, f"{name} has no {unknown}"


def test_bytes_of_every_form_are_those_of_the_estimate(tmp_path: Path) -> None:
    """And the guide's snippets run."""
    numel, dtypes = 1 << 20, {"bf16": torch.bfloat16, "fp32": torch.float32}
    for parameters, code, nbytes, *_ in table("memory.md", "State per element"):
        form = eval(code.strip("`"), {"zero_opt": zero_opt})
        for offload in (None, zero_opt.CPUOffload(), zero_opt.NVMeOffload(tmp_path), zero_opt.WorkerOffload()):
            found = zero_opt.estimate(
                numel, 2, zero_opt.CPUAdamW, offload=offload, param_dtype=dtypes[parameters], device="cpu", state=form
            )
            held = sum(found.on_rank(rank).nbytes(kind) for rank in range(2) for kind in ("state", "masters"))
            separate = 4 * (parameters == "fp32" and isinstance(offload, zero_opt.WorkerOffload))
            assert f"{held / numel - separate:.2f}" == nbytes, (parameters, form, offload)
    run_processes(1, lambda rank, world_size: run("memory.md", str(tmp_path)) and None)
