"""The worker of a form that fails: the number of a rung says how.

The ladder of the matrix product is FORMS or PAIR here, in the test and in its workers. In FORMS the
simplest form stands once without a fault, and once for each. The shipped form is the last of both.
"""

import dataclasses
import os
import signal
import sys
import time

from triton.runtime.errors import OutOfResources

from harness.measure.dissect.form_worker import FormWorker, reached
from harness.measure.dissect.rungs import LADDERS, SHIPPED

LADDER = "matmul", "forward"
PLAIN = LADDERS[LADDER][0]
FAULTS = (
    "none", "raises", "declines", "does not fit", "dies", "is wrong", "raises later",
    "dies later", "exits later", "hangs later", "is wrong later", "forgets its form",
)  # fmt: skip
FORMS = (*(dataclasses.replace(PLAIN, adds=fault) for fault in FAULTS), SHIPPED)
PAIR = (PLAIN, SHIPPED)


class Unavailable(Exception):
    """Has the name of the loader's class."""


class FaultyForm(FormWorker):
    # The first call is of the shipped form.
    forms, first = FORMS, 2

    def __init__(self, op, impl, seed):
        if impl == "absent":
            raise Unavailable("No module named 'absent'")
        LADDERS[LADDER] = self.forms
        super().__init__(op, impl, seed)
        self.fault, self.calls = "", 0

    def prepare(self, case, dtype, pass_, rung):
        self.rung = SHIPPED if rung is None else self.forms[rung]
        self.fault, plain = self.rung.adds, self._function
        self.wrong_from = 2 if self.fault == "is wrong" else None

        def function(**given):
            self.calls += 1
            if self.calls >= self.first:
                self._fail()
            wrong = self.wrong_from is not None and self.calls >= self.wrong_from
            return plain(**given) * (1 + wrong)

        self._function = function
        return super().prepare(case, dtype, pass_, rung)

    def block(self, calls, turn):
        self.fault = self.fault.removesuffix(" later") if turn == 1 else self.fault
        if self.fault == "is wrong":
            self.wrong_from = 0
        if self.fault == "forgets its form":
            self._in_force.close()
        with reached(self._stem, self.rung):
            return super().block(calls, turn)

    def _fail(self):
        if self.fault == "raises":
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")
        if self.fault == "declines":
            raise ValueError("only even sizes")
        if self.fault == "does not fit":
            raise OutOfResources(400000, 232448, "shared memory")
        if self.fault == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "exits":
            print("last words", file=sys.stderr, flush=True)
            os._exit(3)
        if self.fault == "hangs":
            time.sleep(600)


class WithoutShipped(FaultyForm):
    """The first call finds no memory."""

    forms, first = PAIR, 1

    def _fail(self):
        raise RuntimeError("CUDA out of memory")
