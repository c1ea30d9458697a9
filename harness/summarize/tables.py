"""From reports, builds and sidecars to rows of CSV files; absent values are empty or left out."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from harness import status
from harness.project import fingerprint, source_tree
from harness.project.implementations import OURS
from harness.results import hostile, parts, schema, severity
from harness.results.raw import TIMED
from harness.results.reports import REMEDY, ROOT


def changed(reports: Iterable[Mapping], sidecars: Mapping[str, dict]) -> set[str]:
    """The ops whose code may not be what was timed.

    Two reports on ours must name the same code if times are replayed: that of the recorded run
    and that of this machine. A report or a digest that is absent shows nothing, so the op counts.
    """
    codes: dict[str, list] = {op: [] for op in sidecars}
    for report in reports:
        if report["impl"] == OURS and report["op"] in codes:
            codes[report["op"]].append(report["code_sha256"])
    needed = {op: 2 if car["mode"] == "replayed" else 1 for op, car in sidecars.items()}
    return {
        op
        for op, found in codes.items()
        if len(found) < needed[op] or not all(found) or len(set(found)) > 1
    }


def verification(reports: Iterable[Mapping], families: Mapping[str, str]) -> Iterator[dict]:
    """The rows of verification.csv.

    `cells` and `passed` count all that an implementation offers, `hostile` and `hostile_passed` the
    hostile ones among them. Status, reason and the worst ratio are of the ordinary cells: nothing
    is held against a library for what few programs ask for. For ours they are of all cells.
    """
    for report in reports:
        offered = [cell for cell in report["cells"] if cell["status"] not in status.SILENT]
        odd = [cell for cell in offered if hostile.cell(cell)]
        judged = report["cells"]
        if report["impl"] != OURS:
            judged = [cell for cell in judged if not hostile.cell(cell)]
        telling = [cell for cell in judged if cell["status"] not in status.SILENT]
        worst, where = _worst(telling)
        same = {key: report[key] for key in ("op", "impl", "impl_version", "mode")}
        found = severity.overall(judged) if judged else report
        yield same | {
            **{key: found[key] for key in ("status", "reason")},
            "family": families.get(report["op"], ""),
            "cells": len(offered),
            "passed": _passed(offered),
            "hostile": len(odd),
            "hostile_passed": _passed(odd),
            "unreached": sum(cell["status"] == "unreached" for cell in report["cells"]),
            "worst_ratio": worst,
            "worst_case": where,
        }


def _passed(cells: Iterable[Mapping]) -> int:
    return sum(cell["status"] == "ok" for cell in cells)


def _worst(offered: Sequence[Mapping]) -> tuple[float | str, str]:
    """The largest ratio of error over bound, and its cell."""
    found = [
        (tensor["ratio"], severity.name(cell))
        for cell in offered
        for tensor in cell["tensors"]
        if tensor["ratio"] is not None
    ]
    return max(found, key=lambda pair: pair[0], default=("", ""))


def sanitizer(folder: Path, recorded: Path, families: Iterable[str]) -> Iterator[dict]:
    """The rows of sanitizer.csv: what the tools said of a kernel file, here or else as recorded.

    code: whether it is of the "present" code or of "other"; "" where the report does not tell.
    """
    for family in sorted(set(families)):
        present = fingerprint.implementation(ROOT, family, OURS)
        paths = (place / "sanitize" / f"{family}.json" for place in (folder, recorded))
        for path in [path for path in paths if path.is_file()][:1]:
            report = schema.read(path, "sanitizer", REMEDY)
            digest = report.get("code_sha256", "")
            code = digest and ("present" if digest == present else "other")
            for tool in report["tools"]:
                row = {"file": family, "code": code, "version": report["version"]} | tool
                counts = {key: sum(tool.get(key, {}).values()) for key in ("findings", "elsewhere")}
                yield row | counts


def resources(builds: Iterable[Mapping]) -> Iterator[dict]:
    for build in builds:
        for kernel in build["kernels"]:
            yield {"file": build["file"]} | _flat(kernel)


def instructions(builds: Iterable[Mapping]) -> list[str]:
    """The instructions that any build counts, each a column of resources.csv."""
    kernels = (kernel for build in builds for kernel in build["kernels"])
    return list(dict.fromkeys(name for kernel in kernels for name in kernel["instructions"]))


def ir(builds: Iterable[Mapping]) -> Iterator[dict]:
    for build in builds:
        for stage in build["ir"]:
            yield {"file": build["file"], **stage}


def tuning(
    tables: Mapping[str, Mapping], builds: Iterable[Mapping], gpus: set[str]
) -> Iterator[dict]:
    """The entries of the tables of these GPUs; `state` is what the build found amiss in them.

    tables: by the name of their file.
    """
    amiss = {
        (build["file"], finding["table"], finding["kernel"]): finding["state"]
        for build in builds
        for finding in build.get("tables", [])
    }
    for name, table in tables.items():
        families = table["families"] if table["device"] in gpus else {}
        for file, family in families.items():
            for kernel, tuned in family["kernels"].items():
                for entry in tuned["keys"]:
                    config = _pairs(entry["config"])
                    rival = entry["runner_up"] or {}
                    yield {
                        **{"run_id": family["run_id"], "file": file, "kernel": kernel},
                        **{"key": _pairs(entry["key"]), "config": config, "us": entry["us"]},
                        **{"rule": entry["rule"], "changed": config != entry["rule"]},
                        **{"runner_up": rival.get("config"), "gap": rival.get("gap")},
                        **{"tie": rival.get("tie"), "candidates": len(entry["timed"])},
                        "state": amiss.get((file, name, kernel), ""),
                    }


def _pairs(values: Mapping) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items())


def runs(sidecars: Mapping[str, dict], changed: Iterable[str] = ()) -> list[dict]:
    """The rows of runs.csv. changed: the ops whose code has changed since the run."""
    found: dict[tuple[str, ...], dict] = {}
    for op, car in _parts(sidecars):
        gpu = car["environment"].get("gpu") or {}
        row = {key: car[key] for key in ("run_id", "mode", "date", "commit", "dirty")}
        row |= {"machine": car["run_id"].split("-", 2)[-1], "gpu": gpu.get("name", "")}
        row |= {key: car.get(key, "") for key in ("environment_sha256", "harness_sha256")}
        row |= {"board": gpu.get("uuid", ""), "ops": "", "changed_ops": ""}
        keys = ("run_id", "mode", "environment_sha256", "harness_sha256")
        row = found.setdefault(tuple(row[key] for key in keys), row)
        for column in ["ops", *["changed_ops"] * (op in changed)]:
            # Two parts of an op may be of one run.
            row[column] = " ".join(dict.fromkeys([*row[column].split(), op]))
    return list(found.values())


def _parts(sidecars: Mapping[str, dict]) -> Iterator[tuple[str, Mapping]]:
    """The op and the sidecar of each part of each measurement."""
    return ((op, part) for op, car in sidecars.items() for part in parts.of(car))


def environment(environments: Iterable[tuple[str, Mapping]]) -> Iterator[dict]:
    """The rows of environment.csv: of each run every key of its machine's descriptions, once.

    environments: run and description. A run on several boards has a description for each. Values
    that differ between them stand in one row, in the order of the boards.
    """
    found: dict[tuple[str, str], dict[str, object]] = {}
    for run_id, environment in environments:
        for key, value in _flat(environment).items():
            found.setdefault((run_id, key), {}).setdefault(str(value), value)
    for (run_id, key), values in found.items():
        value = next(iter(values.values())) if len(values) == 1 else "; ".join(values)
        yield {"run_id": run_id, "key": key, "value": value}


def ceilings(sidecars: Mapping[str, dict]) -> Iterator[dict]:
    seen = set()
    for _, car in _parts(sidecars):
        board = parts.uuid(car)
        for row in car["ceilings"]:
            key = (car["run_id"], board, row["quantity"], row["source"])
            if key not in seen:
                seen.add(key)
                yield {"run_id": car["run_id"], **row, "board": board}


def overhead(rows: Mapping[str, list], sidecars: Mapping[str, dict]) -> list[dict]:
    """The rows of overhead.csv: one for each op, then one of all together.

    A row has the wall time, the seconds of timing and of first calls in it, and the share of
    neither. It counts the libraries that had tuned themselves before, and those of them that did so
    on another board than the one that measured. It also counts those that tuned themselves in their
    first calls, beside their rivals. The host's time was taken on several cores in turn, and it
    counts those; the row of all has the fewest.

    A sidecar that does not tell leaves its op empty and out of the sum; one that does not tell the
    first calls has them in the overhead.
    """
    found = []
    for op, car in sidecars.items():
        row = {"op": op, **_spent(parts.of(car))}
        row["blocks"] = sum(one["status"] in TIMED for one in rows[op])
        cells = parts.by_cell(rows[op]).values()
        row["cells"] = sum(all(one["status"] != "unreached" for one in cell) for cell in cells)
        tuned: dict[str, bool] = {}
        for part in parts.of(car):
            for impl, one in part.get("autotuned", {}).items():
                here = one.get("gpu", "") == parts.uuid(part)
                tuned[impl] = tuned.get(impl, True) and here
        row["self_tuned"] = len(tuned)
        row["tuned_elsewhere"] = sum(not here for here in tuned.values())
        timed = {one["impl"] for one in rows[op] if one["status"] in TIMED}
        row["tuned_beside"] = len(set(source_tree.self_tuned(ROOT, op, timed)) - set(tuned))
        cores = [part.get("schedule", {}).get("cores") for part in parts.of(car)]
        row["host_cores"] = None if None in cores else min(cores)
        found.append(row)
    known = [row for row in found if row["total_s"] and row["timed_s"] is not None]
    keys = ("total_s", "timed_s", "first_s", "blocks", "cells")
    keys += ("self_tuned", "tuned_elsewhere", "tuned_beside")
    total = {key: sum(row[key] or 0 for row in known) for key in keys}
    total["host_cores"] = min((row["host_cores"] or 0 for row in known), default=None) or None
    spent_s = total["timed_s"] + total["first_s"]
    share = {"share": 1 - spent_s / total["total_s"]} if known else {}
    return [*found, {"op": "all", **(total if known else {}), **share}]


def _spent(measured: Sequence[Mapping]) -> dict[str, float | None]:
    """The seconds of all parts of a measurement; None where one does not tell."""
    told = [part.get("overhead", {}) for part in measured]
    if len(told) == 1:
        return {key: told[0].get(key) for key in ("total_s", "timed_s", "first_s", "share")}
    found: dict[str, float | None] = {}
    for key in ("total_s", "timed_s", "first_s"):
        each = [one.get(key) for one in told]
        found[key] = None if None in each else sum(each)
    known = found["total_s"] and None not in (found["timed_s"], found["first_s"])
    spent_s = found["timed_s"] + found["first_s"] if known else None
    return found | {"share": 1 - spent_s / found["total_s"] if known else None}


def _flat(value: Mapping, prefix: str = "") -> dict:
    """Nested objects become dotted keys; those of `instructions` keep their own names."""
    flat = {}
    for key, item in value.items():
        if isinstance(item, Mapping):
            flat |= _flat(item, "" if key == "instructions" else f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = item
    return flat
