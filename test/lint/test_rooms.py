"""The rooms of the package: imports go down, and the page that draws them is that of today's imports."""

from __future__ import annotations

from docs import rooms
from docs.pictures import rooms as picture


def test_imports_between_rooms_go_down() -> None:
    assert rooms.upward() == []


def test_every_entry_of_the_package_has_its_floor() -> None:
    assert {name.split(".")[0] for name in rooms.modules()} == set(rooms.FLOORS)


def test_the_page_and_its_picture_are_those_of_the_imports() -> None:
    assert rooms.PAGE.read_text() == rooms.page(), "run python docs/rooms.py --write"
    assert rooms.PICTURE.read_text() == picture.draw(), "run python docs/rooms.py --write"
