"""NVMeOffload whose file is lost on one rank: whatever reads or writes state there is an error on every rank."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zero_opt
from test.support.descriptors import no_descriptors
from test.support.failures import PATIENCE_S
from test.support.harness import assert_bitwise, run_processes
from test.support.nvme_training import in_file, make, placement_of
from test.support.worker_training import backward, make_params
from zero_opt.placement.nvme.state_file import BLOCK_BYTES, StateFile
from zero_opt.system import readable_pages

SELECTIVE = zero_opt.Selective(0.5, update_interval=2, select_interval=2)


def _lost(optimizer: zero_opt.ShardedOptimizer) -> None:
    """The disk does not give what is in the file, nor takes anything."""
    placement = placement_of(optimizer)
    os.ftruncate(getattr(placement, "_inner", placement)._disk.file._fd, 0)


def _unreadable(rank: int, world_size: int, path: Path, call: str, closed: bool) -> None:
    """Rank 1's file is lost; every rank hears of it in the same call, and in the one after it."""
    params = make_params()
    optimizer = make(params, path)
    backward(params, 1, rank)
    optimizer.step()
    if rank == 1:
        _lost(optimizer)
    wanted = r"[\d,]+ bytes of optimizer state cannot be read from the file that holds it"
    for _ in range(2):
        dist.barrier()
        if call == "state_dict" and rank == 1:
            if closed:
                optimizer.close()
            continue
        calls = {
            "consolidate": lambda: optimizer.consolidate_state_dict(to=world_size - 1),
            "sharded": lambda: zero_opt.sharded_state_dict(optimizer),
            "state_dict": optimizer.state_dict,
        }
        with pytest.raises(zero_opt.StorageFailed, match=wanted if rank == 1 else f"^rank 1: .*{wanted}"):
            calls[call]()
    dist.barrier()
    optimizer.close()


