"""List the results of verification: cells passed, and the worst error as a share of its bound."""

import _table
from _data import rank, read, run

CAPTION = (
    "Verification by op and implementation: ordinary and hostile cells passed of those the "
    "implementation offers, the largest error as a share of its bound, and the status. These two "
    "are of ordinary cells, and of ours of all. What did not pass, and what a time limit left out, "
    r"is in \cref{sec:gaps} with its reason. Without a GPU ours runs in Triton's interpreter, the "
    "libraries on the CPU."
)
LENGTH, LARGEST = 120, 999
TITLE = " & {ordinary} & {hostile} & {error/bound} & status"
TITLES = {"cpu": "without a GPU", "gpu": "on the GPU"}


def main(arguments):
    reports = read(arguments.run, "verification")
    reports["place"] = reports["mode"].where(reports["mode"] == "gpu", "cpu")
    places = [place for place in TITLES if (reports["place"] == place).any()]
    reports["rank"] = (reports["impl"] != "ours").astype(int)
    rows, last = [], None
    reports["place_of_family"] = reports["family"].map(rank(arguments.run)).fillna(len(reports))
    for key, found in reports.groupby(["place_of_family", "op", "rank", "impl"], sort=True):
        _, op, _, impl = key
        if not found["cells"].any():
            continue
        if last not in (None, op):
            rows.append([r"\addlinespace[2pt]"])
        cells = [cell for place in places for cell in _place(found[found["place"] == place])]
        rows.append(["" if op == last else _table.code(op), _table.code(impl), *cells])
        last = op
    groups = "".join(rf" & \multicolumn{{4}}{{c}}{{{TITLES[place]}}}" for place in places)
    rules = (rf"\cmidrule(lr){{{4 * i + 3}-{4 * i + 6}}}" for i in range(len(places)))
    titles = "op & implementation" + TITLE * len(places)
    head = [f"&{groups}", "".join(rules), titles]
    columns = "ll" + "rrS[table-format=3.3]l" * len(places)
    table = _table.captioned(columns, head, rows, CAPTION, "tab:verification", size=_table.SMALL)
    _table.save(arguments.out, table + _absent(reports))


def _absent(reports):
    """A sentence for each way of offering nothing at all: implementations by their reason."""
    absent = reports[reports["cells"] == 0]
    # An implementation that declines every case gives the reason of one, after its name.
    reasons = absent["reason"].str.replace(r"^\S+ \w+ \w+: ", "", regex=True)
    sentences = []
    for (status, place), found in absent.groupby(["status", "place"], sort=True):
        groups = found["impl"].groupby(reasons[found.index], sort=True)
        parts = (
            ", ".join(map(_table.code, sorted(set(impls))))
            + f" (``{_table.escape(_table.cut(reason, LENGTH))}'')"
            for reason, impls in groups
        )
        sentences.append(f"{status.capitalize()} {TITLES[place]}: {'; '.join(parts)}.")
    return "\n".join([r"\par", *sentences, ""]) if sentences else ""


def _place(reports):
    if reports.empty:
        return ["", "", "", ""]
    status = next((status for status in reports["status"] if status != "ok"), "ok")
    cells, passed, odd, odd_passed = (
        reports[name].sum() for name in ("cells", "passed", "hostile", "hostile_passed")
    )
    ordinary = _share(passed - odd_passed, cells - odd)
    worst = reports["worst_ratio"].max()
    # An error without end, or beside a bound of nearly nothing.
    error = f"{{$>{LARGEST}$}}" if worst > LARGEST else _table.number(worst, 3)
    return [ordinary, _share(odd_passed, odd), error if cells else "", status]


def _share(passed, cells):
    return f"{passed:.0f}/{cells:.0f}" if cells else "--"


if __name__ == "__main__":
    run(main, __doc__)
