"""The programs of docs/quickstarts.md, the lines of docs/choosing.md and those of README.md run as they stand."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.run as launcher

import zero_opt
from test.support.guides import DOCS, snippets
from test.support.harness import assert_bitwise, run_processes

_BLOCKS = snippets("quickstarts.md")
RESUMING = [block.strip() for block in _BLOCKS if block.lstrip().startswith("checkpoint = ")]
PROGRAMS = [block for block in _BLOCKS if block.strip() not in RESUMING]
README = snippets("../README.md")
LINES = re.findall(r"`(zero_opt\.ShardedOptimizer\(.*\))` \|$", (DOCS / "choosing.md").read_text(), re.M)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def _start(rank: int, world_size: int, folder: str, port: int) -> None:
    """Prepare this process as torchrun would; a rank alone as Python would."""
    os.chdir(folder)
    if world_size > 1:
        named = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
        os.environ.update({name: str(value) for name, value in named.items()})
        os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})


def _program(rank: int, world_size: int, program: str, folder: str, port: int) -> None:
    _start(rank, world_size, folder, port)
    exec(compile(program, "quickstarts.md", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize(
    ("number", "ranks"),
    [
        pytest.param(0, 1, id="one_gpu"),
        pytest.param(1, 2, id="several_gpus"),
        pytest.param(2, 2, id="ddp"),
        pytest.param(3, 2, id="fsdp2"),
        pytest.param(4, 2, id="cpu_cluster"),
    ],
)
def test_program(number: int, ranks: int, tmp_path: Path) -> None:
    """It ends well, and a plain optimizer goes on with what it has saved, where that is one file."""
    run_processes(ranks, _program, PROGRAMS[number], str(tmp_path), _free_port(), backend=None)
    if number == 3:
        assert list((tmp_path / "checkpoint").glob("*.distcp"))
        return
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert [int(entry["step"]) for entry in saved["opt"]["state"].values()] == [3] * 4
    model = torch.nn.Sequential(torch.nn.Linear(300, 40), torch.nn.Tanh(), torch.nn.Linear(40, 3))
    model.load_state_dict(saved["model"])
    plain = torch.optim.AdamW(model.parameters())
    plain.load_state_dict(saved["opt"])
    model(torch.ones(1, 300)).sum().backward()
    plain.step()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_program_resumes(ranks: int, tmp_path: Path) -> None:
    """The lines for that stand before the loop, after a run without them; steps count on, and parameters are loaded."""
    program, loop = PROGRAMS[ranks - 1], "for _ in range(3):"
    run_processes(ranks, _program, program, str(tmp_path), _free_port(), backend=None)
    first = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    # The second run begins with another model; with a rate of 0 it stays as it was loaded.
    added = f"{RESUMING[ranks - 1]}\nopt.param_groups[0]['lr'] = 0.0\n{loop}"
    resuming = program.replace("manual_seed(0)", "manual_seed(1)").replace(loop, added)
    run_processes(ranks, _program, resuming, str(tmp_path), _free_port(), backend=None)
    second = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert [int(entry["step"]) for entry in second["opt"]["state"].values()] == [6] * 4
    assert_bitwise(second["model"], first["model"])


def test_every_program_is_run() -> None:
    assert len(PROGRAMS) == 5 and len(RESUMING) == 2


def _readme(rank: int, world_size: int, number: int, folder: str, port: int) -> list[bool]:
    """Whether each parameter has changed, in a program around what the README has of a situation."""
    _start(rank, world_size, folder, port)
    code = README[number]
    if world_size > 1 and "init_process_group" not in code:
        torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.Tanh(), torch.nn.Linear(40, 4))
    names: dict[str, Any] = {"torch": torch, "zero_opt": zero_opt, "model": model, "device": "cpu"}
    names["batches"] = list(torch.randn(3, 8, 30))
    before = [param.detach().clone() for param in model.parameters()]
    exec(compile(code, "README.md", "exec"), names)
    opt, trained = names["opt"], names.get("ddp", names["model"])
    if "opt.step()" not in code:
        for batch in names["batches"]:
            trained(batch.to(next(model.parameters()).dtype)).mean().backward()
            opt.step()
    opt.close()
    after = [getattr(param, "full_tensor", param.detach)() for param in model.parameters()]
    return [not torch.equal(old.to(new.dtype), new) for old, new in zip(before, after, strict=True)]


@pytest.mark.parametrize("number", range(len(README)))
def test_lines_of_the_readme(number: int, tmp_path: Path) -> None:
    ranks = 1 if number == 0 else 2
    found = run_processes(ranks, _readme, number, str(tmp_path), _free_port(), backend=None)
    assert found == [[True] * 4] * ranks
    if number == 1:
        saved = torch.load(tmp_path / "opt.pt", weights_only=True)
        assert [int(entry["step"]) for entry in saved["state"].values()] == [3] * 4


def test_the_readme_has_each_situation() -> None:
    assert len(README) == 4


def _lines(rank: int, world_size: int, folder: str) -> list[Any]:
    os.chdir(folder)
    trained = []
    for line in LINES:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.Tanh(), torch.nn.Linear(40, 3))
        if "MixedPrecision" in line:
            model.bfloat16()
        before = [param.detach().clone() for param in model.parameters()]
        opt = eval(line, {"zero_opt": zero_opt, "torch": torch, "model": model})
        for _ in range(2):
            model(torch.ones(4, 30, dtype=before[0].dtype)).square().sum().backward()
            opt.step()
            opt.zero_grad()
        opt.flush()
        trained.append([not torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True)])
        opt.close()
    return trained


def test_every_line_trains(tmp_path: Path) -> None:
    assert len(LINES) == 9
    assert run_processes(2, _lines, str(tmp_path)) == [[[True] * 4] * 9] * 2


def test_the_slurm_script_starts_every_host(tmp_path: Path) -> None:
    """torchrun takes what each host's task starts: first whether ranks reach each other, then the program."""
    for name, code in (("scontrol", "echo first; echo second"), ("srun", 'printf "%s\\n" "$#" "$@"')):
        tool = tmp_path / name
        tool.write_text(f"#!/bin/bash\n{code}\n")
        tool.chmod(0o755)
    job = {"SLURM_JOB_NODELIST": "two", "SLURM_NNODES": "2", "SLURM_JOB_ID": "7", "RANKS_PER_NODE": "3"}
    ran = subprocess.run(
        ["bash", str(DOCS / "examples" / "train.sbatch"), "program.py", "--lr", "1"],
        env={**os.environ, **job, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    words, commands = ran.stdout.splitlines(), []
    while words:
        count = int(words.pop(0))
        commands.append([words.pop(0) for _ in range(count)])
    assert [command[0] for command in commands] == ["torchrun", "torchrun"]
    doctor, program = (launcher.parse_args(command[1:]) for command in commands)
    assert doctor.module and [doctor.training_script, *doctor.training_script_args] == ["zero_opt", "doctor", "--ranks"]
    assert [program.training_script, *program.training_script_args] == ["program.py", "--lr", "1"]
    for started in (doctor, program):
        assert (started.nnodes, started.nproc_per_node, started.rdzv_id) == ("2", "3", "7")
        assert started.rdzv_endpoint == "first:29500"
