"""Draws the rooms of harness/ and the imports among them: `python docs/rooms.py` writes rooms.svg.

The layers are those of the contract in pyproject.toml, the arrows those of the syntax trees. A dot
is hollow if a room names a module of another only in a string, to start or load it later.
Exit code 1 with `--check`: the picture is not that of the tree.
"""

import argparse
import ast
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs/rooms.svg"
CONTAINER = "harness"
# In px: a box, the step from one room to the next, and where on a box its column stands.
BOX_W, BOX_H, STEP_X, STEP_Y, COLUMN, MARGIN = 88, 26, 46, 37, 66, 12
BAND, INK, LINE = ("#f3f5f8", "#ffffff"), "#1f2328", "#3b5b8c"


def layers() -> list[list[str]]:
    """The rooms by layer, the highest first, as the contract of import-linter has them."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = declared["tool"]["importlinter"]["contracts"]
    [found] = [c["layers"] for c in contracts if c.get("containers") == [CONTAINER]]
    return [layer.split(" | ") for layer in found]


def arrows() -> dict[tuple[str, str], bool]:
    """Which room imports which; False if modules are only named, in a string."""
    rooms = {room for layer in layers() for room in layer}
    found: dict[tuple[str, str], bool] = {}
    for path in sorted((ROOT / CONTAINER).rglob("*.py")):
        room = path.relative_to(ROOT / CONTAINER).with_suffix("").parts[0]
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for name, imported in [(name, i) for node in ast.walk(tree) for name, i in named(node)]:
            package, _, rest = name.partition(".")
            other = rest.partition(".")[0]
            if package == CONTAINER and {room, other} <= rooms and room != other:
                found[room, other] = found.get((room, other), False) or imported
    return dict(sorted(found.items()))


def named(node: ast.AST) -> list[tuple[str, bool]]:
    """The modules that a node names, and whether it imports them."""
    if isinstance(node, ast.Import):
        return [(alias.name, True) for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [(f"{node.module}.{alias.name}", True) for alias in node.names]
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
        return [(node.value, False)]
    return []


def picture() -> str:
    """The rooms and their arrows as SVG, the same bytes for the same tree.

    Rooms stand on a diagonal, layers are bands. The line of a room goes to the right, and each dot
    on it is an arrow: down to the room below the dot.
    """
    drawn = arrows()
    rooms = [(room, level) for level, layer in enumerate(layers()) for room in layer]
    place = {room: (MARGIN + i * STEP_X, MARGIN + i * STEP_Y) for i, (room, _) in enumerate(rooms)}
    width = 2 * MARGIN + (len(rooms) - 1) * STEP_X + BOX_W
    height = 2 * MARGIN + (len(rooms) - 1) * STEP_Y + BOX_H
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
        f' viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="13">',
        f"<title>The {len(drawn)} arrows among the rooms of {CONTAINER}/</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for room, level in rooms:
        y = place[room][1] - (STEP_Y - BOX_H) / 2
        fill = BAND[level % 2]
        lines.append(f'<rect y="{y:g}" width="{width}" height="{STEP_Y}" fill="{fill}"/>')
    for room, (x, y) in place.items():
        middle, column = y + BOX_H / 2, x + COLUMN
        ends = [place[b][0] + COLUMN for a, b in drawn if a == room]
        tops = [place[a][1] + BOX_H / 2 for a, b in drawn if b == room]
        if ends:
            lines.append(f'<path d="M{x + BOX_W} {middle:g}H{max(ends)}" stroke="{LINE}"/>')
        if tops:
            lines.append(f'<path d="M{column} {min(tops):g}V{y - 5}" stroke="{LINE}"/>')
            lines.append(f'<path d="M{column - 3.5} {y - 7}h7l-3.5 7z" fill="{LINE}"/>')
    for (room, other), imported in drawn.items():
        at = f'cx="{place[other][0] + COLUMN}" cy="{place[room][1] + BOX_H / 2:g}"'
        fill = LINE if imported else "#ffffff"
        lines.append(f'<circle {at} r="3.6" fill="{fill}" stroke="{LINE}"/>')
    for room, (x, y) in place.items():
        lines.append(
            f'<rect x="{x}" y="{y}" width="{BOX_W}" height="{BOX_H}" rx="4" fill="#ffffff"'
            f' stroke="{INK}"/><text x="{x + BOX_W / 2:g}" y="{y + BOX_H / 2 + 4.5:g}"'
            f' text-anchor="middle" fill="{INK}">{room}</text>'
        )
    return "\n".join([*lines, "</svg>"]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if not current")
    options = parser.parse_args()
    text = picture()
    if options.check:
        if PICTURE.read_text(encoding="utf-8") == text:
            return 0
        print(f"{PICTURE}: not the imports of this tree; run python docs/rooms.py", file=sys.stderr)
        return 1
    PICTURE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
