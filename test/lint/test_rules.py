"""The lint finds what it is for. ``make lint`` looks for it in the project."""

from __future__ import annotations

import ast

import pytest

from test.lint import rules


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x = 1\n" * 499, []),
        ("x = 1\n" * 500, ["the file has 500 lines"]),
        ("def f():\n" + "    x = 1\n" * 48, []),
        ("def f():\n" + "    x = 1\n" * 49, ["f() has 50 lines"]),
        ("def f(a, b, c, d, e, f, g, *, h, **rest): pass", []),
        ("def f(a, b, c, d, e, f, g, /, *h, i): pass", ["f() has 9 parameters"]),
        ("class C:\n    def f(self, a, b, c, d, e, f, g, h): pass", []),
        ("class C:\n    @staticmethod\n    def f(self, a, b, c, d, e, f, g, h): pass", ["f() has 9 parameters"]),
    ],
)
def test_sizes(source: str, expected: list[str]) -> None:
    found = [message for _, message in rules.size_findings(source, ast.parse(source))]
    assert len(found) == len(expected)
    assert all(message.startswith(start) for message, start in zip(found, expected))


def test_builtin_errors_are_found() -> None:
    def of(source: str, module: str = "kernels.runs") -> list[str]:
        return [message for _, message in rules.raise_findings(ast.parse(source), module)]

    for source in (
        "raise ValueError('x')",
        "raise TypeError",
        "try: f()\nexcept OSError as e: raise KeyError from e",
    ):
        assert len(of(source)) == 1
    for source in ("raise ConfigError('x')", "try: pass\nexcept OSError: raise", "raise error", "raise type(e)(text)"):
        assert not of(source)
    assert not of("raise OSError('x')", "system.shared_memory")


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed as dist\ndist.all_reduce(t)",
        "import torch\ntorch.distributed.all_gather_into_tensor(a, b)",
        "from torch import distributed\ndistributed.barrier()",
        "from torch.distributed import reduce_scatter_tensor",
        "from torch.distributed import distributed_c10d as c10d\nc10d.isend(t, 1)",
        "group.allreduce([t])",
        "group._allgather_base(a, b)",
        "group.alltoall_base(a, b, [], [])",
    ],
)
def test_collectives_are_found(source: str) -> None:
    assert len(list(rules.collective_findings(ast.parse(source)))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed as dist\ndist.get_rank()\ndist.new_group()",
        "connection.send(message)\ntorch.broadcast_tensors(a, b)\nfunctools.reduce(f, x)\nindex.scatter(0, i, x)",
    ],
)
def test_other_names_are_not(source: str) -> None:
    assert not list(rules.collective_findings(ast.parse(source)))


@pytest.mark.parametrize(
    ("source", "module", "depth", "count"),
    [
        ("from .. import _native", "system.extension", 1, 0),
        ("from zero_opt import _native", "cpu_adam", 0, 1),
        ("from . import _native", "optimizer", 0, 1),
        ("from .. import _native", "placement", 1, 1),
        ("import zero_opt._native", "optimizer", 0, 1),
        ("from zero_opt._native import isa", "optimizer", 0, 1),
        ("from zero_opt import CPUAdam", "estimate", 0, 1),
        ("from zero_opt import layout", "estimate", 0, 0),
        ("from . import device", "placement", 1, 0),
        ("import zero_opt", "estimate", 0, 1),
    ],
)
def test_imports_that_no_contract_sees(source: str, module: str, depth: int, count: int) -> None:
    assert len(list(rules.import_findings(ast.parse(source), module, depth, {"layout"}))) == count


@pytest.mark.parametrize(
    ("source", "module", "count"),
    [
        ("popen.wait()", "worker_process", 1),
        ("popen.wait(timeout=5)", "worker_process", 0),
        ("popen.wait(timeout=None)", "worker_process", 1),
        ("future.result()", "layout", 1),
        ("future.result()", "reduction.interface", 0),
        ("thread.join()\nqueue.get()\nlock.acquire()", "layout", 3),
        ("thread.join(5)\nqueue.get(timeout=1)\n','.join(words)\ntable.get(key)", "wiring", 0),
        ("poller = select.poll()\npoller.poll(100)", "worker_process", 0),
        ("poller.poll()", "worker_process", 1),
        ("select.select([a], [], [])\nos.waitpid(pid, 0)\nsignal.pause()", "worker_process", 3),
        ("select.select([a], [], [], 0.1)", "worker_process", 0),
    ],
)
def test_waits_without_a_bound(source: str, module: str, count: int) -> None:
    assert len(list(rules.wait_findings(ast.parse(source), module))) == count


@pytest.mark.parametrize(
    ("source", "module", "count"),
    [
        ("import threading\nthreading.Thread(target=run).start()", "wiring", 1),
        ("import threading\nalarm = threading.Timer(1, run)\nalarm.start()", "system.devices", 1),
        ("ThreadPoolExecutor(2)\nfutures.ThreadPoolExecutor()\n_thread.start_new_thread(run, ())", "wiring", 3),
        ("import threading\nthread.start()", "system.threads", 0),
        ("worker.start()", "doctor", 0),
        ("import threading\nthreads.start(thread)\ngather.start(bucket=1)", "wiring", 0),
    ],
)
def test_threads_that_nothing_ends(source: str, module: str, count: int) -> None:
    assert len(list(rules.thread_findings(ast.parse(source), module))) == count


