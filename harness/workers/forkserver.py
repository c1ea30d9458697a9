"""Forks the workers from a process that has already imported what all of them need.

Python's own forkserver does not serve here. It keeps the environment of its start, and Triton
reads TRITON_INTERPRET as it is imported. It waits without limit for its preload. Each worker
inherits the pipe whose end tells the server that the parent is gone. So after a SIGKILL of the
parent, a worker that hangs would keep itself and the server alive for ever.

The server reads datagrams. A datagram with three descriptors (the socket, the log and the job of a
worker) asks for a fork. A datagram with a process number asks how that worker ended.
"""

import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent import futures
from pathlib import Path
from typing import IO

from harness.workers import child

ROOT = Path(__file__).resolve().parents[2]
# Nothing here may touch the GPU, which no fork survives, nor import a rival library.
PRELOAD = ("torch", "triton", "harness.calls.inputs")
EARLY = "TRITON_INTERPRET"
# A server that has forked answers at once; this is for one that was stopped.
ANSWER_S = 10.0
PAUSE_S = 0.002

_servers: dict[str, "Forkserver"] = {}
_starting = threading.Lock()
# A server dies with the thread that started it, so this one lives as long as the process.
_starter = futures.ThreadPoolExecutor(1)


class Forkserver:
    """The parent's end of a server; its methods raise OSError once the server is dead."""

    def __init__(self):
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        call = [sys.executable, "-m", "harness.workers.forkserver", str(os.getpid())]
        with theirs:
            self._process = subprocess.Popen(call, cwd=ROOT, stdin=theirs, start_new_session=True)
        self._control.settimeout(ANSWER_S)
        self.pid = self._process.pid
        # Workers may belong to several threads, and an answer to the one that asked.
        self._asking = threading.Lock()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def fork(self, connection: socket.socket, log: IO, job: IO) -> None:
        """Ask for a worker with these three, and do not wait for it."""
        descriptors = [connection.fileno(), log.fileno(), job.fileno()]
        socket.send_fds(self._control, [b"{}"], descriptors)

    def exit_code(self, pid: int, limit_s: float, reap: bool) -> int | None:
        """Return how a worker ended, a signal as a negative number; None if it runs on.

        limit_s: the time to wait for its end.

        reap: free its number, which stands for it and its group until then.
        """
        question = {"pid": pid, "limit_s": limit_s, "reap": reap}
        with self._asking:
            self._control.settimeout(limit_s + ANSWER_S)
            self._control.send(json.dumps(question).encode())
            while answer := self._control.recv(2**10):
                # An answer that came too late for its question is passed over.
                if (said := json.loads(answer))["pid"] == pid:
                    return said["code"]
        raise ConnectionResetError("the forkserver is gone")


def current() -> Forkserver:
    """Return the server for the present environment; start one if there is none or it is dead."""
    early = os.environ.get(EARLY, "")
    with _starting:
        if early not in _servers or not _servers[early].alive:
            _servers[early] = _starter.submit(Forkserver).result()
        return _servers[early]


def servers() -> list[Forkserver]:
    """Return the servers that this process has started, except those that were replaced."""
    return list(_servers.values())


def main() -> None:
    """Run the server; return if the parent is gone, and in each worker if its work is done."""
    child.die_with(int(sys.argv[1]))
    control = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    # Ctrl-C is the parent's to handle.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in PRELOAD:
        importlib.import_module(name)
    here = os.getpid()
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 2**10, 3)
        if not message:
            return
        if not descriptors:
            question = json.loads(message)
            code = _exit_code(**question)
            control.send(json.dumps({"pid": question["pid"], "code": code}).encode())
        elif os.fork() == 0:
            control.close()
            signal.signal(signal.SIGINT, signal.default_int_handler)
            child.main(*descriptors, parent=here)
            return
        for descriptor in descriptors:
            os.close(descriptor)


def _exit_code(pid: int, limit_s: float, reap: bool) -> int | None:
    deadline = time.monotonic() + limit_s
    options = os.WEXITED | os.WNOHANG | (0 if reap else os.WNOWAIT)
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_PID, pid, options)) is None:
            if time.monotonic() >= deadline:
                return None
            time.sleep(PAUSE_S)
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
    return None


if __name__ == "__main__":
    main()
