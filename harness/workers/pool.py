"""The parent's end of a worker process: start, ask, wait within a limit, kill."""

import contextlib
import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from multiprocessing import connection

from harness import status
from harness.workers import forkserver
from harness.workers.messages import (
    Answer,
    Failure,
    Hello,
    MessageError,
    Pid,
    Request,
    decode,
    encode,
)

LOG_TAIL_BYTES = 4000
# A worker is named by its implementation. The name of a further process ends in this and a number.
FURTHER = "#"
# The reason of all workers at once if their forkserver is killed, which is no fault of theirs.
POOL_DIED = "lost with the forkserver"
# A process that leaves by itself first ends all that it has imported, slowly on a busy machine.
EXIT_S = 30.0
# Importing torch from a cold disk.
START_S = 300.0
# No answer is as long. A process that writes without end must not fill the parent's memory.
LONGEST = 2**26


def worker_name(impl: str, number: int) -> str:
    """Return the name of a further worker of an implementation; number: from 1."""
    return f"{impl}{FURTHER}{number}"


def process_of(name: str) -> tuple[str, int]:
    """Return the implementation of a worker, and the number of its process, 0 for the first."""
    impl, _, number = name.partition(FURTHER)
    return impl, int(number or 0)


class WorkerHandle:
    """The parent's end of one forked `harness.workers.child`.

    - impl: the implementation that it runs.
    - worker: the class that does the work, as `module:Class`.
    - variables: environment variables that it sees, added to those of the parent at this moment.
    - pid: the number of the process and of its group, None until its first answer.
    - socket: over which requests go and answers come.
    """

    def __init__(
        self, op: str, impl: str, seed: int, worker: str, variables: Mapping[str, str] | None = None
    ):
        self.impl = impl
        self._log = tempfile.TemporaryFile()  # noqa: SIM115, read after the end of the process
        self.socket, theirs = socket.socketpair()
        self._buffer = b""
        self.pid: int | None = None
        self._ended = False
        self._expected: type[Answer] = Hello
        self._server = forkserver.current()
        work: dict[str, object] = {"op": op, "impl": impl, "seed": seed, "worker": worker}
        with theirs, tempfile.TemporaryFile("w+") as job:
            work["environment"] = {**os.environ, **(variables or {})}
            # The forkserver may have begun before the parent had a GPU, and cores with it.
            work["cores"] = sorted(os.sched_getaffinity(0))
            json.dump(work, job)
            job.seek(0)
            # If the forkserver has died, the first `answer` reports it.
            with contextlib.suppress(OSError):
                self._server.fork(theirs, self._log, job)

    def send(self, request: Request) -> None:
        self._expected = request.answer
        self.socket.settimeout(EXIT_S)
        with contextlib.suppress(OSError):
            self.socket.sendall(json.dumps(encode(request)).encode() + b"\n")

    def answer(self, limit_s: float, began: float | None = None) -> Answer:
        """Return the answer to the last request, or to the start: a Hello.

        It is a Failure if the worker says so. It is one too if the process died, wrote something
        else or took too long; then the process is ended.

        - began: when the limit began to run, by the monotonic clock; None for now.
        """
        deadline = (time.monotonic() if began is None else began) + limit_s
        try:
            self._read_pid(deadline)
            return decode(self._read(deadline), self._expected, Failure)
        except TimeoutError:
            self.kill()
            return Failure("hung", f"no answer within {limit_s:g} s")
        except (EOFError, OSError):
            return Failure("crashed", self._end())
        except MessageError as error:
            self.kill()
            return Failure("crashed", f"answers with {error}"[: status.REASON_LENGTH])
        except ValueError:
            self.kill()
            return Failure("crashed", "wrote into the socket of its answers")

    @property
    def ended(self) -> bool:
        """Whether the process died, or the parent ended it for a fault."""
        return self._ended

    def log_tail(self) -> str:
        """Return the end of what the process printed."""
        descriptor = self._log.fileno()
        size = os.fstat(descriptor).st_size
        # `pread` leaves the file's position alone, at which the process goes on writing.
        tail = os.pread(descriptor, LOG_TAIL_BYTES, max(0, size - LOG_TAIL_BYTES))
        return tail.decode(errors="replace")

    def send_sigkill(self) -> None:
        """Send SIGKILL to the process and all that it started, and do not wait for their end."""
        # The process may run and its number be unread. A process that is not yet forked will find
        # its socket closed.
        with contextlib.suppress(OSError, EOFError, ValueError):
            self._read_pid(time.monotonic())
        if self.pid is not None and not self._ended:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def kill(self) -> None:
        """End the process and all that it started; do nothing if it is dead."""
        self.send_sigkill()
        if self.pid is not None and not self._ended:
            # Until it is reaped, the zombie keeps its number from going to another process.
            with contextlib.suppress(OSError):
                self._server.exit_code(self.pid, EXIT_S, reap=True)
        self._ended = True
        self.socket.close()

    def _end(self) -> str:
        """Return the reason why the socket is closed."""
        code = None
        try:
            if self.pid is not None:
                code = self._server.exit_code(self.pid, EXIT_S, reap=False)
        except OSError:
            pass
        lost = self.pid is None or not self._server.alive
        self.kill()
        if code is not None:
            return (
                f"died by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
            )
        return POOL_DIED if lost else "closed the socket of its answers"

    def _read_pid(self, deadline: float) -> None:
        """Read the number of the process, its first line."""
        if self.pid is None:
            self.pid = decode(self._read(deadline), Pid).pid

    def _read(self, deadline: float) -> object:
        """Return the next line; raise TimeoutError, EOFError, or ValueError if it is no JSON."""
        while b"\n" not in self._buffer:
            if len(self._buffer) > LONGEST:
                raise ValueError("an answer without end")
            self.socket.settimeout(max(deadline - time.monotonic(), 1e-3))
            try:
                chunk = self.socket.recv(2**20)
            except ConnectionResetError:
                chunk = b""
            if not chunk:
                raise EOFError
            self._buffer += chunk
        text, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(text, parse_constant=_refuse)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


