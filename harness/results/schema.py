"""Reads JSON files that cross the border of a process or a run, and checks them by their schemas.

A file of `schemas/` describes one format; docs/formats.md shows it. The keys that a reader uses are
required there. Other keys may be absent or new: records of former runs stay readable. A broken file
is a UserError that names the file, the place in it, the value and what was expected.
"""

import functools
import json
import math
from collections.abc import Iterable
from pathlib import Path

import jsonschema
import referencing
from referencing.jsonschema import DRAFT202012

from harness.cli import UserError
from harness.files import read_json

FOLDER = Path(__file__).with_name("schemas")
# The rules of JSON let 1.0 pass for an integer, and Python reads numbers that are not finite.
TYPES = jsonschema.Draft202012Validator.TYPE_CHECKER.redefine_many(
    {
        "integer": lambda _, value: type(value) is int,
        "number": lambda _, value: type(value) in (int, float) and math.isfinite(value),
    }
)
Validator = jsonschema.validators.extend(jsonschema.Draft202012Validator, type_checker=TYPES)
WORDS = {
    "string": "text",
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "object": "an object",
    "array": "a list",
    "null": "null",
}
# So many letters of a value that does not fit are shown.
MOST = 60


@functools.cache
def described(name: str) -> dict:
    """Return the schema of this name."""
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


@functools.cache
def _validator(name: str) -> jsonschema.protocols.Validator:
    """Return the validator of a schema; schemas refer to each other by the names of their files."""
    # A schema that names its dialect would be judged by the types of that dialect where another
    # refers to it.
    plain = {
        path.name: {key: value for key, value in described(path.stem).items() if key != "$schema"}
        for path in FOLDER.glob("*.json")
    }
    resources = ((key, DRAFT202012.create_resource(value)) for key, value in plain.items())
    schemas = referencing.Registry().with_resources(resources)
    return Validator(plain[f"{name}.json"], registry=schemas)


def read(path: str | Path, name: str, remedy: str) -> dict:
    """Return the object in a JSON file of the format `name`.

    Raises UserError that ends in `remedy` if the file is missing, broken or not of that format.
    """
    value = read_json(path, remedy)
    check(value, name, str(path), remedy)
    return value


def check(value: object, name: str, where: str, remedy: str) -> None:
    """Raise UserError for the first part of a value that is not of the format `name`.

    where: the file, as the message is to name it.
    """
    for error in _validator(name).iter_errors(value):
        raise UserError(f"{where}: {_problem(error)}; {remedy}")


def _problem(error: jsonschema.ValidationError) -> str:
    place = _place(error.absolute_path)
    if error.validator == "required":
        absent = next(key for key in error.validator_value if key not in error.instance)
        return f"{place}: has no {absent!r}" if place else f"has no {absent!r}"
    found = repr(error.instance)
    found = found if len(found) <= MOST else f"{found[: MOST - 3]}..."
    return f"{place!r} cannot be {found}, expected {_expected(error.schema)}"


def _place(path: Iterable[str | int]) -> str:
    """The way to a value in a file: `cells[3].tensors[0].ratio`."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return "".join(parts).removeprefix(".")


def _expected(schema: dict) -> str:
    """The values that fit, in words."""
    if "enum" in schema:
        return f"one of {', '.join(map(str, schema['enum']))}"
    types = schema.get("type", [])
    words = [WORDS[name] for name in ([types] if isinstance(types, str) else types)]
    limits = {"minimum": "from", "exclusiveMinimum": "above", "pattern": "that matches"}
    bounds = [f"{word} {schema[key]}" for key, word in limits.items() if key in schema]
    return " ".join([" or ".join(words), *bounds])
