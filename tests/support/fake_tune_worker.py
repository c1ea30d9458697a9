"""Imitate a GPU for the tuner: a candidate's configuration says how it behaves.

- `us` is the time; without it BLOCK_N is.
- `sway` is how far the time goes up and down from block to block.
- `fault` is one of FAULTS.
- `late` is 1 if the fault strikes in a block instead of the preparation.
"""

import os
import signal
import time

from harness.status import Inaccurate, Unsupported
from harness.tune import messages

FAULTS = ("none", "declines", "wrong", "segfault", "kill", "hang", "memory")
LIMITS = {"sm_count": 132, "shared_bytes": 232448, "hip": False}


class FakeTuneWorker:
    requests = messages.REQUESTS
    version = ""

    def __init__(self, op, impl, seed):
        self.configs, self.blocks = {}, 0
        self.log = os.environ.get("FAKE_LOG")
        self._note("start")

    def describe(self):
        return messages.Device("Fake GPU", "90", LIMITS)

    def prepare(self, op, case, dtype, pass_, kernel, index, config):
        self._note(f"prepare {index}")
        if not config.get("late"):
            self._strike(config)
        self.configs[index] = config

    def block(self, index, calls):
        config = self.configs[index]
        self._note(f"block {index}")
        self._strike(config)
        self.blocks += 1
        sway = config.get("sway", 0) * (1 if self.blocks % 2 else -1)
        return messages.LaunchTime(config.get("us", config.get("BLOCK_N")) + sway)

    def _strike(self, config):
        fault = FAULTS[config.get("fault", 0)]
        if fault == "declines":
            raise Unsupported("out of resources")
        if fault == "wrong":
            raise Inaccurate("out is 7 times as far from that of the rule's choice as it may be")
        if fault == "memory":
            raise MemoryError("out of memory")
        if fault == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "hang":
            time.sleep(60)

    def _note(self, line):
        if self.log:
            with open(self.log, "a") as file:
                file.write(f"{line}\n")
