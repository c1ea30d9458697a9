"""Ends a study in time, and keeps what it has measured: for a machine that is lent for a while.

`python -m harness.study.until 25 -- snakemake measured --cores all` runs the command for 25 minutes
at most. Then it is interrupted, as by Ctrl-C, or earlier if this process is. The journal of each
measurement that has not ended is closed (`harness.measure.close`), so that its op can be recorded
with the cells that it has.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from harness import cli
from harness.cli import UserError
from harness.measure.checkpoint import JournalHeldError
from harness.measure.close import close

# How long an interrupted study may take to end its jobs.
PATIENCE_S = 30.0
# By which a person, a batch system or a lost terminal ends this process, and how often it looks for
# them. The study has a session of its own, so it gets no word of a terminal that is gone.
SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
LOOK_S = 0.5
# How often, once a second, a journal is tried that another job holds.
TRIES = 5
# As `timeout` of the GNU coreutils says that a command was ended.
ENDED = 124


def main() -> int:
    parser = argparse.ArgumentParser(prog="harness.study.until", description=__doc__)
    parser.add_argument("minutes", type=float, help="from now on")
    parser.add_argument("--run", type=Path, default=Path("results/study"), help="folder of the run")
    parser.add_argument("command", nargs="+", help="after --, such as snakemake measured")
    options = parser.parse_args()
    if not 0 < options.minutes < float("inf"):
        parser.error(f"minutes: {options.minutes}, expected a positive number")
    code = ended(options.command, 60 * options.minutes)
    if code is not None:
        # As a shell has it, of a command that a signal has ended.
        return code if code >= 0 else 128 - code
    _outlive_terminal()
    closed = close_all(options.run / "raw")
    told = f"closed in {options.run}: {', '.join(closed) or 'none'}"
    print(f"tilewright: interrupted; {told}", file=sys.stderr)
    return ENDED


def ended(command: Sequence[str], limit_s: float) -> int | None:
    """Run a command; return its exit code, or None if it was interrupted.

    It is interrupted after `limit_s` seconds, or if this process gets one of SIGNALS. All that it
    has started is gone in the end.
    """
    with _heard() as heard:
        return _ended(command, time.monotonic() + limit_s, heard)


@contextlib.contextmanager
def _heard() -> Iterator[list[int]]:
    """The signals that come meanwhile, but for those that are ignored. They do nothing else."""
    heard: list[int] = []
    heeded = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    former = {
        number: signal.signal(number, lambda *call: heard.append(call[0])) for number in heeded
    }
    try:
        yield heard
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _ended(command: Sequence[str], end_s: float, heard: Sequence[int]) -> int | None:
    try:
        # A session of its own, so that an interrupt reaches all its jobs, and this process lives.
        job = subprocess.Popen(command, start_new_session=True, preexec_fn=_interruptible)
    except OSError as error:
        raise UserError(f"{command[0]}: {error.strerror}; name a command after --") from None
    try:
        while not heard and (left_s := end_s - time.monotonic()) > 0:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = job.wait(min(left_s, LOOK_S))
                # A batch system tells both at once, and the command may be the first to end.
                return None if heard and code else code
        return None
    finally:
        for number in (signal.SIGINT, signal.SIGKILL):
            if _signalled(job.pid, number):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    job.wait(PATIENCE_S)


def close_all(folder: Path) -> list[str]:
    """Close each journal in a folder; return the ops of those that hold a time.

    Another job may still hold one for a moment: workers end after the process that started them.
    """
    found = []
    for path in sorted(folder.glob(".*.journal")):
        try:
            _close_in_time(path)
            found.append(path.name[1:].removesuffix(".journal"))
        except (UserError, OSError) as error:
            print(f"tilewright: {error}", file=sys.stderr)
    return found


def _outlive_terminal() -> None:
    """Have words on a terminal that is gone lost, for they must not end what is still to do."""
    try:
        print("tilewright: closes journals", file=sys.stderr, flush=True)
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for number in (1, 2):
            os.dup2(nowhere, number)


def _close_in_time(path: Path) -> None:
    for _ in range(TRIES):
        with contextlib.suppress(JournalHeldError):
            return close(path)
        time.sleep(1.0)
    return close(path)


def _interruptible() -> None:
    # A shell lets its background jobs ignore the signal, and their processes inherit it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _signalled(session: int, number: int) -> bool:
    """Send a signal to the processes of a session; say whether there was one."""
    found = False
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            if os.getsid(int(entry.name)) == session:
                os.kill(int(entry.name), number)
                found = True
    return found


if __name__ == "__main__":
    cli.run(main)
