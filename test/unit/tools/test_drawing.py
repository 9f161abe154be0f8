"""Pictures that cannot be written are refused before anything is measured."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from zero_opt.__main__ import main
from zero_opt.errors import ConfigError
from zero_opt.tools.drawing import require_drawable

pytest.importorskip("matplotlib")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:matplotlib")


def test_what_can_be_written(tmp_path: Path) -> None:
    there = tmp_path / "there.PNG"
    there.touch()
    for path in (None, str(there), str(tmp_path / "new.png")):
        require_drawable(path)


@pytest.mark.parametrize("name", ["new", "new.jpg", "folder.png", "nowhere/new.png"])
def test_what_cannot(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(ConfigError, match=name):
        require_drawable(str(tmp_path / name))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_to(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="cannot write"):
        require_drawable(str(tmp_path / "new.png"))


def test_nothing_is_printed_first(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["plan", "1M", "--device", "cpu", "--host-memory", "1GB", "--plot", "/nowhere/at/all.png"]
    assert main(given) == 2
    out, err = capsys.readouterr()
    assert not out and "cannot write /nowhere/at/all.png" in err
