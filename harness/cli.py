"""Holds what every command shares: its end, errors that a user can meet, seeds and dates."""

import datetime
import os
import sys
import traceback
from collections.abc import Callable

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
        # The reader of the output has read enough; the rest of the buffer goes nowhere.
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


def seed(text: str) -> int | None:
    """The argument of `--seed`: an integer from 0; None of "fresh", which is drawn for each run."""
    return None if text == "fresh" else int(text)


def part(text: str) -> tuple[int, int]:
    """The argument of `--part`: of 2/3 the numbers 2 and 3. Raises ValueError for other text."""
    number, of = map(int, text.split("/"))
    if not 1 <= number <= of:
        raise ValueError(text)
    return number, of


def fresh_seed() -> int:
    """A seed that nobody chose, below 2**32."""
    return int.from_bytes(os.urandom(4), "big")


def utc(moment: datetime.datetime) -> str:
    """A moment of UTC as files have it: 2026-11-20T23:50:00Z."""
    return f"{moment:%Y-%m-%dT%H:%M:%SZ}"
