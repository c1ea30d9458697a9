"""The raw rows and sidecars of all ops of a run."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.cli import UserError
from harness.results import parts, raw


def measurements(
    folder: Path, ops: Sequence[str] | None = None
) -> dict[str, tuple[list[dict], dict]]:
    """The raw rows and the sidecar of each op below `folder`/raw; UserError where there is none."""
    paths = sorted((folder / "raw").glob("*.csv"))
    paths = [path for path in paths if ops is None or path.stem in ops]
    if not paths:
        raise UserError(f"{folder}/raw: no CSV file; run the measure or replay stage first")
    return {path.stem: raw.read(path, f"measure or replay {path.stem} again") for path in paths}


def limits(sidecar: Mapping, cell: parts.Cell | None = None) -> dict[str, float]:
    """Each ceiling by its quantity; a measured one goes before the data sheet's.

    cell: the one that they bound, if the measurement may have several parts.
    """
    part = parts.of_cell(sidecar, cell) if cell else sidecar
    ordered = sorted(part["ceilings"], key=lambda row: row["source"] == "measured")
    return {row["quantity"]: float(row["value"]) for row in ordered}
