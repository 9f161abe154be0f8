"""torchrun restarts the ranks of two agents after one was killed, as docs/launching.md has it."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 300  # nothing hangs
# Rank 1 is killed in the first attempt, while rank 0 does not notice: its agent restarts it all the same.
PROGRAM = """
import os, signal, sys, time
from pathlib import Path
import torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
import zero_opt
killed = Path(sys.argv[1]) / "killed"
first = not killed.exists()
param = torch.nn.Parameter(torch.ones(100))
optimizer = zero_opt.ShardedOptimizer([param], torch.optim.AdamW)
for step in range(4):
    param.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if first and step == 1:
        if dist.get_rank() == 1:
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(3600)
print("trained", dist.get_rank(), flush=True)
"""


def test_ranks_meet_again_after_a_restart(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    launcher = ["-m", "torch.distributed.run", "--nnodes=2", "--max-restarts=3", "--monitor-interval=0.1"]
    launcher += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1"]
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in (ROOT / "docs" / "launching.md").read_text()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    command = [sys.executable, *launcher, "program.py", str(tmp_path)]
    agents = [
        subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for _ in range(2)
    ]
    try:
        said = "".join(agent.communicate(timeout=SECONDS)[0] for agent in agents)
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], said
    assert sorted(re.findall(r"^trained (\d)$", said, re.MULTILINE)) == ["0", "1"], said
