"""Make a release, up to its upload: ``python -m release VERSION TORCH...``; RELEASE.md says what each step is for.

Stops where something has to be done by hand first. It is then run again, from the beginning.
"""

from __future__ import annotations

import configparser
import datetime
import hashlib
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from . import audit, build, clean_install
from .pythons import ROOT

FOLDER = ROOT / "dist"
SUMS = "SHA256SUMS"
UPLOAD = "twine upload dist/*.whl dist/*.tar.gz"


class NotReadyError(Exception):
    """What has to be done by hand before the release goes on."""


def stamp(root: Path, version: str, day: datetime.date) -> list[Path]:
    """Set the version, and give the changelog's first section its number and day; return the files that changed."""
    rules = {
        root / "zero_opt" / "__init__.py": (r'^__version__ = ".*"$', f'__version__ = "{version}"'),
        root / "CHANGELOG.md": (r"^## \S+ - unreleased$", f"## {version} - {day.isoformat()}"),
    }
    changed = []
    for path, (pattern, line) in rules.items():
        before = path.read_text("utf-8")
        after = re.sub(pattern, line, before, count=1, flags=re.MULTILINE)
        if after != before:
            path.write_text(after, "utf-8")
            changed.append(path)
    first = re.search(r"^## (\S+) - (\S+)$", (root / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    if first is None or first[1] != version:
        raise NotReadyError(f"CHANGELOG.md does not begin with a section of {version}")
    return changed


def run(*command: str) -> str:
    """Return what a command prints."""
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True, timeout=600).stdout


def check_tree(version: str) -> None:
    """Check that what is released is what is committed, by a name that others can follow."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    url = config["metadata"]["url"]
    if ".invalid" in url:
        raise NotReadyError(f"set url in setup.cfg to where the repository is: {url} is nowhere")
    if changed := [str(path.relative_to(ROOT)) for path in stamp(ROOT, version, datetime.date.today())]:
        raise NotReadyError(f"commit {' and '.join(changed)}: version {version} is now written there")
    if left := run("git", "status", "--porcelain"):
        raise NotReadyError(f"commit or remove what differs from the last commit:\n{left}")
    if f"v{version}" not in run("git", "tag", "--points-at", "HEAD").split():
        raise NotReadyError(f"tag the commit: git tag --sign v{version}")


def sign(folder: Path) -> None:
    """Write the sums of all files, and sign them with the default key of gpg."""
    sums = "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in packages(folder))
    (folder / SUMS).write_text(sums)
    subprocess.run(["gpg", "--yes", "--armor", "--detach-sign", str(folder / SUMS)], check=True, timeout=600)


def packages(folder: Path) -> list[Path]:
    """Return what is uploaded."""
    return sorted([*folder.glob("*.whl"), *folder.glob("*.tar.gz")])


def main(version: str, torches: Sequence[str]) -> None:
    """Do everything but the upload."""
    check_tree(version)
    build.main(str(FOLDER))
    names = [str(path) for path in packages(FOLDER)]
    audit.main(str(FOLDER))
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *names], check=True, timeout=600)
    clean_install.main(str(FOLDER), *torches)
    sign(FOLDER)
    print(f"{version} is ready. To upload it:", f"git push origin v{version}", UPLOAD, sep="\n    ")
    print(f"Add {SUMS} and {SUMS}.asc to the tag's page in the repository.")


if __name__ == "__main__":
    try:
        main(sys.argv[1], sys.argv[2:])
    except NotReadyError as reason:
        sys.exit(f"not ready: {reason}")
