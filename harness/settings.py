"""The configuration, checked before any job exists; each mistake is one line with its remedy."""

import difflib
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
    for error in sorted(errors, key=lambda error: (len(error.path), list(map(str, error.path)))):
        raise UserError(_explain(schema, error, files))


def select(key: str, names: Sequence[str], config: Mapping, files: Sequence[str]) -> list[str]:
    """The names that `config[key]`, "all" or a list, chooses; UserError where one is unknown."""
    wish = config[key]
    if wish == "all":
        return list(names)
    for name in wish:
        if name not in names:
            where = _origin([key], files)
            raise UserError(f"{where}: {key}: {name!r} does not exist; {_hint(name, names)}")
    return [name for name in names if name in wish]


def _explain(schema: Mapping, error: jsonschema.ValidationError, files: Sequence[str]) -> str:
    path = list(error.path)
    if error.validator == "additionalProperties":
        known = list(error.schema["properties"])
        key = next(key for key in error.instance if key not in known)
        dotted = ".".join([*path, str(key)])
        return f"{_origin([*path, key], files)}: unknown key {dotted}; {_hint(str(key), known)}"
    if error.validator == "required":
        key = next(key for key in error.validator_value if key not in error.instance)
        dotted = ".".join([*path, key])
        meaning = error.schema["properties"][key]["description"]
        return f"{_origin(path, files)}: key {dotted} is missing; expected {meaning}"
    keys = [part for part in path if isinstance(part, str)]
    meaning = schema
    for key in keys:
        meaning = meaning["properties"][key]
    problem = f"{'.'.join(keys)}: {error.instance!r} does not fit"
    return f"{_origin(path, files)}: {problem}; expected {meaning['description']}"


def _hint(name: str, known: Sequence[str]) -> str:
    if close := difflib.get_close_matches(name, known, n=1):
        return f"did you mean {close[0]!r}?"
    return f"there are: {', '.join(known)}"


def _origin(path: Sequence[str | int], files: Sequence[str]) -> str:
    """The last of the files that holds the key; what none holds came from the command line."""
    for file in reversed(files):
        if _holds(yaml.safe_load(Path(file).read_text(encoding="utf-8")), path):
            return str(file)
    return "--config"


def _holds(value: object, path: Sequence[str | int]) -> bool:
    try:
        for part in path:
            value = value[part]
    except (KeyError, IndexError, TypeError):
        return False
    return True
