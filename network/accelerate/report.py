"""The report of `accelerate`: what it replaced, what it left and why, and the way back."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Line:
    """A module by its path in the model and its class, and the kernels that it now uses, or why
    it is as it was."""

    path: str
    kind: str
    said: str


@dataclass(frozen=True)
class Report:
    """The modules that `accelerate` replaced, and those that it left.

    `str` counts modules of one kind. `undo()` makes the model as it was.
    """

    replaced: tuple[Line, ...]
    left: tuple[Line, ...]
    _undo: list[Callable[[], None]] = field(repr=False)

    def undo(self) -> None:
        """Put every replaced attribute back; a second call does nothing."""
        while self._undo:
            self._undo.pop()()

    def __str__(self) -> str:
        if not self.replaced:
            return "\n".join(["replaced nothing", *_counted("left", self.left)])
        return "\n".join([*_counted("replaced", self.replaced), *_counted("left", self.left)])


def _counted(head, lines):
    counts = Counter((line.kind, line.said) for line in lines)
    if not counts:
        return []
    return [head, *(f"  {count} {kind}: {said}" for (kind, said), count in counts.items())]
