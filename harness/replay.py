"""Copies the recorded measurement of one op into a run, in place of measuring it.

`python -m harness.replay --op softmax --recorded results/recorded/h200 --out raw/softmax.csv`
"""

import argparse
from pathlib import Path

from harness import command, measured, raw
from harness.command import UserError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--op", required=True)
    parser.add_argument("--recorded", type=Path, required=True, help="folder of a recorded run")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    replay(options.op, options.recorded, options.out)


def replay(op: str, recorded: Path, out: Path) -> None:
    """Writes both files of an op, or neither; UserError where the recorded ones are not whole."""
    source = recorded / "raw" / f"{op}.csv"
    if measured.is_held(out):
        raise UserError(f"{out}: holds measured times; name another file, or remove it first")
    remedy = f"record {op} on a GPU machine or take it out of ops in config/config.yaml"
    rows, sidecar = raw.read(source, remedy)
    if {op} != {sidecar["op"], *(row["op"] for row in rows)}:
        raise UserError(f"{source}: is about another op than {op}; {remedy}")
    with command.whole_file(out) as temporary:
        temporary.write_bytes(source.read_bytes())
        command.write_json(out.with_suffix(".json"), sidecar | {"mode": "replayed"})


if __name__ == "__main__":
    command.run(main)
