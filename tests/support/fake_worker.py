"""Imitate a GPU's worker: the name of an implementation says how it behaves.

- `<fault>` fails in its second timed block, `<fault>_at_once` when a cell is prepared,
  `<fault>_to_warm_up` in the block before the timed ones. In a case named LAST_CASE all behave
  well.
- `eventful` has no graph; `eventful_and_<what>` has none and behaves as `<what>`.
- `prepares_slowly` takes SLOWLY_S to prepare a cell.
- `waits_for_others` takes until FAKE_OTHERS cells of LAST_CASE were begun, except for those.
- `has_candidates` has CANDIDATES of them in each cell.
- `says_how_it_tunes` declines each cell; the reason says whether tuners keep their choices.
- `torch_compile`, whose library tunes itself, notes for each cell whether it chose or found a
  choice.
- `crowded` finds no memory for a cell of LAST_CASE beside more than one other process.
  `crowded_at_start` does not even start again there. `crowded_at_the_next_start` ends at the end
  of other cells and does not start again beside so many. `crowded_in_a_block` is prepared there,
  and finds none in its first block.
"""

import contextlib
import ctypes
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

from harness.measure import messages
from harness.status import Inaccurate, Unsupported
from harness.workers.messages import encode
from tests.support.patience import wait_until

US = {"slow": 103.0, "fast": 1.0}
LAST_CASE = "M2"
EVENTFUL = "eventful"
GIB = 2**30
SLOWLY_S = 0.5
CANDIDATES = 3


TIMES = encode(messages.BlockTimes(0.001, 100.0, 200.0))
# Answers that are of no class, or not of the one that was asked for.
FORGED = {
    "leaves_out_a_time": {name: value for name, value in TIMES.items() if name != "call_us"},
    "adds_a_field": TIMES | {"speed": 1},
    "says_a_word": TIMES | {"device_us": "soon"},
    "answers_other": encode(messages.Released(0)),
}


class OutOfMemoryError(RuntimeError):
    """Has the name of torch's class."""


class Unavailable(Exception):
    """Has the name of the loader's class."""


