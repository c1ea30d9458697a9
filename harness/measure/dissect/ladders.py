"""Times the forms of a kernel, from the simplest to the shipped one: what each technique buys.

All forms of a cell hold their graphs in one process, with rivals beside them. They are timed as the
study times its cells (`harness.measure.worker`), in blocks in which all take turns in a random
order. No form is timed whose results are not those of the shipped one, which verification judges.
"""

import contextlib
import functools
import importlib
import math
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from unittest import mock

import torch

from harness.build import recorder
from harness.calls import drawn, inputs, invoke, tolerance
from harness.measure.dissect.rungs import LADDERS, SHIPPED, Rung
from harness.measure.dissect.steps import Row, attempted, release, seconds
from harness.project import registry
from harness.project.implementations import OURS
from harness.status import Inaccurate, Unsupported
from kernels._runtime.configs import Configs

# Calls of a block take at least so long, and are at least so many.
BLOCK_US, LEAST_CALLS = 3000.0, 3


def declared(stem: str) -> dict[str, Configs]:
    """Return the `Configs` of a kernel file and of the folder beside it, by kernel."""
    registry.kernel(stem)
    details = [name for name in sys.modules if name.startswith(f"kernels.{stem}_details.")]
    places = [vars(sys.modules[name]) for name in (f"kernels.{stem}", *details)]
    found = [each for place in places for each in place.values() if isinstance(each, Configs)]
    return {configs.name: configs for configs in found}


@contextlib.contextmanager
def forced(stem: str, rung: Rung) -> Iterator[None]:
    """Within the body the launchers of a kernel file take the form of a rung.

    Raises Unsupported at the end if the kernel of the rung was not launched.
    """
    known = declared(stem)
    with contextlib.ExitStack() as stack:
        stack.enter_context(recorder.uncached())
        for target in rung.without:
            place, _, name = target.partition(":")
            owner = functools.reduce(getattr, name.split(".")[:-1], importlib.import_module(place))
            denied = mock.patch.object(owner, name.split(".")[-1], lambda *_, **__: None)
            stack.enter_context(denied)
        for name, config in rung.configs.items():
            stack.enter_context(recorder.picking(known[name], config))
        kernels = [known[rung.kernel].kernel] if rung.kernel else []
        calls = stack.enter_context(recorder.launches(*kernels))
        yield
        if kernels and not calls:
            raise Unsupported(f"{rung.kernel} does not take this problem")


def kernel_ladder(
    op: str,
    cells: Sequence[str],
    dtype: str,
    rivals: Sequence[str],
    blocks: int,
    seed: int,
    gpu: bool,
) -> Iterator[Row]:
    """The times of all forms of an op, and of rivals, in cells named `case.pass`."""
    for cell in cells:
        case, _, pass_ = cell.rpartition(".")
        if (op, pass_) not in LADDERS:
            raise ValueError(f"{cell}: {op} has no ladder of this pass")
        yield from _cell(op, case, dtype, pass_, rivals, blocks, seed, gpu)
        release(gpu)


def _cell(op, case, dtype, pass_, rivals, blocks, seed, gpu):
    ladder = LADDERS[op, pass_]
    judge, ready = _Judge(op, case, dtype, pass_, gpu), []
    about: Row = {"op": op, "case": case, "dtype": dtype, "pass": pass_, "flops": judge.flops}
    forms = [(about | {"impl": OURS, "rung": n, "adds": r.adds}, r) for n, r in enumerate(ladder)]
    forms += [(about | {"impl": name}, None) for name in rivals]
    # The shipped form comes first: the others are judged by its results.
    for words, rung in sorted(forms, key=lambda form: form[1] is not SHIPPED):
        prepared: list[_Timed] = []
        prepare = functools.partial(_prepare, judge, words["impl"], rung, seed, prepared)
        (first,) = attempted(prepare, words, gpu)
        ready += [(words, timed) for timed in prepared]
        if not prepared:
            yield first
    order, taken = random.Random(seed), []
    for block in range(blocks):
        for words, timed in order.sample(ready, len(ready)):
            row = {"status": "ok", "reason": timed.remark, "block": block} | timed.block()
            taken.append((timed, words | row))
    # A form that gave other results while it was timed has no time.
    wrong = set()
    for words, timed in ready:
        (last,) = attempted(timed.check, words, gpu)
        if last["status"] != "ok":
            wrong.add(timed)
            yield last
    yield from (row for timed, row in taken if timed not in wrong)


