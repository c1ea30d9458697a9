"""What each kernel was to reach, what it reached, and the fastest baseline of the same run.

targets.csv says for each row which cells count (ops, pass, a pattern for the case, dtype, least
traffic in MiB; an empty field takes all), the quantity, and two bounds on it. Of several cells the
one furthest from the bound is shown.
"""

from pathlib import Path
from typing import NamedTuple

import _table
import pandas as pd
from _data import OURS, PaperError, read, run, summary

TARGETS = Path(__file__).parents[1] / "targets.csv"
MIB = 2**20
CELL = ["op", "case", "dtype", "pass"]
TIMED = ("ok", "throttled")
NONE = "not recorded"
CAPTION = (
    "Targets: what must be reached, what was aimed at, and what was reached in the run shown here, "
    "in its cell furthest from the target where several count. Beside it the fastest baseline of "
    "that cell in the same quantity. ``Not recorded'': the run has no such cell. Rates are device "
    "times on a cold level-two cache; the last row compares the host's time of a call."
)
FLOAT_ROWS = 20


class Quantity(NamedTuple):
    """name: as the table prints it. digits: so many. less: whether less is better."""

    name: str
    digits: int = 2
    less: bool = False


# Quantities that compare ours with a baseline already.
RATIOS = ("peer_ratio", "eager_ratio", "call_ratio", "memory_share")
QUANTITIES = {
    "tb_s": Quantity("TB/s"),
    "us": Quantity(r"\si{\micro\second}", 1, less=True),
    "ms": Quantity("ms", 3, less=True),
    "copy_share": Quantity("of the copy ceiling", 3),
    "write_share": Quantity("of the write ceiling", 3),
    "peer_ratio": Quantity("of the best baseline's rate", 3),
    "eager_ratio": Quantity("of eager's rate"),
    "call_ratio": Quantity("of eager's host time", less=True),
    "memory_share": Quantity("of eager's memory beside inputs and results", 3, less=True),
}


def main(arguments):
    cells = _cells(arguments.run)
    lines, last = [], None
    for target in _targets().itertuples(index=False):
        if last not in (None, target.kernel):
            lines.append([r"\addlinespace[2pt]"])
        name = "" if target.kernel == last else _table.escape(target.kernel)
        lines.append([name, *_line(target, cells[_counts(cells, target)])])
        last = target.kernel
    head = [r"kernel & pass & cell & quantity & {must} & {aim} & {reached} & state & best baseline"]
    wrapped = (rf">{{\raggedright\arraybackslash}}p{{{width}mm}}" for width in (26, 25, 19, 15, 24))
    columns = "{}l{}{}rrr{}{}".format(*wrapped)
    text = _table.captioned(columns, head, lines, CAPTION, "tab:targets", FLOAT_ROWS)
    _table.save(arguments.out, text)


def _line(target, found):
    values = found[target.quantity].dropna()
    quantity = QUANTITIES[target.quantity]
    bounds = [target.must or "--", target.aim or "--"]
    passes = "" if target.pass_ == "*" else target.pass_
    if values.empty:
        return [passes, "", quantity.name, *bounds, "--", "no time" if len(found) else NONE, ""]
    worst = values.idxmax() if quantity.less else values.idxmin()
    row = found.loc[worst]
    where = rf"{_table.code(row['op'])} {_table.code(row['case'])}"
    if target.pass_ == "*":
        passes = row["pass"]
    reached = f"{values[worst]:.{quantity.digits}f}"
    rival = _table.code(row["best"]) if row["best"] else ""
    if target.quantity in RATIOS:
        rival = rival if target.quantity == "peer_ratio" else ""
    elif rival:
        rival += f" {row[f'best_{target.quantity}']:.{quantity.digits}f}"
    lost = (~found["timed"]).sum()
    state = f"missed, {lost} without a time" if lost else _state(target, values)
    return [passes, where, quantity.name, *bounds, reached, state, rival]


