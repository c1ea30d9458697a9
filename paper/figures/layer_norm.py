"""Layer normalisation: GB/s over the row length, by pass and dtype."""

import _figure
from _data import run, summary


def main(arguments):
    every = summary(arguments.run)
    rows = every[every["family"] == "layer_norm"]
    _figure.family(
        every,
        rows,
        arguments.out,
        x=lambda cells: cells["size_N"],
        label="row length N",
        rate="gbps",
        down="pass",
        across="dtype",
        fixed=("size_M",),
    )


if __name__ == "__main__":
    run(main, __doc__)
