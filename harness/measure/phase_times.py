"""Where the time of a cell goes: seconds by stage, for the log of a measurement."""

import time
from collections import Counter
from collections.abc import Mapping


class Stages:
    """The seconds of one cell, which begins now, by what the workers were asked for.

    Workers that are asked together are waited for together; the one that took longest is named.
    """

    def __init__(self):
        self._began = time.monotonic()
        self._seconds: Counter[str] = Counter()
        self._slowest: dict[str, tuple[float, str]] = {}

    def add(self, stage: str, seconds: float, answers: Mapping[str, Mapping]) -> None:
        """seconds: until all had answered. answers: by implementation, each with its `spent_s`,
        unless its process was lost.
        """
        self._seconds[stage] += seconds
        if len(answers) > 1:
            slowest = max((answer.get("spent_s", 0.0), impl) for impl, answer in answers.items())
            self._slowest[stage] = max(slowest, self._slowest.get(stage, slowest))

    def __str__(self) -> str:
        """Such as "3.1 s: prepare 0.9 (torch_compile 0.8), block 1.6, rest 0.6"."""
        total = time.monotonic() - self._began
        parts = {**self._seconds, "rest": total - self._seconds.total()}
        words = [f"{stage} {seconds:.1f}{self._by(stage)}" for stage, seconds in parts.items()]
        return f"{total:.1f} s: {', '.join(words)}"

    def _by(self, stage: str) -> str:
        if stage not in self._slowest:
            return ""
        seconds, impl = self._slowest[stage]
        return f" ({impl} {seconds:.1f})"
