r"""Networks: a table of each call and stack, and what the section may show of this run.

The table has the wall time and the GPU time of a call. `\networklaunched` says which calls are CUDA
graphs. `\networkwaits` names the calls in which the GPU waits for the host for long.

The section is absent from the paper of a run without anything about a network. So are the timed
calls without times, and each figure without rows.
"""

import _table
import numpy as np
from _data import read, run
from _parity import parity

OPS = {
    "model_forward": "Forward",
    "model_train_step": "Training step",
    "model_decode": "Prompt and decoding",
}
# The files on what is within a step, and the commands that say whether a run has rows of them.
FILES = {
    "step_parts": "whenstepparts",
    "step_ladder": "whenstepladder",
    "step_memory": "whenstepmemory",
    "step_power": "whensteppower",
    "loss_parity": "whenlossparity",
}
# The name of each time stands over its columns.
ABOVE = r"& & \multicolumn{4}{c}{wall time} & \multicolumn{2}{c}{GPU time} & &"
RULES = r"\cmidrule(lr){3-6}\cmidrule(lr){7-8}"
HEADS = ("", "stack", "ms", "eager", "tokens/s", "MFU", "ms", "eager", "peak", "energy")
UNITS = ("", "", "", "/ stack", "", r"\%", "", "/ stack", "GiB", "mJ/token")
# How the wall time of a call is taken, now and in older rows.
LONG_ROW = (
    "After a rest a board may run faster for about a second. So calls follow each other for seconds"
    " before the clock runs. The time is the mean of calls in a row behind them. So the host may"
    " submit a call while the GPU still has the one before, which hides some of the host's work."
)
SHORT_ROW = (
    "A block makes its calls one after the other, and a long one once, about a second after a rest."
    " Near that time the clock of a board may fall and rise again. So the two times of a long call"
    " may have clocks that differ, and neither need have that of a loop of minutes. A program that"
    " does not wait for each call hides some of the host's work behind the call before."
)
# The GPU waits for long if the wall time is so many times the GPU time: for a third of the call.
WAITS = 1.5


def main(arguments):
    rows = read(arguments.run, "network")
    losses = parity(read(arguments.run, "loss_parity"))
    has = {command: _has(read(arguments.run, name)) for name, command in FILES.items()}
    has = {"whennetwork": len(rows) > 0} | has
    has = {"whenanynetwork": any(has.values())} | has
    lines = [rf"\newcommand{{\{name}}}[1]{{{'#1' if yes else ''}}}" for name, yes in has.items()]
    lines.append(rf"\newcommand{{\parityverdict}}{{{_verdict(losses)}}}")
    lines.append(rf"\newcommand{{\networklaunched}}{{{_launched(rows)}}}")
    lines.append(rf"\newcommand{{\networksustained}}{{{_sustained(rows)}}}")
    lines.append(rf"\newcommand{{\networkwaits}}{{{_waits(rows)}}}")
    lines.append(rf"\newcommand{{\networktable}}{{{_tabular(rows)}}}")
    _table.save(arguments.out, "\n".join([*lines, ""]))


def _verdict(losses):
    """Which stacks stay in the band, and which leave it how often; nothing without a band."""
    if losses is None:
        return ""
    outside = {stack: losses.outside(stack) for stack in sorted(losses.gaps)}
    inside = [_table.code(stack) for stack, times in outside.items() if not times]
    left = [
        rf"{_table.code(stack)} in {times} of {len(losses.centre)} windows"
        for stack, times in outside.items()
        if times
    ]
    parts = [f"In the band throughout: {_table.listed(inside)}."] if inside else []
    return " ".join([*parts, *([f"Out of it: {_table.listed(left)}."] if left else [])])


def _has(rows):
    return bool((rows["status"] == "ok").any())


def _cells(rows):
    """The title of each cell, an op after the other and a case after the other, and its rows."""
    for op, title in OPS.items():
        found = rows[(rows["op"] == op) & ~rows["stack"].str.contains("_with_")]
        for _, cell in found.groupby(["preset", "batch", "length", "dtype"], sort=False):
            first = cell.iloc[0]
            size = f"{first['batch']} x {first['length']}"
            if op == "model_decode":
                size += f" + {first['tokens'] / first['batch']:.0f}"
            case = f"{first['preset']}, {size}, {first['dtype']}"
            yield f"{title}: {_table.escape(case)}", cell


