"""List the time that measuring took by op, and the gap of two processes that run ours."""

import math

import _table
from _data import OURS, rank, read, run

CAPTION = (
    "What measuring took: cells of ours, blocks over all implementations, wall time, of it the "
    "share of first calls, in which the libraries compile and tune (a dash: counted as overhead), "
    "and the share that was neither these nor timed work nor its warm-up or flush; beside it the "
    "gap between two processes that run ours (A/A), over single cells of all lengths."
)
ALL = "all"


def main(arguments):
    rows = read(arguments.run, "summary")
    own = rows[(rows["impl"] == OURS) & (rows["status"] == "ok")]
    gaps = 100 * (own["speedup_vs_ours_twin"] - 1).abs()
    overhead = read(arguments.run, "overhead").set_index("op")
    place = rank(arguments.run)
    family = rows.drop_duplicates("op").set_index("op")["family"]
    # An op that no pass of the configuration concerns has no cell.
    ops = sorted(set(overhead.index) & set(family.index), key=lambda op: (place[family[op]], op))
    lines = [_line(_table.code(op), overhead.loc[op], gaps[own["op"] == op]) for op in ops]
    if ALL in overhead.index:
        lines += [[r"\midrule"], _line(ALL, overhead.loc[ALL], gaps)]
    head = [
        r"& & & & \multicolumn{2}{c}{of it, \%} & \multicolumn{3}{c}{A/A gap, \%}",
        r"\cmidrule(lr){5-6}\cmidrule(l){7-9}",
        r"op & {cells} & {blocks} & {seconds} & {first calls} & {overhead} & {median} & {95th} &"
        r" {largest}",
    ]
    columns = "lrrS[table-format=4.0]*{2}{S[table-format=2.0]}*{3}{S[table-format=2.2]}"
    table = _table.captioned(
        columns, head, lines, CAPTION, "tab:measuring", size=_table.SMALL, place="H"
    )
    _table.save(arguments.out, table)


def _line(title, row, gaps):
    took = [_table.number(row["total_s"], 0)]
    first_s = row["first_s"] or math.nan
    took += [_table.number(100 * part, 0) for part in (first_s / row["total_s"], row["share"])]
    ends = [_table.number(gap) for gap in (gaps.median(), gaps.quantile(0.95), gaps.max())]
    return [title, f"{row['cells']:.0f}", f"{row['blocks']:.0f}", *took, *ends]


if __name__ == "__main__":
    run(main, __doc__)
