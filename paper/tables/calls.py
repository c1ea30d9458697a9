"""List the host time of a call in the cells that the targets name, and that of the libraries."""

import _table
import pandas as pd
from _data import OURS, changed, natural, rank, run, summary
from _targets import CELL, cells, counts, targets

CAPTION = (
    r"Host time of a call in \si{\micro\second}, from Python to the launch, in the cells that the "
    "targets name, the least of the blocks, since what else a host does only adds, and that of "
    "ours over that of eager PyTorch. A backward pass includes what autograd does. A dash: no "
    "result, or none that counts."
)
QUANTITY = "call_ratio"
PASSES = {"forward": "forward", "backward": "backward", "both": "with both in one call"}
SHOWN = (OURS, "torch_eager", "torch_compile")


def main(arguments):
    found = cells(arguments.run)
    chosen = pd.Series(False, found.index)
    for target in targets().itertuples(index=False):
        if target.quantity == QUANTITY:
            chosen |= counts(found, target)
    rows = summary(arguments.run).set_index(["impl", *CELL])
    place = rank(arguments.run)
    lines, since = [], changed(arguments.run)
    for cell in sorted(
        found[chosen].to_dict("records"),
        key=lambda cell: (place[cell["family"]], cell["op"], natural(cell["pass"]), cell["case"]),
    ):
        key = [cell[name] for name in CELL]
        times = [rows["call_us"].get((impl, *key), float("nan")) for impl in SHOWN]
        where = f"{_table.code(cell['case'])} {cell['dtype']}"
        numbers = [*(_table.number(time, 1) for time in times), _table.number(cell[QUANTITY])]
        op = _table.code(cell["op"]) + _table.DAGGER * (cell["op"] in since)
        lines.append([op, cell["pass"], where, *numbers])
    if not lines:
        _table.save(arguments.out, "This run has no cell that the targets name.\n")
        return
    names = " & ".join(f"{{{_table.code(impl)}}}" for impl in SHOWN)
    head = [f"op & pass & cell & {names} & {{ours / eager}}"]
    columns = "lll*{3}{S[table-format=4.1]}S[table-format=2.2]"
    caption = CAPTION + _table.DAGGER_NOTE * bool(since & set(found[chosen]["op"]))
    table = _table.captioned(columns, head, lines, caption, "tab:calls", size=_table.SMALL)
    _table.save(arguments.out, _sentence(found[chosen].dropna(subset=QUANTITY), since) + table)


def _sentence(compared, since):
    """How ours stands to eager PyTorch: how many cells meet the bound, the median, the worst; and
    how many of those whose code is still what was timed."""
    if compared.empty:
        return ""
    bound = next(row.must for row in targets().itertuples() if row.quantity == QUANTITY)
    ratios = compared[QUANTITY]
    worst = compared.loc[ratios.idxmax()]
    medians = ratios.groupby(compared["pass"]).median()
    by_pass = (f"{medians[name]:.2f} {PASSES[name]}" for name in PASSES if name in medians)
    same = ratios[~compared["op"].isin(since)]
    still = f" Of the {len(same)} whose code is what was timed, {(same <= float(bound)).sum()} do."
    still *= 0 < len(same) < len(ratios)
    return (
        f"Of {len(ratios)}~cells of one size (\\cref{{tab:calls}}), ours takes at most {bound} "
        f"times eager PyTorch's host time in {(ratios <= float(bound)).sum()}; the median ratio is "
        f"{', '.join(by_pass)}, and the largest is {ratios.max():.2f}, in "
        f"{_table.code(worst['op'])} {worst['pass']}.{still}\n"
    )


if __name__ == "__main__":
    run(main, __doc__)
