"""The targets of targets.csv, and what each cell of ours and its fastest baseline reached.

A row of targets.csv names the cells that count, the quantity, and two bounds on it. The cells are
given by ops, pass, a pattern for the case, dtype and least traffic in MiB; an empty field takes
all. A rate or a time is set for one model of GPU, which `gpu` names.
"""

from pathlib import Path
from typing import NamedTuple

import pandas as pd
from _data import CELL, EVENTS, OURS, PaperError, read, summary

TARGETS = Path(__file__).parents[1] / "targets.csv"
MIB = 2**20
TIMED = ("ok", "throttled")
# The family of the ops of whole networks.
NETWORK = "model"


class Quantity(NamedTuple):
    """name: as the table prints it. digits: so many. less: whether less is better."""

    name: str
    digits: int = 2
    less: bool = False


QUANTITIES = {
    "tb_s": Quantity("TB/s"),
    "us": Quantity(r"\si{\micro\second}", 1, less=True),
    "ms": Quantity("ms", 3, less=True),
    "copy_share": Quantity("of the copy ceiling", 3),
    "write_share": Quantity("of the write ceiling", 3),
    "peer_ratio": Quantity("of the best rate", 3),
    "eager_ratio": Quantity("of eager's rate"),
    "call_ratio": Quantity("of eager's host time", less=True),
    "memory_share": Quantity("of eager's memory", 3, less=True),
}


def targets():
    """The rows of targets.csv; `pass_` is the pass, which is a word of Python."""
    frame = pd.read_csv(TARGETS, dtype=str, keep_default_na=False)
    if unknown := set(frame["quantity"]) - set(QUANTITIES):
        raise PaperError(f"{TARGETS}: quantity {min(unknown)!r} is none of {', '.join(QUANTITIES)}")
    return frame.rename(columns={"pass": "pass_"})


def counts(cells, target):
    """Which of the cells a target speaks of."""
    chosen = pd.Series(True, cells.index)
    if target.op == "*":
        # The wall time of a network holds the GPU's.
        chosen &= cells["family"] != NETWORK
    else:
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


def cells(folder):
    """The cells of ours, with each quantity of ours and, as `best_…`, of the fastest baseline."""
    rows = summary(folder)
    rows = rows[rows["set"] == "grid"].set_index(CELL)
    # A time by events is compared with no time of a graph; the host's time of such a call is.
    by_events = (rows["timed_by"] == EVENTS) & (rows["impl"] != OURS)
    rows["device_us"] = rows["device_us"].mask(by_events)
    valid = rows["status"].isin(TIMED) & rows["device_us"].notna()
    ours = rows[rows["impl"] == OURS]
    timed = valid[rows["impl"] == OURS]
    ours = ours.where(timed)
    rivals = rows[valid & (rows["impl"] != OURS)].sort_values("device_us")
    eager = rows[(rows["impl"] == "torch_eager") & (valid | by_events)].reindex(ours.index)
    best = rivals[~rivals.index.duplicated()].reindex(ours.index)
    limits = _limits(folder, ours)
    # All implementations of a cell move the same bytes, and one may have no time to tell.
    moved = (rows["gbps"] * rows["device_us"] * 1e3).groupby(level=CELL).max().reindex(ours.index)
    own, other = (_quantities(frame, eager, limits, moved) for frame in (ours, best))
    own["peer_ratio"] = best["device_us"] / ours["device_us"]
    found = own.join(other.add_prefix("best_")).reset_index()
    # Both have six digits, so that 64 MiB may come out as a little less.
    found["mib"] = (moved.to_numpy() / MIB).round(2)
    family = rows[rows["impl"] == OURS]["family"].to_numpy()
    best, gpu = best["impl"].fillna("").to_numpy(), _of_run(folder, ours, "gpu")
    return found.assign(best=best, timed=timed.to_numpy(), family=family, gpu=gpu)


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
    """The measured ceilings, in GB/s, of the GPU that took the times of each cell."""
    rows = read(folder, "shown_ceilings")
    rows = rows[rows["source"] == "measured"].set_index(["run_id", "board", "quantity"])["value"]
    boards = list(zip(ours["run_id"], _of_run(folder, ours, "board"), strict=True))
    return {
        name: [rows.get((*board, name), float("nan")) for board in boards]
        for name in ("copy", "write")
    }


def _of_run(folder, ours, column):
    """Return a column of runs.csv, of the run that took the times of each cell."""
    runs = read(folder, "runs")
    lines = zip(runs["ops"], runs["run_id"], runs[column], strict=True)
    known = {(op, run_id): value for ops, run_id, value in lines for op in ops.split()}
    cells = zip(ours.index.get_level_values("op"), ours["run_id"], strict=True)
    return [known.get(cell, "") for cell in cells]
