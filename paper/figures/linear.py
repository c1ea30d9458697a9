"""Linear layers: TFLOP/s of each, one a line."""

import _figure
import pandas as pd
from _data import run, summary


def main(arguments):
    every = summary(arguments.run)
    _figure.family(
        every,
        every[every["family"] == "linear"],
        arguments.out,
        x=lambda cells: pd.Series(float("nan"), cells.index),
        label="",
        rate="tflops",
        down="pass",
        across="dtype",
    )


if __name__ == "__main__":
    run(main, __doc__)
