"""One implementation of one op in a process of its own, driven by messages.

The parent sends its job, then a request a line, and gets an answer a line back, see
`harness.workers.messages`. The lines pass through a socket that only the two know. Standard output
and standard error are a log, so a line that a library prints is never taken for an answer.
"""

import contextlib
import ctypes
import json
import os
import pkgutil
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TextIO

from harness import status
from harness.workers.messages import Answer, Done, Failure, Hello, Pid, decode, encode

PR_SET_PDEATHSIG = 1


def main(connection: int, log: int, job: int, parent: int) -> None:
    """Run a worker that was just forked, with the descriptors of its socket and its log.

    The first line back is its process number.

    - job: the descriptor of a JSON file with `op`, `impl`, `seed`, `worker` (the class that does
      the work, as `module:Class`), `cores` and `environment`, which is too long for a socket.
    - parent: the process number of the forkserver.
    """
    os.setsid()
    die_with(parent)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    # A descriptor that came through a socket is inheritable: programs started here would get it.
    os.set_inheritable(connection, False)
    with socket.socket(fileno=connection) as line:
        requests, answers = line.makefile("r"), line.makefile("w")
        with open(job) as file:
            work = json.load(file)
        # The parent may have given up this worker meanwhile, and closed the socket.
        with contextlib.suppress(BrokenPipeError):
            _say(answers, Pid(os.getpid()))
            _work(work, requests, answers)


def die_with(parent: int) -> None:
    """Have Linux kill this process as soon as its parent, the process of this number, ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit("the parent is gone")


def _work(job: dict, requests: TextIO, answers: TextIO) -> None:
    os.environ.clear()
    os.environ.update(job["environment"])
    # A container may forbid it; then all jobs share its cores.
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, job["cores"])

    def start() -> object:
        return pkgutil.resolve_name(job["worker"])(job["op"], job["impl"], job["seed"])

    serve(start, requests, answers)


def serve(start: Callable[[], object], requests: TextIO, answers: TextIO) -> None:
    """Make the worker, say hello, and serve requests until the parent closes the socket.

    start: makes the worker. It has `version`, `requests` (the classes of the requests that it
    serves) and a method for each, named by the request's `do`, which returns an answer or None. An
    exception becomes a Failure.
    """
    worker = None

    def greet() -> Answer:
        nonlocal worker
        worker = start()
        return Hello(worker.version)

    def serve_one(line: str) -> Answer | None:
        request = decode(json.loads(line), *worker.requests)
        return getattr(worker, request.do)(**vars(request))

    _say(answers, _attempt(greet))
    for line in requests:
        _say(answers, _attempt(serve_one, line))


def _attempt(action: Callable[..., Answer | None], *arguments: object) -> Answer:
    began = time.monotonic()
    try:
        answer = action(*arguments) or Done()
    except Exception as error:
        answer = Failure(status.of(error), status.reason(error))
    return replace(answer, spent_s=time.monotonic() - began)


def _say(answers: TextIO, message: object) -> None:
    try:
        text = json.dumps(encode(message), allow_nan=False)
    except ValueError:
        text = json.dumps(encode(Failure("crashed", "answers with a number that is not finite")))
    answers.write(text + "\n")
    answers.flush()
