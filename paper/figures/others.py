"""Families without a figure of their own: GB/s or TFLOP/s of each case, by what bounds it."""

from pathlib import Path

import _figure
from _data import run, summary


def main(arguments):
    every = summary(arguments.run)
    drawn = {path.stem for path in Path(__file__).parent.glob("*.py")}
    _figure.by_cell(every, {*every["family"]} - drawn, arguments.out)


if __name__ == "__main__":
    run(main, __doc__)
