"""How large each kernel is, in lines and KiB, after each stage of the compiler."""

import _table
from _data import read, run

CAPTION = "Lines and KiB of each kernel after each stage, compiled for compute capability~9.0."


def main(arguments):
    rows = read(arguments.run, "ir")
    if rows.empty:
        # The text refers to the table all the same.
        empty = ["This run kept no intermediate representation."]
        _table.save(arguments.out, _table.captioned("l", empty, [], CAPTION, "tab:ir"))
        return
    stages = list(rows["stage"].drop_duplicates())
    lines = []
    for (file, kernel), found in rows.groupby(["file", "kernel"], sort=True):
        sizes = found.set_index("stage")
        cells = []
        for stage in stages:
            known = stage in sizes.index
            cells.append(f"{sizes.loc[stage, 'lines']:.0f}" if known else "{--}")
            cells.append(f"{sizes.loc[stage, 'bytes'] / 1024:.1f}" if known else "{--}")
        short = kernel.removeprefix("_").removesuffix("_kernel").removeprefix(f"{file}_")
        lines.append([_table.code(f"{file}: {short}" if short != file else file), *cells])
    groups = " & ".join(rf"\multicolumn{{2}}{{c}}{{{_table.escape(s.upper())}}}" for s in stages)
    rules = "".join(rf"\cmidrule(lr){{{c}-{c + 1}}}" for c in range(2, 2 + 2 * len(stages), 2))
    head = [f"& {groups}", rules, "kernel" + " & {lines} & {KiB}" * len(stages)]
    columns = "l" + "S[table-format=5.0]S[table-format=4.1]" * len(stages)
    table = _table.captioned(columns, head, lines, CAPTION, "tab:ir", size=_table.SMALL)
    _table.save(arguments.out, table)


if __name__ == "__main__":
    run(main, __doc__)