def _prepare(judge, impl, rung, seed, prepared):
    """Append the timed form to `prepared`, if it is right; one row without a time."""
    form = functools.partial(forced, judge.stem, rung) if rung else contextlib.nullcontext
    if rung:
        with form():
            judge.compare(rung)
    with form():
        prepared.append(_Timed(judge, impl, seed, form))
    return [{}]


class _Judge:
    """The problem of a cell, and the results of the shipped form."""

    def __init__(self, op: str, case: str, dtype: str, pass_: str, gpu: bool):
        self.op, self.stem = registry.op(op)
        self.cell, self.gpu = (case, dtype, pass_), gpu
        self.case = drawn.named(self.op, case)
        self.flops = self.op.cost(self.case, pass_, getattr(torch, dtype).itemsize).flops
        self.tensors = inputs.make(self.op, self.case, dtype, 0, "cuda" if gpu else "cpu")
        self.seeds, self._expected = None, None
        if pass_ != "forward":
            blank = invoke.run(self.op, self._function(OURS), self.case, self.tensors)
            self.seeds = inputs.gradients(list(blank.values()), 0)

    def _function(self, impl: str) -> Callable:
        return registry.function(self.op.name, impl)

    def run(self, impl: str) -> dict[str, torch.Tensor]:
        return invoke.run(self.op, self._function(impl), self.case, self.tensors, self.seeds)

    def compare(self, rung: Rung) -> None:
        """Raise Inaccurate if the form in force gives other results than the shipped one."""
        found = self.run(OURS)
        if rung is SHIPPED:
            self._expected = found
        if self._expected is None:
            raise Unsupported("the shipped form, which would judge it, has no results")
        for name, result in found.items():
            distance = tolerance.distance(result, self._expected[name])
            ratio = tolerance.judge(distance, None, result.dtype).ratio
            if not ratio <= 1:
                how_far = f"{ratio:.3g} times as far from that of the shipped form as it may be"
                raise Inaccurate(f"{name} is {how_far}")


class _Timed:
    """An implementation that is ready to be timed, in a form that is in force while it is made.

    form: the context of that form, for a CPU, where no graph keeps it.
    """

    def __init__(self, judge: _Judge, impl: str, seed: int, form: Callable):
        self._worker, self.remark = None, ""
        if not judge.gpu:

            def call() -> None:
                with form():
                    judge.run(impl)

            self._call = call
            call()
            return
        # It sets up a stream of the GPU as it is imported and made.
        from harness.measure.worker import MeasureWorker

        self._worker = MeasureWorker(judge.op.name, impl, seed)
        self.remark = self._worker.prepare(*judge.cell).remark
        us = self._worker.block(LEAST_CALLS).device_us
        self._calls = max(LEAST_CALLS, math.ceil(BLOCK_US / us))

    def block(self) -> Row:
        """Return the time of a call, with the state of the GPU."""
        if self._worker is None:
            return {"device_us": 1e6 * seconds(self._call, False)}
        found = self._worker.block(self._calls)
        names = ("device_us", "sm_mhz", "temp_c", "power_w")
        return {name: getattr(found, name) for name in names}

    def check(self) -> list[Row]:
        """Raise Inaccurate unless the timed calls gave the results from before the timing."""
        if self._worker is not None:
            self._worker.check()
        return [{}]