def _launched(rows):
    """How the kernels of each op start, by stack if these differ; nothing if no row says it."""
    said = rows[(rows["status"] == "ok") & ~rows["stack"].str.contains("_with_")]
    said = said[said["launched"].fillna("") != ""]
    parts = []
    for op, title in OPS.items():
        stacks = said[said["op"] == op].groupby("launched", sort=True)["stack"].unique()
        ways = [
            way if len(stacks) == 1 else f"{way} ({_table.listed(map(_table.code, sorted(each)))})"
            for way, each in stacks.items()
        ]
        if ways:
            parts.append(f"{title}: {'; '.join(ways)}.")
    return " ".join(parts)


def _sustained(rows):
    """How the calls are timed: in a long row, if all rows say so."""
    timed = rows[rows["call_us"] > 0]
    return LONG_ROW if (timed["sustained"] == 1).all() else SHORT_ROW


def _waits(rows):
    """The stacks of each cell in whose calls the GPU waits for long, the longest first."""
    parts = []
    for title, cell in _cells(rows):
        share = cell["call_us"] / cell["device_us"]
        long = cell.assign(share=share)[share >= WAITS].sort_values("share", ascending=False)
        if len(long):
            parts.append(f"{title}: {_table.listed(map(_table.code, long['stack']))}.")
    if not parts:
        return ""
    return f"In these calls the GPU waits for at least a third of the wall time. {' '.join(parts)}"


def _tabular(rows):
    """The rows as a long table, a cell after the other."""
    lines = []
    for title, cell in _cells(rows):
        lines.append(rf"\multicolumn{{{len(HEADS)}}}{{l}}{{\emph{{{title}}}}}\\*")
        order = sorted(cell.to_dict("records"), key=_by_time)
        whys = {_why(row) for row in order}
        if len(whys) == 1 and None not in whys:
            order = [order[0] | {"stack": ""}]
        lines += [" & ".join(_fields(row)) + r"\\" for row in order]
    if not lines:
        return ""
    heads = [ABOVE + r"\\", RULES, *(" & ".join(words) + r"\\" for words in (HEADS, UNITS))]
    table = [
        rf"\begin{{longtable}}{{@{{}}ll{'r' * (len(HEADS) - 2)}@{{}}}}",
        r"\caption{\networkcaption}\label{tab:network}\\",
    ]
    table += [r"\toprule", *heads, r"\midrule", r"\endfirsthead", r"\toprule", *heads]
    table += [r"\midrule", r"\endhead", *lines, r"\bottomrule", r"\end{longtable}"]
    return rf"{{{_table.SIZE}" + "\n" + "\n".join(table) + "}"


def _by_time(row):
    """The least wall time first, then rows with a GPU time alone, then those without any."""
    times = [row["call_us"], row["device_us"]]
    return [(not time > 0, time if time > 0 else 0) for time in times], row["stack"]


def _why(row):
    """The reason why a stack has no time; None if it has one."""
    if row["device_us"] > 0:
        return None
    return f"{row['status']}: {_table.reason(row['reason'], 60)}"


def _fields(row):
    """The entries of a line; a line without a stack is one of all stacks."""
    if why := _why(row):
        stack = _table.code(row["stack"]) if row["stack"] else "all"
        return ["", stack, rf"\multicolumn{{{len(HEADS) - 2}}}{{l}}{{{why}}}"]
    return [
        "",
        _table.code(row["stack"]),
        _number(row["call_us"] / 1e3, 3),
        _number(row["speedup_vs_eager"], 3),
        _number(row["tokens_per_s"], 3),
        _number(100 * row["mfu"], 2),
        _number(row["device_us"] / 1e3, 3),
        _number(row["device_speedup_vs_eager"], 3),
        _number(row["peak_mem_bytes"] / 2**30, 3),
        _number(row["energy_mj_per_token"], 3),
    ]


def _number(value, digits):
    """A number with so many digits; a dash for one that was not measured."""
    if not np.isfinite(value):
        return "--"
    places = max(0, digits - 1 - int(np.floor(np.log10(abs(value))))) if value else 0
    return rf"\num{{{value:.{places}f}}}"


if __name__ == "__main__":
    run(main, __doc__)
