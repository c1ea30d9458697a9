"""Verdicts of recorded reports that the project no longer stands by.

A report says by `guard` which version of the rules judged it; one from before there was a version
has none. A verdict that rested on a fault of those rules accuses a library of what it may not have
done, or clears one, ours included, of what nobody looked at. Both are withdrawn until a new record
judges the cell again.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from harness.results import severity

# The version of the rules as they are. It rises with the repair of a fault that could have made a
# right result wrong, or a wrong one right.
GUARD = 1
# The size H is the variance of a logit where neither factor was scaled. Beyond this one nearly all
# gradients are nothing beside the largest (docs/kernel-guide.md), and recorded bounds rise with H
# from 2 % to 50 % of it.
STEEP = 25


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
    Fault(
        1,
        lambda report, cell: (
            report["op"] == "linear_cross_entropy"
            and (cell["status"], cell["pass"]) == ("ok", "both")
            and _size(cell["case"], "H") > STEEP
        ),
        "unscaled weights left nearly all gradients zero, and errors of half the largest passed",
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
    if cell["status"] not in ("unsupported", "unreached"):
        for fault in FAULTS:
            if version < fault.mended and fault.affects(report, cell):
                said = cell["reason"] or cell["status"]
                reason = f"{fault.why}; the recorded verdict was: {said}"
                return dict(cell) | {"status": "withdrawn", "reason": reason, "tensors": []}
    return dict(cell)


def _size(case: str, letter: str) -> int:
    """A size in the name of a case; 0 where it has none of this letter."""
    sizes = (part[1:] for part in case.split("-") if part[:1] == letter and part[1:].isdigit())
    return int(next(sizes, 0))
