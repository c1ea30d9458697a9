"""Shows that a change of names or words left every binary as it was, and keeps what rests on them.

`python -m harness.build --file softmax … --same-as OLD.json --keep results/recorded/hopper`
compares a build with that of the tree before the change. If all binaries and launches are equal,
then the recorded reports of the old code take over the digest of the new code. Entries of a tuned
table do if both builds hold all that was tuned, so build with `--candidates` to keep them.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from harness.cli import UserError
from harness.files import read_json, write_json
from harness.results import manifest, schema

# The fields of a build report that a comparison needs.
FIELDS = {"file", "triton", "code_sha256", "sources", "launches_sha256", "kernels"}


def text_sha256(text: str, name: str) -> str:
    """The digest of an assembly text in which the kernel has no name: a new one is no new code."""
    # Comments are aligned, so their blanks depend on the length of the name.
    plain = re.sub(r"[ \t]+", " ", text.replace(name, "kernel"))
    return hashlib.sha256(plain.encode()).hexdigest()


def launches_sha256(launches: Iterable) -> str:
    """The digest of what launchers hand over by default: the grid, each argument in its place.

    A tensor counts by dtype, shape and strides. Names do not count. None and False do not either: a
    kernel that gained a variant is handed them where the variant is not wanted. launches:
    `recorder.Launch`.
    """
    told = [
        [x.op.name, x.case.name, x.dtype, list(x.grid), *_given(x.arguments.values())]
        for x in launches
        if x.default
    ]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


def _given(values: Iterable) -> list[object]:
    return [_value(value) for value in values if value is not None and value is not False]


def _value(value: object) -> object:
    if hasattr(value, "stride") and hasattr(value, "dtype"):
        return [str(value.dtype), list(value.shape), list(value.stride())]
    return getattr(value, "value", value) if isinstance(value, int | float | bool) else str(value)


def read(path: Path) -> dict:
    """The build report in a file; UserError if it lacks what a comparison needs."""
    remedy = "build the tree before the change with this version's harness"
    report = read_json(path, remedy, FIELDS)
    schema.check(report, "build", str(path), remedy)
    return report


def differences(old: Mapping, new: Mapping) -> list[str]:
    """Return the differences of two builds of a file, a line each; none if all binaries are equal.

    Kernels and meta-parameters may have other names. Architectures that one build lacks are left
    out; raises UserError if they share none.
    """
    both = _archs(old) & _archs(new)
    if not both:
        raise UserError(f"{new['file']}: the two builds share no architecture; name the same ones")
    found = []
    if old["triton"] != new["triton"]:
        found.append(f"triton {old['triton']} there, {new['triton']} here")
    if old["launches_sha256"] != new["launches_sha256"]:
        found.append("grids or arguments of launches differ")
    before, after = (_binaries(build, both, default=True) for build in (old, new))
    for where, build, digests in (
        ("only there", before, before.keys() - after.keys()),
        ("only here", after, after.keys() - before.keys()),
    ):
        found += [f"{where}: {build[digest]}" for digest in sorted(digests)]
    return found


def keep(old: Mapping, new: Mapping, recorded: Path, tables: Path, commit: str) -> list[str]:
    """Gives reports and table entries of the old code the digests of the new; a line for each.

    To be called if `differences` finds none. A report says under `carried` at which commit the
    binaries were seen to be equal, how many they were, and which digest it had.
    """
    said = []
    binaries = len(_binaries(new, _archs(old) & _archs(new)))
    note = {"commit": commit, "binaries": binaries, "was": old["code_sha256"]}
    paths = [*recorded.glob("verify/*/ours.json"), recorded / "sanitize" / f"{new['file']}.json"]
    for path in sorted(path for path in paths if path.is_file()):
        report = read_json(path, f"git checkout {path}")
        if report.get("code_sha256") == old["code_sha256"] != new["code_sha256"]:
            carried = [*report.get("carried", []), note]
            report = report | {"code_sha256": new["code_sha256"], "carried": carried}
            manifest.rewrite(recorded, path, report)
            said.append(f"{path}: carried over")
    names = _renamed(old, new)
    for path in sorted(tables.glob("*.json")):
        table = read_json(path, f"git checkout {path}")
        kernels = table["families"].get(new["file"], {}).get("kernels", {})
        fresh = {}
        for name, tuned in kernels.items():
            place = names.get(name)
            if place and tuned["source_sha256"] == old["sources"].get(name):
                fresh[place] = tuned | {"source_sha256": new["sources"][place]}
            else:
                fresh[name] = tuned
        if fresh != kernels:
            table["families"][new["file"]]["kernels"] = fresh
            write_json(path, table)
            said.append(f"{path}: entries of {new['file']} carried over")
    return said


def _archs(build: Mapping) -> set[str]:
    return {row["arch"] for row in build["kernels"]}


def _binaries(
    build: Mapping, archs: set[str], default: bool = False
) -> dict[tuple[str, str, str], str]:
    """The name of the kernel by each binary: its architecture, dtype and text.

    default: leave out what only tables or candidates choose.
    """
    return {
        (row["arch"], row["dtype"], row["text_sha256"]): row["kernel"]
        for row in build["kernels"]
        if row["arch"] in archs and row["status"] == "ok" and row["default"] >= default
    }


def _renamed(old: Mapping, new: Mapping) -> dict[str, str]:
    """The name here of each tuned kernel there; without those that lack a binary here."""
    both = _archs(old) & _archs(new)
    before, after = (_binaries(build, both) for build in (old, new))
    found = {name: after[key] for key, name in before.items() if key in after}
    lost = {name for key, name in before.items() if key not in after}
    tuned = {row["kernel"] for row in old["kernels"] if not row["default"]}
    return {
        name: place
        for name, place in found.items()
        if name in tuned - lost and place in new["sources"]
    }
