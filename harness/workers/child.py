"""One implementation of one op in a process of its own, driven by JSON lines.

The parent sends its job, then `{"do": name, …}` again and again, and gets a line back each time,
with a `status`. They pass through a socket that nobody else knows; standard output and standard
error are a log, so nothing that a library prints can be taken for an answer.
"""

import contextlib
import ctypes
import importlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable
from typing import TextIO

from harness import status

COMMANDS = ("prepare", "block", "energy", "check", "release", "ledger")
PR_SET_PDEATHSIG = 1


def main(connection: int, log: int, job: int, parent: int) -> None:
    """The life of a worker that was just forked, with the descriptors of its socket and its log.

    The first line back is its process number. job: of a file that holds `op`, `impl`, `seed`,
    `bench` (the module whose Bench does the work) and `environment`, which no socket may take.
    """
    os.setsid()
    die_with(parent)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    # Unlike all others, a descriptor that was sent would pass to the programs that are run here.
    os.set_inheritable(connection, False)
    with socket.socket(fileno=connection) as line:
        commands, answers = line.makefile("r"), line.makefile("w")
        with open(job) as file:
            work = json.load(file)
        # A parent that has given up this worker meanwhile is not there to hear it.
        with contextlib.suppress(BrokenPipeError):
            _say(answers, {"pid": os.getpid()})
            _work(work, commands, answers)


def die_with(parent: int) -> None:
    """Has the kernel kill this process when its parent, of this number, ends in whatever way."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit("the parent is gone")


def _work(job: dict, commands: TextIO, answers: TextIO) -> None:
    os.environ.clear()
    os.environ.update(job["environment"])

    def start() -> object:
        return importlib.import_module(job["bench"]).Bench(job["op"], job["impl"], job["seed"])

    serve(start, commands, answers)


def serve(start: Callable[[], object], commands: TextIO, answers: TextIO) -> None:
    """Makes the bench, says so, and obeys until the end of the commands.

    A bench has `version` and, of the methods COMMANDS, those that its parent asks for; they
    return None or a dict, and an exception becomes the status and the reason of the answer. It
    also tells `spent_s`, the seconds that the work took.
    """
    bench = None

    def greet() -> dict:
        nonlocal bench
        bench = start()
        return {"impl_version": bench.version}

    _say(answers, _attempt(greet))
    for line in commands:
        command = json.loads(line)
        name = command.pop("do")
        if name not in COMMANDS:
            raise ValueError(f"no command {name!r}")
        _say(answers, _attempt(getattr(bench, name), **command))


def _attempt(action: Callable[..., dict | None], **arguments: object) -> dict:
    began = time.monotonic()
    try:
        answer = {"status": "ok", **(action(**arguments) or {})}
    except Exception as error:
        answer = {"status": status.of(error), "reason": status.reason(error)}
    return answer | {"spent_s": time.monotonic() - began}


def _say(answers: TextIO, answer: dict) -> None:
    try:
        text = json.dumps(answer, allow_nan=False)
    except ValueError:
        text = json.dumps({"status": "crashed", "reason": "answers with a number without end"})
    answers.write(text + "\n")
    answers.flush()
