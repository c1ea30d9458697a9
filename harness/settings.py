"""The configuration, checked before any job exists; each mistake is one line with its remedy."""

import difflib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import jsonschema
import yaml

from harness.command import UserError

SCHEMA = "workflow/schemas/config.schema.yaml"


def check(root: Path, config: Mapping, files: Sequence[str]) -> None:
    """Raises UserError for the first mistake in `config`, which was merged from `files`."""
    schema = yaml.safe_load((root / SCHEMA).read_text(encoding="utf-8"))
    errors = jsonschema.Draft202012Validator(schema).iter_errors(config)
    for error in sorted(errors, key=lambda error: [str(part) for part in error.path]):
        raise UserError(_explain(schema, error, config, files))


def select(key: str, names: Sequence[str], config: Mapping, files: Sequence[str]) -> list[str]:
    """The names that `config[key]`, "all" or a list, chooses; UserError where one is unknown."""
    wish = config[key]
    if wish == "all":
        return list(names)
    for name in wish:
        if name not in names:
            problem = f"{key}: {name!r} does not exist; {_hint(name, names)}"
            raise UserError(f"{_origin([key], config, files)}: {problem}")
    return [name for name in names if name in wish]


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
    return f"{where}: {_dotted(path)}: {error.instance!r} does not fit; expected {meaning}"


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
            if _value(given, path) == _value(config, path):
                return os.path.relpath(file)
        except (KeyError, IndexError, TypeError):
            continue
    return "--config"


def _value(tree, path: Sequence[str | int]):
    for part in path:
        tree = tree[part]
    return tree