@pytest.mark.parametrize(
    ("source", "missing"),
    [
        ("torch.empty(3)", ["device and dtype"]),
        ("torch.zeros(3, dtype=torch.float32)\ntorch.arange(3, device=HOST)", ["device", "dtype"]),
        ("torch.sparse_coo_tensor(i, v, dtype=d)", ["device"]),
        ("torch.tensor([0], dtype=d, device=where)\ntorch.full((1,), 2, **like)", []),
        ("torch.zeros_like(x)\nx.new_empty(3)\ntorch.stack([x])\nself.empty()\nx.zeros()", []),
    ],
)
def test_tensors_of_the_programs_default_device_or_dtype(source: str, missing: list[str]) -> None:
    found = [message for _, message in rules.default_findings(ast.parse(source))]
    assert [message.partition("without ")[2].partition(" takes")[0] for message in found] == missing


@pytest.mark.parametrize(
    ("folder", "include", "count"),
    [
        ("worker", '#include "worker/control.hpp"', 0),
        ("worker", '#include "step/step.hpp"', 0),
        ("bindings", '  # include "threads/thread_pool.hpp"', 0),
        ("kernels", "#include <cstdint>", 0),
        ("step", '#include "worker/control.hpp"', 1),
        ("worker", '#include "exchange/peer_words.hpp"', 1),
        ("kernels", '#include "threads/thread_pool.hpp"', 1),
        ("kernels", '#include "step_loop.inl"', 1),
        ("kernels", '#include "../kernels/step_loop.inl"', 1),
        ("maths", "", 1),
    ],
)
def test_native_includes_go_down(folder: str, include: str, count: int) -> None:
    assert len(list(rules.include_findings(include, folder))) == count


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ('warnings.warn("x", ZeroOptWarning, stacklevel=2)', 0),
        ('warnings.warn("x", category=DeprecationWarning)', 0),
        ('warnings.warn("x")', 1),
        ('warn("x", stacklevel=2)', 1),
        ('warnings.warn("x", UserWarning)', 1),
        ('log.warning("x")', 0),
    ],
)
def test_categories_of_warnings(source: str, count: int) -> None:
    assert len(list(rules.warn_findings(ast.parse(source)))) == count


@pytest.mark.parametrize(
    ("source", "path", "count"),
    [
        (
            "from test.support.harness import run_threads\nfrom torch import test_it",
            "unit/comm/test_a",
            0,
        ),
        ("from test.unit.comm.test_b import x", "unit/comm/test_a", 1),
        ("from test.unit.comm import test_b", "unit/comm/test_a", 1),
        ("import test.crash.test_b", "crash/test_a", 1),
        ("from .test_b import x", "accelerator/test_a", 1),
        ("def f():\n    from .test_b import x", "accelerator/test_a", 1),
        ("from .build import x\nfrom . import build\nfrom test import accelerator", "accelerator/test_a", 0),
        ("from ..native import build", "accelerator/test_a", 1),
        ("from test import native\nfrom test.crash.programs import LONG", "accelerator/cases", 2),
        ("from test.crash.programs import LONG", "support/cases", 1),
        ("from test.support.audit import AUDIT", "conftest", 0),
    ],
)
def test_imports_of_tests_and_of_other_folders_helpers(source: str, path: str, count: int) -> None:
    assert len(list(rules.helper_findings(ast.parse(source), path.split("/")))) == count


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("unit/comm/test_groups", None),
        ("unit/test_main", None),
        ("unit/test_policies", None),
        ("unit/comm/__init__", None),
        ("unit/comm/test_nothing", "there is no zero_opt/comm/nothing.py"),
        ("unit/test_groups", "there is no zero_opt/groups.py"),
        ("unit/nowhere/test_groups", "zero_opt has no room nowhere"),
        ("unit/comm/helpers", "test/unit has tests alone"),
        ("distributed/placement/worker/test_anything", None),
        ("distributed/worker/test_anything", "zero_opt has no room worker"),
        ("whole/test_anything", None),
        ("whole/helpers", "test/whole has tests alone"),
        ("support/helpers", None),
        ("conftest", None),
    ],
)
def test_tests_lie_as_what_they_test_does(path: str, message: str | None) -> None:
    found = [text for _, text in rules.place_findings(path.split("/"), rules.ROOT / rules.PACKAGE)]
    assert [text.startswith(message or "-") for text in found] == [True] * (message is not None)


def test_names_that_two_modules_define() -> None:
    sources = {
        "a": "X = 1\n__all__ = []\ndef f(): y = 1",
        "b": "y = 2\n__all__ = []\nclass f: ...",
        "c": "X: int = 2\nX = 3",
    }
    modules = {name: ast.parse(source) for name, source in sources.items()}
    expected = [("b", 3, "f is defined in a"), ("c", 1, "X is defined in a"), ("c", 2, "X is defined in a")]
    found = [(name, line, text.partition(" too")[0]) for name, (line, text) in rules.repeated_names(modules)]
    assert found == expected


def test_native_waits_without_a_bound() -> None:
    source = "poll(&fd, 1, kSliceMs);\npoll(&fd, 1, -1);\nfcntl(fd, F_SETLK, &lock);\nfcntl(fd, F_SETLKW, &lock);\n"
    assert [line for line, _ in rules.native_wait_findings(source)] == [2, 4]
