"""Registers and shared memory of each kernel: defaults by target, all that is chosen for one."""

import _table
import pandas as pd
from _data import natural, read, run


def main(arguments):
    built = read(arguments.run, "resources")
    if built.empty:
        _table.save(arguments.out, "This run has built no kernel.\n")
        return
    default = built[built["default"].astype(bool)]
    archs = sorted(default["arch"].unique(), key=natural)
    widest = built.groupby("arch")["config"].nunique().idxmax()
    rows = []
    for (file, kernel), configs in built.groupby(["file", "kernel"], sort=True):
        mine = default[(default["file"] == file) & (default["kernel"] == kernel)]
        cells = [cell for arch in archs for cell in _default(mine[mine["arch"] == arch])]
        rows.append([_name(file, kernel), *cells, *_range(configs[configs["arch"] == widest])])
    groups = " & ".join(rf"\multicolumn{{2}}{{c}}{{{_arch(arch)}}}" for arch in archs)
    last = 1 + 2 * len(archs)
    rules = "".join(rf"\cmidrule(lr){{{c}-{c + 1}}}" for c in range(2, last, 2))
    every = rf"\multicolumn{{4}}{{c}}{{by rule or table, {_arch(widest)}}}"
    head = [
        f"& {groups} & {every}",
        rules + rf"\cmidrule(l){{{last + 1}-{last + 4}}}",
        "kernel" + " & {reg} & {KiB}" * len(archs) + " & {no.} & {reg} & {KiB} & {spill}",
    ]
    columns = "l" + "rr" * len(archs) + "rrrr"
    _table.save(arguments.out, _table.tabular(columns, head, rows))


def _default(rows):
    """Registers and KiB of the default configuration, the larger of its dtypes."""
    registers, shared = rows["registers"].max(), rows["shared_bytes"].max()
    spills = rows[["spill_stores", "spill_loads"]].fillna(0).to_numpy().sum()
    mark = r"\rlap{*}" if spills else ""
    return [f"{_whole(registers)}{mark}", _kib(shared)]


def _range(rows):
    registers = _span(rows["registers"].dropna(), _whole)
    shared = _span(rows["shared_bytes"].dropna(), _kib)
    spilling = (rows[["spill_stores", "spill_loads"]].fillna(0).sum(axis=1) > 0).sum()
    return [str(rows["config"].nunique()), registers, shared, str(spilling)]


def _span(values, text):
    if values.empty:
        return "--"
    least, most = text(values.min()), text(values.max())
    return least if least == most else f"{least}--{most}"


def _whole(value):
    return "--" if pd.isna(value) else f"{value:.0f}"


def _kib(value):
    return (
        "--"
        if pd.isna(value)
        else f"{value / 1024:.0f}"
        if value >= 10240
        else f"{value / 1024:.1f}"
    )


def _name(file, kernel):
    short = kernel.removeprefix("_").removesuffix("_kernel").removeprefix(f"{file}_")
    return _table.code(f"{file}: {short}" if short != file else file)


def _arch(arch):
    return _table.code(f"sm_{arch}" if arch.isdigit() else arch)


if __name__ == "__main__":
    run(main, __doc__)
