"""A journal becomes the two files of a measurement: `raw/<op>.csv` and its sidecar.

`python -m harness.measure.close results/study/raw/.softmax.journal` does so for a measurement that
will not go on, because its machine is gone. Finished cells have their rows. Each other cell has a
row of status `unreached` for each implementation that verification let through, and the sidecar
says how many there are. Their order follows from the sweep and the ceilings, so no time decides
which cells are reached.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from harness import cli
from harness.cli import UserError
from harness.machine import affinity
from harness.measure.checkpoint import Journal
from harness.measure.gate import Gate
from harness.measure.rows import Rows
from harness.measure.scheduler import MeasurementPlan
from harness.measure.stopping import REASONS
from harness.results import measured, raw
from harness.status import TIMED
from harness.workers.messages import Failure

UNREACHED = Failure("unreached", "the measurement ended before this cell")
ELSEWHERE = Failure("unreached", "another part of the measurement times this cell")


def main() -> None:
    parser = argparse.ArgumentParser(prog="harness.measure.close", description=__doc__)
    parser.add_argument("journal", type=Path, help="raw/.<op>.journal of the run")
    close(parser.parse_args().journal)


def close(path: Path) -> None:
    """Write the files beside a journal, and remove it.

    Raises UserError where it is missing or no journal, another job writes it, it holds no time, or
    measured times lie in that place.
    """
    with Journal.found(path) as kept:
        if not kept.about:
            raise UserError(f"{path}: of an older version, which names no cells; measure again")
        out = path.with_name(f"{kept.about['sidecar']['op']}.csv")
        if measured.is_held(out):
            raise UserError(f"{out}: holds measured times; move it away, or remove the journal")
        if not has_time(kept.cells):
            raise UserError(f"{path}: holds no time; measure again")
        write(out, kept, sum(each["spent_s"] for each in kept.cells.values()), _span(kept))
        kept.remove()


def about(
    plan: MeasurementPlan, gate: Gate, origin: Mapping[str, object], board: str, began: str
) -> dict[str, object]:
    """All that the two files of a plan hold but what its finished cells tell, for the journal."""
    schedule = {"drawn_seed": plan.drawn_seed, **asdict(plan.timing), "cores": affinity.count()}
    unreached = {}
    for cell in plan.cells:
        rows = Rows(plan.op, plan.family, cell, plan.ceilings, board)
        for impl in plan.impls:
            verdict = gate.verdict(impl, cell)
            refused = Failure(verdict.status, verdict.reason)
            lacking = ELSEWHERE if str(cell) in plan.others else UNREACHED
            # A baseline is verified where the cell is timed.
            waits = verdict.status in ("ok", UNREACHED.status)
            failure = lacking if waits else refused
            rows.failed(impl, verdict.impl_version, failure, block=0, order=0)
        unreached[str(cell)] = rows.taken
    sidecar = {**origin, "schedule": schedule}
    return {"sidecar": sidecar, "unreached": unreached, "began": began}


def _span(kept: Journal) -> dict[str, str] | None:
    """When a measurement began and its last cell ended; None if it had several parts."""
    ended = [each["ended"] for each in kept.cells.values()]
    return None if kept.resumed else {"began": kept.about["began"], "ended": max(ended)}


def has_time(cells: Mapping[str, Mapping]) -> bool:
    """Whether a row of finished cells has a time."""
    return any(row["status"] in TIMED for each in cells.values() for row in each["rows"])


def write(out: Path, kept: Journal, total_s: float, span: Mapping[str, str] | None = None) -> None:
    """Write the CSV and the sidecar whole, or neither; print the share of overhead.

    - total_s: the seconds of the whole measurement.
    - span: when its last part began and ended, None if that is not known.
    """
    cells = [kept.cells.get(name) for name in kept.about["unreached"]]
    finished = [each for each in cells if each]
    timed_s, first_s = (sum(each[key] for each in finished) for key in ("timed_s", "first_s"))
    share = 1 - (timed_s + first_s) / total_s
    rows = _rows(kept)
    stopped = Counter(each["stopped"] for each in finished)
    sidecar = kept.about["sidecar"]
    schedule = {"seed": kept.seed} | sidecar["schedule"]
    schedule |= {"stopped": {reason: stopped[reason] for reason in REASONS}}
    overhead = {"total_s": total_s, "timed_s": timed_s, "first_s": first_s}
    sidecar = sidecar | {
        "schedule": schedule,
        "resumed": kept.resumed,
        **({"span": span} if span else {}),
        "unreached": len(cells) - len(finished),
        "overhead": {name: round(seconds, 3) for name, seconds in overhead.items()}
        | {"share": round(share, 4)},
    }
    raw.write(out, rows, sidecar)
    done = f"{sidecar['op']}: {len(rows)} rows in {total_s:.1f} s, "
    done += f"first calls {first_s / total_s:.0%}, overhead {share:.0%}"
    if sidecar["unreached"]:
        done += f", {sidecar['unreached']} of {len(cells)} cells unreached"
    print(done, file=sys.stderr)


def _rows(kept: Journal) -> Sequence[Mapping]:
    """The rows of all cells, in the order of the sweep."""
    found = []
    for name, unreached in kept.about["unreached"].items():
        found += kept.cells[name]["rows"] if name in kept.cells else unreached
    return found


if __name__ == "__main__":
    cli.run(main)
