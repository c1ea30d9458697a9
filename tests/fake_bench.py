"""Implementations whose behaviour is known, in place of a GPU: their name says what they do."""

import ctypes
import os
import signal
import sys
import time

US = {"ours": 100.0, "ours_twin": 100.0, "slow": 103.0, "fast": 1.0, "hot": 100.0}
LAST_CASE = "M2"


class OutOfMemoryError(RuntimeError):
    """Has the name of torch's own."""


class Bench:
    version = "1.0"

    def __init__(self, op, impl, seed):
        if impl == "absent":
            raise ImportError("No module named 'absent'")
        self.impl, self.blocks = impl, 0

    def prepare(self, case, dtype, direction):
        self.case = case
        self._act(f"{self.impl}_in_prepare")
        if self.impl == "declines":
            from harness.statuses import Unsupported

            raise Unsupported("only even sizes")
        return {"reason": "", "peak_mem_bytes": 7, "l2_bytes": 1000}

    def block(self, calls):
        self.blocks += 1
        # The first block is warm-up: what fails in the second fails after a row was taken.
        if self.case != LAST_CASE and self.blocks == 3:
            self._act(self.impl)
        throttle = "thermal slowdown" if self.impl == "hot" else "power cap"
        reading = {"sm_mhz": 1980, "temp_c": 40, "power_w": 123.4, "throttle": throttle}
        time_us = US.get(self.impl, 100.0)
        return reading | {"device_us": time_us, "call_us": 2 * time_us, "busy_s": 0.001}

    def check(self):
        if self.impl == "wrong_later" and self.case != LAST_CASE:
            from harness.statuses import Inaccurate

            raise Inaccurate("output 0 changed")

    def release(self):
        self.blocks = 0

    def _act(self, what):
        if what == "raises":
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")
        if what == "exhausts_memory":
            raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        if what == "segfaults":
            ctypes.string_at(0)
        if what == "is_killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "exits":
            sys.exit(3)
        if what == "hangs":
            time.sleep(600)
        if what == "prints":
            os.write(1, b'{"status": "ok", "device_us": 0.001}\n' * 50_000)
            print('{"status": "crashed"}', flush=True)
        if what == "garbles":
            for descriptor in range(3, 20):
                try:
                    os.write(descriptor, b"noise\n")
                except OSError:
                    continue
