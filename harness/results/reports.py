"""The verification reports of a run and of a recorded one."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from harness.project import source_tree
from harness.project.implementations import OURS
from harness.results import hostile, schema, withdrawn

ROOT = Path(__file__).resolve().parents[2]
REMEDY = "run the stage that writes it again"


def verified(folders: Iterable[Path]) -> list[dict]:
    """The reports in folders of ops; by op, ours first, then by implementation and mode.

    Each cell says whether it is hostile, and verdicts that no longer stand are withdrawn. A
    baseline that has no function for the op in this tree, or no stack, is left out. Its record says
    that it declined, and no verification could renew that.
    """
    paths = (path for folder in folders for path in folder.glob("*.json"))
    paths = (path for path in paths if _offered(path.parent.name, path.stem))
    read = (schema.read(path, "verification", f"remove it and {REMEDY}") for path in paths)
    reports = [withdrawn.standing(report) for report in read]
    for report in reports:
        for cell in report["cells"]:
            cell["hostile"] = hostile.cell(cell)
    return sorted(reports, key=lambda r: (r["op"], r["impl"] != "ours", r["impl"], r["mode"]))


def _offered(op: str, impl: str) -> bool:
    path = f"baselines/{impl}.py"
    if op in source_tree.network_ops(ROOT):
        return impl in source_tree.stacks(ROOT, op)
    return impl == OURS or ((ROOT / path).is_file() and op in source_tree.public_names(ROOT, path))


def folders(folder: Path, recorded: Path, sidecars: Mapping[str, dict]) -> Iterator[Path]:
    """Yield the folders with reports of the ops: those of this machine, then the recorded ones."""
    yield from (folder / "verify" / op for op in sidecars)
    for op, sidecar in sidecars.items():
        if sidecar["mode"] == "replayed":
            yield recorded / "verify" / op
