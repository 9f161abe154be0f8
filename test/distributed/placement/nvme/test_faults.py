"""NVMeOffload on a disk that fails, is full, or is none; and what is left of the file in the end."""

from __future__ import annotations

import errno
import itertools
import os
import resource
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zero_opt
from test.support.compact_training import FORMS
from test.support.failures import PATIENCE_S
from test.support.harness import assert_bitwise, run_processes
from test.support.nvme_training import Faults, in_file, make, placement_of
from test.support.scenario import values
from test.support.worker_training import DTYPES, SHAPES, backward, make_params
from zero_opt.placement.nvme import placement as nvme_placement
from zero_opt.placement.nvme import state_file
from zero_opt.placement.nvme.window_pass import Disk

# The dtype of parameters, and what the optimizer is made with.
KINDS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    **{str(dtype): (dtype, {}) for dtype in DTYPES[:2]},
    **{name: (form.dtype, {"cls": zero_opt.CPUAdamW, "state": form.state}) for name, form in FORMS.items()},
}
SOME_KINDS = ("torch.float32", "block8", "block8, split")

# -- a disk that fails ------------------------------------------------------------------------------------------------


def _failing(path: Path, faults: Faults | None, fault: tuple[str, int, int] | None, kind: str) -> Any:
    """Train; in step 2 the fault strikes; the gradients are gone before it is repaired by flush()."""
    dtype, options = KINDS[kind]
    params = make_params(dtype)
    optimizer = make(params, path, **options)
    for step in range(4):
        optimizer.zero_grad()
        torch.autograd.backward(params, [values(step, 1, 0, i, s).to(dtype) for i, s in enumerate(SHAPES)])
        if step != 2 or fault is None:
            optimizer.step()
            continue
        assert faults is not None
        with faults.at(*fault), pytest.raises(zero_opt.StorageFailed, match=rf"failed \({os.strerror(fault[2])}\)"):
            optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(zero_opt.StepPending, match=r"opt\.flush\(\)"):
            optimizer.state_dict()
        optimizer.flush()
    found = [param.detach() for param in params], optimizer.state_dict()["state"]
    optimizer.close()
    return found


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_in_which_a_transfer_fails_is_taken_up_again(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every transfer of a step in turn."""
    reference = _failing(tmp_path, None, None, kind)
    faults = Faults(monkeypatch)
    optimizer = make(make_params(KINDS[kind][0]), tmp_path, **KINDS[kind][1])
    transfers = sum(len(window.parts) for window, _ in placement_of(optimizer)._windows)
    optimizer.close()
    assert transfers >= 4
    for name, code in (("preadv", errno.EIO), ("pwritev", errno.ENOSPC)):
        for number in range(transfers):
            assert_bitwise(_failing(tmp_path, faults, (name, number, code), kind), reference, f"{name} {number}")


@pytest.mark.parametrize("kind", SOME_KINDS)
def test_transfers_that_come_short_are_gone_on_with(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block at a time, whatever is asked for."""
    reference = _failing(tmp_path, None, None, kind)
    faults = Faults(monkeypatch)
    for name in faults.counts:
        whole = getattr(os, name)
        monkeypatch.setattr(os, name, lambda fd, buffers, at, whole=whole: whole(fd, [buffers[0][:4096]], at))
    assert_bitwise(_failing(tmp_path, None, None, kind), reference)
    assert all(count > 0 for count in faults.counts.values())


def _struck(function: Any, due: int, *, after: bool) -> Any:
    """The function, of which Ctrl-C strikes before or after the given call."""
    calls = itertools.count()

    def call(*given: Any, **named: Any) -> Any:
        strikes = next(calls) == due
        if strikes and not after:
            signal.raise_signal(signal.SIGINT)
        result = function(*given, **named)
        if strikes and after:
            signal.raise_signal(signal.SIGINT)
        return result

    return call


def _interrupted(path: Path, monkeypatch: pytest.MonkeyPatch, place: tuple[Any, str], due: int, after: bool) -> Any:
    """Train; in step 2 Ctrl-C falls before or after the given call of a function; flush() goes on with it."""
    params = make_params()
    optimizer = make(params, path)
    for step in range(4):
        optimizer.zero_grad()
        torch.autograd.backward(params, [values(step, 1, 0, i, s) for i, s in enumerate(SHAPES)])
        if step != 2:
            optimizer.step()
            continue
        with monkeypatch.context() as patch:
            patch.setattr(*place, _struck(getattr(*place), due, after=after))
            with pytest.raises(KeyboardInterrupt):
                optimizer.step()
        optimizer.flush()
    found = [param.detach() for param in params], optimizer.state_dict()["state"]
    optimizer.close()
    return found


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    "place", [(nvme_placement, "step_batches"), (Disk, "read"), (Disk, "write")], ids=lambda at: at[1]
)
def test_ctrl_c_loses_no_window(
    place: tuple[Any, str], after: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = _failing(tmp_path, None, None, "torch.float32")
    optimizer = make(make_params(), tmp_path)
    windows = len(placement_of(optimizer)._windows)
    optimizer.close()
    assert windows >= 2
    for due in range(windows):
        assert_bitwise(_interrupted(tmp_path, monkeypatch, place, due, after), reference, f"{due}")


def _asks(optimizer: zero_opt.ShardedOptimizer, rank: int) -> None:
    """State that lacks a part of a step is refused, and why."""
    dist.barrier()
    failed = pytest.raises(zero_opt.StepFailed, match=r"^rank 1: the last step failed .* StorageFailed: (read|writ)ing")
    with pytest.raises(zero_opt.StepPending, match=r"opt\.flush\(\)") if rank == 1 else failed:
        optimizer.state_dict()
    dist.barrier()


def _fails_on_one(rank: int, world_size: int, path: Path) -> Any:
    """Rank 1's disk fails for three steps' worth of tries."""
    params = make_params()
    optimizer = make(params, path)
    read, broken = os.preadv, [rank == 1]

    def preadv(*given: Any) -> int:
        if broken[0]:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(*given)

    backward(params, 1, rank)
    os.preadv = preadv
    told = pytest.raises(zero_opt.StepFailed, match=r"^rank 1: step 0 failed with StorageFailed: reading")
    with pytest.raises(zero_opt.StorageFailed, match=r"reading .* failed") if rank == 1 else told:
        optimizer.step()
    _asks(optimizer, rank)
    with pytest.raises(zero_opt.StorageFailed, match=r"reading .* failed" if rank else r"^rank 1: reading"):
        optimizer.flush()
    _asks(optimizer, rank)
    broken[0] = False
    optimizer.flush()
    optimizer.consolidate_state_dict()
    state = optimizer.state_dict()["state"] if rank == 0 else None
    optimizer.close()
    return [param.detach() for param in params], state


def _fails_nowhere(rank: int, world_size: int, path: Path) -> Any:
    params = make_params()
    optimizer = make(params, path)
    backward(params, 1, rank)
    optimizer.step()
    optimizer.consolidate_state_dict()
    state = optimizer.state_dict()["state"] if rank == 0 else None
    optimizer.close()
    return [param.detach() for param in params], state


def test_a_disk_that_fails_on_one_rank(tmp_path: Path) -> None:
    found = run_processes(2, _fails_on_one, tmp_path)
    assert_bitwise(found, run_processes(2, _fails_nowhere, tmp_path))


def _goes_on(rank: int, world_size: int, path: Path, fails: bool) -> Any:
    """Without a flush: all hear of the failure in their next step, and the one after that brings in what is pending."""
    params = make_params()
    optimizer = make(params, path)

    def give(step: int) -> None:
        optimizer.zero_grad()
        torch.autograd.backward(params, [values(step, 1, rank, i, shape) for i, shape in enumerate(SHAPES)])

    give(0)
    write, broken = os.pwritev, [fails and rank == 1]

    def pwritev(*given: Any) -> int:
        if broken[0]:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return write(*given)

    os.pwritev = pwritev
    if broken[0]:
        with pytest.raises(zero_opt.StorageFailed, match=r"writing .* failed"):
            optimizer.step()
    else:
        optimizer.step()
    broken[0] = False
    if fails:
        _asks(optimizer, rank)
    give(1)
    if fails:
        with pytest.raises(zero_opt.StepFailed, match="StorageFailed: writing"):
            optimizer.step()
        give(1)
    optimizer.step()
    optimizer.consolidate_state_dict()
    state = optimizer.state_dict()["state"] if rank == 0 else None
    optimizer.close()
    return [param.detach() for param in params], state


def test_a_failure_that_nobody_flushes(tmp_path: Path) -> None:
    found, wanted = (run_processes(2, _goes_on, tmp_path, fails) for fails in (True, False))
    assert_bitwise(found, wanted)


def test_an_edit_between_the_failure_and_the_flush_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params = make_params()
    optimizer = make(params, tmp_path)
    backward(params, 1, 0)
    with Faults(monkeypatch).at("preadv", 0, errno.EIO), pytest.raises(zero_opt.StorageFailed):
        optimizer.step()
    with torch.no_grad():
        params[0].fill_(3.0)
    others = params[2].detach().clone()
    with pytest.raises(zero_opt.StepPending, match="keeps the change"):
        optimizer.flush()
    assert (params[0] == 3).all()
    assert not torch.equal(params[2], others)
    assert optimizer.state_dict()["state"][0]["exp_avg"].any()
    optimizer.zero_grad()
    backward(params, 2, 0)
    optimizer.step()
    assert not (params[0] == 3).any()
    optimizer.close()


EDITS: dict[str, Any] = {
    "replaced": lambda state, param: state.update({param: {k: value * 2 for k, value in state[param].items()}}),
    "dropped": lambda state, param: state.pop(param),
    "written to": lambda state, param: state[param].update(exp_avg=torch.zeros_like(param)),
}


@pytest.mark.parametrize("how", ["disk", "Ctrl-C"])
@pytest.mark.parametrize("edit", EDITS)
def test_entries_that_are_edited_between_the_failure_and_the_flush_are_put_back(
    edit: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(path: Path, *, edits: bool) -> Any:
        params = make_params()
        optimizer = make(params, path)
        for step in range(4):
            optimizer.zero_grad()
            backward(params, step, 0)
            if step != 2 or not edits:
                optimizer.step()
                continue
            with monkeypatch.context() as patch, Faults(patch).at("pwritev", 0, errno.EIO):
                if how == "Ctrl-C":
                    patch.setattr(nvme_placement, "step_batches", _struck(nvme_placement.step_batches, 0, after=False))
                with pytest.raises((zero_opt.StorageFailed, KeyboardInterrupt)):
                    optimizer.step()
            EDITS[edit](optimizer.state, params[0])
            with pytest.raises(zero_opt.StepPending, match=r"was changed while a step for it was pending"):
                optimizer.flush()
        return params, optimizer.state_dict()["state"]

    assert_bitwise(train(tmp_path, edits=True), train(tmp_path, edits=False))


def test_a_load_forgets_a_step_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params = make_params()
    optimizer = make(params, tmp_path)
    backward(params, 1, 0)
    optimizer.step()
    saved = optimizer.state_dict()
    with Faults(monkeypatch).at("pwritev", 1, errno.EIO), pytest.raises(zero_opt.StorageFailed):
        optimizer.step()
    optimizer.load_state_dict(saved)
    assert_bitwise(optimizer.state_dict(), saved)
    optimizer.close()


def test_a_disk_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = _fails_nowhere(0, 1, tmp_path)
    params = make_params()
    optimizer = make(params, tmp_path, offload=in_file(tmp_path, hang_timeout=0.05))
    backward(params, 1, 0)
    answers, read = threading.Event(), os.preadv
    monkeypatch.setattr(os, "preadv", lambda *given: answers.wait(PATIENCE_S) and read(*given))
    with pytest.raises(zero_opt.StorageFailed, match=r"has not answered for 0\.05 s.*hang_timeout"):
        optimizer.step()
    answers.set()
    for _ in range(100):
        with_error = None
        try:
            optimizer.flush()
            break
        except zero_opt.StorageFailed as error:  # a busy machine may be as slow as that
            with_error = error
    assert with_error is None
    assert_bitwise([param.detach() for param in params], reference[0])
    optimizer.close()


@pytest.mark.parametrize("kind", SOME_KINDS)
def test_state_that_cannot_be_read_is_an_error_and_no_signal(kind: str, tmp_path: Path) -> None:
    """A page past the end of its file is as one that the disk does not give."""
    dtype, options = KINDS[kind]
    params = make_params(dtype)
    optimizer = make(params, tmp_path, **options)
    backward(params, 1, 0)
    optimizer.step()
    file = placement_of(optimizer)._disk.file
    os.ftruncate(file._fd, 0)
    with pytest.raises(zero_opt.StorageFailed, match="cannot be read from the file that holds it"):
        optimizer.state_dict()
    with pytest.raises(zero_opt.StorageFailed, match="cannot be read from the file that holds it"):
        zero_opt.sharded_state_dict(optimizer)
    backward(params, 1, 0)
    with pytest.raises(zero_opt.StorageFailed, match=r"reading .* failed \(the file ends there\)"):
        optimizer.step()
    optimizer.close()


# -- the file ---------------------------------------------------------------------------------------------------------


def _full(*_: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


NO_ROOM = {
    "disk": (zero_opt.StorageFull, r"needs .* in '.*', where .* MiB are free .*; make room, use more ranks"),
    "limit": (
        zero_opt.StorageFailed,
        r"needs .* in '.*', where no file may be so long \(File too large\); raise the limit of the size of files: "
        r"'ulimit -f', .* \(now 65,536 bytes\); or use more ranks",
    ),
}


def _no_room(rank: int, world_size: int, path: Path, added: bool, reason: str) -> str:
    """One rank has no room, when made or for an added group; all hear of it, and go on."""
    params = make_params()
    optimizer = make(params[:1], path) if added else None
    patch = pytest.MonkeyPatch()
    if rank == 1 and reason == "limit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))  # the store is a file too
    elif rank == 1:
        patch.setattr(os, "posix_fallocate", _full)
    large = {"params": [nn.Parameter(torch.ones(100_000))]}
    with pytest.raises(zero_opt.StorageFailed, match=NO_ROOM[reason][1]) as caught:
        make([*params, *large["params"]], path) if optimizer is None else optimizer.add_param_group(large)
    patch.undo()
    assert type(caught.value) is NO_ROOM[reason][0]
    assert optimizer is None or len(optimizer.param_groups) == 1
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    if optimizer is None:
        optimizer = make(params[:1], path)
    optimizer.add_param_group({"params": params[1:]})
    backward(params, 1, rank)
    optimizer.step()
    optimizer.close()
    return str(caught.value)


@pytest.mark.parametrize("reason", NO_ROOM)
@pytest.mark.parametrize("added", [False, True])
def test_no_room(added: bool, reason: str, tmp_path: Path) -> None:
    first, second = run_processes(2, _no_room, tmp_path, added, reason)
    assert first == f"rank 1: {second}"


def _limited_later(rank: int, world_size: int, path: Path) -> None:
    params = make_params()
    optimizer = make(params, path)
    backward(params, 1, rank)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    with pytest.raises(zero_opt.StorageFailed, match=r"1,000 bytes at the most \(ulimit -f\)"):
        optimizer.step()
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    optimizer.flush()
    optimizer.close()


def test_a_limit_that_comes_later_is_named(tmp_path: Path) -> None:
    run_processes(1, _limited_later, tmp_path)


def _bad_path(rank: int, world_size: int, path: Path) -> None:
    wanted = path if rank == 0 else path / "missing"
    with pytest.raises(zero_opt.StorageFailed, match=r"no file for optimizer state can be made in .*missing"):
        make(make_params(), wanted)
    if rank == 0:
        (path / "file").touch()
    with pytest.raises(zero_opt.StorageFailed, match=r"no file for optimizer state can be made in '/proc'"):
        make(make_params(), "/proc")
    with pytest.raises(zero_opt.StorageFailed, match=r"Not a directory"):
        make(make_params(), path / "file" if rank == 0 else path)


def test_a_path_that_is_none_on_one_rank(tmp_path: Path) -> None:
    run_processes(2, _bad_path, tmp_path)


def _die(rank: int, world_size: int, path: Path) -> None:
    params = make_params()
    optimizer = make(params, path)
    for step in itertools.count():
        optimizer.zero_grad()
        backward(params, step, rank)
        optimizer.step()
        if step == 3:
            os.kill(os.getpid(), signal.SIGKILL)


def test_nothing_is_left_of_a_killed_process(tmp_path: Path) -> None:
    (failure,) = run_processes(1, _die, tmp_path, expect_errors=True)
    assert failure.type_name == "Died"
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_that_knows_no_files_without_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = os.open

    def refusing(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "no")
        return opened(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refusing)
    optimizer = make(make_params(), tmp_path)
    assert list(tmp_path.iterdir()) == []
    optimizer.close()


def test_closing_gives_the_room_back(tmp_path: Path) -> None:
    optimizer = make(make_params(), tmp_path)
    fd = placement_of(optimizer)._disk.file._fd
    optimizer.close()
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)


def test_memory_that_looks_like_a_disk_is_named(caplog: pytest.LogCaptureFixture) -> None:
    kind = state_file.filesystem_of
    fd = os.open("/dev/shm", os.O_RDONLY)
    try:
        in_memory = kind(fd)
    finally:
        os.close(fd)
    optimizer = make(make_params(), "/dev/shm")
    optimizer.close()
    assert ("which is memory" in caplog.text) == (in_memory in state_file._IN_MEMORY)


def _forked(rank: int, world_size: int, path: Path) -> None:
    params = make_params()
    optimizer = make(params, path)
    backward(params, 1, rank)
    pid = os.fork()
    if not pid:
        try:
            optimizer.step()
        except zero_opt.StorageFailed:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    optimizer.step()
    optimizer.close()


def test_a_fork_may_not_touch_the_file(tmp_path: Path) -> None:
    run_processes(1, _forked, tmp_path, backend=None)
