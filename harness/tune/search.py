"""Finds the fastest configuration of a kernel: the parent's side of tuning.

A worker prepares every candidate of a key and times them block by block, all in each block and in
a random order, so that drift meets all alike. A short round leaves the best few, a longer one
decides between them. A difference within the noise is a tie. A tie goes to the rule's own choice,
else to the first of the list, so that tables do not change from run to run.
"""

import random
import statistics as plain
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from harness import stats
from harness.build.tables import text
from harness.tune.messages import DescribeDevice, Device, PrepareCandidate, TimeCandidate
from harness.workers.gpu_memory import Memory
from harness.workers.messages import Answer, Failure, Request
from harness.workers.pool import START_S, WorkerHandle
from kernels._runtime.configs import Config

# A smaller difference counts for nothing, however certain it is.
MARGIN = stats.MARGIN
ROUGH_BLOCKS, ROUGH_US = 3, 1500.0
FINE_BLOCKS, FINE_US = 10, 3000.0
FEWEST_CALLS, MOST_CALLS = 3, 20
# A candidate that is further behind after the short round is out.
BEHIND, FINALISTS = 1.1, 5
# A preparation may have to compile, and draws the inputs.
ANSWER_S = 120.0
FATAL = ("crashed", "hung")


@dataclass(frozen=True)
class TuningKey:
    """One key of one kernel, and the case in which it is timed.

    candidates: in the order in which a tie is decided. rule: the place in it of what the rule of
    the kernel chooses.
    """

    kernel: str
    key: Mapping[str, object]
    op: str
    case: str
    dtype: str
    pass_: str
    candidates: tuple[Config, ...]
    rule: int

    def __str__(self) -> str:
        return f"{self.kernel} {text(self.key)}"


class Lost(Exception):
    """The worker died or hangs over a candidate."""

    def __init__(self, candidate: int, reason: str):
        super().__init__(reason)
        self.candidate = candidate


class Tuner:
    """Times tuning_keys one after the other; a context that ends its worker.

    - start: makes a worker over `harness.tune.worker` or its like.
    - seed: of the order in the blocks.
    - memory: of the GPU; that of a dead worker is back before the next one starts.
    """

    def __init__(self, start: Callable[[], WorkerHandle], seed: int, memory: Memory):
        self._start = start
        self._random, self._memory = random.Random(seed), memory
        self._worker: WorkerHandle | None = None

    def __enter__(self) -> "Tuner":
        return self

    def __exit__(self, *_: object) -> None:
        self._dismiss()

    def device(self) -> Device:
        """Return what the worker says of its GPU; raise Lost if it cannot."""
        answer = self._ask(-1, DescribeDevice())
        if isinstance(answer, Failure):
            raise Lost(-1, answer.reason)
        return answer

    def tune(self, tuning_key: TuningKey, rejected: Mapping[int, str]) -> dict[str, object]:
        """The entry of a tuning_key in the table.

        rejected: candidates that cannot be launched, with the reason. Raises Lost where the rule's
        own choice fails: there is nothing to hold the others against.
        """
        failed = dict(rejected)
        while True:
            if reason := failed.get(tuning_key.rule):
                raise Lost(tuning_key.rule, reason)
            try:
                rough, fine = self._time(tuning_key, failed)
                return entry(tuning_key, rough, fine, failed)
            except Lost as lost:
                self._dismiss()
                failed[lost.candidate] = str(lost)

    def _time(self, tuning_key: TuningKey, failed: dict[int, str]) -> tuple[dict, dict]:
        """Times by candidate, of the short and of the long round; adds to `failed`."""
        where = (
            tuning_key.op,
            tuning_key.case,
            tuning_key.dtype,
            tuning_key.pass_,
            tuning_key.kernel,
        )
        ready = []
        others = [i for i in range(len(tuning_key.candidates)) if i != tuning_key.rule]
        # The rule's choice comes first: its results are what the others are held against.
        for index in [tuning_key.rule, *others]:
            if index in failed:
                continue
            config = dict(tuning_key.candidates[index])
            answer = self._ask(index, PrepareCandidate(*where, index, config))
            if not isinstance(answer, Failure):
                ready.append(index)
            elif index == tuning_key.rule:
                raise Lost(index, answer.reason)
            else:
                failed[index] = answer.reason
        rough = self._round(ready, ROUGH_BLOCKS, ROUGH_US)
        medians = {index: plain.median(times) for index, times in rough.items()}
        ranked = sorted(medians, key=medians.get)
        near = [i for i in ranked[:FINALISTS] if medians[i] <= BEHIND * medians[ranked[0]]]
        finalists = list(dict.fromkeys([*near, *ranked[:2], tuning_key.rule]))
        return rough, self._round(finalists, FINE_BLOCKS, FINE_US)

    def _round(self, ready: Sequence[int], blocks: int, budget_us: float) -> dict[int, list]:
        times, calls = {index: [] for index in ready}, dict.fromkeys(ready, FEWEST_CALLS)
        for _ in range(blocks):
            for index in self._random.sample(ready, len(ready)):
                answer = self._ask(index, TimeCandidate(index, calls[index]))
                if isinstance(answer, Failure):
                    raise Lost(index, answer.reason)
                us = answer.us
                times[index].append(us)
                calls[index] = round(min(MOST_CALLS, max(FEWEST_CALLS, budget_us / max(us, 1e-3))))
        return times

    def _ask(self, candidate: int, request: Request) -> Answer:
        if self._worker is None:
            self._memory.settle()
            self._memory.idle()
            self._worker = self._start()
            self._hear(candidate, START_S)
        self._worker.send(request)
        return self._hear(candidate, ANSWER_S)

    def _hear(self, candidate: int, limit_s: float) -> Answer:
        answer = self._worker.answer(limit_s)
        if isinstance(answer, Failure) and answer.status in FATAL:
            raise Lost(candidate, answer.reason)
        return answer

    def _dismiss(self) -> None:
        if self._worker is not None:
            self._worker.kill()
            self._memory.lost("the tuner's worker", self._worker.pid)
            self._worker = None


