"""Edits of compact state between steps, under every placement: taken over, and nothing else is changed by them."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_opt
from test.support.compact_training import FORMS, Form
from test.support.harness import assert_bitwise, run_processes
from test.support.scenario import values
from zero_opt import StateDictError

NUMEL, STEPS = 200, 5
PLACEMENTS: dict[str, Callable[[str], Any]] = {
    "cpu": lambda _: zero_opt.CPUOffload(),
    "worker": lambda _: zero_opt.WorkerOffload(threads=1),
    "worker, delay": lambda _: zero_opt.WorkerOffload(threads=1, delay=1),
    "worker, speculating": lambda _: zero_opt.WorkerOffload(threads=1, speculate=True),
    "nvme": lambda folder: zero_opt.NVMeOffload(folder, threads=1),
}
KEPT = {
    **{name: FORMS[name] for name in ("block8", "bfloat16, split", "block8, master")},
    "bfloat16, master": Form(torch.bfloat16, zero_opt.AdamState("bfloat16", "float32")),
}


def _replace(optimizer: zero_opt.ShardedOptimizer, param: nn.Parameter) -> None:
    optimizer.state[param] = dict(optimizer.state[param])


# Edits that change no value.
EDITS: dict[str, Callable[[zero_opt.ShardedOptimizer, nn.Parameter], object]] = {
    "step": lambda optimizer, param: optimizer.state[param]["step"].add_(0),
    "exp_avg": lambda optimizer, param: optimizer.state[param]["exp_avg"].mul_(1.0),
    "exp_avg_sq": lambda optimizer, param: optimizer.state[param]["exp_avg_sq"].mul_(1.0),
    "entry": _replace,
}


def _train(
    form: Form, offload: Any, edit: Callable[[zero_opt.ShardedOptimizer, nn.Parameter], object] | None
) -> tuple[Tensor, Any]:
    param = nn.Parameter(values(3, 0, 0, 0, (NUMEL,)).to(form.dtype, copy=True))
    optimizer = zero_opt.ShardedOptimizer([param], zero_opt.CPUAdamW, lr=1e-4, state=form.state, offload=offload)
    for step in range(STEPS):
        param.backward(values(step, 1, 0, 0, (NUMEL,)).to(form.dtype))
        optimizer.step()
        optimizer.zero_grad()
        optimizer.flush()
        if edit is not None and optimizer.state.get(param):
            edit(optimizer, param)
    state = {key: value.clone() for key, value in optimizer.state.get(param, {}).items()}
    optimizer.close()
    return param.detach(), state


def _edited_and_not(rank: int, world_size: int, folder: str, kind: str) -> Any:
    def train(form: Form, edit: Any) -> Any:
        return _train(form, PLACEMENTS[kind](folder), edit)

    return {
        name: (train(form, None), {key: train(form, edit) for key, edit in EDITS.items()})
        for name, form in KEPT.items()
    }


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("kind", PLACEMENTS)
def test_an_edit_that_changes_no_value_changes_no_bit(kind: str, world_size: int, tmp_path: Path) -> None:
    for rank, found in enumerate(run_processes(world_size, _edited_and_not, str(tmp_path), kind)):
        for name, (plain, edited) in found.items():
            for key, result in edited.items():
                assert_bitwise(result, plain, f"{name}, {key}, rank {rank}")


def _halved(form: Form, offload: Any) -> tuple[Tensor, Any]:
    return _train(form, offload, lambda optimizer, param: optimizer.state[param]["master"].mul_(0.5))


@pytest.mark.parametrize("kind", [kind for kind in PLACEMENTS if kind != "cpu"])
@pytest.mark.parametrize("name", ["block8, master", "bfloat16, master"])
def test_a_master_that_was_written_to_is_stepped(name: str, kind: str, tmp_path: Path) -> None:
    expected = _halved(KEPT[name], zero_opt.CPUOffload())
    start = values(3, 0, 0, 0, (NUMEL,))
    assert expected[0].float().abs().max() < start.abs().max() / 8  # it was halved after each step but the last
    assert_bitwise(_halved(KEPT[name], PLACEMENTS[kind](str(tmp_path))), expected)


def _write_to_a_split_master(rank: int, world_size: int, folder: str, kind: str) -> Any:
    form = FORMS["bfloat16, split"]
    params = [nn.Parameter(values(3, 0, 0, at, (NUMEL,)).to(form.dtype, copy=True)) for at in range(2)]
    optimizer = zero_opt.ShardedOptimizer(
        params, zero_opt.CPUAdamW, lr=1e-4, state=form.state, offload=PLACEMENTS[kind](folder)
    )

    def step(number: int) -> None:
        torch.autograd.backward(params, [values(number, 1, 0, at, (NUMEL,)).to(form.dtype) for at in range(2)])
        optimizer.step()
        optimizer.zero_grad()
        optimizer.flush()

    step(0)

    def masters() -> list[Tensor]:
        return [optimizer.state[param]["master"] for param in params if "master" in optimizer.state[param]]

    before = [master.clone() for master in masters()]
    if rank == 0:
        masters()[0].mul_(0.5)
    torch.autograd.backward(params, [values(1, 1, 0, at, (NUMEL,)).to(form.dtype) for at in range(2)])
    with pytest.raises(StateDictError, match=r"(?s)the split master of .* was written to, and has been left as it was"):
        optimizer.step()
    after = [master.clone() for master in masters()]
    optimizer.step()  # with the gradients that were left
    optimizer.flush()
    optimizer.close()
    return before, after


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("kind", PLACEMENTS)
def test_a_write_to_a_split_master_is_an_error_on_every_rank(kind: str, world_size: int, tmp_path: Path) -> None:
    for before, after in run_processes(world_size, _write_to_a_split_master, str(tmp_path), kind):
        assert_bitwise(after, before)


def _saved_and_loaded(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda state: pickle.loads(pickle.dumps(state)), _saved_and_loaded])
@pytest.mark.parametrize("kind", ["cpu", "worker"])
def test_copies_of_an_entry_are_dicts_of_values_as_they_are(kind: str, copied: Callable[[Any], Any]) -> None:
    param = nn.Parameter(values(3, 0, 0, 0, (NUMEL,)))
    state = zero_opt.AdamState("block8")
    optimizer = zero_opt.ShardedOptimizer([param], zero_opt.CPUAdamW, lr=0.1, state=state, offload=PLACEMENTS[kind](""))
    for step in range(2):
        param.backward(values(step, 1, 0, 0, (NUMEL,)))
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            saved = copied(optimizer.state[param])
            expected = {key: value.clone() for key, value in optimizer.state[param].items()}
    assert_bitwise(saved, expected)
    entry = optimizer.state[param]
    assert all(isinstance(made, dict) for made in (saved, copy.copy(entry), entry.copy(), entry | {}))
    optimizer.close()


@pytest.mark.parametrize("key", ["exp_avg", "step"])
@pytest.mark.parametrize("kind", ["cpu", "worker"])
def test_what_is_no_value_is_refused_though_none_was_read(kind: str, key: str) -> None:
    param = nn.Parameter(values(3, 0, 0, 0, (NUMEL,)))
    state = zero_opt.AdamState("block8")
    optimizer = zero_opt.ShardedOptimizer([param], zero_opt.CPUAdamW, lr=0.1, state=state, offload=PLACEMENTS[kind](""))
    param.backward(values(0, 1, 0, 0, (NUMEL,)))
    optimizer.step()
    optimizer.state[param][key] = None
    with pytest.raises(zero_opt.StateDictError):
        optimizer.step()
    optimizer.close()


@pytest.mark.parametrize("count", [-1.0, torch.nan, torch.inf])
def test_a_step_count_that_is_none_is_refused(count: float) -> None:
    param = nn.Parameter(values(3, 0, 0, 0, (NUMEL,)))
    optimizer = zero_opt.ShardedOptimizer([param], torch.optim.AdamW, fused=True, offload=PLACEMENTS["worker"](""))
    param.backward(values(0, 1, 0, 0, (NUMEL,)))
    optimizer.step()
    optimizer.state[param]["step"].fill_(count)
    with pytest.raises(zero_opt.StateDictError, match="step count of parameter 0"):
        optimizer.step()
    optimizer.close()


def _below_0(rank: int, world_size: int, folder: str, kind: str) -> None:
    """Load squares below 0 on rank 0 alone, as a state dict and cut by rows, and write them to the state."""
    offload = None if kind == "device" else PLACEMENTS[kind](folder)
    for form in (FORMS["block8"], FORMS["block8, split"], Form(torch.float32, zero_opt.AdamState())):
        params = [nn.Parameter(values(3, 0, 0, at, (NUMEL,)).to(form.dtype, copy=True)) for at in range(2)]
        optimizer = zero_opt.ShardedOptimizer(params, zero_opt.CPUAdamW, lr=0.1, state=form.state, offload=offload)
        torch.autograd.backward(params, [values(0, 1, 0, at, (NUMEL,)).to(form.dtype) for at in range(2)])
        optimizer.step()
        optimizer.zero_grad()
        optimizer.flush()
        saved, cut = optimizer.state_dict(), zero_opt.sharded_state_dict(optimizer)
        saved["state"][1]["exp_avg_sq"][7] *= -1 if rank == 0 else 1
        rows = cut["state"][1]["exp_avg_sq"]
        (rows.to_local() if world_size > 1 else rows)[7] *= -1 if rank == 0 else 1
        said = r"state 'exp_avg_sq' of parameter 1 has values below 0"
        with pytest.raises(StateDictError, match=said):
            optimizer.load_state_dict(saved)
        with pytest.raises(StateDictError, match=said):
            zero_opt.load_sharded_state_dict(optimizer, cut)
        if form.state.moments == "block8" and (world_size > 1 or kind != "device"):
            for param in params:
                if param in optimizer.state:
                    optimizer.state[param]["exp_avg_sq"].mul_(-1)
            torch.autograd.backward(params, [values(1, 1, 0, at, (NUMEL,)).to(form.dtype) for at in range(2)])
            with pytest.raises(StateDictError, match="'exp_avg_sq' has values below 0"):
                optimizer.step()
        optimizer.close()


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("kind", ["device", "cpu", "worker", "nvme"])
def test_means_of_squares_below_0_are_refused(kind: str, world_size: int, tmp_path: Path) -> None:
    run_processes(world_size, _below_0, str(tmp_path), kind)
