r"""Tell the share of the ops that only PyTorch and the tutorials have: `\alonesentence`.

An op that no other library has is an easy one to lead in, and may lift the mean over all cells.
"""

import _table
from _data import fastest, mean_ratio, run

# From this mean on an op is named by itself.
FAR = 1.25


def main(arguments):
    found = fastest(arguments.run)
    alone = found[found["outside"] == 0]
    # TeX takes the space behind a name for its end, so that the sentence brings one along.
    text = _sentence(found, alone) + " " if 0 < len(alone) < len(found) else ""
    _table.save(arguments.out, rf"\newcommand{{\alonesentence}}{{{text}}}" + "\n")


def _sentence(found, alone):
    means = {op: mean_ratio(cells) for op, cells in alone.groupby("op")}
    parts = [
        f"In {len(means)}~operations the only rivals are PyTorch's and the tutorials'; without "
        f"their {len(alone)}~cells the mean over all is {mean_ratio(found.drop(alone.index)):.3f}."
    ]
    far = sorted((op for op in means if means[op] >= FAR), key=means.get, reverse=True)
    if far:
        rest = found[~found["op"].isin(far)]
        named = _table.listed(f"{_table.code(op)} ({means[op]:.2f})" for op in far)
        many = "one of them stands" if len(far) == 1 else f"{len(far)}~of them stand"
        parts.append(
            f"Far ahead {many}, {named}: without {'it' if len(far) == 1 else 'these'} the mean is "
            f"{mean_ratio(rest):.3f}, with {'it' if len(far) == 1 else 'them'} "
            f"{mean_ratio(found):.3f}."
        )
    return " ".join(parts)


if __name__ == "__main__":
    run(main, __doc__)
