"""Checks one cell: calls an implementation several times and compares it with the oracle."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from harness.calls import guards, invoke
from harness.calls.invoke import Named, Wrong
from harness.calls.snapshot import InputSnapshot
from harness.calls.tolerance import Verdict, same_bits
from harness.verify.problem import Problem

# Elements of inputs up to which a kernel in Triton's interpreter is called more than twice.
CHEAP = 2**14
# GPU cycles, some milliseconds, for which the inputs of a call are not yet there.
DELAY = 10_000_000


@dataclass(frozen=True)
class Finding:
    """reason: why a result is wrong, "" where it is right. tensors: a report row for each.

    deterministic: whether a repeat had the same bits; None where no repeat was reached.
    """

    reason: str
    tensors: list[dict[str, object]]
    deterministic: bool | None


def check(
    function: Callable, problem: Problem, pass_: str, ours: bool, in_place: bool = False
) -> Finding:
    """Call an implementation on decoy inputs, then on those of the problem, and both once more.

    A result kept from an earlier call, by shape or by address, is wrong in this order, because the
    decoys lie in the same memory.

    - ours: the repeat must give the same bits if the op is declared deterministic in the pass.
    - in_place: the implementation may write over its inputs, and its results may lie there.

    An exception of the implementation passes through.
    """
    calls = _CheckedCalls(function, problem, pass_, ours, in_place)
    rows, same, kept = [], None, {}
    try:
        for repeat in (False, True):
            if not (ours or repeat):
                # A library compiles in its first call, with no function replaced.
                calls.warm_up()
            elif calls.cheap or not ours:
                calls.run_on_decoy_inputs()
            results = calls.judged()
            if not repeat:
                kept = results
                worst, verdicts = calls.verdicts(results)
                rows = [verdict.row(name) for name, verdict in verdicts.items()]
                if worst:
                    return Finding(worst, rows, None)
                continue
            odd = [name for name, tensor in results.items() if not same_bits(tensor, kept[name])]
            same = not odd
            worst, _ = calls.verdicts(results) if odd else ("", {})
            if odd and ours and problem.op.repeats(pass_):
                return Finding(f"{odd[0]} differs between two calls", rows, same)
            if worst:
                return Finding(f"in a later call {worst}", rows, same)
    except Wrong as wrong:
        return Finding(str(wrong), rows, None)
    finally:
        calls.close()
    return Finding("", rows, same)


class _CheckedCalls:
    """The calls of one check; the inputs of the problem are as before after `close`."""

    def __init__(
        self, function: Callable, problem: Problem, pass_: str, ours: bool, in_place: bool
    ):
        self._function, self._problem, self._pass = function, problem, pass_
        self._given = problem.given(pass_)
        self._kept, self._in_place = InputSnapshot(self._given), in_place
        self._results: list[Named] = []
        self._gpu = any(tensor.is_cuda for tensor in self._given)
        elements = sum(tensor.numel() for tensor in self._given)
        self.cheap = self._gpu or elements <= CHEAP
        # A compiled graph that makes a mask of ones would be compiled anew for another function.
        self._filled = ours
        self._by_properties = problem.op.judged(ours) == "properties"

    def warm_up(self) -> None:
        self._write_decoys()
        self._forget(self._run())

    def run_on_decoy_inputs(self) -> None:
        """Make a call on other values in the memory of the inputs; drop its results."""
        self._write_decoys()
        with guards.guarded(self._filled) as bands:
            results = self._run()
        self._forget(results)
        _fail_if(bands.broken())

    def judged(self) -> Named:
        """Return the results of a call on the problem's inputs; raise Wrong for a memory fault."""
        free = guards.FreeMemory() if self._gpu else None
        if self._gpu:
            # A call that does not wait for the current stream reads the other values.
            torch.cuda._sleep(DELAY)
        self._kept.restore()
        with guards.guarded(self._filled) as bands:
            results = self._run()
        self._results.append(results)
        if free:
            # A result in the memory of an input is no allocation of the call.
            apart = [tensor for tensor in results.values() if not self._kept.covers(tensor)]
            _fail_if(free.overrun(apart))
        _fail_if(bands.broken())
        _shaped(results, self._problem.expected, self._pass)
        if self._in_place:
            # The results may lie where the inputs do, and the inputs are needed to judge them.
            results = {name: tensor.detach().clone() for name, tensor in results.items()}
            self._results.append(results)
            self._kept.restore()
            return results
        _fail_if("changes its inputs" if self._kept.changed else "")
        _separate(results, self._problem)
        return results

    def verdicts(self, results: Named) -> tuple[str, dict[str, Verdict]]:
        """Return what is wrong with the worst result, "" if nothing, and the verdict on each."""
        if self._by_properties:
            return self._problem.violation(results, self._pass), {}
        verdicts = self._problem.judge(results)
        if 1 < max(each.ratio for each in verdicts.values()) < math.inf:
            verdicts = self._problem.judge(results, strict=False)
        worst = max(verdicts, key=lambda name: verdicts[name].ratio)
        if verdicts[worst].ratio <= 1:
            return "", verdicts
        if not results[worst].is_floating_point():
            return f"{worst} is not equal to the oracle", verdicts
        return _explain(worst, verdicts[worst]), verdicts

    def close(self) -> None:
        self._kept.restore()
        for results in self._results:
            self._forget(results)

    def _run(self) -> Named:
        problem = self._problem
        seeds = None if self._pass == "forward" else problem.seeds
        return invoke.run(problem.op, self._function, problem.case, problem.tensors, seeds)

    def _write_decoys(self) -> None:
        others = self._problem.decoys(self._pass)
        for tensor, other in zip(self._given, others, strict=True):
            guards.memory(tensor).copy_(guards.memory(other))

    def _forget(self, results: Named) -> None:
        guards.wipe(results.values(), keep=self._given)


def _fail_if(reason: str) -> None:
    if reason:
        raise Wrong(reason)


def _shaped(results: Named, expected: Named, pass_: str) -> None:
    names = [name for name in expected if pass_ != "forward" or name.startswith("out")]
    if list(results) != names:
        raise Wrong(f"returns {', '.join(results)}; expected {', '.join(names)}")
    for name, tensor in results.items():
        want = expected[name]
        if tensor.shape != want.shape or tensor.dtype != want.dtype:
            raise Wrong(
                f"{name} is {tuple(tensor.shape)} {tensor.dtype},"
                f" expected {tuple(want.shape)} {want.dtype}"
            )


def _separate(results: Named, problem: Problem) -> None:
    for name, tensor in results.items():
        for other, given in problem.tensors.items():
            if given is not None and tensor.numel() and guards.start(tensor) == guards.start(given):
                raise Wrong(f"{name} lies in the memory of the input {other}")


def _explain(name: str, verdict: Verdict) -> str:
    if not math.isfinite(verdict.distance.max):
        return f"{name} has inf or NaN where the oracle has none, or none where it has"
    return f"{name} is {verdict.ratio:.3g} times as far from the oracle as the rule allows"
