"""Statuses of a cell, and the status that an exception stands for."""

import re

from harness.cli import UserError

# After these a process holds memory or cannot be trusted.
FATAL = ("crashed", "hung", "oom")


STATUSES = (
    "ok",
    "inaccurate",
    "unavailable",
    "unsupported",
    "oom",
    "crashed",
    "hung",
    "throttled",
    "impossible",
    "unreached",
)
# The statuses of a row that has times.
TIMED = ("ok", "throttled", "impossible")
# Statuses of verification that say nothing of how an implementation computes. The library declines
# the cell, no time was left for it, or the project has withdrawn its recorded verdict.
SILENT = ("unsupported", "unreached", "withdrawn")
REASON_LENGTH = 240
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class Unsupported(Exception):
    """A library declined a case; the message is the first line of what it said."""


class Inaccurate(Exception):
    """A timed call gave another result than the call before the timing."""


def of(error: BaseException) -> str:
    """The status of a cell that ended with this exception."""
    if isinstance(error, Inaccurate):
        return "inaccurate"
    if out_of_memory(error):
        return "oom"
    if isinstance(error, (Unsupported, UserError)):
        return "unsupported"
    return "unavailable" if type(error).__name__ == "Unavailable" else "crashed"


def out_of_memory(error: BaseException) -> bool:
    # By name, so that this needs no torch; CUDA's own error carries the words only, and so do those
    # of torch's allocator on the CPU, of cuBLAS and of cuDNN.
    memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    text = str(error).lower()
    words = "out of memory", "can't allocate memory", "status_alloc_failed"
    return memory or any(each in text for each in words)


def no_compiler(error: BaseException) -> bool:
    """Whether a compiler of C or C++, which torch.compile and Triton call, is missing here."""
    text = str(error).lower()
    return "no working c++ compiler" in text or "failed to find c compiler" in text


def reason(error: BaseException) -> str:
    """The first line of an exception, after its type unless its own message suffices."""
    text = first_line(error)
    plain = isinstance(error, (Unsupported, Inaccurate, UserError))
    if not plain and of(error) != "unavailable":
        text = f"{type(error).__name__}: {text}".rstrip(": ")
    return text[:REASON_LENGTH]


def first_line(error: BaseException) -> str:
    """The first line of a message, "" of an empty one.

    One that only announces the next, as that of a failed compilation, takes it along. Colours of a
    terminal are left out.
    """
    text = COLOUR.sub("", str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    return " ".join(lines[:2] if lines[0].endswith(":") else lines[:1])[:REASON_LENGTH]
