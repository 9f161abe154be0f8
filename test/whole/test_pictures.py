"""The pictures of the guides are what their scripts draw of today's code."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from docs.pictures import gradient
from docs.pictures.__main__ import FOLDER, PICTURES

SHAPE = "{http://www.w3.org/2000/svg}rect"


@pytest.mark.parametrize("name", PICTURES)
def test_the_file_is_what_its_script_draws(name: str) -> None:
    assert (FOLDER / name).read_text() == PICTURES[name](), "run python -m docs.pictures --write"


@pytest.mark.parametrize("name", PICTURES)
def test_every_bar_is_on_the_page(name: str) -> None:
    page, *bars = ElementTree.parse(FOLDER / name).getroot().iter(SHAPE)
    width, height = (float(page.attrib[side]) for side in ("width", "height"))
    assert bars
    for bar in bars:
        x, y, across, down = (float(bar.attrib[side]) for side in ("x", "y", "width", "height"))
        assert 0 <= x <= x + across <= width and 0 <= y <= y + down <= height and across > 0


def test_the_phases_of_a_step_are_those_of_the_design() -> None:
    assert gradient.phases() == ["report", "plan", "collect", "norm", "step and gather", "end"]


def test_a_rank_keeps_its_shards_of_all_buckets() -> None:
    assert gradient.held(gradient.START) == 0
    assert gradient.held(gradient.END) == len(gradient.BACKWARD) / gradient.WORLD_SIZE
