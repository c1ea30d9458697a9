"""Packed attention: TFLOP/s of each batch, by pass."""

import _figure
from _data import run, summary


def main(arguments):
    _figure.by_cell(summary(arguments.run), ["attention_varlen"], arguments.out)


if __name__ == "__main__":
    run(main, __doc__)
