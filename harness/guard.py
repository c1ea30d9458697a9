"""Verdicts of recorded reports that the project no longer stands by.

A report says by `guard` which version of the rules judged it; one from before there was a version
has none. A verdict that rested on a fault of those rules accuses a library of what it may not have
done, so it is withdrawn until a new record judges the cell again.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from harness import severity

# Of the rules as they are; it rises where a mended fault could have made a right result wrong.
GUARD = 1


@dataclass(frozen=True)
class Fault:
    """A fault that reports with a smaller `guard` have, which verdicts rest on it, and why."""

    mended: int
    affects: Callable[[Mapping, Mapping], bool]
    why: str


FAULTS = (
    Fault(
        1,
        lambda report, cell: cell["reason"].startswith("writes past the end of an output of "),
        "an empty result was counted as an allocation",
    ),
    Fault(
        1,
        lambda report, cell: (
            report["op"] == "linear_cross_entropy" and cell["status"] == "inaccurate"
        ),
        "weights were drawn so large that logits had a standard deviation of 45 and more",
    ),
)


def standing(report: Mapping) -> dict:
    """The report without the verdicts that are withdrawn, and with the status of what stands."""
    version = report.get("guard", 0)
    cells = [_standing(report, cell, version) for cell in report["cells"]]
    found = dict(report) | {"cells": cells}
    if any(cell["status"] == "withdrawn" for cell in cells):
        found |= severity.overall(cells)
    return found


def _standing(report: Mapping, cell: Mapping, version: int) -> dict:
    if cell["status"] not in ("ok", "unsupported", "unreached"):
        for fault in FAULTS:
            if version < fault.mended and fault.affects(report, cell):
                reason = f"{fault.why}; the recorded verdict was: {cell['reason']}"
                return dict(cell) | {"status": "withdrawn", "reason": reason, "tensors": []}
    return dict(cell)
