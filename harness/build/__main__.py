"""Ahead-of-time build of a kernel file: `python -m harness.build --file softmax --archs 90 …`.

No GPU takes part. The ops' own launchers say what to compile: they run on tensors without data,
and a recorder stands where Triton would launch. Each recorded launch is compiled in its default
configuration, for sm_90 also in those that the committed tables choose, or in every candidate.
Exit code 1: a default does not build for sm_90, or `--same-as` finds another binary.
"""

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.build import same
from harness.cli import UserError, run
from harness.files import write_json, write_text
from harness.machine import environment
from harness.project import fingerprint, source_tree
from harness.project.implementations import OURS

# The architecture for which other than default configurations are compiled, and whose IR is kept.
HOME = "90"
ARCHS = (HOME, "80", "100", "120", "gfx942")
# The others are compiled in the first; launchers may branch on the dtype, so defaults in both.
DTYPES = ("bfloat16", "float32")


def main() -> int:
    parser = argparse.ArgumentParser(prog="harness.build", description=__doc__.split("\n")[0])
    parser.add_argument("--file", required=True, help="stem of a kernel file")
    parser.add_argument("--archs", nargs="+", default=ARCHS, help="80, 90, … or gfx942, …")
    every = "compile all candidates of each kernel, not only those that tables choose"
    parser.add_argument("--candidates", action="store_true", help=every)
    parser.add_argument("--out", required=True, help="the table, JSON")
    parser.add_argument("--ir", required=True, help="folder for the IR of every stage")
    parser.add_argument("--same-as", type=Path, help="a build of the tree before a change of names")
    kept = "recorded run whose reports, and with them the tuned tables, are kept if all is the same"
    parser.add_argument("--keep", type=Path, help=kept)
    arguments = parser.parse_args()
    old = same.read(arguments.same_as) if arguments.same_as else None
    archs = [arch for arch in ",".join(arguments.archs).split(",") if arch]
    if odd := next((a for a in archs if not re.fullmatch(r"\d+|gfx\w+", a)), None):
        raise UserError(f"--archs: {odd!r} is no architecture; write 90 for sm_90, or gfx942")
    if not archs:
        raise UserError("--archs: names no architecture; write 90 for sm_90, or gfx942")
    if arguments.file not in source_tree.stems(Path.cwd(), "kernels"):
        raise UserError(f"kernels/{arguments.file}.py: no such file of kernels; name its stem")
    if arguments.keep and not old:
        raise UserError("--keep: needs --same-as, the build to which this one must be equal")
    if arguments.keep and not arguments.keep.is_dir():
        raise UserError(f"{arguments.keep}: no such folder; name that of a recorded run")
    # Triton reads both while it is imported; line numbers would put this folder into the binaries.
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
    import triton

    from harness.build import compiler, recorder
    from harness.build import tables as tuned

    chosen = None if arguments.candidates else tuned.chosen(arguments.file)
    found = recorder.of_file(arguments.file, DTYPES, chosen)
    rows = table(arguments.file, found, archs)
    stages = []
    for name, launch in sorted(recorder.models(found, DTYPES).items()):
        texts = compiler.stages(launch, HOME)
        for stage, text in texts.items():
            path = Path(arguments.ir) / f"{name}.{stage}"
            write_text(path, text)
            size = {"bytes": len(text.encode()), "lines": len(text.splitlines())}
            where = os.path.relpath(path, Path(arguments.out).parent)
            stages.append({"kernel": name, "stage": stage} | size | {"path": where})
    identity = {
        "file": arguments.file,
        "triton": triton.__version__,
        "code_sha256": fingerprint.implementation(environment.ROOT, arguments.file, OURS),
        "sources": tuned.sources(arguments.file),
        "launches_sha256": same.launches_sha256(found),
    }
    tables = tuned.findings(arguments.file)
    for finding in tables:
        print("build {file}: {table}: {kernel} {state}: {reason}".format(**identity, **finding))
    write_json(arguments.out, identity | {"kernels": rows, "ir": stages, "tables": tables})
    verdict = _verdict(arguments.file, rows)
    return verdict if old is None else verdict | _same(old, identity | {"kernels": rows}, arguments)


def _same(old: Mapping, new: Mapping, arguments: argparse.Namespace) -> int:
    """Says whether the build is that of the old tree, and keeps what rests on it if asked to."""
    from kernels._runtime import configs as _tuned

    differences = same.differences(old, new)
    for line in differences:
        print(f"build {arguments.file}: {line}")
    print(f"build {arguments.file}: {'not ' if differences else ''}the same as {arguments.same_as}")
    if arguments.keep and not differences:
        commit, dirty = environment.revision(environment.ROOT)
        commit += "-dirty" if dirty else ""
        for line in same.keep(old, new, arguments.keep, _tuned.COMMITTED, commit):
            print(line)
    return int(bool(differences))


def table(file: str, found: Sequence, archs: Sequence[str]) -> list[dict]:
    """A row for each launch and architecture that gives another binary; `found`: those at home."""
    from harness.build import compiler

    rows = {}
    for arch in archs:
        for launch in found if arch == HOME else _abroad(file, arch):
            row = compiler.row(launch, arch)
            rows.setdefault((launch.name, arch, launch.dtype, launch.config, row["sha256"]), row)
    return list(rows.values())


def _abroad(file: str, arch: str) -> list:
    """Return the last default launch on an architecture for each kernel, op and dtype."""
    from harness.build import compiler, recorder
    from kernels._runtime import device as _device

    limits = {"hip": arch.startswith("gfx"), "tensor_memory": arch in compiler.TENSOR_MEMORY}
    if arch in compiler.SHARED_BYTES:
        limits["shared_bytes"] = compiler.SHARED_BYTES[arch]
    with _device.assume_device(**limits, hopper=False):
        found = recorder.of_file(file, DTYPES, {}, every=False)
    return list({(x.name, x.op.name, x.dtype): x for x in found}.values())


def _verdict(file: str, rows: Sequence[Mapping]) -> int:
    faults = [row for row in rows if row["status"] != "ok" or row["fits"] is False]
    for row in faults:
        why = row["reason"] or f"{row['shared_bytes']} bytes of shared memory do not fit"
        print(f"build {file}: {row['kernel']} {row['arch']} {row['dtype']} {row['config']}: {why}")
    fatal = [row for row in faults if row["default"] and row["arch"] == HOME]
    kernels = len({row["kernel"] for row in rows})
    print(f"build {file}: {kernels} kernels, {len(rows)} binaries, {len(faults)} faults")
    return int(bool(fatal))


if __name__ == "__main__":
    run(main)
