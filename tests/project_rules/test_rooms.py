"""Check that the picture of the rooms is that of the tree and stays readable."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]
# A reader can follow so many arrows in one picture.
MOST_ARROWS = 80
ROOMS = runpy.run_path(str(ROOT / "docs/rooms.py"))


def test_the_picture_is_current():
    drawn = (ROOT / "docs/rooms.svg").read_text(encoding="utf-8")
    assert drawn == ROOMS["picture"](), "run python docs/rooms.py"


def test_the_arrows_among_rooms_are_few():
    assert 0 < len(ROOMS["arrows"]()) <= MOST_ARROWS


def test_every_arrow_points_to_a_lower_layer():
    level = {room: n for n, layer in enumerate(ROOMS["layers"]()) for room in layer}
    imported = [arrow for arrow, imports in ROOMS["arrows"]().items() if imports]
    assert not [(room, other) for room, other in imported if level[room] >= level[other]]


def test_every_room_is_drawn():
    folders = {path.parent.name for path in (ROOT / "harness").glob("*/__init__.py")}
    files = {path.stem for path in (ROOT / "harness").glob("[!_]*.py")}
    assert folders | files == {room for layer in ROOMS["layers"]() for room in layer}
