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
    lines = {op: pair for op, pair in lines.items() if None not in pair}
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
    """lines: of each operation ours and the fastest baselines."""
    ours, best = (pd.DataFrame(column).median() for column in zip(*lines.values(), strict=True))
    moved = least * MIB / 1e6
    reached = [moved / (start + moved / rate) for start, rate in (ours, best)]
    several = f"in the median over {len(lines)}~operations"
    (start, rate), (best_start, best_rate) = ours, best
    return (
        "The time of an element-wise call is a start and an end, and a rate between them: by the "
        f"smallest and the largest cell of an operation \\SI{{{start:.1f}}}{{\\micro\\second}} "
        f"and \\SI{{{rate:.2f}}}{{\\tera\\byte\\per\\second}} with ours, "
        f"\\SI{{{best_start:.1f}}}{{\\micro\\second}} and "
        f"\\SI{{{best_rate:.2f}}}{{\\tera\\byte\\per\\second}} with the fastest baselines, "
        f"{several if len(lines) > 1 else f'in {_table.code(*lines)}'}. On these lines a cell of "
        f"\\SI{{{least:.0f}}}{{\\mebi\\byte}} has "
        f"\\SI{{{reached[0]:.1f}}}{{\\tera\\byte\\per\\second}} with ours and "
        f"\\SI{{{reached[1]:.1f}}}{{\\tera\\byte\\per\\second}} with the others.\n"
    )


if __name__ == "__main__":
    run(main, __doc__)
