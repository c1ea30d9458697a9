"""Cross entropy: GB/s over the number of classes, by pass and dtype."""

import _figure
from _data import run, summary


def main(arguments):
    every = summary(arguments.run)
    _figure.family(
        every,
        every[every["family"] == "cross_entropy"],
        arguments.out,
        x=lambda cells: cells["size_V"],
        label="classes V",
        rate="gbps",
        down="pass",
        across="dtype",
        fixed=("size_M", "flags"),
    )


if __name__ == "__main__":
    run(main, __doc__)
