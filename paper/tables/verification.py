"""What was verified: cells passed, and the worst error as a share of the bound allowed to it."""

import _table
from _data import read, run

CAPTION = (
    "Verification by op and implementation: cells passed of those the implementation offers, and "
    "the largest error as a share of its bound. Without a GPU ours runs in Triton's interpreter, "
    "the libraries on the CPU."
)


def main(arguments):
    reports = read(arguments.run, "verification")
    reports["place"] = reports["mode"].where(reports["mode"] == "gpu", "cpu")
    rows, last = [], None
    reports["rank"] = (reports["impl"] != "ours").astype(int)
    for key, found in reports.groupby(["family", "op", "rank", "impl"], sort=True, dropna=False):
        _, op, _, impl = key
        if last not in (None, op):
            rows.append([r"\addlinespace"])
        name = "" if op == last else _table.code(op)
        places = [_place(found[found["place"] == place]) for place in ("cpu", "gpu")]
        rows.append([name, _table.code(impl), *places[0], *places[1]])
        last = op
    head = [
        r"& & \multicolumn{3}{c}{without a GPU} & \multicolumn{3}{c}{on the GPU}",
        r"\cmidrule(lr){3-5}\cmidrule(l){6-8}",
        "op & implementation" + r" & {passed} & {error/bound} & status" * 2,
    ]
    columns = "ll" + "rS[table-format=1.3]l" * 2
    _table.save(arguments.out, _table.longtable(columns, head, rows, CAPTION, "tab:verification"))


def _place(reports):
    if reports.empty:
        return ["", "", ""]
    status = next((status for status in reports["status"] if status != "ok"), "ok")
    cells = reports["cells"].sum()
    passed = f"{reports['passed'].sum()}/{cells}" if cells else "--"
    worst = reports["worst_ratio"].max()
    return [passed, _table.number(worst, 3) if cells else "", status]


if __name__ == "__main__":
    run(main, __doc__)
