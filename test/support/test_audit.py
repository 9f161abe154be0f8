"""The checks that every test, and the whole run, ends with, would notice what they are for."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
import tempfile
import types
from pathlib import Path

import pytest

from test.support import leftovers
from test.support.audit import AUDIT, PACKAGE, UnpickledByUs
from test.support.leftovers import children, files, shared_memory
from zero_opt.system.shared_memory import Arena


def test_the_package_unpickling_anything_is_noticed_and_ends_it() -> None:
    module = types.ModuleType("fake")
    code = "import pickle\ndef load(data):\n    return pickle.loads(data)\n"
    exec(compile(code, PACKAGE + "fake.py", "exec"), module.__dict__)  # as if it were a file of the package
    data = pickle.dumps(io.BytesIO)
    assert pickle.loads(data) is io.BytesIO
    with pytest.raises(UnpickledByUs, match=r"fake\.py:3 unpickles _io\.BytesIO"):
        module.load(data)
    events, AUDIT.events = AUDIT.events, []
    assert len(events) == 1


def test_processes_files_and_shared_memory_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not [child for child in children() if "sleep" in child]
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        assert any(found.startswith(f"{child.pid} ") for found in children())
    finally:
        child.kill()
        child.wait()
    before = shared_memory()
    arena = Arena.create("zero_opt test", 4096)
    assert len(shared_memory()) > len(before)
    arena.close()
    del arena
    assert shared_memory() == before
    (tmp_path / "pytest-of-somebody").touch()
    assert files(tmp_path) == []
    (tmp_path / "left").touch()
    assert files(tmp_path) == [str(tmp_path / "left")]
    monkeypatch.setattr(leftovers, "_PATIENCE_S", 0.1)
    assert [found for found in leftovers.left(tmp_path) if "left" in found] == [f"file {tmp_path / 'left'}"]
    assert tempfile.gettempdir() == os.environ["TMPDIR"] != "/tmp"
