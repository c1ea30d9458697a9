"""Copies the recorded measurement of one op into a run, in place of measuring it.

`python -m harness.results.replay --op softmax --recorded results/recorded/hopper --out
raw/softmax.csv`
"""

import argparse
from pathlib import Path

from harness import cli, files
from harness.cli import UserError
from harness.project.implementations import TWIN
from harness.results import manifest, measured, raw, schema


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--op", required=True)
    parser.add_argument("--recorded", type=Path, required=True, help="folder of a recorded run")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    replay(options.op, options.recorded, options.out)


def replay(op: str, recorded: Path, out: Path) -> None:
    """Writes both files of an op, or neither.

    Raises UserError where the recorded ones are not whole, are not as the manifest has them, or
    have an implementation without a verification report, and where `out` holds measured times.
    """
    source = recorded / "raw" / f"{op}.csv"
    if measured.is_held(out):
        raise UserError(f"{out}: holds measured times; name another file, or remove it first")
    remedy = f"git checkout {recorded}, record {op} on a GPU machine, or take it out of ops"
    manifest.check(recorded, [op])
    rows, sidecar = raw.read(source, remedy)
    if {op} != {sidecar["op"], *(row["op"] for row in rows)}:
        raise UserError(f"{source}: is about another op than {op}; {remedy}")
    for impl in dict.fromkeys(row["impl"] for row in rows if row["impl"] != TWIN):
        path = recorded / "verify" / op / f"{impl}.json"
        report = schema.read(path, "verification", remedy)
        if (report["op"], report["impl"]) != (op, impl):
            raise UserError(f"{path}: is about {report['op']} of {report['impl']}; {remedy}")
    with files.whole_file(out) as temporary:
        temporary.write_bytes(source.read_bytes())
        files.write_json(out.with_suffix(".json"), sidecar | {"mode": "replayed"})


if __name__ == "__main__":
    cli.run(main)
