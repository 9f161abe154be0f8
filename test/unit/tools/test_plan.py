"""Plans: what fits a machine, in which order, and what the command line makes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import zero_opt
from zero_opt.__main__ import main
from zero_opt.errors import ConfigConflict, ConfigError
from zero_opt.kernels import CPULion
from zero_opt.kernels.table import NATIVE_CLASSES, UPDATES
from zero_opt.placement.native_rules import say_fused
from zero_opt.tools import plan as planning
from zero_opt.tools.plan import PLANNED, Choice, Machines, plan

GB, TB = 1e9, 1e12
STATE_FORMS = planning._forms(torch.optim.AdamW, {})
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:matplotlib")


def machines(**given: Any) -> Machines:
    usual = {"device": "cuda", "world_size": 8, "ranks_per_host": 8, "device_nbytes": 80 * GB}
    return Machines(**{**usual, "host_nbytes": 512 * GB, "disk_nbytes": 2 * TB, **given})


def fitting(numel: float, **given: Any) -> list[Choice]:
    return [choice for choice in plan(numel, machines(**given)) if not choice.lacks]


def test_what_fits_is_what_has_room_everywhere() -> None:
    there = machines(device_nbytes=40 * GB, host_nbytes=256 * GB)
    choices = plan(13e9, there)
    for choice in choices:
        for place in ("device", "host", "nvme"):
            over = choice.total(place) - there.room(place)
            assert choice.lacks.get(place, 0) == max(0, round(over))
        assert choice.left == max(0, round(there.room("device") - choice.total("device")))
    assert [bool(choice.lacks) for choice in choices] == sorted(bool(choice.lacks) for choice in choices)
    assert any(choice.lacks for choice in choices) and not choices[0].lacks


def test_torchs_bits_come_first_and_then_the_shortest_step() -> None:
    found = fitting(7e9)
    worth = [(choice.says, choice.exposed_s) for choice in found]
    kinds = [says for says, _ in worth]
    assert kinds[0] == "fp32 state, torch's bits" and "one step late" in kinds[-1]
    for kind in set(kinds):
        there = [at for at, other in enumerate(kinds) if other == kind]
        assert there == list(range(there[0], there[-1] + 1))
        assert [worth[at][1] for at in there] == sorted(worth[at][1] for at in there)


def test_three_machines() -> None:
    """A model that fits, one whose state does not, and one whose state does not fit host memory either."""
    plain = fitting(1e9, world_size=1, ranks_per_host=1)[0]
    assert plain.offload == "none"
    host = fitting(7e9, world_size=1, ranks_per_host=1, device_nbytes=40 * GB, host_nbytes=256 * GB)[0]
    assert host.offload == "WorkerOffload(speculate=True)"
    disk = fitting(7e9, world_size=1, ranks_per_host=1, device_nbytes=40 * GB, host_nbytes=24 * GB)[0]
    assert disk.offload == "NVMeOffload(...)"
    assert not fitting(7e9, world_size=1, ranks_per_host=1, device_nbytes=10 * GB)
    sharded = fitting(70e9, world_size=64)[0]
    assert sharded.params == "FSDP2" and sharded.code.startswith("fully_shard(model")


@pytest.mark.parametrize("form", [STATE_FORMS[0], STATE_FORMS[2]], ids=lambda form: form.moments)
@pytest.mark.parametrize("placed", planning._PLACED[1:], ids=lambda placed: placed.name)
def test_large_numbers_are_as_estimated(placed: Any, form: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    there, numel = machines(world_size=2, ranks_per_host=2), 2.5e9
    found = planning._held(numel, there, placed, form, fsdp=False)
    monkeypatch.setattr(planning, "_MORE", 10**10)
    expected = planning._held(numel, there, placed, form, fsdp=False)
    for place, kinds in expected.items():
        for kind, nbytes in kinds.items():
            assert found[place][kind] == pytest.approx(nbytes, rel=0.01, abs=2**24)


@pytest.mark.parametrize("fsdp", [False, True])
def test_many_ranks_are_as_estimated(fsdp: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    there, numel = machines(world_size=24, ranks_per_host=8), 2e9
    for placed in planning._PLACED[:2]:
        found = planning._held(numel, there, placed, STATE_FORMS[0], fsdp=fsdp)
        with monkeypatch.context() as patch:
            patch.setattr(planning, "_RANKS", 24)
            expected = planning._held(numel, there, placed, STATE_FORMS[0], fsdp=fsdp)
        for place, kinds in expected.items():
            assert sum(found[place].values()) == pytest.approx(sum(kinds.values()), rel=0.02)


def test_every_native_update_can_be_planned() -> None:
    assert {UPDATES[cls] for cls in PLANNED} == set(UPDATES.values())
    assert set(NATIVE_CLASSES) <= {*PLANNED, *planning._COMPACT.values(), zero_opt.CPUSGD, zero_opt.CPUAdagrad}


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}])
def test_state_is_that_of_the_class_and_its_options(options: dict[str, float]) -> None:
    there = machines(world_size=1, ranks_per_host=1)
    choices = plan(1e8, there, torch.optim.SGD, **options)
    first = next(choice for choice in choices if choice.offload == "none")
    assert first.nbytes["device"].get("state", 0) == pytest.approx(4e8 if options else 0, abs=1e3)
    assert all(choice.says.startswith("fp32 state, torch's bits") for choice in choices)


def test_a_class_for_the_cpu_alone_needs_an_offload_elsewhere() -> None:
    on_device, on_host = (
        {choice.offload for choice in plan(1e8, machines(device=device), CPULion)} for device in ("cuda", "cpu")
    )
    assert on_host - on_device == {"none"} and on_device - on_host == {"CPUOffload()"}


@pytest.mark.parametrize("cls", PLANNED)
def test_a_class_is_fused_where_torch_has_that(cls: type[torch.optim.Optimizer]) -> None:
    for choice in plan(1e8, machines(), cls):
        of_torch = f"torch.optim.{cls.__name__}," in choice.code
        on_device = choice.offload == "none"
        assert ("fused=True" in choice.code) == (of_torch and not (on_device and cls is torch.optim.Adagrad))


@pytest.mark.parametrize("cls", PLANNED)
@pytest.mark.parametrize("number", range(3))
def test_the_line_of_code_runs_where_parameters_are_on_the_cpu(number: int, cls: type[torch.optim.Optimizer]) -> None:
    there = machines(device="cpu", world_size=1, ranks_per_host=1)
    choices = [choice for choice in plan(1e6, there, cls) if not choice.lacks]
    for choice in choices[number::3]:
        if "NVMeOffload" in choice.code:
            continue
        model = torch.nn.Linear(64, 64, dtype=torch.bfloat16)
        names: dict[str, Any] = {"model": model, "torch": torch, "zero_opt": zero_opt, "lr": 1e-3, "warmup": 2}
        exec(choice.code, names)
        model(torch.ones(2, 64, dtype=torch.bfloat16)).sum().backward()
        names["opt"].step()
        names["opt"].close()


@pytest.mark.parametrize("option", ["fused", "foreach"])
@pytest.mark.parametrize("value", [True, False])
def test_how_a_class_steps_is_not_for_the_user_to_say(option: str, value: bool) -> None:
    with pytest.raises(ConfigConflict, match=f"leave out {option}"):
        plan(1e8, machines(), **{option: value})


def test_a_host_has_no_more_ranks_than_there_are() -> None:
    with pytest.raises(ConfigError, match="16 ranks per host are more than all 8"):
        machines(ranks_per_host=16)


def test_on_the_cpu_all_is_host_memory() -> None:
    for choice in plan(1e8, machines(device="cpu", device_nbytes=0.0, world_size=2, ranks_per_host=2)):
        assert choice.total("device") == 0 < choice.total("host")
        assert choice.params == "on every rank" and choice.offload != "CPUOffload()"
        assert choice.left == round(256 * GB - choice.total("host"))


def _run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", *arguments]) == 0
    return capsys.readouterr().out


def test_the_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    given = ("100M", "--world", "2", "--device-memory", "1.5GB", "--host-memory", "16GiB", "--disk", "100GB")
    text = _run(capsys, *given)
    choices = json.loads(_run(capsys, *given, "--json"))
    first = choices[0]
    assert first["fits"] and f"1. {first['code']}" in text.splitlines()
    heading, row = text.splitlines()[2:4]
    assert heading.split()[-1] == "left" and row.split()[-1] == f"{first['left'] / 1e9:,.1f}"
    assert "device/1.5" in text and "host/8.6" in text and "nvme/50.0" in text
    pytest.importorskip("matplotlib")
    _run(capsys, *given, "--plot", str(tmp_path / "plan.png"))
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_line_takes_a_class_and_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    given = ("1M", "--device", "cpu", "--host-memory", "1GB", "--optimizer", "SGD", "--option", "momentum=0.9")
    lines = [choice["code"] for choice in json.loads(_run(capsys, *given, "--json"))]
    assert lines and all(
        "(model.parameters(), torch.optim.SGD, lr=lr, fused=True, momentum=0.9" in code for code in lines
    )
    rate = _run(capsys, *given, "--option", "lr=0.1")
    assert "momentum=0.9, lr=0.1" in rate and "lr=lr" not in rate


def test_the_command_line_logs_nothing(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    say_fused.cache_clear()
    _run(capsys, "1M", "--device", "cpu", "--host-memory", "1GB", "--disk", "1GB")
    assert not caplog.records


@pytest.mark.parametrize(
    ("memory", "place", "words"), [((40, 20, 0), "host", "in host memory"), ((1, 1, 999), "device", "on the device")]
)
def test_nothing_fits(capsys: pytest.CaptureFixture[str], memory: tuple[int, int, int], place: str, words: str) -> None:
    options = zip(("--device-memory", "--host-memory", "--disk"), memory, strict=True)
    given = ["7B", *(part for option, size in options if size for part in (option, f"{size}GB"))]
    choices = json.loads(_run(capsys, *given, "--json"))
    nearest = min(choices, key=lambda choice: sum(choice["lacks"].values()))
    assert list(nearest["lacks"]) == [place]
    said = _run(capsys, *given).splitlines()[-1]
    assert said.startswith(f"Nothing fits. The closest is offload {nearest['offload']} ({nearest['says']}, ")
    assert f"which lacks {nearest['lacks'][place] / 1e9:,.2f} GB {words}. Add ranks" in said


def test_devices_may_have_no_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert "Nothing fits." in _run(capsys, "1M", "--device-memory", "0GB", "--host-memory", "1GB")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["7B", "--host-memory", "1GB"], "--device cuda needs --device-memory"),
        (["0", "--device", "cpu", "--host-memory", "1GB"], "must be positive"),
        (["1e30", "--device", "cpu", "--host-memory", "1GB"], "elements must be at most"),
        (["inf", "--device", "cpu", "--host-memory", "1GB"], "elements must be at most"),
        (["7B", "--device", "tpu", "--device-memory", "80GB", "--host-memory", "1GB"], "torch device such as 'cuda'"),
        (["7B", "--device", "cpu", "--device-memory", "80GB", "--host-memory", "1GB"], "not for --device cpu"),
        (["7B", "--device", "cpu", "--host-memory", "1GB", "--world", "0"], "world_size must be at least 1"),
        (
            ["7B", "--device", "cpu", "--host-memory", "1GB", "--optimizer", "Muon"],
            "zero_opt.estimate() with the model takes other classes",
        ),
        (["7B", "--device", "cpu", "--host-memory", "1GB", "--option", "momentum=1"], "unexpected keyword"),
    ],
)
def test_mistakes(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *arguments]) == 2
    assert says in capsys.readouterr().err


def test_mistakes_in_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "7B", "--host-memory", "lots"])
    assert "is not a number of bytes with its unit, such as 80GB" in capsys.readouterr().err
    with pytest.raises(ConfigError):
        plan(float("nan"), machines())
