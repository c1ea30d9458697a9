"""The configuration, checked before any job exists; each mistake is one line with its remedy."""

import difflib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import jsonschema
import yaml

from harness.cli import UserError
from harness.results.schema import Validator

SCHEMA = "workflow/schemas/config.schema.yaml"


def check(root: Path, config: Mapping, files: Sequence[str]) -> None:
    """Raises UserError for the first mistake in `config`, which was merged from `files`."""
    schema = yaml.safe_load((root / SCHEMA).read_text(encoding="utf-8"))
    errors = Validator(schema).iter_errors(config)
    for error in sorted(errors, key=lambda error: [str(part) for part in error.path]):
        raise UserError(_explain(schema, error, config, files))


def select(key: str, names: Sequence[str], config: Mapping, files: Sequence[str]) -> list[str]:
    """The names that `config[key]`, "all" or a list, chooses; UserError where one is unknown."""
    wish = config[key]
    if wish == "all":
        return list(names)
    exist([key], names, config, files)
    return [name for name in names if name in wish]


def exist(path: Sequence[str], names: Sequence[str], config: Mapping, files: Sequence[str]) -> None:
    """Raises UserError where the list at `path` of the configuration has a name not in `names`."""
    for name in _value(config, path):
        if name not in names:
            refuse(path, f"{name!r} does not exist; {_hint(name, names)}", config, files)


def refuse(path: Sequence[str], problem: str, config: Mapping, files: Sequence[str]) -> None:
    """Raises the UserError about the value at `path` of the configuration."""
    raise UserError(f"{_origin(path, config, files)}: {_dotted(path)}: {problem}")


def _explain(
    schema: Mapping, error: jsonschema.ValidationError, config: Mapping, files: Sequence[str]
) -> str:
    path = list(error.path)
    if error.validator == "additionalProperties":
        known = list(error.schema["properties"])
        path.append(next(key for key in error.instance if key not in known))
        problem = f"unknown key {_dotted(path)}; {_hint(str(path[-1]), known)}"
        return f"{_origin(path, config, files)}: {problem}"
    if error.validator == "required":
        path.append(next(key for key in error.validator_value if key not in error.instance))
        meaning = error.schema["properties"][path[-1]]["description"]
        return f"{files[0]}: key {_dotted(path)} is missing; expected {meaning}"
    where = _origin(path, config, files)
    path = [part for part in path if isinstance(part, str)]
    for key in path:
        schema = schema["properties"][key]
    meaning = schema["description"]
    if twice := _twice(error.instance):
        return f"{where}: {_dotted(path)}: {twice[0]!r} is given twice; leave one out"
    return f"{where}: {_dotted(path)}: {error.instance!r} does not fit; expected {meaning}"


def _twice(value: object) -> list:
    """The entries of a list that stand in it more than once."""
    entries = value if isinstance(value, list) else []
    return [entry for number, entry in enumerate(entries) if entry in entries[:number]]


def _dotted(path: Sequence[str]) -> str:
    return ".".join(map(str, path))


def _hint(name: str, known: Sequence[str]) -> str:
    if close := difflib.get_close_matches(name, known, n=1):
        return f"did you mean {close[0]!r}?"
    return f"there are: {', '.join(known)}"


def _origin(path: Sequence[str | int], config: Mapping, files: Sequence[str]) -> str:
    """The last of the files that gives this value; what none gives came from the command line."""
    for file in reversed(files):
        given = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
        try:
            # By what they look like: a NaN is not equal to itself.
            if repr(_value(given, path)) == repr(_value(config, path)):
                return os.path.relpath(file)
        except (KeyError, IndexError, TypeError):
            continue
    return "--config"


def _value(tree, path: Sequence[str | int]):
    for part in path:
        tree = tree[part]
    return tree
