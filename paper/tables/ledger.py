"""List what else the time of each implementation contains, as observed in one call."""

import _table
from _data import natural, rank, read, run, settled

CAPTION = (
    "What else a call contains, as observed in one call of the first timed case, in the first of "
    "bfloat16, float16 and float32 that the implementation offers. Launches: kernels on the GPU, "
    "and beside them its copies and fills of memory. Copies, casts: operators of PyTorch that "
    "copy, and those among them that change the data type. Saved: MiB that the forward pass keeps "
    "for the backward pass beside inputs and outputs. Workspace: MiB beyond all results. Sums: "
    "the data type of sums, as declared from a named source. Same bits: whether repeats agreed in "
    "all verified cells. In place: the call writes over what it was given, which is put back "
    "before each timed call. A dash: not observed, not declared or, for a part, not there."
)
DTYPES = ("bfloat16", "float16", "float32")
MIB = 2**20
EMPTY = "No implementation was verified.\n"
WIDE = "kept in float32 whatever the data type of the others, with no cast in the timed call: "


def main(arguments):
    found = settled(read(arguments.run, "ledger"))
    if found.empty:
        _table.save(arguments.out, EMPTY)
        return
    place = rank(arguments.run)
    found["place"] = found["family"].map(place).fillna(len(place))
    found["rank"] = found["dtype"].map(DTYPES.index)
    # The bytes written may by chance be those that were there: one change seen is enough.
    calls = found.groupby(["op", "pass", "impl"])
    found["in_place"] = calls["overwritten_bytes"].transform("max") > 0
    found["seen"] = found["launches"].isna() & found["copies"].isna()
    chosen = found.sort_values(["seen", "rank"]).drop_duplicates(["op", "pass", "impl"])
    groups = sorted(
        chosen.groupby(["place", "op", "pass"]),
        key=lambda group: (group[0][0], group[0][1], natural(group[0][2])),
    )
    head = [
        r"implementation & {launches} & {copies, casts} & {saved} & {workspace} & sums"
        r" & {same bits} & {timed by}"
    ]
    lines = []
    for (_, op, pass_), rows in groups:
        lines += _table.heading(head[0].count("&") + 1, f"{_table.code(op)} {pass_}")
        for row in rows.sort_values("impl", key=lambda impls: impls.map(_ours_first)).itertuples():
            lines.append([_table.code(row.impl), *_values(row)])
    columns = r"lrrrr>{\raggedright\arraybackslash}p{48mm}ll"
    table = _table.captioned(columns, head, lines, CAPTION, "tab:ledger", size=_table.SMALL)
    _table.save(arguments.out, table + _called(found))


def _called(found):
    """How calls depart from a library's default, and what it has in float32, a line for each."""
    items = []
    for row in found.drop_duplicates(["op", "impl", "settings", "wide"]).itertuples():
        names = [_table.code(name) for name in row.wide.split()]
        told = [_table.prose(row.settings), WIDE + _table.listed(names) if names else ""]
        if text := "; ".join(filter(None, told)):
            items.append(rf"\item {_table.code(row.impl)}, {_table.code(row.op)}: {text}.")
    if not items:
        return ""
    head = "Calls that differ from a library's default, or hold tensors in another data type:"
    body = "\n".join(sorted(items))
    return f"\n\\noindent {head}\n\\begin{{itemize}}\n{body}\n\\end{{itemize}}\n"


def _ours_first(impl):
    return impl != "ours", impl


def _values(row):
    memory = "" if row.memory_ops in (0, None) or row.memory_ops != row.memory_ops else row
    launches = _count(row.launches) + (f" + {memory.memory_ops:.0f}" if memory else "")
    copies = "--" if row.copies != row.copies else f"{row.copies:.0f}, {row.casts:.0f}"
    sizes = [_size(value) for value in (row.saved_bytes, row.workspace_bytes)]
    return [launches, copies, *sizes, *_words(row)]


def _words(row):
    same = {"True": "yes", "False": "no"}.get(str(row.deterministic), "--")
    timed_by = row.timed_by or "--"
    if row.in_place:
        timed_by += ", in place"
    return _table.escape(row.accumulates) or "--", same, timed_by


def _count(value):
    return "--" if value != value else f"{value:.0f}"


def _size(value):
    return "--" if value != value else f"{value / MIB:.1f}"


if __name__ == "__main__":
    run(main, __doc__)
