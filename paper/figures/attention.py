"""Attention: TFLOP/s over the sequence length, by pass, mask, head dimension and dtype."""

import _figure
from _data import run, summary


def main(arguments):
    every = summary(arguments.run)
    rows = every[every["family"] == "attention"]
    if not rows.empty:
        head = "D = " + rows["size_D"].map("{:g}".format) + ", " + rows["dtype"]
        # Grouped heads, other numbers of keys and windows are no points of the plain curves.
        for letter in "KTW":
            size = rows.get(f"size_{letter}")
            if size is not None:
                head = head.where(size.isna(), head + f", {letter} = " + size.map("{:g}".format))
        rows = rows.assign(head=head)
        flags = rows["flags"].where(rows["flags"] == "", " " + rows["flags"])
        rows = rows.assign(mask=rows["pass"] + flags)
    _figure.family(
        every,
        rows,
        arguments.out,
        x=lambda cells: cells["size_S"],
        label="sequence length S",
        rate="tflops",
        down="flags" if rows.empty or rows["pass"].nunique() == 1 else "mask",
        across="head",
    )


if __name__ == "__main__":
    run(main, __doc__)
