"""The parent's end of a worker process: start, ask, wait within a limit, kill."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORKER = "harness.worker"
LAST_WORDS = 4000
EXIT_S = 5.0
# Importing torch beside several other workers, from a cold disk.
START_S = 300.0


class Worker:
    """One `harness.worker`; every answer is a dict with a `status`, also that of a dead process.

    impl: the implementation it runs. bench: the module whose `Bench` it drives.
    """

    def __init__(self, op: str, impl: str, seed: int, bench: str):
        self.impl = impl
        call = [sys.executable, "-m", WORKER]
        call += ["--op", op, "--impl", impl, "--seed", str(seed), "--bench", bench]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115, closed by kill
        self._process = subprocess.Popen(
            call,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
        )
        self._buffer = b""

    def send(self, do: str, **arguments: object) -> None:
        # A dead worker has closed its end; the next answer says so.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
            self._process.stdin.flush()

    def answer(self, limit_s: float, began: float | None = None) -> dict:
        """The next answer; a worker that dies, talks nonsense or takes too long is ended here.

        began: when the limit began to run, by the monotonic clock; now where it is left out.
        """
        deadline = (time.monotonic() if began is None else began) + limit_s
        while b"\n" not in self._buffer:
            left = max(0.0, deadline - time.monotonic())
            ready, _, _ = select.select([self._process.stdout], [], [], left)
            if not ready:
                self.kill()
                return {"status": "hung", "reason": f"no answer within {limit_s:g} s"}
            chunk = os.read(self._process.stdout.fileno(), 2**16)
            if not chunk:
                return {"status": "crashed", "reason": self._end()}
            self._buffer += chunk
        text, _, self._buffer = self._buffer.partition(b"\n")
        try:
            answer = json.loads(text)
            return answer | {"status": str(answer["status"])}
        except (ValueError, TypeError, LookupError):
            self.kill()
            return {"status": "crashed", "reason": "wrote into the pipe of its answers"}

    def last_words(self) -> str:
        """The end of what the process printed."""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - LAST_WORDS))
        return self._log.read().decode(errors="replace")

    def kill(self) -> None:
        """Ends the process and all that it started; does nothing to a dead one."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()

    def _end(self) -> str:
        try:
            code = self._process.wait(EXIT_S)
        except subprocess.TimeoutExpired:
            code = None
        self.kill()
        if code is None:
            return "closed the pipe of its answers"
        return f"died by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


class Crew:
    """The workers of one op, by implementation; a context that ends them all."""

    def __init__(self, op: str, seed: int, bench: str):
        self._about = (op, seed, bench)
        self._workers: dict[str, Worker] = {}

    def __enter__(self) -> "Crew":
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers.values():
            worker.kill()

    def start(self, impls: Iterable[str]) -> dict[str, dict]:
        """Starts the workers that are missing, side by side; what each of these said."""
        op, seed, bench = self._about
        fresh = [impl for impl in impls if impl not in self._workers]
        for impl in fresh:
            self._workers[impl] = Worker(op, impl, seed, bench)
        began = time.monotonic()
        return {impl: self._workers[impl].answer(START_S, began) for impl in fresh}

    def ask(self, impls: Iterable[str], limit_s: float, do: str, **arguments) -> dict[str, dict]:
        """Gives all of them the same command at once; their answers, each within the limit."""
        impls = list(impls)
        for impl in impls:
            self._workers[impl].send(do, **arguments)
        began = time.monotonic()
        return {impl: self._workers[impl].answer(limit_s, began) for impl in impls}

    def dismiss(self, impl: str) -> None:
        """Ends a worker, and repeats the end of what it printed; the next start replaces it."""
        worker = self._workers.pop(impl)
        worker.kill()
        if words := worker.last_words().strip():
            print(f"{impl} printed last:\n{words}", file=sys.stderr)
