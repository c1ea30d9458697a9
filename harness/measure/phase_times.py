"""Counts the seconds of a cell by phase, for the log of a measurement."""

import time
from collections import Counter
from collections.abc import Mapping

from harness.workers.messages import Answer


class PhaseTimes:
    """The seconds of one cell, which begins now, by the request that the workers served.

    If the parent waits for several workers together, the text names the slowest.
    """

    def __init__(self):
        self._began = time.monotonic()
        self._seconds: Counter[str] = Counter()
        self._slowest: dict[str, tuple[float, str]] = {}

    def add(self, phase: str, seconds: float, answers: Mapping[str, Answer]) -> None:
        """Add the seconds until all had answered. answers: by name of the worker."""
        self._seconds[phase] += seconds
        if len(answers) > 1:
            slowest = max((answer.spent_s, name) for name, answer in answers.items())
            self._slowest[phase] = max(slowest, self._slowest.get(phase, slowest))

    def __str__(self) -> str:
        """Return a line such as "3.1 s: prepare 0.9 (torch_compile 0.8), block 1.6, rest 0.6"."""
        total = time.monotonic() - self._began
        parts = {**self._seconds, "rest": total - self._seconds.total()}
        words = [f"{phase} {seconds:.1f}{self._by(phase)}" for phase, seconds in parts.items()]
        return f"{total:.1f} s: {', '.join(words)}"

    def _by(self, phase: str) -> str:
        if phase not in self._slowest:
            return ""
        seconds, name = self._slowest[phase]
        return f" ({name} {seconds:.1f})"
