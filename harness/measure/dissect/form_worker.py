"""One form of a kernel, or a baseline, in a process of its own: judged, timed and checked.

The form is in force from its first call to the end of the process. So all calls are of one form:
those that are judged, those of a graph, the eager ones of a block, and the last one of the check.
The process computes the shipped form before, and by its results judges its own.
"""

import contextlib
import functools
import importlib
import math
import os
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from triton.runtime.errors import OutOfResources

from harness import status
from harness.build import recorder
from harness.calls import context, drawn, inputs, interpreter, invoke, tolerance
from harness.measure.dissect.messages import REQUESTS, FormReady
from harness.measure.dissect.rungs import LADDERS, SHIPPED, Rung
from harness.measure.dissect.steps import release, seconds
from harness.measure.messages import BlockTimes, Checked
from harness.project import registry
from harness.status import Inaccurate, Unsupported
from kernels._runtime.configs import Configs
from ops._spec import Op

# Calls of a block take at least so long, and are at least so many.
BLOCK_US, LEAST_CALLS = 3000.0, 3

Results = dict[str, torch.Tensor]


def declared(stem: str) -> dict[str, Configs]:
    """Return the `Configs` of a kernel file by kernel."""
    return {configs.name: configs for configs in recorder.declared(stem)}


@contextlib.contextmanager
def forced(stem: str, rung: Rung) -> Iterator[None]:
    """Within the body the launchers of a kernel file take the form of a rung."""
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
        yield


@contextlib.contextmanager
def reached(stem: str, rung: Rung) -> Iterator[None]:
    """Raise Unsupported at the end of the body if it has not launched the kernel of a rung."""
    if not rung.kernel:
        yield
        return
    with recorder.launches(declared(stem)[rung.kernel].kernel) as calls:
        yield
    if not calls:
        raise Unsupported(f"{rung.kernel} does not take this problem")


class FormWorker:
    """See the module; raises as its parts do, and `harness.status` reads the exceptions."""

    requests = REQUESTS

    def __init__(self, op: str, impl: str, seed: int):
        self._gpu = os.environ.get("TRITON_INTERPRET") != "1"
        if not self._gpu:
            interpreter.amend()
        self._op, self._stem = registry.op(op)
        self._impl, self._seed = impl, seed
        self._function = registry.function(op, impl)
        self.version = registry.version(impl)
        self._in_force = contextlib.ExitStack()

    def prepare(self, case: str, dtype: str, pass_: str, rung: int | None) -> FormReady:
        """Judge the form by the shipped one, and prepare it to be timed."""
        try:
            if rung is not None:
                self._judge(LADDERS[self._op.name, pass_][rung], case, dtype, pass_)
                release(self._gpu)
            self._timed = (
                _OnGpu(self._op.name, self._impl, self._seed)
                if self._gpu
                else _OnCpu(self._op, self._function)
            )
            return self._timed.prepare(case, dtype, pass_)
        except (ValueError, TypeError) as error:
            # An implementation that cannot do what is asked says so by these.
            raise Unsupported(status.reason(error)) from error

    def block(self, calls: int, turn: int) -> BlockTimes:
        """Time `calls` calls; one on a CPU."""
        return self._timed.block(calls, turn)

    def check(self) -> Checked:
        """Raise Inaccurate unless the timed calls gave the results from before the timing."""
        return self._timed.check()

    def _judge(self, rung: Rung, *cell: str) -> None:
        """Put a form in force; raise Inaccurate if it gives other results than the shipped one."""
        problem = Problem(self._op, self._function, *cell, gpu=self._gpu)
        expected = None if rung is SHIPPED else _shipped(problem)
        # It is left by the end of the process alone.
        self._in_force.enter_context(forced(self._stem, rung))
        if expected is not None:
            with reached(self._stem, rung), _fitting():
                found = problem.run()
            compare(found, expected, "that of the shipped form")


@contextlib.contextmanager
def _fitting() -> Iterator[None]:
    """Raise Unsupported if a launch in the body asks for more than a multiprocessor has."""
    try:
        yield
    except OutOfResources as error:
        raise Unsupported(status.reason(error)) from error


def _shipped(problem: "Problem") -> Results:
    try:
        return problem.run()
    except Exception as error:
        if not context.alive():
            raise
        raise Unsupported("the shipped form, which would judge it, has no results") from error


class Problem:
    """The problem of a cell, solved by a function."""

    def __init__(self, op: Op, function: Callable, case: str, dtype: str, pass_: str, gpu: bool):
        self._op, self._function, self._case = op, function, drawn.named(op, case)
        self._tensors = inputs.make(op, self._case, dtype, 0, "cuda" if gpu else "cpu")
        self._backward, self._seeds = pass_ != "forward", None

    def run(self) -> Results:
        """Return the results by name, with the gradients in a backward pass."""
        run = functools.partial(invoke.run, self._op, self._function, self._case, self._tensors)
        if self._backward and self._seeds is None:
            self._seeds = inputs.gradients(list(run().values()), 0)
        return run(self._seeds)


def compare(found: Results, expected: Results, which: str) -> None:
    """Raise Inaccurate if results are further from others than those of one dtype may be."""
    for name, result in found.items():
        distance = tolerance.distance(result, expected[name])
        ratio = tolerance.judge(distance, None, result.dtype).ratio
        if not ratio <= 1:
            raise Inaccurate(f"{name} is {ratio:.3g} times as far from {which} as it may be")


class _OnGpu:
    """Times calls as the study does."""

    def __init__(self, op: str, impl: str, seed: int):
        # It sets up a stream of the GPU as it is imported and made.
        from harness.measure.worker import MeasureWorker

        self._worker = MeasureWorker(op, impl, seed)
        self.block, self.check = self._worker.block, self._worker.check

    def prepare(self, *cell: str) -> FormReady:
        remark = self._worker.prepare(*cell).remark
        us = self._worker.block(LEAST_CALLS).device_us
        return FormReady(remark, max(LEAST_CALLS, math.ceil(BLOCK_US / us)))


class _OnCpu:
    """Times single calls by the wall clock."""

    def __init__(self, op: Op, function: Callable):
        self._op, self._function = op, function

    def prepare(self, *cell: str) -> FormReady:
        self._problem = Problem(self._op, self._function, *cell, gpu=False)
        self._expected = self._last = self._problem.run()
        return FormReady("", 1)

    def block(self, calls: int, turn: int) -> BlockTimes:
        def call() -> None:
            self._last = self._problem.run()

        busy_s = seconds(call, False)
        return BlockTimes(busy_s, device_us=1e6 * busy_s, call_us=1e6 * busy_s)

    def check(self) -> Checked:
        compare(self._last, self._expected, "that from before the timing")
        return Checked(0)
