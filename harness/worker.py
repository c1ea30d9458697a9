"""One implementation of one op in a process of its own, driven by JSON lines.

The parent sends `{"do": name, …}` and gets one line back with a `status`. The answers go through
a copy of standard output; standard output itself is joined to standard error first, so nothing
that a library prints can be taken for an answer.
"""

import argparse
import ctypes
import importlib
import json
import os
import signal
from collections.abc import Callable
from typing import TextIO

from harness import command, statuses

COMMANDS = ("prepare", "block", "check", "release")
PR_SET_PDEATHSIG = 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--op", required=True)
    parser.add_argument("--impl", required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--bench", required=True, help="module whose Bench does the work")
    options = parser.parse_args()
    _die_with_parent()
    commands, answers = _private_pipes()

    def start() -> object:
        bench = importlib.import_module(options.bench)
        return bench.Bench(options.op, options.impl, options.seed)

    serve(start, commands, answers)


def serve(start: Callable[[], object], commands: TextIO, answers: TextIO) -> None:
    """Makes the bench, says so, and obeys until "quit" or the end of the commands.

    A bench has `version` and the methods COMMANDS, which return None or a dict; an exception
    becomes the status and the reason of the answer.
    """
    bench = None

    def greet() -> dict:
        nonlocal bench
        bench = start()
        return {"impl_version": bench.version}

    _say(answers, _attempt(greet))
    for line in commands:
        command_ = json.loads(line)
        name = command_.pop("do")
        if name == "quit":
            return
        if name not in COMMANDS:
            raise ValueError(f"no command {name!r}")
        _say(answers, _attempt(getattr(bench, name), **command_))


def _attempt(action: Callable[..., dict | None], **arguments: object) -> dict:
    try:
        return {"status": "ok", **(action(**arguments) or {})}
    except Exception as error:
        return {"status": statuses.of(error), "reason": statuses.reason(error)}


def _say(answers: TextIO, answer: dict) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def _private_pipes() -> tuple[TextIO, TextIO]:
    """The parent's pipes under new numbers; what others read or print goes elsewhere."""
    commands, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return commands, answers


def _die_with_parent() -> None:
    """Has the kernel kill this process when its parent ends in whatever way."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit("the parent is gone")


if __name__ == "__main__":
    command.run(main)
