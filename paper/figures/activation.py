"""Activations: GB/s over the length, by pass and op."""

import _figure
from _data import run, summary


def main(arguments):
    every = summary(arguments.run)
    _figure.family(
        every,
        every[every["family"] == "activation"],
        arguments.out,
        x=lambda cells: cells["size_N"],
        label="length N",
        rate="gbps",
        down="pass",
        across="op",
        fixed=("dtype", "flags"),
    )


if __name__ == "__main__":
    run(main, __doc__)