def _state(target, values):
    """Whether all cells reach the bounds; of those that miss one, how many do."""
    less = QUANTITIES[target.quantity].less
    for bound, word in ((target.aim, "aim met"), (target.must, "must met")):
        if bound and (values <= float(bound) if less else values >= float(bound)).all():
            return word
    bound = float(target.must or target.aim)
    met = (values <= bound if less else values >= bound).sum()
    return "missed" if len(values) == 1 else f"missed ({met} of {len(values)} met)"


def _targets():
    frame = pd.read_csv(TARGETS, dtype=str, keep_default_na=False)
    if unknown := set(frame["quantity"]) - set(QUANTITIES):
        raise PaperError(f"{TARGETS}: quantity {min(unknown)!r} is none of {', '.join(QUANTITIES)}")
    return frame.rename(columns={"pass": "pass_"})


def _counts(cells, target):
    """Which cells a target speaks of."""
    chosen = pd.Series(True, cells.index)
    if target.op != "*":
        chosen &= cells["op"].isin(target.op.split())
    if target.pass_ != "*":
        chosen &= cells["pass"] == target.pass_
    if target.case:
        chosen &= cells["case"].str.fullmatch(target.case)
    if target.dtype:
        chosen &= cells["dtype"] == target.dtype
    if target.least_mib:
        chosen &= cells["mib"] >= float(target.least_mib)
    return chosen


def _cells(folder):
    """The cells of ours, with each quantity of ours and, as `best_…`, of the fastest baseline."""
    rows = summary(folder).set_index(CELL)
    counts = rows["status"].isin(TIMED) & rows["device_us"].notna()
    ours = rows[rows["impl"] == OURS]
    timed = counts[rows["impl"] == OURS]
    ours = ours.where(timed)
    rivals = rows[counts & (rows["impl"] != OURS)].sort_values("device_us")
    eager = rivals[rivals["impl"] == "torch_eager"].reindex(ours.index)
    best = rivals[~rivals.index.duplicated()].reindex(ours.index)
    limits = _limits(folder, ours)
    # All implementations of a cell move the same bytes, and one may have no time to tell.
    moved = (rows["gbps"] * rows["device_us"] * 1e3).groupby(level=CELL).max().reindex(ours.index)
    own, other = (_quantities(frame, eager, limits, moved) for frame in (ours, best))
    own["peer_ratio"] = best["device_us"] / ours["device_us"]
    found = own.join(other.add_prefix("best_")).reset_index()
    found["mib"] = moved.to_numpy() / MIB
    return found.assign(best=best["impl"].fillna("").to_numpy(), timed=timed.to_numpy())


def _quantities(frame, eager, limits, moved):
    """moved: the bytes of inputs and results, each once, which every implementation holds."""
    return pd.DataFrame(
        {
            "tb_s": frame["gbps"] / 1e3,
            "us": frame["device_us"],
            "ms": frame["device_us"] / 1e3,
            "copy_share": frame["gbps"] / limits["copy"],
            "write_share": frame["gbps"] / limits["write"],
            "eager_ratio": eager["device_us"] / frame["device_us"],
            "call_ratio": frame["call_us"] / eager["call_us"],
            "memory_share": (frame["peak_mem_bytes"] - moved) / (eager["peak_mem_bytes"] - moved),
        }
    )


def _limits(folder, ours):
    """The measured ceilings, in GB/s, of the run that each cell comes from."""
    rows = read(folder, "shown_ceilings")
    rows = rows[rows["source"] == "measured"].set_index(["run_id", "quantity"])["value"]
    run_of = {op: row.run_id for row in read(folder, "runs").itertuples() for op in row.ops.split()}
    ops = ours.index.get_level_values("op")
    return {
        name: [rows.get((run_of.get(op), name), float("nan")) for op in ops]
        for name in ("copy", "write")
    }


if __name__ == "__main__":
    run(main, __doc__)