def entry(
    tuning_key: TuningKey,
    rough: Mapping[int, Sequence[float]],
    fine: Mapping[int, Sequence[float]],
    failed: Mapping[int, str],
) -> dict[str, object]:
    """Return a key's entry in the table, from times in µs by candidate, one a block and round."""
    medians = {index: plain.median(times) for index, times in fine.items()}
    fastest = min(medians, key=medians.get)
    tied = [index for index in medians if _tie(fine[index], fine[fastest])]
    winner = tuning_key.rule if tuning_key.rule in tied else min(tied)
    others = sorted(set(medians) - {winner}, key=medians.get)
    names = [text(candidate) for candidate in tuning_key.candidates]
    timed = {index: plain.median(times) for index, times in rough.items()} | medians
    found = {
        "key": dict(tuning_key.key),
        "config": dict(tuning_key.candidates[winner]),
        "us": round(medians[winner], 3),
        "rule": names[tuning_key.rule],
        "runner_up": None,
        "timed": {names[index]: round(timed[index], 3) for index in sorted(timed)},
        "failed": {names[index]: failed[index] for index in sorted(failed)},
        "op": tuning_key.op,
        "case": tuning_key.case,
        "dtype": tuning_key.dtype,
        "pass": tuning_key.pass_,
    }
    if others:
        gap = _gap(fine[others[0]], fine[winner])
        name = {"config": names[others[0]], "us": round(medians[others[0]], 3)}
        found["runner_up"] = name | gap | {"tie": others[0] in tied}
    return found


def _gap(times: Sequence[float], winner: Sequence[float]) -> dict[str, float]:
    """How much longer these times are than the winner's, as a fraction, with its interval."""
    ratio = stats.paired_ratio(times, winner)
    bounds = {"gap": ratio.value, "gap_lo": ratio.lo, "gap_hi": ratio.hi}
    return {name: round(value - 1, 4) for name, value in bounds.items()}


def _tie(times: Sequence[float], fastest: Sequence[float]) -> bool:
    """Whether nothing shows that these times are worse by more than the margin."""
    return stats.paired_ratio(times, fastest).lo <= 1 + MARGIN
