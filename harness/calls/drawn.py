"""Shapes that nobody chose.

`python -m harness.calls.drawn --seed fresh --out results/<run>/drawn.json` draws a seed. Kernels
are tuned on the cases of their sweep, by people who know them. So each run draws a few shapes more
for each op, from the range that the op declares, verifies them and times all rivals on them. The
file holds the seed, and the shapes follow from it and from the op's name. So the jobs of a run
agree on them, and a seed from a sidecar gives them again.
"""

import argparse
import dataclasses
import random
import re
from pathlib import Path

from harness import cli, files
from ops._spec import Case, Op

SHAPES = 4
# The format that is trained in; an op without it has but one.
DTYPE = "bfloat16"
# The values of the column `set`.
GRID, DRAWN = "grid", "drawn"
SIZE = re.compile(r"([A-Z])(\d+)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=cli.seed, required=True, help="an integer, or fresh")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    seed = cli.fresh_seed() if options.seed is None else options.seed
    files.write_json(options.out, {"drawn_seed": seed})


def read(path: Path | None) -> int | None:
    """The seed in a file that this command wrote; None without a file, where nothing is drawn.

    UserError where the file is missing or holds none.
    """
    if path is None:
        return None
    remedy = f"make it with python -m harness.calls.drawn --seed fresh --out {path}"
    seed = files.read_json(path, remedy, {"drawn_seed"})["drawn_seed"]
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise cli.UserError(f"{path}: drawn_seed is {seed!r}, no integer from 0; {remedy}")
    return seed


def cases(op: Op, seed: int | None) -> tuple[Case, ...]:
    """The shapes of an op that a seed gives, in one dtype; none without a seed.

    No two have the same name, and none has that of a case of the sweep.
    """
    if seed is None or op.drawn is None:
        return ()
    # The generator takes all bits of a string, in every process the same.
    generator, known, found = random.Random(f"{seed}/{op.name}"), set(), []
    known |= {case.name for case in op.sweep}
    dtypes = (DTYPE,) if DTYPE in op.dtypes else op.dtypes[:1]
    while len(found) < SHAPES:
        case = dataclasses.replace(op.drawn(generator), dtypes=dtypes)
        if case.name not in known:
            known.add(case.name)
            found.append(case)
    return tuple(found)


def passes(op: Op) -> tuple[str, ...]:
    """The passes in which drawn shapes are timed: "both" only of an op without a backward pass.

    If an op has a `backward` pass, its `both` launches what the other two passes launch.
    """
    return tuple(name for name in op.passes if name != "both" or "backward" not in op.passes)


def named(op: Op, name: str) -> Case:
    """The timed case of this name: that of the sweep, else the shape that the name spells."""
    for case in op.sweep:
        if case.name == name:
            return case
    parts = [(part, SIZE.fullmatch(part)) for part in name.split("-")]
    sizes = {match[1]: int(match[2]) for _, match in parts if match}
    return Case(sizes, tuple(part for part, match in parts if not match))


if __name__ == "__main__":
    cli.run(main)
