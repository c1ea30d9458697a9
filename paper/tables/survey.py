"""The kernels of each library by category and by language, and where they were read."""

import _table
from _data import OURS, kernels, read, run

LANGUAGES = {"triton": "in Triton", "gluon": "in Gluon", "cute": "in CuTe", "template": "templates"}


def main(arguments):
    every, found = read(arguments.run, "survey"), kernels(arguments.run)
    libraries = sorted(every["library"].unique(), key=lambda name: (name != OURS, name))

    def line(title, rows):
        """How many of the rows each library has; a dot reads easier than a zero."""
        counts = rows["library"].value_counts()
        return [title, *(str(counts.get(name, r"$\cdot$")) for name in libraries)]

    categories = sorted(found["category"].unique(), key=lambda name: (name == "other", name))
    medians = found.groupby("library")["lines"].median()
    rows = [
        *(line(_table.escape(name), found[found["category"] == name]) for name in categories),
        [r"\midrule"],
        line("kernels", found),
        *(line(title, found[found["language"] == name]) for name, title in LANGUAGES.items()),
        line("autotuned", found[found["autotuned"]]),
        line("functions they call", every[every["role"] == "function"]),
        ["lines, median", *(_table.number(value, 0) for value in medians.reindex(libraries))],
    ]
    places = every.groupby("library").first()
    titles = "".join(f" & {_title(name, places.loc[name])}" for name in libraries)
    _table.save(arguments.out, _table.tabular("l" + "r" * len(libraries), [titles], rows))


def _title(library, row):
    """Library, version, and where it was read, one below the other."""
    place = f"read {row['date']}" if row["source"] == "snapshot" else row["source"]
    lines = r" \\ ".join((_table.code(library), *map(_table.escape, (row["version"], place))))
    return rf"\shortstack[r]{{{lines}}}"


if __name__ == "__main__":
    run(main, __doc__)
