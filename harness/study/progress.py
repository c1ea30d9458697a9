"""The words of a study while it runs: jobs done of all, their share, the time left, and at the end
where the documents are.

Snakemake tells its events to a Python logger; here a filter of that logger puts them into words.
"""

import logging
import time
from collections.abc import Callable
from pathlib import Path

DOCUMENTS = ("paper.pdf", "report.html")
# The last words of Snakemake, of work done and of none.
LAST = ("Nothing to be done", "Elapsed time")
# They add nothing to a line for each job that begins and one for each that is done.
SILENT_EVENTS = ("JOB_FINISHED", "RESOURCES_INFO")
SILENT_WORDS = ("Select jobs to execute", "Execute ")
# Snakemake's first words after Ctrl-C. It then tells each job that ran as an error, a dozen lines.
STOPPED = "Terminating processes on user request"
INTERRUPTED = "Interrupted: what ran is stopped; the same command goes on from here."


def documents(run: Path) -> str:
    """A line that names the documents of a run, as far as they are there; else ""."""
    found = [str(run / name) for name in DOCUMENTS if (run / name).is_file()]
    return f"Written: {', '.join(found)}" if found else ""


def line(done: int, total: int, spent_s: float) -> str:
    """`12 of 134 jobs done (9 %), about 6 min left`, as if all jobs took the same time."""
    text = f"{done} of {total} jobs done ({100 * done // max(1, total)} %)"
    if not 0 < done < total:
        return text
    left_s = spent_s / done * (total - done)
    shown = f"{left_s / 60:.0f} min" if left_s >= 90 else f"{left_s:.0f} s"
    return f"{text}, about {shown} left"


class Words(logging.Filter):
    """Puts the progress of a study into words and leaves out what only Snakemake needs.

    run: its folder. clock: seconds that rise; they count from the first record on.
    """

    def __init__(self, run: Path, clock: Callable[[], float] = time.monotonic):
        super().__init__()
        self._run, self._clock = run, clock
        self._began, self._failed, self._stopped = clock(), False, False

    def filter(self, record: logging.LogRecord) -> bool:
        name = getattr(getattr(record, "event", None), "name", "")
        if self._stopped and record.levelno >= logging.ERROR:
            return False
        if str(record.msg).startswith(STOPPED):
            record.msg, self._stopped, self._failed = INTERRUPTED, True, True
        if name in SILENT_EVENTS or str(record.msg).startswith(SILENT_WORDS):
            return False
        if name == "PROGRESS":
            record.msg = line(record.done, record.total, self._clock() - self._began)
            record.event = None
        self._failed |= record.levelno >= logging.ERROR
        if str(record.msg).startswith(LAST) and not self._failed:
            record.msg = "\n".join(filter(None, [str(record.msg), documents(self._run)]))
        return True
