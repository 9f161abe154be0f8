"""The package's metadata: whole, and with links that lead somewhere from a package index too."""

from __future__ import annotations

import configparser
import email
import os
import re
import subprocess
import sys
from email.message import Message
from pathlib import Path

import pytest

import zero_opt

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def metadata(tmp_path_factory: pytest.TempPathFactory) -> Message:
    """What setup.py writes for a package index."""
    folder = tmp_path_factory.mktemp("metadata")
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(folder)]
    environment = {**os.environ, "ZERO_OPT_NATIVE": "skip"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=300, capture_output=True)
    return email.message_from_string((folder / "zero_opt.egg-info" / "PKG-INFO").read_text("utf-8"))


def repository() -> str:
    """The one setting that all links are made from."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    return config["metadata"]["url"]


def test_metadata_are_whole(metadata: Message) -> None:
    assert metadata["Version"] == zero_opt.__version__
    assert metadata["Author"] == "zero_opt developers"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "License" not in metadata
    assert metadata["Requires-Python"] == ">=3.11"
    assert "ZeRO" in metadata["Keywords"].split(",")
    prefix = "Programming Language :: Python :: 3."
    pythons = {name.removeprefix(prefix) for name in metadata.get_all("Classifier", []) if name.startswith(prefix)}
    assert pythons == {"11", "12", "13"}


def test_every_link_is_made_from_one_setting(metadata: Message) -> None:
    links = dict(link.split(", ") for link in metadata.get_all("Project-URL", []))
    assert links.keys() == {"Source", "Issues", "Documentation", "Changelog"}
    assert all(url.startswith(repository()) for url in [metadata["Home-page"], *links.values()])


def test_links_of_the_long_description_are_absolute_and_lead_to_files(metadata: Message) -> None:
    targets = re.findall(r"\]\(([^)]*)\)", str(metadata.get_payload()))
    files = f"{repository()}/blob/v{zero_opt.__version__}/"
    paths = [target.removeprefix(files).partition("#")[0] for target in targets if target.startswith(files)]
    assert [target for target in targets if not target.startswith((files, "#", "http"))] == []
    assert paths
    assert [path for path in paths if not (ROOT / path).is_file()] == []
