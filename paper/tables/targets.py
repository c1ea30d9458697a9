"""List the target of each kernel, its result, and the fastest baseline of the same run.

If a row of targets.csv takes several cells, the one furthest from the bound is shown. A rate or a
time that was set for one GPU judges no cell that another GPU took.
"""

from collections import Counter

import _table
from _data import changed, run
from _targets import QUANTITIES, cells, counts, targets

CAPTION = (
    "Targets: what must be reached, what was aimed at, and what was reached in the run shown here; "
    "of several cells in the one furthest from the target, and how many meet what must be reached "
    "(the aim, where there is nothing else). Beside it the fastest baseline of that cell in the "
    "same quantity. Rates are device times on a cold level-two cache; memory is counted beside "
    "inputs and results."
)
UNRECORDED = " ``Not recorded'': the run has no such cell."
FOREIGN = " ``Other GPU'': the rate or time was set for another GPU, so it judges nothing here."
# Quantities that compare ours with a baseline already.
RATIOS = ("peer_ratio", "eager_ratio", "call_ratio", "memory_share")
AIM, MUST, MISSED, SHORT = "aim met", "must met", "missed", "aim missed"
NONE, OTHER = "not recorded", "other GPU"
HEAD = (
    r"pass & cell furthest from the target & quantity & {must} & {aim} & {reached} & {met} & state"
    r" & \multicolumn{2}{l}{best baseline}"
)
# Headings and the space above them count, and are low.
FLOAT_ROWS = 90


def main(arguments):
    found, since = cells(arguments.run), changed(arguments.run)
    lines, states, last, stale = [], Counter(), None, 0
    for target in targets().itertuples(index=False):
        if last != target.kernel:
            lines += _table.heading(HEAD.count("&") + 2, _table.escape(target.kernel))
        chosen = found[counts(found, target)]
        line, state = _line(target, chosen, since)
        lines.append(line)
        states[state] += 1
        stale += state == MISSED and bool(since & set(chosen["op"]))
        last = target.kernel
    columns = (
        r"l>{\raggedright\arraybackslash}p{40mm}>{\raggedright\arraybackslash}p{19mm}"
        r"rrrrl>{\raggedright\arraybackslash}p{25mm}r"
    )
    caption = CAPTION + UNRECORDED * bool(states[NONE]) + FOREIGN * bool(states[OTHER])
    caption += _table.DAGGER_NOTE * bool(since & set(found["op"]))
    table = _table.captioned(
        columns, [HEAD], lines, caption, "tab:targets", FLOAT_ROWS, _table.SMALL
    )
    _table.save(arguments.out, _sentence(states, stale) + table)


def _sentence(states, stale):
    """stale: in how many of the rows that miss, code has changed since the times were taken."""
    parts = [
        f"Of the {states.total()}~rows of \\cref{{tab:targets}}, the aim is reached in "
        f"{states[AIM]}, and what had to be reached in {states[MUST]} more",
        f"; in {states[MISSED]} at least one cell misses that",
        f" (in {_of(stale, states[MISSED])}, code has changed since its times were taken)"
        * bool(stale),
        f", and in {states[SHORT]} an aim that stands alone" * bool(states[SHORT]),
        f"; {states[OTHER]} were set for another GPU than the one that took the times"
        * bool(states[OTHER]),
        f"; {states[NONE]} have no cell in this run" * bool(states[NONE]),
    ]
    # The table comes next, and there is a space behind it.
    return "".join([*parts, ".%\n"])


def _of(some, number):
    return "each of these" if some == number else f"{some} of these"


def _line(target, found, since):
    """The cells of a line of the table, and its state. since: the ops that have changed."""
    there = found[found["gpu"].isin([target.gpu] if target.gpu else found["gpu"])]
    elsewhere = there.empty and not found.empty
    found = found if elsewhere else there
    values = found[target.quantity].dropna()
    quantity = QUANTITIES[target.quantity]
    bounds = [target.must or "--", target.aim or "--"]
    passes = "" if target.pass_ == "*" else target.pass_
    lost = (~found["timed"]).sum()
    if values.empty:
        state, shown = (MISSED, "no time") if lost else (NONE, NONE)
        return [passes, "", quantity.name, *bounds, "--", "--", shown, "", ""], state
    worst = values.idxmax() if quantity.less else values.idxmin()
    row = found.loc[worst]
    several = target.op == "*" or " " in target.op
    where = " ".join(_table.code(row[name]) for name in ["op"] * several + ["case"])
    if not target.dtype:
        where += f" {row['dtype']}"
    rival = _table.code(row["best"]) if row["best"] and _compared(target.quantity) else ""
    figure = ""
    if rival and target.quantity not in RATIOS:
        figure = f"{row[f'best_{target.quantity}']:.{quantity.digits}f}"
    met, state = ("--", OTHER) if elsewhere else _state(target, values, len(values) + lost)
    shown = state if state != MISSED else rf"\textbf{{{MISSED}}}"
    shown += _table.DAGGER * (row["op"] in since)
    reached = _rounded(values[worst], [float(bound) for bound in bounds if bound != "--"], quantity)
    line = [passes or row["pass"], where, quantity.name, *bounds, reached, met, shown, rival]
    return [*line, figure], state


def _rounded(value, bounds, quantity):
    """A value in the digits of its quantity; in more where it would seem to meet what it misses."""
    digits, sign = quantity.digits, -1 if quantity.less else 1
    while any(sign * value < sign * b <= sign * round(value, digits) for b in bounds):
        digits += 1
    return f"{value:.{digits}f}"


def _compared(quantity):
    return quantity == "peer_ratio" or quantity not in RATIOS


def _state(target, values, number):
    """How many of so many cells meet the bound that must be met, and what all of them do."""
    less = QUANTITIES[target.quantity].less
    met = [
        (values <= float(bound) if less else values >= float(bound)).sum()
        for bound in (target.aim, target.must)
        if bound
    ]
    words = [word for bound, word in ((target.aim, AIM), (target.must, MUST)) if bound]
    missed = MISSED if target.must else SHORT
    state = next((word for word, some in zip(words, met, strict=True) if some == number), missed)
    return f"{met[-1]}/{number}", state


if __name__ == "__main__":
    run(main, __doc__)
