"""Tell the time of a call beyond the memory's: the line through its smallest and largest cell.

It is drawn for targets on all cells from some traffic on: there only their size differs.
"""

import _table
import pandas as pd
from _data import run
from _targets import cells, counts, targets

MIB = 2**20
# Cells of the size alone, and at least so many times as much traffic in the largest.
CASE, SPAN = r"N\d+", 4


def main(arguments):
    found = cells(arguments.run)
    lines, least = {}, None
    for target in targets().itertuples(index=False):
        if target.dtype and target.least_mib:
            least = float(target.least_mib)
            for op, rows in found[counts(found, target)].groupby("op"):
                rows = rows[rows["case"].str.fullmatch(CASE)].sort_values("mib")
                lines[op] = [_line(rows, prefix) for prefix in ("", "best_")]
    lines = [pair for pair in lines.values() if None not in pair]
    _table.save(arguments.out, _sentence(lines, least) if lines else "")


def _line(rows, prefix):
    """Microseconds that do not depend on the size, and TB/s; None where two cells are not told."""
    timed = rows[rows[f"{prefix}us"].notna()]
    if timed.empty or timed["mib"].iloc[-1] < SPAN * timed["mib"].iloc[0]:
        return None
    first, last = timed[f"{prefix}us"].iloc[[0, -1]]
    small, large = timed["mib"].iloc[[0, -1]] * MIB / 1e6
    rate = (large - small) / (last - first)
    return first - small / rate, rate


def _sentence(lines, least):
    ours, best = (pd.DataFrame(column).median() for column in zip(*lines, strict=True))
    moved = least * MIB / 1e6
    reached = moved / (ours[0] + moved / ours[1])
    return (
        "The time of an element-wise call is a start and an end, and a rate between them: by the "
        f"smallest and the largest cell of an operation \\SI{{{ours[0]:.1f}}}{{\\micro\\second}} "
        f"and \\SI{{{ours[1]:.2f}}}{{\\tera\\byte\\per\\second}} with ours, "
        f"\\SI{{{best[0]:.1f}}}{{\\micro\\second}} and "
        f"\\SI{{{best[1]:.2f}}}{{\\tera\\byte\\per\\second}} with the fastest baselines, in the "
        f"median over {len(lines)}~operations. On that line a cell of "
        f"\\SI{{{least:.0f}}}{{\\mebi\\byte}} has "
        f"\\SI{{{reached:.1f}}}{{\\tera\\byte\\per\\second}}, whoever wrote the kernel.\n"
    )


if __name__ == "__main__":
    run(main, __doc__)