@pytest.mark.parametrize("call", ["consolidate", "sharded", "state_dict", "state_dict of a closed rank"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_state_that_one_rank_cannot_read_is_an_error_on_all_at_once(call: str, world_size: int, tmp_path: Path) -> None:
    name, _, closed = call.partition(" ")
    run_processes(world_size, _unreadable, tmp_path, name, bool(closed), group_timeout=20 * PATIENCE_S)


def _loads(rank: int, world_size: int, path: Path, options: dict[str, Any], late: bool) -> None:
    """Rank 1's file is lost, before a load is checked or after that; every rank hears of it."""
    params = make_params()
    optimizer = make(params, path, offload=in_file(path, **options))
    for step in range(3):
        optimizer.zero_grad()
        backward(params, step, rank)
        optimizer.step()
    saved = optimizer.state_dict()
    optimizer.zero_grad()
    backward(params, 3, rank)
    optimizer.step()
    live = optimizer.state_dict()["state"]
    dist.barrier()
    if rank == 1 and late:
        placement = placement_of(optimizer)
        load = placement.load
        placement.load = lambda *given: (_lost(optimizer), load(*given))
    elif rank == 1:
        _lost(optimizer)
    wanted = "cannot be written to the file that holds it"
    with pytest.raises(zero_opt.StorageFailed, match=wanted if rank == 1 else f"^rank 1: .*{wanted}"):
        optimizer.load_state_dict(saved)
    if not late and rank == 0:
        own = {id(param): index for index, param in enumerate(params)}
        for param, state in optimizer.state.items():
            if state["step"].numel() and state["exp_avg"].shape == param.shape:
                assert_bitwise(dict(state), live[own[id(param)]], f"{own[id(param)]}")
    dist.barrier()
    optimizer.close()


@pytest.mark.parametrize("late", [False, True], ids=["before", "meanwhile"])
@pytest.mark.parametrize("options", [{}, {"selective": SELECTIVE}], ids=["all", "selective"])
def test_a_load_that_one_rank_cannot_write_is_an_error_on_all(
    options: dict[str, Any], late: bool, tmp_path: Path
) -> None:
    run_processes(2, _loads, tmp_path, options, late, group_timeout=20 * PATIENCE_S)


def _edits(rank: int, world_size: int, path: Path, what: str, dtype: torch.dtype) -> None:
    """What would write to the mapping, or read it, is an error once the file is lost."""
    params = make_params(dtype)
    optimizer = make(params, path, offload=in_file(path, **({"selective": SELECTIVE} if what == "select" else {})))
    steps = 3 if what == "select" else 1  # columns are selected in steps 1 and 3
    for step in range(steps):
        optimizer.zero_grad()
        backward(params, step, rank)
        optimizer.step()
    _lost(optimizer)
    stepped = next(iter(optimizer.state))
    if what == "replace":
        optimizer.state[stepped]["exp_avg"] = torch.ones_like(stepped)
    elif what == "drop":
        del optimizer.state[stepped]
    elif what == "master":
        with torch.no_grad():
            stepped.fill_(1.0)
    optimizer.zero_grad()
    backward(params, 2, rank)
    call = optimizer.state_dict if what == "master" else optimizer.step
    with pytest.raises(zero_opt.StorageFailed, match=r"cannot be (read from|written to) the file that holds it"):
        call()
    optimizer.close()


@pytest.mark.parametrize("what", ["replace", "drop", "master", "select"])
def test_what_else_touches_state_that_is_lost_is_an_error_and_no_signal(what: str, tmp_path: Path) -> None:
    dtype = torch.bfloat16 if what == "master" else torch.float32
    run_processes(1, _edits, tmp_path, what, dtype, backend=None)


@pytest.mark.parametrize("what", ["step", "load", "grow"])
def test_a_file_that_the_program_has_closed_says_so(what: str, tmp_path: Path) -> None:
    params, late = make_params(), torch.nn.Parameter(torch.ones(1 << 14))
    optimizer = make(params, tmp_path)
    backward(params, 1, 0)
    optimizer.step()
    saved = optimizer.state_dict()
    backward(params, 2, 0)
    if what == "grow":
        optimizer.add_param_group({"params": [late]})
        late.grad = torch.ones_like(late)
    os.close(placement_of(optimizer)._disk.file._fd)
    said = r"\(Bad file descriptor\); has the program closed .* load a checkpoint into a new optimizer"
    with pytest.raises(zero_opt.StorageFailed, match=said):
        optimizer.load_state_dict(saved) if what == "load" else optimizer.step()
    optimizer.close()


def test_a_kernel_that_cannot_tell_is_not_needed_for_a_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes are read and written back instead; that changes none of them."""
    monkeypatch.setattr(readable_pages, "_POPULATE_WRITE", 10_000)
    params = make_params()
    optimizer = make(params, tmp_path)
    backward(params, 1, 0)
    optimizer.step()
    saved = optimizer.state_dict()
    placement_of(optimizer).require_writable()
    assert_bitwise(optimizer.state_dict(), saved)
    optimizer.load_state_dict(saved)
    assert_bitwise(optimizer.state_dict(), saved)
    _lost(optimizer)
    with pytest.raises(zero_opt.StorageFailed, match=r"reading .* failed \(the file ends there\)"):
        optimizer.load_state_dict(saved)
    optimizer.close()


def _no_descriptors(rank: int, world_size: int, path: Path) -> None:
    """With a descriptor for the file, all is well."""
    make(make_params(), path).close()  # what is imported late is there
    refused = pytest.raises(
        zero_opt.OutOfResources, match=r"made in .*raise the limit of file descriptors: .*ulimit -n"
    )
    with no_descriptors(), refused:
        make(make_params(), path)
    make(make_params(), path).close()


def test_no_descriptor_for_the_file_names_the_limit(tmp_path: Path) -> None:
    run_processes(1, _no_descriptors, tmp_path, backend=None)


def test_views_of_the_file_take_no_descriptors(tmp_path: Path) -> None:
    """However many arrays there are, the file has one, and views outlive it."""
    file = StateFile(tmp_path)
    file.reserve(4 * BLOCK_BYTES)
    before = len(os.listdir("/proc/self/fd"))
    views = [file.view(start * BLOCK_BYTES, BLOCK_BYTES) for start in range(4)]
    assert len(os.listdir("/proc/self/fd")) == before
    views[3].fill_(7)
    again = file.view(2 * BLOCK_BYTES, 2 * BLOCK_BYTES)
    file.close()
    assert again[:BLOCK_BYTES].sum() == 0 and (again[BLOCK_BYTES:] == 7).all()
