"""Implementations whose behaviour is known, in place of a GPU: their name says what they do.

`<fault>` fails in its second timed block, `<fault>_at_once` when a cell is prepared; in a case
named LAST_CASE all behave.
"""

import ctypes
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

from harness.statuses import Inaccurate, Unsupported

US = {"slow": 103.0, "fast": 1.0}
LAST_CASE = "M2"


class OutOfMemoryError(RuntimeError):
    """Has the name of torch's own."""


class Unavailable(Exception):
    """Has the name of the loader's own."""


class Bench:
    version = "1.0"

    def __init__(self, op, impl, seed):
        if impl == "absent":
            raise Unavailable("No module named 'absent'")
        self.impl, self.blocks, self.case = impl, 0, ""

    def prepare(self, case, dtype, direction):
        self.case, self.blocks = case, 0
        if self.impl == "starves_beside_others" and not self._alone():
            raise OutOfMemoryError("CUDA out of memory")
        if case != LAST_CASE and self.impl.endswith("_at_once"):
            self._fail(self.impl.removesuffix("_at_once"))
        return {"reason": "", "peak_mem_bytes": 7, "l2_bytes": 1000}

    def block(self, calls):
        self.blocks += 1
        # The first block is warm-up.
        if self.case != LAST_CASE and self.blocks == 3:
            self._fail(self.impl)
        throttle = "thermal slowdown" if self.impl == "hot" else "power cap"
        reading = {"sm_mhz": 1980, "temp_c": 40, "power_w": 123.4, "throttle": throttle}
        time_us = US.get(self.impl, 100.0)
        return reading | {"device_us": time_us, "call_us": 2 * time_us, "busy_s": 0.001}

    def check(self):
        if self.impl == "wrong_later" and self.case != LAST_CASE:
            raise Inaccurate("output 0 changed")

    def release(self):
        if self.impl == "keeps_memory":
            raise RuntimeError("cannot free")

    def _alone(self):
        """Whether this is not the first process of its kind that the parent started."""
        mark = Path(tempfile.gettempdir()) / f"starved-{os.getppid()}"
        if mark.exists():
            return True
        mark.touch()
        return False

    def _fail(self, what):
        if what == "declines":
            raise Unsupported("only even sizes")
        if what == "raises":
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")
        if what == "exhausts_memory":
            raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        if what == "segfaults":
            ctypes.string_at(0)
        if what == "is_killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "exits":
            print("last words", file=sys.stderr)
            sys.exit(3)
        if what == "hangs":
            time.sleep(600)
        if what == "closes_its_pipes":
            os.closerange(3, 20)
            time.sleep(600)
        if what == "prints":
            os.write(1, b'{"status": "ok", "device_us": 0.001}\n' * 50_000)
            print('{"status": "crashed"}', flush=True)
        if what == "reads":
            sys.stdin.read()
        if what == "garbles":
            for descriptor in range(3, 20):
                try:
                    os.write(descriptor, b"noise\n")
                except OSError:
                    continue
