"""List the cases and findings of compute-sanitizer on our kernels, by kernel file and tool."""

import _table
from _data import rank, read, run

CAPTION = (
    "Our kernels under compute-sanitizer{version}: edge cases run by each tool and, after the "
    "slash, findings. Findings in kernels of PyTorch, which made the inputs, are not counted."
)
CHANGED = " A dagger: the code has changed since."
UNKNOWN = " The reports of {} do not say of which code they are."
TITLES = {"memcheck": "out of bounds", "initcheck": "never written", "racecheck": "hazards"}


def main(arguments):
    found = read(arguments.run, "sanitizer")
    if found.empty:
        _table.save(arguments.out, "No sanitizer has looked at these kernels.\n")
        return
    order = rank(arguments.run)
    files = sorted(found["file"].unique(), key=lambda file: (order.get(file, 99), file))
    changed = set(found.loc[found["code"] == "other", "file"])
    untold = set(found.loc[found["code"] == "", "file"])
    silent = [_table.code(file) for file in files if file in untold]
    rows = []
    for file in files:
        tools = found[found["file"] == file].set_index("tool")
        name = _table.code(file) + _table.DAGGER * (file in changed)
        rows.append([name, *(_cell(tools, tool) for tool in TITLES)])
    versions = " and ".join(sorted(set(found["version"]) - {""}))
    caption = CAPTION.format(version=f" {versions}" if versions else "") + CHANGED * bool(changed)
    if silent:
        caption += UNKNOWN.format("all files" if len(silent) == len(files) else ", ".join(silent))
    head = [
        "kernel file & "
        + " & ".join(f"{title} ({_table.code(tool)})" for tool, title in TITLES.items())
    ]
    table = _table.captioned("l" + "r" * len(TITLES), head, rows, caption, "tab:sanitizer")
    _table.save(arguments.out, table)


def _cell(tools, tool):
    if tool not in tools.index:
        return ""
    row = tools.loc[tool]
    if row["status"] in ("ok", "findings"):
        return f"{row['cases']} / {row['findings']}"
    return row["status"]


if __name__ == "__main__":
    run(main, __doc__)
