"""Attention: TFLOP/s over the sequence length, by mask, head dimension and dtype."""

import _figure
from _data import run, summary


def main(arguments):
    every = summary(arguments.run)
    rows = every[every["family"] == "attention"]
    if not rows.empty:
        rows = rows.assign(head="D = " + rows["size_D"].map("{:g}".format) + ", " + rows["dtype"])
    _figure.family(
        every,
        rows,
        arguments.out,
        x=lambda cells: cells["size_S"],
        label="sequence length S",
        rate="tflops",
        down="flags",
        across="head",
    )


if __name__ == "__main__":
    run(main, __doc__)
