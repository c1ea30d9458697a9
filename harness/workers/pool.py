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

from harness.workers import forkserver

LAST_WORDS = 4000
# A worker is named by its implementation; a further process of it has a mark and a number behind.
FURTHER = "#"
# The reason of all workers at once when their forkserver is killed, which is no fault of theirs.
LOST = "lost with the forkserver"
EXIT_S = 5.0
# Importing torch from a cold disk.
START_S = 300.0
# No answer is as long; a process that talks without end must not fill the parent's memory.
LONGEST = 2**26


def further(impl: str, number: int) -> str:
    """The name of a further worker of an implementation; number: from 1."""
    return f"{impl}{FURTHER}{number}"


def process_of(name: str) -> tuple[str, int]:
    """The implementation of a worker, and the number of the process among those that run it."""
    impl, _, number = name.partition(FURTHER)
    return impl, int(number or 0)


class Worker:
    """One forked `harness.workers.child`; every answer is a dict with a `status`, also of a dead
    process.

    impl: the implementation it runs. bench: the module whose `Bench` it drives. It sees the
    environment variables of this moment, and `variables` before them. pid: the number of the
    process and of its group, None until its first answer.
    """

    def __init__(
        self, op: str, impl: str, seed: int, bench: str, variables: Mapping[str, str] | None = None
    ):
        self.impl = impl
        self._log = tempfile.TemporaryFile()  # noqa: SIM115, read after the end of the process
        self._socket, theirs = socket.socketpair()
        self._buffer = b""
        self.pid: int | None = None
        self._ended = False
        self._server = forkserver.current()
        work = {"op": op, "impl": impl, "seed": seed, "bench": bench}
        with theirs, tempfile.TemporaryFile("w+") as job:
            json.dump(work | {"environment": {**os.environ, **(variables or {})}}, job)
            job.seek(0)
            # Of a dead server the first answer tells.
            with contextlib.suppress(OSError):
                self._server.fork(theirs, self._log, job)

    def send(self, do: str, **arguments: object) -> None:
        self._write({"do": do, **arguments})

    def answer(self, limit_s: float, began: float | None = None) -> dict:
        """The next answer; a worker that dies, talks nonsense or takes too long is ended here.

        began: when the limit began to run, by the monotonic clock; now where it is left out.
        """
        deadline = (time.monotonic() if began is None else began) + limit_s
        try:
            self._greet(deadline)
            answer = self._read(deadline)
            return answer | {"status": str(answer["status"])}
        except TimeoutError:
            self.kill()
            return {"status": "hung", "reason": f"no answer within {limit_s:g} s"}
        except (EOFError, OSError):
            return {"status": "crashed", "reason": self._end()}
        except (ValueError, TypeError, LookupError):
            self.kill()
            return {"status": "crashed", "reason": "wrote into the socket of its answers"}

    @property
    def ended(self) -> bool:
        """Whether the process died, or was ended here for a fault of its own."""
        return self._ended

    def last_words(self) -> str:
        """The end of what the process printed."""
        descriptor = self._log.fileno()
        size = os.fstat(descriptor).st_size
        # At a place of its own: the process writes on where the file ends.
        words = os.pread(descriptor, LAST_WORDS, max(0, size - LAST_WORDS))
        return words.decode(errors="replace")

    def strike(self) -> None:
        """Sends SIGKILL to the process and all that it started, without waiting for their end."""
        # It may be running and not have said its number yet; one not yet forked will find its
        # socket closed.
        with contextlib.suppress(OSError, EOFError, ValueError, TypeError, LookupError):
            self._greet(time.monotonic())
        if self.pid is not None and not self._ended:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def kill(self) -> None:
        """Ends the process and all that it started; does nothing to a dead one."""
        self.strike()
        if self.pid is not None and not self._ended:
            # Until then the zombie keeps the number from going to another process.
            with contextlib.suppress(OSError):
                self._server.exit_code(self.pid, EXIT_S, reap=True)
        self._ended = True
        self._socket.close()

    def _end(self) -> str:
        """The reason of a closed socket."""
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
        return LOST if lost else "closed the socket of its answers"

    def _greet(self, deadline: float) -> None:
        """Hears the number of the process, which it says first of all."""
        if self.pid is None:
            self.pid = int(self._read(deadline)["pid"])

    def _read(self, deadline: float) -> dict:
        """The next line; raises TimeoutError, EOFError, or ValueError where it is no JSON."""
        while b"\n" not in self._buffer:
            if len(self._buffer) > LONGEST:
                raise ValueError("an answer without end")
            self._socket.settimeout(max(deadline - time.monotonic(), 1e-3))
            try:
                chunk = self._socket.recv(2**20)
            except ConnectionResetError:
                chunk = b""
            if not chunk:
                raise EOFError
            self._buffer += chunk
        text, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(text, parse_constant=_refuse)

    def _write(self, message: dict) -> None:
        self._socket.settimeout(EXIT_S)
        with contextlib.suppress(OSError):
            self._socket.sendall(json.dumps(message).encode() + b"\n")


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


class Crew:
    """The workers of one op, by name; a context that ends them all.

    variables: by implementation the environment variables that its workers alone see.
    """

    def __init__(
        self,
        op: str,
        seed: int,
        bench: str,
        variables: Mapping[str, Mapping[str, str]] | None = None,
    ):
        self._about, self._variables = (op, seed, bench), variables or {}
        self._workers: dict[str, Worker] = {}

    def __enter__(self) -> "Crew":
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers.values():
            worker.strike()
        for worker in self._workers.values():
            worker.kill()

    @property
    def groups(self) -> set[int]:
        """The process groups of the workers, each the number of its worker."""
        return {worker.pid for worker in self._workers.values() if worker.pid is not None}

    def start(self, names: Iterable[str]) -> dict[str, dict]:
        """Starts the workers that are missing, side by side; what each of these said."""
        op, seed, bench = self._about
        fresh = [name for name in names if name not in self._workers]
        for name in fresh:
            impl, _ = process_of(name)
            self._workers[name] = Worker(op, impl, seed, bench, self._variables.get(impl))
        began = time.monotonic()
        return {name: self._workers[name].answer(START_S, began) for name in fresh}

    def ask(self, names: Iterable[str], limit_s: float, do: str, **arguments) -> dict[str, dict]:
        """Gives all of them the same command at once; their answers, each within the limit."""
        names = list(names)
        for name in names:
            self._workers[name].send(do, **arguments)
        began = time.monotonic()
        return {name: self._workers[name].answer(limit_s, began) for name in names}

    def dismiss(self, name: str) -> int | None:
        """Ends a worker, and repeats the end of what it printed; the next start replaces it.

        Returns the number that its process had.
        """
        worker = self._workers.pop(name)
        worker.kill()
        if words := worker.last_words().strip():
            print(f"{name} printed last:\n{words}", file=sys.stderr)
        return worker.pid
