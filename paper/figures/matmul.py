"""Matrix products: TFLOP/s over the size of plain square ones by dtype; all others below."""

import _figure
from _data import run, summary


def square(cells):
    same = (cells["size_M"] == cells["size_N"]) & (cells["size_M"] == cells["size_K"])
    return cells["size_M"].where(same & (cells["flags"] == ""))


def main(arguments):
    every = summary(arguments.run)
    _figure.family(
        every,
        every[every["family"] == "matmul"],
        arguments.out,
        x=square,
        label="M = N = K",
        rate="tflops",
        down="pass",
        across="dtype",
        sharey="col",
        ratios=True,
    )


if __name__ == "__main__":
    run(main, __doc__)