class WorkerPool:
    """The workers of one op, by name; a context that ends them all.

    worker: the class that does the work, as `module:Class`. variables: the environment variables
    that only the workers of an implementation see, by implementation.
    """

    def __init__(
        self,
        op: str,
        seed: int,
        worker: str,
        variables: Mapping[str, Mapping[str, str]] | None = None,
    ):
        self._about, self._variables = (op, seed, worker), variables or {}
        self._workers: dict[str, WorkerHandle] = {}
        # Those whose first answer nobody has waited for.
        self._launched: set[str] = set()

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers.values():
            worker.send_sigkill()
        for worker in self._workers.values():
            worker.kill()

    @property
    def names(self) -> list[str]:
        """The workers that were started and not ended."""
        return list(self._workers)

    @property
    def groups(self) -> set[int]:
        """The process groups of the workers, each the number of its worker."""
        return {worker.pid for worker in self._workers.values() if worker.pid is not None}

    def launch(self, names: Iterable[str]) -> None:
        """Start the workers that are missing, side by side; `start` waits for what they say.

        Nothing may be asked of them before.
        """
        op, seed, worker = self._about
        for name in names:
            if name not in self._workers:
                impl, _ = process_of(name)
                variables = self._variables.get(impl)
                self._workers[name] = WorkerHandle(op, impl, seed, worker, variables)
                self._launched.add(name)

    def start(self, names: Iterable[str]) -> dict[str, Answer]:
        """Start the workers that are missing, side by side; return what each of these said.

        Those that were launched before are among them.
        """
        names = list(names)
        self.launch(names)
        fresh = [name for name in names if name in self._launched]
        self._launched.difference_update(fresh)
        began = time.monotonic()
        return {name: self._workers[name].answer(START_S, began) for name in fresh}

    def ask(self, names: Iterable[str], limit_s: float, request: Request) -> dict[str, Answer]:
        """Send all of them the same request at once; return the answers, each within the limit."""
        return self.ask_each(dict.fromkeys(names, request), limit_s)

    def ask_each(self, requests: Mapping[str, Request], limit_s: float) -> dict[str, Answer]:
        """Send each worker its own request, as `ask` does."""
        for name, request in requests.items():
            self._workers[name].send(request)
        began = time.monotonic()
        return {name: self._workers[name].answer(limit_s, began) for name in requests}

    def send(self, name: str, request: Request) -> None:
        """Send a worker a request; `first_answers` waits for what it says."""
        self._workers[name].send(request)

    def first_answers(self, began: Mapping[str, float], limit_s: float) -> dict[str, Answer]:
        """Wait until one of several workers answers, or was asked more than the limit ago.

        Returns the answers of all that have one by then. began: when each worker was asked, by the
        monotonic clock.
        """
        sockets = {self._workers[name].socket: name for name in began}
        rest_s = min(began.values()) + limit_s - time.monotonic()
        found = connection.wait(sockets, max(rest_s, 0.0))
        names = [sockets[each] for each in found] or [min(began, key=began.get)]
        return {name: self._workers[name].answer(limit_s, began[name]) for name in names}

    def stop(self, name: str) -> int | None:
        """End a worker, and print the end of its log; the next start replaces it.

        Returns the number that its process had.
        """
        worker = self._workers.pop(name)
        worker.kill()
        if tail := worker.log_tail().strip():
            print(f"{name} printed last:\n{tail}", file=sys.stderr)
        return worker.pid
