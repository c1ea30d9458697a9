"""Linear cross entropy: TFLOP/s over the size of the three products, by pass and dtype."""

import _figure
from _data import run, summary


def main(arguments):
    every = summary(arguments.run)
    _figure.family(
        every,
        every[every["family"] == "linear_cross_entropy"],
        arguments.out,
        x=lambda cells: cells["size_M"] * cells["size_H"] * cells["size_V"],
        label="products M H V",
        rate="tflops",
        down="pass",
        across="dtype",
        fixed=("flags",),
    )


if __name__ == "__main__":
    run(main, __doc__)
