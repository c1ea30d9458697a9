"""Which cell of a report speaks for it: the worst of those that tell something."""

from collections.abc import Mapping, Sequence

from harness import status

# From the best to the worst.
SEVERITY = ("ok", "unsupported", "withdrawn", "unreached", "oom", "inaccurate", "hung", "crashed")


def worst(cells: Sequence[Mapping]) -> Mapping:
    """The first cell of the worst status and, within it, of the largest error.

    A cell that tells nothing of how an implementation computes counts only if no other one does.
    cells: at least one.
    """
    telling = [cell for cell in cells if cell["status"] not in status.SILENT]
    return max(telling or cells, key=lambda cell: (SEVERITY.index(cell["status"]), _ratio(cell)))


def overall(cells: Sequence[Mapping]) -> dict[str, str]:
    """`status` and `reason` of a report with these cells: those of the worst, after its name."""
    if not cells:
        return {"status": "unsupported", "reason": "no case in these dtypes and passes"}
    speaks = worst(cells)
    if speaks["status"] == "ok":
        return {"status": "ok", "reason": ""}
    return {"status": speaks["status"], "reason": f"{name(speaks)}: {speaks['reason']}"}


def name(cell: Mapping) -> str:
    """The case, dtype and pass of a cell in one text."""
    return f"{cell['case']} {cell['dtype']} {cell['pass']}"


def _ratio(cell: Mapping) -> float:
    """The worst ratio of a cell; null stands for one that is not finite."""
    ratios = [tensor["ratio"] for tensor in cell.get("tensors", ())]
    return float("inf") if None in ratios else max(ratios, default=0.0)
