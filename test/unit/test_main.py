"""The command line."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import zero_opt
from zero_opt.__main__ import main


def test_alone_it_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    told = capsys.readouterr().out
    assert "estimate" in told and "doctor" in told


def test_it_runs_as_a_module() -> None:
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-m", "zero_opt", "estimate", "1M", "--world", "2", "--device", "cpu"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"{zero_opt.estimate(1e6, 2, device='cpu')}\n"


def test_every_option_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "estimate 2e6 --world 3 --optimizer Adam --option amsgrad=True --option lr=0.1 --param-dtype bfloat16 "
        "--reduce-dtype float32 --device cuda --reduction at-step --bucket-mb 2 --offload worker --delay 1 --rank 2 "
        "--ranks-per-host 2 --between-hosts-dtype bf16"
    )
    assert main(words.split()) == 0
    same = zero_opt.estimate(
        2_000_000,
        3,
        torch.optim.Adam,
        reduction=zero_opt.AtStep(bucket_mb=2.0),
        offload=zero_opt.WorkerOffload(delay=1),
        precision=zero_opt.MixedPrecision(reduce_dtype=torch.float32, between_hosts_dtype=torch.bfloat16),
        param_dtype=torch.bfloat16,
        device="cuda",
        amsgrad=True,
        lr=0.1,
    ).on_hosts_of(2)
    assert "rank 2 of 3, 2 to a host, in MiB" in str(same.on_rank(2))
    assert capsys.readouterr().out == f"{same.on_rank(2)}\n"


def test_hosts_may_be_a_mesh(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "1e6", "--world", "4", "--ranks-per-host", "2", "--mesh", "--device", "cuda"]) == 0
    assert capsys.readouterr().out == f"{zero_opt.estimate(1e6, 4, device='cuda').on_mesh_of(2)}\n"


@pytest.mark.parametrize(("short", "name"), [("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32")])
def test_dtypes_have_short_names(short: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    told = []
    for dtype in (short, name):
        assert main(f"estimate 1e6 --device cpu --param-dtype {dtype} --reduce-dtype {dtype}".split()) == 0
        told.append(capsys.readouterr().out)
    assert told[0] == told[1] and name in told[0]


def test_masters_and_host_memory(capsys: pytest.CaptureFixture[str]) -> None:
    words = "estimate 1e6 --param-dtype bfloat16 --device cuda --offload cpu --ratio 0.5 --subgroup-mb 2 --master split"
    assert main([*words.split(), "--option", "fused=True"]) == 0
    offload, precision = zero_opt.CPUOffload(ratio=0.5, subgroup_mb=2.0), zero_opt.MixedPrecision("split")
    options = {"offload": offload, "precision": precision, "device": "cuda", "fused": True}
    same = zero_opt.estimate(1_000_000, 1, param_dtype=torch.bfloat16, **options)
    assert capsys.readouterr().out == f"{same}\n"


def test_a_second_bank_and_gradients_of_two_dtypes(capsys: pytest.CaptureFixture[str]) -> None:
    words = "estimate 1e6 --world 2 --param-dtype bfloat16 --device cpu --offload worker --speculate"
    assert main([*words.split(), "--reduction", "ddp-hook", "--accumulate-dtype", "float32"]) == 0
    same = zero_opt.estimate(
        1_000_000,
        2,
        reduction=zero_opt.DDPHook(),
        offload=zero_opt.WorkerOffload(speculate=True),
        precision=zero_opt.MixedPrecision(accumulate_dtype=torch.float32),
        param_dtype=torch.bfloat16,
        device="cpu",
    )
    assert capsys.readouterr().out == f"{same}\n"


def test_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "3e6", "--world", "2", "--device", "cuda", "--offload", "nvme", "--window-mb", "2"]) == 0
    same = zero_opt.estimate(3e6, 2, offload=zero_opt.NVMeOffload(".", window_mb=2.0), device="cuda")
    assert capsys.readouterr().out == f"{same}\n" and same.nvme_bytes > 12 * 3e6 / 2


def test_the_doctor_s_report_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    found = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert found["torch"]["status"] == "ok" and torch.__version__ in found["torch"]["found"]
    assert all(entry.keys() == {"status", "name", "found", "advice"} for entry in found.values())


@pytest.mark.parametrize(
    ("name", "says"), [("LBFGS", "evaluates the loss several times per step"), ("Optimizer", "is not a class")]
)
def test_classes_that_cannot_be_estimated(name: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(SystemExit):
        assert main(["estimate", "7B", "--world", "8", "--optimizer", name]) == 2
    assert says in capsys.readouterr().err


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.strip() == f"zero_opt {zero_opt.__version__}, torch {torch.__version__}"


def test_the_doctor_looks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    assert "native" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("-5", "whole number"),
        ("0", "whole number"),
        ("7.5", "whole number"),
        ("nan", "whole number"),
        ("inf", "whole number"),
        ("much", "7B or 350M"),
        ("1e6 --world 0", "world_size"),
        ("1e6 --world 99999999999999999999", "world_size"),
        ("1e6 --world -3", "world_size"),
        ("1e6 --world 2.5", "invalid int"),
        ("1e6 --world 2 --rank 2", "rank"),
        ("1e6 --offload foo", "invalid choice"),
        ("1e6 --offload worker --delay 7", "delay"),
        ("1e6 --offload worker --delay 1 --speculate", "speculate"),
        ("B", "7B or 350M"),
        ("1e12 --bucket-mb 1", "bucket_mb"),
        ("1e30", "elements must be at most"),
        ("1e30 --world 8 --bucket-mb 1e12", "elements must be at most"),
        ("1e6 --option params=3", "'params' is not an option of an optimizer class"),
        ("1e6 --option offload=None", "not an option"),
        ("1e6 --ratio 0.5", "--offload cpu, not of none"),
        ("1e6 --ratio 0", "--offload cpu, not of none"),
        ("1e6 --offload cpu --ratio 0", "ratio"),
        ("1e6 --offload cpu --subgroup-mb 0", "subgroup_mb"),
        ("1e6 --offload nvme --window-mb 0", "window_mb"),
        ("1e6 --offload cpu --window-mb 3", "--offload nvme, not of cpu"),
        ("1e6 --offload nvme --speculate", "--offload worker, not of nvme"),
        ("7X", "7B or 350M"),
        ("1e6 --accumulate-dtype int8", "accumulate_dtype"),
        ("1e6 --offload cpu --ratio 2", "ratio"),
        ("1e6 --master float16", "master_dtype"),
        ("1e6 --offload worker --optimizer RMSprop", "steps Adam"),
        ("1e6 --optimizer Foo", "not a class"),
        ("1e6 --optimizer SGD --world 0", "world_size"),
        ("1e6 --world 4 --ranks-per-host 0", "ranks_per_host"),
        ("1e6 --world 4 --ranks-per-host 3 --mesh", "pass a divisor"),
        ("1e6 --optimizer Adafactor", "shapes"),
        ("1e6 --param-dtype int8", "floating-point"),
        ("1e6 --param-dtype float31", "not a torch dtype"),
        ("1e6 --device moon", "device"),
        ("1e6 --device meta", "device"),
        ("1e6 --option lr", "Python value"),
        ("1e6 --option lr=-1", "learning rate"),
        ("1e6 --option nothing=1", "nothing"),
        ("1e6 --bucket-mb 0", "bucket_mb"),
        ("1e6 --bucket-mb 5 --reduction already-reduced", "not of --reduction already-reduced"),
        ("1e6 --reduction foo", "invalid choice"),
    ],
)
def test_nonsense_is_refused_by_name(words: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status: object = main(["estimate", *words.split()])
    except SystemExit as end:
        status = end.code
    assert status == 2
    assert told in capsys.readouterr().err


# "0.0015t" is trillions; small, since time grows with the number of buckets.
@pytest.mark.parametrize("text", ["1.07B", "4.02B", "8.03B", "0.1K", "7e9", "0.0015t", "350M"])
def test_sizes_of_models_are_whole_numbers(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", text, "--world", "8"]) == 0
    assert "AdamW" in capsys.readouterr().out
