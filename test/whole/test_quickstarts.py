"""The programs of docs/quickstarts.md and the lines of docs/choosing.md run as they stand."""

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
from test.support.harness import run_processes

PROGRAMS = snippets("quickstarts.md")
LINES = re.findall(r"`(zero_opt\.ShardedOptimizer\(.*\))` \|$", (DOCS / "choosing.md").read_text(), re.M)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def _program(rank: int, world_size: int, number: int, folder: str, port: int) -> None:
    """Run a program as torchrun would start it; a rank alone as Python would."""
    os.chdir(folder)
    if world_size > 1:
        named = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
        os.environ.update({name: str(value) for name, value in named.items()})
        os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"})
    exec(compile(PROGRAMS[number], "quickstarts.md", "exec"), {"__name__": "__main__"})


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
    run_processes(ranks, _program, number, str(tmp_path), _free_port(), backend=None)
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


def test_every_program_is_run() -> None:
    assert len(PROGRAMS) == 5


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
