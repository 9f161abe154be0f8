"""Examples that no other test runs, on small sizes."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest

from docs.examples import small_gpu
from test.support.harness import run_processes

# 3.2 MB of parameters, as much of gradients, 19 MB of state, and 12 MB of windows for a file.
SIZES = ["--width", "512", "--layers", "6", "--steps", "2"]


def _example(rank: int, world_size: int, arguments: list[str]) -> tuple[int, str]:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = small_gpu.main(arguments)
    return code, said.getvalue()


@pytest.mark.parametrize(
    ("device", "host", "chosen"),
    [
        pytest.param("1", "1", "beside the parameters", id="all_fits"),
        pytest.param("0.015", "1", "CPUOffload", id="not_the_device"),
        pytest.param("0.015", "0.014", "NVMeOffload", id="nor_the_host"),
    ],
)
def test_one_gpu_that_is_too_small(device: str, host: str, chosen: str, tmp_path: Path) -> None:
    """It takes the first way that fits, and ends with the same bits."""
    limits = ["--device-memory", device, "--host-memory", host, "--directory", str(tmp_path)]
    code, said = run_processes(1, _example, [*SIZES, *limits], backend=None)[0]
    assert code == 0
    assert f"state: {chosen}\n" in said and said.count("step 1: loss") == 2


def test_nothing_fits(tmp_path: Path) -> None:
    with contextlib.redirect_stdout(io.StringIO()), pytest.raises(SystemExit, match="nothing fits"):
        small_gpu.main([*SIZES, "--device-memory", "0.001", "--directory", str(tmp_path)])