class FakeWorker:
    requests = (*messages.REQUESTS, messages.Compile)
    version = "1.0"

    def __init__(self, op, impl, seed):
        if impl == "absent":
            raise Unavailable("No module named 'absent'")
        if impl.startswith("crowded_at_") and _mark(impl).exists() and _siblings() > 2:
            raise OutOfMemoryError("CUDA out of memory")
        self.eventful, self.impl = impl.startswith(EVENTFUL), impl.removeprefix(f"{EVENTFUL}_and_")
        self.blocks, self.case, self.kept = 0, "", 0
        self.log = os.environ.get("FAKE_LOG")

    def prepare(self, case, dtype, pass_):
        self.case, self.blocks = case, 0
        self._note(f"{self.impl} {case} {dtype} {pass_}")
        if self.impl == "room_for_one" and self._alone():
            raise OutOfMemoryError("CUDA out of memory")
        if self.impl == "starves_beside_others" and not self._alone():
            raise OutOfMemoryError("CUDA out of memory")
        if case != LAST_CASE and self.impl.endswith("_at_once"):
            self._fail(self.impl.removesuffix("_at_once"))
        if self.impl == "prepares_slowly":
            time.sleep(SLOWLY_S)
        if self.impl in ("crowded", "crowded_at_start") and case == LAST_CASE and _siblings() > 2:
            _mark(self.impl).touch()
            raise OutOfMemoryError("CUDA out of memory")
        if self.impl == "crowded_in_other_cells" and case != LAST_CASE and _siblings() > 2:
            raise OutOfMemoryError("CUDA out of memory")
        if self.impl == "waits_for_others" and case != LAST_CASE:
            wait_until(self._others_began)
        if self.impl == "says_how_it_tunes":
            raise Unsupported("kept" if os.environ.get("TRITON_CACHE_AUTOTUNING") else "forgotten")
        if self.impl == "torch_compile":
            self._choose(f"{case} {dtype} {pass_}")
        if self.impl == "leaks":
            self.kept += GIB
        return messages.Prepared(
            busy_s=0.002,
            first_s=0.004,
            remark="events: no graph" if self.eventful else "",
            peak_mem_bytes=7,
            held_bytes=self.kept + GIB,
            l2_bytes=10**9 if self.impl == "large_l2" else 1000,
        )

    def compile(self, case, dtype, pass_, candidate):
        self._note(f"compiles {candidate}")
        self.prepare(case, dtype, pass_)
        return messages.Compiled(CANDIDATES if self.impl == "has_candidates" else 1)

    def block(self, calls, turn):
        self.blocks += 1
        first = self.case == LAST_CASE and self.blocks == 1
        if self.impl == "crowded_in_a_block" and first and _siblings() > 2:
            raise OutOfMemoryError("CUDA out of memory")
        if self.case != LAST_CASE and self.blocks == 1 and self.impl.endswith("_to_warm_up"):
            self._fail(self.impl.removesuffix("_to_warm_up"))
        # The first block is warm-up.
        if self.case != LAST_CASE and self.blocks == 3:
            self._fail(self.impl)
        time.sleep(0.001)
        throttle = "thermal slowdown" if self.impl == "hot" else "power cap"
        reading = {"sm_mhz": 1980, "temp_c": 40, "power_w": 123.4, "throttle": throttle}
        time_us = US.get(self.impl, 100.0)
        if self.impl == "answers_nan" and self.case != LAST_CASE and self.blocks == 3:
            time_us = float("nan")
        if self.impl == "answers_zero" and self.case != LAST_CASE and self.blocks == 3:
            time_us = 0.0
        if self.impl == "noisy":
            time_us *= random.Random(self.blocks).uniform(0.5, 2)
        return messages.BlockTimes(0.001, time_us, 2 * time_us, **reading)

    def energy(self, window_ms):
        if self.impl == "exits_at_last" and self.case != LAST_CASE:
            sys.exit(4)
        time.sleep(0.003)
        return messages.Energy(0.003, 10 * window_ms, 0.5)

    def check(self):
        if self.impl == "crowded_at_the_next_start" and self.case != LAST_CASE:
            _mark(self.impl).touch()
            sys.exit(4)
        released = _mark(f"released-{self.case}").exists()
        if self.impl == "crowded_in_its_check" and self.case != LAST_CASE and not released:
            raise OutOfMemoryError("CUDA out of memory")
        if self.impl == "wrong_later" and self.case != LAST_CASE:
            raise Inaccurate("output 0 changed")
        return messages.Checked(0)

    def release(self):
        if self.impl == "keeps_memory":
            raise RuntimeError("cannot free")
        _mark(f"released-{self.case}").touch()
        return messages.Released(self.kept + GIB // 8)

    def _note(self, line):
        if self.log:
            with open(self.log, "a") as log:
                log.write(f"{os.getpid()} {time.monotonic()} {line}\n")

    def _others_began(self):
        begun = Path(self.log).read_text().splitlines()
        return sum(LAST_CASE in line.split() for line in begun) >= int(os.environ["FAKE_OTHERS"])

    def _choose(self, cell):
        folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        kept, compiled = folder / f"{cell}.best_config", folder / f"{cell}.cubin"
        self._note("found" if kept.exists() else "chose")
        kept.parent.mkdir(exist_ok=True)
        kept.touch()
        compiled.touch()

    def _alone(self):
        """Return whether the parent has started a process of this kind before."""
        mark = _mark(f"{self.impl}-{self.case}")
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
            os.write(1, b'{"status": "ok", "device_us": 0.001}\n' * 200_000)
            print('{"status": "crashed"}', flush=True)
        if what == "reads":
            sys.stdin.read()
        if what == "says_half":
            self._write_everywhere(b'{"status": ')
            time.sleep(600)
        if what == "kills_the_forkserver":
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(600)
        if what == "forges_nan":
            self._write_everywhere(b'{"status": "ok", "device_us": NaN, "call_us": Infinity}\n')
        if what == "forges_success":
            self._write_everywhere(b'{"status": "ok", "call_us": "soon"}\n')
        if what in FORGED:
            self._write_everywhere(json.dumps(FORGED[what]).encode() + b"\n")
        if what == "garbles":
            self._write_everywhere(b"noise\n")

    def _write_everywhere(self, text):
        for descriptor in range(3, 20):
            with contextlib.suppress(OSError):
                os.write(descriptor, text)


def _mark(what: str) -> Path:
    """Return a file that the processes of one parent share."""
    return Path(tempfile.gettempdir()) / f"{what}-{os.getppid()}"


def _siblings() -> int:
    """Return how many living processes the parent has, this one included."""
    parent = os.getppid()
    return len(Path(f"/proc/{parent}/task/{parent}/children").read_text().split())
