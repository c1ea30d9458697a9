"""Transpose: GB/s over the number of elements, by pass and dtype."""

import _figure
from _data import run, summary


def main(arguments):
    every = summary(arguments.run)
    _figure.family(
        every,
        every[every["family"] == "transpose"],
        arguments.out,
        x=lambda cells: cells["size_M"] * cells["size_N"],
        label="elements M N",
        rate="gbps",
        down="pass",
        across="dtype",
    )


if __name__ == "__main__":
    run(main, __doc__)
