"""Compares two runs of the study, cell by cell and claim by claim.

`python -m harness.compare results/recorded/hopper results/mine` takes recorded folders or folders
of runs. On one GPU model it compares the times of ours, else the ratios to each baseline and the
share of the speed of light. Exit codes: 0 the same or better, 1 a regression, 2 unusable input, 3
undecided.

On one GPU model, a regression is a cell or an (op, pass) that is slower, with families corrected by
Holm. On two, it is a claim that held and now is decided against. On both, it is also a cell of ours
that had a time and lost it. Without a regression, 0 needs proof that the geometric mean over all
cells is not slower by one percent. On two models it needs every decided claim to be decided again.
No cell may be missing. A cell of a network decides nothing, unless it lost its time.
"""

import argparse
import csv
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness import stats
from harness.cli import UserError, run
from harness.compare import changes, text
from harness.compare.changes import Run
from harness.files import whole_file
from harness.summarize import __main__ as summarize

SAME, REGRESSION, UNDECIDED = 0, 1, 3
RANK = {"worse": 0, "no difference": 1, "better": 2}
COLUMNS = (
    "kind,against,op,case,dtype,pass,baseline,cells,of,unit,old,new,old_pct_sol,new_pct_sol,ratio,ci_lo,"
    "ci_hi,noise,p,p_holm,verdict,old_verdict,new_verdict,old_status,new_status,old_reason,"
    "new_reason"
)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="harness.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("old", type=Path, help="a recorded folder, or that of a run")
    parser.add_argument("new", type=Path, help="the same, to be compared with it")
    parser.add_argument("--all", action="store_true", help="show all rows, not what changed most")
    parser.add_argument("--csv", type=Path, help="also write all rows to this file")
    options = parser.parse_args()
    old, new = Run.read(options.old), Run.read(options.new)
    if not set(old.summary) & set(new.summary):
        raise UserError(f"{options.new}: no cell of {options.old}; compare runs of the same ops")
    on_times = changes.same_gpu(old, new)
    cells, claims = changes.cell_rows(old, new), changes.claim_rows(old, new)
    means, p_worse = changes.mean_rows(old, new) if on_times else ([], 1.0)
    if options.csv:
        _write(options.csv, cells, means, claims)
    code, why = verdict(cells, means, claims, p_worse, on_times)
    about = [f"{options.old}: {old.origin()}", f"{options.new}: {new.origin()}"]
    about.append(_basis(old, new, on_times))
    shown = text.page(cells, means, claims, options.all)
    print("\n".join([*about, "", *shown, "", why]))
    return code


def verdict(
    cells: Sequence[Mapping],
    means: Sequence[Mapping],
    claims: Sequence[Mapping],
    p_worse: float,
    on_times: bool,
) -> tuple[int, str]:
    """The exit code and why, in a sentence; the rows are those of `harness.compare.changes`."""
    found = Counter(row["verdict"] for row in cells)
    slower = [f"mean of {row['op']} {row['pass']}" for row in means if row["verdict"] == "slower"]
    fell = [f"claim {row['op']} {row['pass']} {text.rival(row)}" for row in claims if _fell(row)]
    problems = slower if on_times else fell
    for word in ("lost", "slower") if on_times else ("lost",):
        if found[word]:
            problems.append(f"{found[word]} cells {word}")
    if problems:
        return REGRESSION, f"Regression: {'; '.join(problems)}."
    if found["missing"]:
        return UNDECIDED, f"Undecided: {found['missing']} cells of the first are not in the second."
    if on_times:
        if p_worse <= 1 - stats.CONFIDENCE:
            return SAME, "The same or better: no cell is slower, nor is the mean over all."
        return UNDECIDED, "Undecided: no cell is shown to be slower, but the mean over all may be."
    decided = [row for row in claims if row["old_verdict"] != "undecided"]
    if unsure := sum(row["outcome"] in ("undecided", "not testable") for row in decided):
        return UNDECIDED, f"Undecided: {unsure} of {len(decided)} claims."
    if not decided:
        return UNDECIDED, "Undecided: the first run decides no claim."
    return SAME, f"The same or better: of {len(decided)} claims none fell."


def _fell(row: Mapping) -> bool:
    old, new = (RANK.get(row[f"{when}_verdict"]) for when in ("old", "new"))
    return old is not None and new is not None and new < old


def _basis(old: Run, new: Run, on_times: bool) -> str:
    if not on_times:
        return "Several GPU models: ratios (a baseline's time over ours), % of the speed of light."
    control = changes.control(old, new)
    if not control:
        return "One GPU model: times of ours; no baseline is the same in both, nothing is decided."
    return f"One GPU model: times of ours; how far runs of the same code differ, {control} tells."


def _write(path: Path, cells: Sequence, means: Sequence, claims: Sequence) -> None:
    claims = [
        row
        | {"unit": "ratio", "old": row["old_ratio"], "new": row["new_ratio"]}
        | {"verdict": row["outcome"]}
        for row in claims
    ]
    with whole_file(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(
            file, COLUMNS.split(","), restval="", extrasaction="ignore", lineterminator="\n"
        )
        writer.writeheader()
        for kind, rows in {"cell": cells, "mean": means, "claim": claims}.items():
            writer.writerows({"kind": kind} | summarize.texts(row) for row in rows)


if __name__ == "__main__":
    run(main)
