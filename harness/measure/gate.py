"""No time without a verification: what the reports of `harness.verify` say of each cell."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from harness.calls.cell import Cell
from harness.cli import UserError
from harness.project.implementations import OURS, TWIN
from harness.results import parts, schema


@dataclass(frozen=True)
class Verdict:
    status: str
    reason: str
    impl_version: str


class Gate:
    """The reports `<folder>/<op>/<impl>.json` of the implementations that are to be timed.

    code: the digest of an implementation as it is now. Raises UserError where a report is missing,
    was not made on a GPU, or is of other code or another version of the library.
    """

    def __init__(self, folder: Path, op: str, impls: list[str], code: Callable[[str], str]):
        self._reports, self._cells, self._paths = {}, {}, {}
        for impl in impls:
            path = folder / op / f"{OURS if impl == TWIN else impl}.json"
            remedy = f"make it with python -m harness.verify --op {op}"
            report = schema.read(path, "verification", remedy)
            if report["mode"] != "gpu" and report["status"] != "unavailable":
                raise UserError(f"{path}: made without a GPU; {remedy} on the machine that times")
            if report["code_sha256"] != code(impl):
                raise UserError(
                    f"{path}: is of other code or another version than are here now; verify again:"
                    f" python -m harness.verify --op {op} --impl {path.stem} --out {path}"
                )
            self._reports[impl], self._paths[impl] = report, path
            self._cells[impl] = {
                (cell["case"], cell["dtype"], cell["pass"]): cell for cell in report["cells"]
            }

    def verdict(self, impl: str, cell: Cell) -> Verdict:
        """The status of a cell; that of the whole report where verification never reached it.

        It is `unreached` only where another part of the measurement verifies the cell.
        """
        report = self._reports[impl]
        found = self._cells[impl].get((cell.case.name, cell.dtype, cell.pass_))
        if found is None and report["status"] not in ("ok", "unreached"):
            found = report
        elif found is None:
            found = {"status": "inaccurate", "reason": "never verified"}
        elif found["status"] == "unreached" and found["reason"] != parts.ELSEWHERE:
            found = {"status": "hung", "reason": f"not verified within the {found['reason']}"}
        return Verdict(found["status"], found["reason"] or "", report["impl_version"] or "")

    def refuse_elsewhere(self, cells: Iterable[Cell]) -> None:
        """Raise UserError if a report leaves one of these cells to another part."""
        for cell in cells:
            for impl, path in self._paths.items():
                if self.verdict(impl, cell).status == "unreached":
                    raise UserError(
                        f"{path}: leaves {cell}, which is to be timed, to another part; verify this"
                        " one: python -m harness.verify with the --part of the measurement"
                    )
