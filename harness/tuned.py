"""The committed tables of tuned configurations: what is in them, and how a run gets there.

`python -m harness.tuned --run results/study --into kernels/tuned` puts the tables that a run made
(tuning: tune) into the one of their GPU; a family is replaced whole.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from harness import command, load
from harness.command import UserError
from harness.environment import ROOT, describe, model
from kernels import _tuned


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--into", type=Path, required=True)
    parser.add_argument("--allow-dirty", action="store_true", help="keep uncommitted code's too")
    options = parser.parse_args()
    for path, family in merge(options.run, options.into, options.allow_dirty):
        print(f"{path}: {family}", file=sys.stderr)


def merge(run: Path, into: Path, allow_dirty: bool) -> list[tuple[Path, str]]:
    """Puts every family of a run's tables into those of `into`, or none; returns what went where.

    Raises UserError where the run has no table, or a broken one, or, unless allowed, one made by
    code that no commit holds.
    """
    sources = sorted((run / "tuned").glob("*.json"))
    if not sources:
        raise UserError(f"{run}/tuned: holds no table; make them with tuning: tune on a GPU")
    merged, went = {}, []
    for source in sources:
        fresh = _read(source)
        path = into / f"{model(fresh['device'])}.json"
        if path not in merged:
            empty = {"device": fresh["device"], "families": {}}
            merged[path] = _read(path) if path.is_file() else empty
        for family, record in fresh["families"].items():
            if record["dirty"] and not allow_dirty:
                raise UserError(f"{source}: tuned uncommitted code; commit it and tune again")
            merged[path]["families"][family] = record
            went.append((path, family))
    for path, table in merged.items():
        command.write_json(path, table | {"families": dict(sorted(table["families"].items()))})
    return went


def record(stem: str, entries: Mapping[str, list]) -> dict[str, object]:
    """The part of a table that belongs to one kernel file, with what it was tuned on: now, here."""
    import triton

    environment = describe(ROOT, "")
    kernels = _kernels(stem)
    return {
        "run_id": environment["run_id"],
        "commit": environment["commit"],
        "dirty": environment["dirty"],
        "driver": (environment["gpu"] or {}).get("driver"),
        "triton": triton.__version__,
        "kernels": {
            name: {"source_sha256": _tuned.source_sha256(kernels[name].kernel), "keys": keys}
            for name, keys in entries.items()
        },
    }


def _kernels(stem: str) -> dict[str, _tuned.Configs]:
    """What a kernel file, or one that it shares, declares to be tuned, by the kernel's name."""
    values = vars(load.kernel(stem)).values()
    return {each.name: each for each in values if isinstance(each, _tuned.Configs)}


def sources(stem: str) -> dict[str, str]:
    """The digest of each kernel of a file that can be tuned, by name: that of its table entries."""
    return {name: _tuned.source_sha256(each.kernel) for name, each in _kernels(stem).items()}


def findings(stem: str, folder: Path = _tuned.COMMITTED) -> list[dict[str, str]]:
    """What is amiss in the tables for a kernel file: `table`, `kernel`, `state`, `reason`.

    state: "stale" entries bind no longer, "incomplete" ones bind but have not met every candidate.
    Raises UserError for a broken table.
    """
    return [
        {"table": path.name, "kernel": kernel, "state": state, "reason": reason}
        for path, kernel, tuned, family in _records(stem, folder)
        for state, reason in _amiss(stem, kernel, tuned, family)
    ]


def chosen(stem: str, folder: Path = _tuned.COMMITTED) -> dict[str, list[_tuned.Config]]:
    """By kernel the configurations that entries in force choose, each once.

    Raises UserError for a broken table.
    """
    found, bound = {}, _kernels(stem)
    for _, kernel, tuned, family in _records(stem, folder):
        if kernel in bound and not _tuned.stale(bound[kernel].kernel, tuned, family):
            configs = found.setdefault(kernel, [])
            for entry in tuned["keys"]:
                if entry["config"] not in configs:
                    configs.append(entry["config"])
    return found


def _records(stem: str, folder: Path) -> Iterator[tuple[Path, str, Mapping, Mapping]]:
    """The parts of the tables for a kernel file: the table, the kernel, its part, its family's."""
    for path in sorted(folder.glob("*.json")):
        family = _read(path)["families"].get(stem, {"kernels": {}})
        for kernel, tuned in family["kernels"].items():
            yield path, kernel, tuned, family


def _amiss(stem: str, kernel: str, tuned: Mapping, family: Mapping) -> Iterator[tuple[str, str]]:
    from harness.tuner import text

    bound = _kernels(stem)
    if kernel not in bound:
        yield "stale", "the file has no such kernel"
    elif why := _tuned.stale(bound[kernel].kernel, tuned, family):
        yield "stale", why
    else:
        configs, untried = bound[kernel], set()
        for entry in tuned["keys"]:
            suited = {text(c) for c in configs.candidates if configs.suits(c, **entry["key"])}
            untried |= suited - entry["timed"].keys() - entry["failed"].keys()
        if untried:
            yield "incomplete", f"never tried: {', '.join(sorted(untried))}"


def _read(path: Path) -> dict:
    try:
        return _tuned.read(path)
    except ValueError as error:
        raise UserError(str(error)) from None


if __name__ == "__main__":
    command.run(main)
