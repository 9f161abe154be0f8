"""The benchmark of the command line, on a model so small that its figures mean nothing."""

from __future__ import annotations

import json
import math
import resource
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

import zero_opt
from test.support.failures import PATIENCE_S
from zero_opt.__main__ import main
from zero_opt.errors import ConfigError
from zero_opt.tools import bench as benching
from zero_opt.tools.bench import Bench, Way, report, run


@pytest.mark.filterwarnings("ignore::DeprecationWarning:matplotlib")
def test_every_way_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--numel", "40K", "--rows", "4", "--seconds", "0.1", "--param-dtype", "bf16", "--path", str(tmp_path)]
    assert main(["bench", *given, "--json"]) == 0
    timings = json.loads(capsys.readouterr().out)
    names = {timing["name"] for timing in timings}
    assert names == {way.name for way in benching.ways(Bench(4e4, param_dtype=torch.bfloat16, path=str(tmp_path)))}
    assert {"DDP + AdamW", "Overlapped()", "WorkerOffload(speculate=True)", f"NVMeOffload({str(tmp_path)!r})"} <= names
    assert all(timing["step_s"] > 0 for timing in timings)
    exposed = [timing["exposed_s"] for timing in timings]
    assert exposed == sorted(exposed)


def test_the_report_has_the_lines_to_write(tmp_path: Path) -> None:
    timings = [
        benching.Timing("ours", "zero_opt.A()", 0.3, 0.1, 2**21),
        benching.Timing("DDP", "", 0.4, 0.2, 2**20),
        benching.Timing("small", "zero_opt.B()", 0.5, 0.3, 2**20),
    ]
    lines = report(timings).splitlines()
    assert lines[1].split() == ["ours", "300.0", "100.0", "2"]
    assert lines[-2:] == ["  opt = zero_opt.A()", "  opt = zero_opt.B()"]
    pytest.importorskip("matplotlib")
    benching.picture(timings, str(tmp_path / "bench.png"))
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("way", benching.ways(Bench(1e4, ranks=1)), ids=lambda way: way.name)
def test_the_code_of_a_way_is_what_was_measured(way: Way) -> None:
    if not way.code:
        return
    model, twin = (nn.Linear(8, 8, bias=False) for _ in range(2))
    names: dict[str, Any] = {"zero_opt": zero_opt, "torch": torch, "model": model, "lr": 1e-3}
    written = eval(way.code, names)
    _, measured = way.make(twin)
    ours, theirs = (dict(optimizer._config.entries()) for optimizer in (written, measured))
    assert ours == theirs
    written.close()
    measured.close()


def test_a_rank_that_fails_ends_the_run() -> None:
    with pytest.raises(ProcessRaisedException, match="1152921504606846976"):  # no memory for so long a batch
        run(Bench(1e4, rows=1 << 60, seconds=0.1))


def test_what_a_rank_raises_is_one_line() -> None:
    few = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (40, 40))
    command = [sys.executable, "-m", "zero_opt", "bench", "--numel", "40K", "--rows", "4", "--seconds", "0.1"]
    limits: Any = {"preexec_fn": few, "timeout": PATIENCE_S}
    ended = subprocess.run(command, **limits, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "error: rank" in ended.stderr and "file descriptors" in ended.stderr, ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--param-dtype int8", "param_dtype must be one of float32, bfloat16, float16, got torch.int8"),
        ("--param-dtype complex64", "param_dtype must be one of"),
        ("--param-dtype fp64", "param_dtype must be one of"),
        ("--path /nonexist", "no file for optimizer state can be made in '/nonexist'"),
        ("--path /etc/passwd", "no file for optimizer state can be made in '/etc/passwd'"),
        ("--device tpu", "torch device such as 'cuda'"),
        ("--numel 1e15", "need at least 30,517,578,325.0 MiB of host memory, and "),
        ("--numel 100K --ranks 100000", "100000 ranks with 100000 elements each need at least 10,"),
        ("--device cuda --ranks 1000", f"1000 ranks need as many cuda devices, and torch {torch.__version__} finds "),
        ("--numel 1e30", "elements must be at most"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_ranks_are_started(
    words: str, told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benching, "start_processes", None)
    assert main(["bench", *words.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and told in error and error.count("\n") == 1


def test_ranks_of_a_launcher_start_no_bench(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benching, "start_processes", None)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["bench"]) == 2
    assert "run python -m zero_opt bench --ranks N without it" in capsys.readouterr().err


NUMBERS = ({"numel": 0.0}, {"numel": math.inf}, {"ranks": 0}, {"rows": 0}, *({"seconds": s} for s in (0, -1, math.inf)))


@pytest.mark.parametrize("given", [*NUMBERS, {"seconds": math.nan}])
def test_mistakes(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Bench(**{"numel": 1e4, **given})


def test_the_rank_that_has_failed_first_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ranks:
        processes = (SimpleNamespace(pid=4710), SimpleNamespace(pid=4711))

        def join(self, timeout: float) -> bool:
            raise ProcessRaisedException("rank 1 ended because of rank 0, and before it", 1, 4711)

    def fail(*_: object) -> None:
        raise KeyError("of rank 0")

    failures = mp.get_context("spawn").SimpleQueue()
    monkeypatch.setattr(benching, "_measure_all", fail)
    with pytest.raises(KeyError):
        benching._rank(0, Bench(1e4), "", None, None, failures)  # type: ignore[arg-type]
    failures.put((1, "PeerLost", "rank 0 has ended"))
    with pytest.raises(ProcessRaisedException, match=r"(?s)in fail.*KeyError: 'of rank 0'") as raised:
        benching._ended(Ranks(), failures)
    assert (raised.value.error_index, raised.value.error_pid) == (0, 4710)


def test_memory_is_measured_while_threads_end() -> None:
    over = threading.Event()

    def start_threads() -> None:
        while not over.is_set():
            brief = threading.Thread(target=lambda: None)
            brief.start()
            brief.join()

    threads = [threading.Thread(target=start_threads) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        assert all(benching._resident(torch.device("cpu")) > 0 for _ in range(500))
    finally:
        over.set()
        for thread in threads:
            thread.join(PATIENCE_S)


@pytest.mark.parametrize(("code", "name", "how"), [(-9, "SIGKILL", "SIGKILL"), (3, None, "exit code 3")])
def test_a_rank_that_ends_without_an_error_is_named(code: int, name: str | None, how: str) -> None:
    class Ranks:
        def join(self, timeout: float) -> bool:
            raise ProcessExitedException("process 1 ended", 1, 4711, code, name)

    with pytest.raises(zero_opt.PeerLost, match=rf"rank 1 was ended \({how}\)"):
        benching._ended(Ranks(), None)
