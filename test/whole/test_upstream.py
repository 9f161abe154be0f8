"""The pages for other projects: their links, and the program of torch's. ``test/clients`` runs the others' programs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from test.support.guides import DOCS, anchors, run_under_torchrun, snippets

FOLDER = DOCS / "upstream"
PAGES = [path for path in FOLDER.iterdir() if path.name != "README.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_of_the_repository(page: Path) -> None:
    text = page.read_text()
    targets = re.findall(r"REPOSITORY(?:/blob/main/([^)#>]*))?(?:#([\w-]+))?", text)
    assert targets and len(targets) == text.count("REPOSITORY")
    for path, anchor in targets:
        assert (DOCS.parent / path).exists(), path
        assert not anchor or anchor in anchors(DOCS.parent / path), anchor


def test_every_page_is_listed_with_its_test() -> None:
    rows = dict(re.findall(r"^\| \[(\S+)\]\(\S+\) \|.*\| `(\S+)` \|$", (FOLDER / "README.md").read_text(), re.M))
    assert rows.keys() == {page.name for page in PAGES}
    for name, test in rows.items():
        assert name in (DOCS.parent / test).read_text()


def test_the_program_of_torch(tmp_path: Path) -> None:
    """It compares both optimizers itself, and Adam loads what it has saved."""
    (program,) = snippets("upstream/torch.md")
    run_under_torchrun(program, tmp_path, ranks=2, timeout_s=300)
    model = torch.nn.Sequential(torch.nn.Linear(200, 200), torch.nn.ReLU(), torch.nn.Linear(200, 10))
    opt = torch.optim.Adam(model.parameters())
    opt.load_state_dict(torch.load(tmp_path / "adam.pt", weights_only=True))
    assert [int(state["step"]) for state in opt.state.values()] == [3] * 4
