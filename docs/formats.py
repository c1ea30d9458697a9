"""Write the tables of formats.md from the declared columns and the JSON schemas.

    python docs/formats.py [--check]

A line `<!-- columns: NAME -->` begins the columns of a CSV file, `<!-- schema: NAME -->` the keys
of a JSON file; `<!-- end -->` ends either. The declarations are `harness/results/columns.py` and
`harness/results/schemas/`. `--check` writes nothing and exits with 1 if the page is not current.
"""

import argparse
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from harness.results import columns, schema

PAGE = Path(__file__).with_name("formats.md")
PART = re.compile(r"<!-- (columns|schema): (\S+) -->\n(?:.*?\n)??<!-- end -->", re.DOTALL)
HEADS = {
    "columns": "| column | kind | unit | content |\n| --- | --- | --- | --- |",
    "schema": "| key | kind | content |\n| --- | --- | --- |",
}


def of_columns(name: str) -> list[str]:
    """Return the rows of a CSV file: column, kind, unit, meaning with the values that it may have.

    A unit that a text or a flag does not have is left empty.
    """
    return [
        f"| `{column.name}` | {column.kind} | {column.unit} | {_meaning(column)} |"
        for column in columns.TABLES[name].columns
    ]


def _meaning(column: columns.Column) -> str:
    values = " or ".join(f"`{value}`" for value in column.values)
    if column.values == columns.STATUSES:
        values = "one of the [statuses](map.md#names)"
    return f"{column.meaning}: {values}" if values else column.meaning


def of_schema(name: str) -> list[str]:
    """Return the rows of a JSON format: the way to a key, its kind, its meaning."""
    whole = schema.described(name)
    return [
        f"| `{place}` | {kind} | {meaning} |" for place, kind, meaning in _keys(whole, whole, "")
    ]


def _keys(node, whole, place):
    """Yield way, kind and meaning of each key below a node; `[]` is any entry, `*` any name."""
    node = _resolved(node, whole)
    required = node.get("required", ())
    for key, value in node.get("properties", {}).items():
        way = f"{place}.{key}".lstrip(".")
        absent = "" if key in required else ", or absent"
        yield way, _kind(_resolved(value, whole)) + absent, value.get("description", "")
        yield from _inside(value, whole, way)
    yield from _inside({k: v for k, v in node.items() if k != "properties"}, whole, place)


def _inside(value, whole, way):
    if "items" in value:
        yield from _keys(value["items"], whole, f"{way}[]")
    if isinstance(value.get("additionalProperties"), dict):
        yield from _keys(value["additionalProperties"], whole, f"{way}.*")
    if "properties" in value:
        yield from _keys(value, whole, way)


def _resolved(node, whole):
    """A node with what its reference within the same file says."""
    reference = node.get("$ref", "")
    if not reference.startswith("#/"):
        return node
    found = whole
    for part in reference[2:].split("/"):
        found = found[part]
    return found | {key: value for key, value in node.items() if key != "$ref"}


def _kind(value):
    if "$ref" in value:
        return f"as `{value['$ref'].partition('#')[0]}`"
    if "enum" in value:
        return ", ".join(f"`{word}`" for word in value["enum"])
    types = value.get("type", "any")
    return " or ".join(types if isinstance(types, list) else [types])


def written(page: str) -> str:
    """Return the page with each part made anew."""

    def part(found: re.Match) -> str:
        kind, name = found[1], found[2]
        rows = {"columns": of_columns, "schema": of_schema}[kind](name)
        lines = [f"<!-- {kind}: {name} -->", HEADS[kind], *rows, "<!-- end -->"]
        return "\n".join(lines)

    return PART.sub(part, page)


def shown(page: str) -> set[tuple[str, str]]:
    """Return the parts that a page has: `columns` or `schema`, and the name."""
    return {(found[1], found[2]) for found in PART.finditer(page)}


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if not current")
    options = parser.parse_args(words)
    old = PAGE.read_text(encoding="utf-8")
    new = written(old)
    if old == new:
        return 0
    if options.check:
        print("docs/formats.md is not current: run python docs/formats.py", file=sys.stderr)
        return 1
    draft = PAGE.with_suffix(".part")
    draft.write_text(new, encoding="utf-8")
    draft.replace(PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
