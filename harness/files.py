"""Files written whole, and read with an error that a user can mend."""

import contextlib
import fcntl
import json
import os
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path

from harness.cli import UserError


@contextlib.contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """Yields a temporary name beside `path`; renames it to `path` only if the body succeeds."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        yield Path(name)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)
        os.replace(name, path)
    except BaseException as error:
        Path(name).unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno and error.filename in (None, name):
            # A full disk names no file, and nobody knows the temporary one. An error that is not
            # the system's own has words only, and a name would take their place.
            error.filename = str(path)
        raise


@contextlib.contextmanager
def locked(path: str | Path) -> Iterator[None]:
    """Admits one process at a time that reads `path` and writes it anew."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path.parent / f".{path.name}.lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def write_text(path: str | Path, text: str) -> None:
    with whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | Path, value: object) -> None:
    write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def read_json(path: str | Path, remedy: str, fields: Collection[str] = ()) -> dict:
    """Return the object in a JSON file.

    Raises UserError that ends in `remedy` if the file is missing or broken, or if the object lacks
    one of the fields.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        value = json.loads(text, parse_constant=_refuse)
    except FileNotFoundError:
        raise UserError(f"{path}: missing; {remedy}") from None
    except ValueError as error:
        raise UserError(f"{path}: not readable as JSON ({error}); {remedy}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: holds no JSON object; {remedy}")
    if absent := set(fields) - set(value):
        raise UserError(f"{path}: has no {min(absent)!r}; {remedy}")
    return value


def _refuse(constant: str) -> None:
    """Raise ValueError for NaN and Infinity, which Python would read and JSON does not have."""
    raise ValueError(f"{constant} is no number")
