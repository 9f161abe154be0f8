"""Processes that end, one way or another, while other ranks may still ask for their part of the state."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

# Forks the two ranks of all cases, with everything imported, and says how they ended: each one's exit code, what it
# wrote to stderr, and the seconds until it ended. Ranks that outlast the others of all cases are killed.
LAUNCHER = """
import atexit, gc, json, os, signal, sys, threading, time
import torch, torch._dynamo, torch.distributed as dist, torch.multiprocessing as mp, zero_opt
from zero_opt.comm import process_exit

def train(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(folder + "/store", 2), rank=rank, world_size=2)
    params = [torch.nn.Parameter(torch.ones(500))]
    opt = zero_opt.ShardedOptimizer(params, torch.optim.AdamW)
    params[0].sum().backward()
    opt.step()
    return opt

def save(opt, folder):
    torch.save(opt.state_dict(), folder + "/opt.pt")

def start_no_thread():
    def refuse(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")
    threading.Thread.start = refuse

def child(rank, folder, programs):
    exec(programs[rank], globals() | {"rank": rank, "folder": folder})

torch.set_num_threads(1)
warm = torch.nn.Parameter(torch.ones(1))
warm.grad = torch.ones(1)
torch.optim.AdamW([warm]).step()
gc.freeze()  # what is imported stays: no rank copies it as it ends
cases, pids = json.load(sys.stdin), {}
for name, case in cases.items():
    folder = case["folder"]
    os.mkdir(folder)
    for number in range(1 if case["children"] else 2):
        pid = os.fork()
        if pid == 0:
            signal.alarm(280)
            process_exit._QUIET_S = case["quiet"]
            os.dup2(os.open(folder + f"/said_{number}", os.O_CREAT | os.O_WRONLY), 2)
            if case["children"]:
                mp.start_processes(child, (folder, case["programs"]), nprocs=2, start_method="fork")
            else:
                exec(case["programs"][number], globals() | {"rank": number, "folder": folder})
            sys.exit()
        pids[pid] = name, number, case["outlasts"] == number
begun, found = time.monotonic(), {name: {} for name in cases}
while not all(outlasts for _, _, outlasts in pids.values()):
    pid, status = os.wait()
    name, number, _ = pids.pop(pid)
    said = open(cases[name]["folder"] + f"/said_{number}").read()
    found[name][number] = os.waitstatus_to_exitcode(status), said, time.monotonic() - begun
for pid in pids:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
json.dump(found, sys.stdout)
"""
TRAIN = "globals()['opt'] = opt = train(rank, folder)  # alive until the process ends\n"


def _case(rank_0: str, rank_1: str, quiet: float = 30, **options: Any) -> dict[str, Any]:
    programs = [TRAIN + textwrap.dedent(program) for program in (rank_0, rank_1)]
    return {"programs": programs, "quiet": quiet, "outlasts": None, "children": False, **options}


SAVES = "time.sleep(1.5); save(opt, folder)"
SAVES_SLOWLY = """
    service = opt._engine._groups.service; fetch = service._questions._fetch_all
    service._questions._fetch_all = lambda *args: time.sleep(1) or fetch(*args)
    save(opt, folder)
"""
IS_ASKED = "while not opt._engine._groups.service._serving._count: time.sleep(0.01)"
IN_ORDER = {
    "returns": _case(SAVES, ""),
    "exits with 0": _case(SAVES, "sys.exit(0)"),
    "has closed": _case(SAVES, "opt.close()", 0.2),
    "is being asked": _case(SAVES_SLOWLY, IS_ASKED, 0.2),
    "starts no threads": _case(SAVES + "; save(opt, folder)", "atexit.register(start_no_thread)"),
    "starts no threads before it closes": _case(
        SAVES, "atexit.register(time.sleep, 3); atexit.register(start_no_thread)"
    ),
    "asks at its own exit": _case("atexit.register(save, opt, folder); atexit.register(start_no_thread)", ""),
    "is a child": _case(SAVES, "", 0.2, children=True),
    "is a child and exits with 0": _case(SAVES, "sys.exit(0)", 0.2, children=True),
}
RAISES = "raise SystemError('training went wrong')"
WAITS = "time.sleep(270)"
EXCHANGES = """
    from zero_opt.system import background_thread
    background_thread._PATIENCE_S = background_thread._INTERRUPTED_PATIENCE_S = 250
    params = [torch.nn.Parameter(torch.ones(500)) for _ in range(4)]
    reduction = zero_opt.Overlapped(1e-3, exchange="backend")
    globals()["exchanging"] = zero_opt.ShardedOptimizer(params, torch.optim.AdamW, reduction=reduction)
"""
# The other rank does not answer these messages.
UNDER_WAY = EXCHANGES + "    sum(param.sum() for param in params).backward()\n"
FAILED = {
    "raises": _case(WAITS, RAISES, 250, outlasts=0),
    "raises amid an exchange": _case(EXCHANGES + f"    {WAITS}", UNDER_WAY + f"    {RAISES}", 250, outlasts=0),
    "exits with 1": _case(WAITS, "sys.exit(1)", 0.5, outlasts=0),
    "exits with 1, and closes": _case(WAITS, "try: sys.exit(1)\nfinally: opt.close()", 0.5, outlasts=0),
}
FAILED_CHILDREN = {
    "child raises": _case(WAITS, RAISES, 250, children=True),
    "child exits with 1": _case(WAITS, "sys.exit(1)", 250, children=True),
    "child ends": _case(WAITS, "os._exit(1)", 250, children=True),
}
STEPS_ON = """
    opt.zero_grad(); opt.param_groups[0]["params"][0].sum().backward(); opt.step()
    """
ENDS_EARLY = {
    "has a batch less": _case(STEPS_ON, "", 250),
    "exits early": _case(STEPS_ON, "sys.exit(0)", 250),
    "closes early": _case(STEPS_ON, "opt.close()", 250),
    "is a child with a batch less": _case(STEPS_ON, "", 250, children=True),
}
# Connections of rank 0 break, of which no rank's watch hears.
LOSES = """
    from zero_opt.errors import PeerLost
    def lose(*_): raise PeerLost("rank 1 has ended or does not answer") from RuntimeError("Connection reset by peer")
    opt._engine._groups.service._questions.{wait} = lose
    try: opt.state_dict()
    except PeerLost as error: sys.stderr.write(f"lost: {{error}}")
    else: sys.exit(3)
"""
LOST = {
    what: _case(LOSES.format(wait=wait), WAITS, 250, outlasts=1)
    for what, wait in {"an answer": "_ask", "elements": "_fetch_all"}.items()
}


# The thread that listens is over, but is in native code when its process exits, which lasts until it is back.
LEAVES = """
    import builtins, contextlib, datetime
    class Leaves(set):
        def discard(self, service):
            super().discard(service)
            with contextlib.suppress(RuntimeError):
                store.wait(["absent"], datetime.timedelta(seconds=2))
    class Lasts:
        def __del__(self, sleep=time.sleep):
            sleep(3)
    store, process_exit._THREADS_END_S = dist.FileStore(folder + f"/absent_{rank}", 1), 90
    process_exit.running, builtins.lasts = Leaves(process_exit.running), Lasts()
    opt.close()
    while process_exit.running: time.sleep(0.01)
"""
# Ctrl-C meanwhile.
INTERRUPTED = (
    LEAVES
    + """
    join = process_exit.threads.join
    process_exit.threads.join = lambda *given: os.kill(os.getpid(), signal.SIGINT) or join(*given)
    signal.signal(signal.SIGINT, signal.default_int_handler)
"""
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ends")


def _ends(cases: dict[str, Any], folder: Path) -> Any:
    """By case and rank: exit code, what it said, and after how many seconds."""
    text = json.dumps({name: {**case, "folder": str(folder / name)} for name, case in cases.items()})
    done = subprocess.run([sys.executable, "-c", LAUNCHER], input=text, stdout=subprocess.PIPE, timeout=400, text=True)
    assert done.returncode == 0
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def ended(folder: Path) -> Any:
    """See _ends()."""
    return _ends({**IN_ORDER, **FAILED, **FAILED_CHILDREN, **ENDS_EARLY, **LOST}, folder)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("how", IN_ORDER)
def test_a_process_that_is_over_is_asked(how: str, ended: Any, folder: Path) -> None:
    for code, said, _ in ended[how].values():
        assert code == 0, said
        assert "Traceback" not in said
    saved = torch.load(folder / how / "opt.pt", weights_only=True)
    assert saved["state"][0]["exp_avg"].shape == (500,)


@pytest.mark.parametrize("how", FAILED)
def test_a_main_program_that_fails_is_not_kept(how: str, ended: Any) -> None:
    ((code, said, seconds),) = ended[how].values()  # the other rank's is not known: it still ran
    assert code == 1, said
    assert seconds < 180
    assert ("ranks [0] may still ask" in said) is ("raises" not in how)


@pytest.mark.parametrize("how", FAILED_CHILDREN)
def test_the_parent_hears_of_a_child_that_fails(how: str, ended: Any) -> None:
    ((code, said, seconds),) = ended[how].values()
    assert code == 1, said
    assert "ProcessRaisedException" in said or "ProcessExitedException" in said
    assert seconds < 180


def test_a_thread_that_is_in_native_code_when_all_have_closed_is_waited_for(tmp_path: Path) -> None:
    for code, said, _ in _ends({"leaves": _case(LEAVES, LEAVES)}, tmp_path)["leaves"].values():
        assert (code, said) == (0, "")


def test_a_thread_that_is_in_native_code_is_waited_for_whatever_interrupts_that(tmp_path: Path) -> None:
    for code, said, _ in _ends({"leaves": _case(INTERRUPTED, INTERRUPTED)}, tmp_path)["leaves"].values():
        assert code == 0, said
        assert "KeyboardInterrupt" in said


@pytest.mark.parametrize("how", ENDS_EARLY)
def test_a_rank_that_has_ended_early_is_named_to_the_others(how: str, ended: Any) -> None:
    code, said, _ = ended[how]["0"]
    assert code == 1, said
    what = "closed this optimizer" if how == "closes early" else "ended its program"
    assert f"PeerLost: rank 1 has {what} after 1 step; do all ranks have the same number of batches?" in said
    if "1" in ended[how]:
        assert ended[how]["1"][0] == 0, ended[how]["1"][1]


@pytest.mark.parametrize("what", LOST)
def test_a_rank_that_has_lost_another_without_knowing_why_does_not_wait_for_it_at_its_exit(
    what: str, ended: Any
) -> None:
    ((code, said, seconds),) = ended[what].values()
    assert (code, said) == (0, "lost: rank 1 has ended or does not answer")
    assert seconds < 180
