"""A TikZ picture: the compiler's stages, with the sizes of the study's smallest kernel."""

import _table
from _data import read, run

MEANING = {
    "ttir": "tiles of unknown layout",
    "ttgir": "tiles laid out over threads",
    "llir": "one thread, LLVM",
    "ptx": "virtual registers",
    "sass": "machine code",
}


def main(arguments):
    rows = read(arguments.run, "ir")
    if rows.empty:
        nothing = "{This run kept no intermediate representation.}"
        names = r"\newcommand{\stagekernel}{a kernel}\newcommand{\stagefile}{none built}"
        _table.save(arguments.out, rf"{names}\newcommand{{\stagepicture}}{nothing}" + "\n")
        return
    first = rows[rows["stage"] == rows["stage"].iloc[0]]
    smallest = first.sort_values(["lines", "file", "kernel"]).iloc[0]
    found = rows[(rows["file"] == smallest["file"]) & (rows["kernel"] == smallest["kernel"])]
    nodes = [r"\node[stage] (python) {\textbf{Python}\\syntax tree\\of the function};"]
    before = "python"
    for row in found.itertuples():
        meaning = MEANING.get(row.stage, "")
        size = rf"{row.lines} lines\\{row.bytes / 1024:.1f} KiB"
        label = rf"\textbf{{{_table.escape(row.stage.upper())}}}\\{meaning}\\{size}"
        nodes.append(rf"\node[stage, right=of {before}] ({row.stage}) {{{label}}};")
        nodes.append(rf"\draw[->] ({before}) -- ({row.stage});")
        before = row.stage
    kernel = rf"\newcommand{{\stagekernel}}{{{_table.code(smallest['kernel'])}}}"
    place = rf"\newcommand{{\stagefile}}{{{_table.code(smallest['file'] + '.py')}}}"
    picture = [r"\begin{tikzpicture}[node distance=4mm]", *nodes, r"\end{tikzpicture}"]
    text = [kernel, place, r"\newcommand{\stagepicture}{%", *picture, "}", ""]
    _table.save(arguments.out, "\n".join(text))


if __name__ == "__main__":
    run(main, __doc__)
