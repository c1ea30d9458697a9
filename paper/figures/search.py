"""Bucketize: GB/s over the number of elements, by dtype."""

import _figure
from _data import run, summary


def main(arguments):
    every = summary(arguments.run)
    _figure.family(
        every,
        every[every["family"] == "search"],
        arguments.out,
        x=lambda cells: cells["size_N"],
        label="elements N",
        rate="gbps",
        down="pass",
        across="dtype",
        fixed=("size_B", "flags"),
    )


if __name__ == "__main__":
    run(main, __doc__)
