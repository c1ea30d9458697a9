"""What every command of the harness shares: errors a user can meet, and files written whole."""

import contextlib
import datetime
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

# The exit code of a fault of software (sysexits.h).
FAULT = 70
# That of a program that SIGPIPE ends, as the shell has it.
CLOSED = 141


class UserError(Exception):
    """A mistake or a lack that the user can mend: what, where, what to do, in one or two lines."""


def run(main: Callable[[], int | None]) -> None:
    """Runs a command's main function; a UserError becomes a short message and exit code 2.

    Ctrl-C is no fault: exit code 130, and nothing to read. A fault of the command itself prints its
    traceback and ends with FAULT, which no command gives as its verdict: 1 would be one.
    """
    try:
        code = main() or 0
        sys.stdout.flush()
        sys.exit(code)
    except KeyboardInterrupt:
        sys.exit(130)
    except UserError as error:
        sys.exit(_complain(str(error)))
    except BrokenPipeError:
        # Who reads the output has read enough; what is left in its buffer goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(CLOSED)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        sys.exit(_complain(f"{where}{error.strerror or error}"))
    except Exception:
        traceback.print_exc()
        sys.exit(FAULT)


def _complain(message: str) -> int:
    print(f"tilewright: {message}", file=sys.stderr)
    return 2


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


def write_text(path: str | Path, text: str) -> None:
    with whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | Path, value: object) -> None:
    write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def seed(text: str) -> int | None:
    """The argument of `--seed`: an integer from 0; None of "fresh", which is drawn for each run."""
    return None if text == "fresh" else int(text)


def fresh_seed() -> int:
    """A seed that nobody chose, below 2**32."""
    return int.from_bytes(os.urandom(4), "big")


def utc(moment: datetime.datetime) -> str:
    """A moment of UTC as files have it: 2026-11-20T23:50:00Z."""
    return f"{moment:%Y-%m-%dT%H:%M:%SZ}"


def read_json(path: str | Path, remedy: str, fields: Collection[str] = ()) -> dict:
    """The object in a JSON file; a missing or broken one, or one without some of the fields, is a
    UserError that ends in `remedy`."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: missing; {remedy}") from None
    except ValueError as error:
        raise UserError(f"{path}: not readable as JSON ({error}); {remedy}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: holds no JSON object; {remedy}")
    if absent := set(fields) - set(value):
        raise UserError(f"{path}: has no {min(absent)!r}; {remedy}")
    return value
