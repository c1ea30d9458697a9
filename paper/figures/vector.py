"""Vector ops: GB/s over the length, a panel for each dtype; below, the ratios op by op."""

import _figure
from _data import run, summary


def main(arguments):
    every = summary(arguments.run)
    _figure.family(
        every,
        every[every["family"] == "vector"],
        arguments.out,
        x=lambda cells: cells["size_N"],
        label="length N",
        rate="gbps",
        down="pass",
        across="dtype",
        ratios=("dtype", "op"),
    )


if __name__ == "__main__":
    run(main, __doc__)
