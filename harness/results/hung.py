"""Tells which cells hung when a library tuned itself, so that no later stage waits for them again.

A compiler that has no end for a shape has none in verification either. A crash or a lack of memory
may depend on the neighbours of that moment, so these are not taken over.
"""

from pathlib import Path

from harness.results import schema

STATUS = "hung"


def cells(chosen: Path | None, code: str) -> dict[str, str]:
    """Return the reason of each cell that hung, by its name.

    It is empty without a report, or if the report is of other code.

    - chosen: the folder of what the library chose; its report lies beside it. None for no library
      that tunes itself.
    - code: the digest of the implementation as it is now.

    Raises UserError if the report is broken.
    """
    if chosen is None or not (path := chosen.with_suffix(".json")).is_file():
        return {}
    report = schema.read(path, "autotune", "remove it, and let the library tune itself again")
    if report["code_sha256"] != code:
        return {}
    found = (cell for cell in report["cells"] if cell["status"] == STATUS)
    return {cell["cell"]: cell.get("reason", "") for cell in found}
